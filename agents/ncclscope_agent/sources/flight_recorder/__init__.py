"""Dumps of PyTorch's Flight Recorder: what each rank called last, with the stack from which it did."""
