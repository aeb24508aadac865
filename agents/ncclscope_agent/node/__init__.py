"""What the agent asks on its node beside files: NCCL's RAS, and the counters of the machine."""
