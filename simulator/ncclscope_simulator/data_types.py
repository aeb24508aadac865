"""NCCL's data types, reductions and operations: ids, sizes, and the words that appear in logs and kernel names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DataType:
    """One ncclDataType_t. Source: NCCL src/nccl.h.in; names of kernels: src/device/generate.py."""

    id: int
    name: str
    bytes: int
    c_name: str
    """As `ncclKernel_..._Sum_<c_name>` up to 2.18 has it."""
    short_name: str
    """As `ncclDevKernel_..._Sum_<short_name>_...` from 2.19 has it; signed types share the unsigned kernel."""


INT8: Final = DataType(0, "int8", 1, "int8_t", "u8")
UINT8: Final = DataType(1, "uint8", 1, "uint8_t", "u8")
INT32: Final = DataType(2, "int32", 4, "int32_t", "u32")
INT64: Final = DataType(4, "int64", 8, "int64_t", "u64")
FLOAT16: Final = DataType(6, "float16", 2, "half", "f16")
FLOAT32: Final = DataType(7, "float32", 4, "float", "f32")
BFLOAT16: Final = DataType(9, "bfloat16", 2, "__nv_bfloat16", "bf16")

SUM: Final = 0
MAX: Final = 2
MIN: Final = 3
AVG: Final = 4

RED_NAMES: Final = {0: "sum", 1: "prod", 2: "max", 3: "min", 4: "avg"}

REDUCING: Final = frozenset({"AllReduce", "ReduceScatter", "Reduce"})
"""Operations that have a reduction; the others log op 0 and mean nothing by it."""

_PER_RANK: Final = frozenset({"AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter"})


def message_bytes(op: str, count: int, size: int, ranks: int) -> int:
    """Message size S as nccl-tests counts it. Source: nccl-tests doc/PERFORMANCE.md."""
    return count * size * (ranks if op in _PER_RANK else 1)


def bus_factor(op: str, ranks: int) -> float:
    """The factor from algorithm bandwidth to bus bandwidth. Source: nccl-tests doc/PERFORMANCE.md."""
    if op == "AllReduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in _PER_RANK else 1.0
