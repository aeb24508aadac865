"""The contract between agents and the service: words, records, batches, frames and errors.

Imports nothing of ours. Both sides import it, and nothing else of each other.
"""
