"""Batches that the service has not acknowledged, on the node's disk: kept over restarts, delivered exactly once."""
