"""Detectors: what is wrong with a job, reported once, with the numbers that prove it."""
