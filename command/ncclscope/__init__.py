"""The command `ncclscope`: puts agent, service and simulator together."""

__version__ = "0.1.0"
