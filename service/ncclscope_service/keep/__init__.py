"""Persistence on disk: the service's state, the journal of what changed it, and finished operations."""
