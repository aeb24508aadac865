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
from ncclscope_simulator.contention import Contention, parse_contention
from ncclscope_simulator.faults import FAULT_KEYS, Fault, parse_faults
from ncclscope_simulator.gpu_speed import GpuSpeed, parse_gpu_speed
from ncclscope_simulator.megatron_model import MegatronModel, parse_model
from ncclscope_simulator.player import Player, write

__all__ = [
    "CONTEXT_EXCHANGES",
    "EXPERT_DISPATCHERS",
    "FAULT_KEYS",
    "GRAPH_TRACES",
    "INSPECTOR_FORMATS",
    "NSYS_VERSIONS",
    "ORDERS",
    "Contention",
    "Fault",
    "GpuSpeed",
    "MegatronModel",
    "Player",
    "SimulationConfig",
    "parse_contention",
    "parse_faults",
    "parse_gpu_speed",
    "parse_model",
    "write",
]
