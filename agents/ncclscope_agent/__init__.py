"""The agent: reads what NCCL and nsys write on one node, and says it to the service in batches."""
