"""A simulated training job that writes NCCL logs and nsys exports as the real ones look, and the truth.

Shares no code with the reader, the translator or the clocks, so that an error there cannot hide here:
it imports nothing of ours, and a test holds that.
"""
