"""The answer to a Prometheus scrape: the table of all metrics, their values from the store, and the bytes."""
