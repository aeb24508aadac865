"""Traces of the PyTorch profiler (Kineto): operations and kernels of one rank in one file."""
