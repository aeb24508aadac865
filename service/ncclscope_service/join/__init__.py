"""The same operation on all ranks: collectives, sends and receives, and replays of CUDA graphs."""
