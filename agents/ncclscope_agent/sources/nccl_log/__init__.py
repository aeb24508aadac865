"""Reads NCCL's debug logs, line by line, into batches."""
