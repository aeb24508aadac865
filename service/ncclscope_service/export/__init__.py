"""The output files: everything that `analyze` and `snapshot` write, from a `Store`."""
