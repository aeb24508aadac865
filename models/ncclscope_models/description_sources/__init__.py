"""Readers of what describes a job: each gives fields with the place where they stand."""
