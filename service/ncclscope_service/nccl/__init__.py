"""Rules of NCCL as formulas with their source: sizes, bandwidth, kernel names, launch rules, topology."""
