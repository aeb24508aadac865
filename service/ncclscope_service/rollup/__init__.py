"""Sums that outlive rows: since the start, and of the last minutes."""
