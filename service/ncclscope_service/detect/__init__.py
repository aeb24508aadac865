"""Detectors: what is wrong, said once, with the numbers that prove it.

Every detector takes joined collectives or counts as they come (`feed`), decides at `findings(now_ns)`, and keeps its
findings in a ledger: opened once, updated while the fault lasts, closed when it has healed.
"""
