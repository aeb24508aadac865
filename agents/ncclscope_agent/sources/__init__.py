"""Readers of the files that NCCL and nsys write: bytes or rows in, batches out."""
