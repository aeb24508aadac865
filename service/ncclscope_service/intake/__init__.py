"""Agents' sessions and batches, in the store's terms; communicators get their identity."""
