"""Advice on the debug settings of NCCL: which lines a job needs, and how much they write."""
