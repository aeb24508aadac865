"""Parquet files of a run: their columns and how each is filled from the store."""
