"""Emission rules: the operations that a framework gives to NCCL in one iteration, counted exactly, with sources."""
