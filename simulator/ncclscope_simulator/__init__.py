"""A simulated training job that writes NCCL logs and nsys exports as the real ones look, and the truth.

Shares no code with the reader, the translator or the clocks, so that an error there cannot hide here:
it imports nothing of ours, and a test holds that.
"""

from ncclscope_simulator.config import (
    CONTEXT_EXCHANGES,
    EXPERT_DISPATCHERS,
    GRAPH_TRACES,
    INSPECTOR_FORMATS,
    NSYS_VERSIONS,
    ORDERS,
    SimulationConfig,
)
from ncclscope_simulator.faults import FAULT_KEYS, Fault, parse_faults
from ncclscope_simulator.player import Player, write

__all__ = [
    "CONTEXT_EXCHANGES",
    "EXPERT_DISPATCHERS",
    "FAULT_KEYS",
    "GRAPH_TRACES",
    "INSPECTOR_FORMATS",
    "NSYS_VERSIONS",
    "ORDERS",
    "Fault",
    "Player",
    "SimulationConfig",
    "parse_faults",
    "write",
]
