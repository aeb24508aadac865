"""Launches and kernels paired by their order alone, for logs without time stamps, in spite of losses on both sides."""
