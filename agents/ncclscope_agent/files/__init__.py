"""Logs and exports on the node: found, followed as they grow, read, and given back to their disk."""
