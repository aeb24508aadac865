"""The field's words as types: operations, data types, reductions, algorithms, protocols.

Values are spelled as NCCL spells them ("AllReduce", "RING", "LL128"); numbers are NCCL's own.
Source: NCCL `src/init.cc:ncclFuncStr`, `src/nccl.h.in`, `src/collectives.cc`; see `docs/formats.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

NO_TIME_NS: Final = -(2**63)
"""Stands in an int64 column for "this time is not known"; it is null in every file and None in every record."""

NO_NUMBER: Final = -1
"""Stands in an integer column that cannot be negative for "not known"; null in every file."""

NO_POINTER: Final = 2**64 - 1
"""Stands in a column of pointers for "not known"; 0 is NCCL's (nil)."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One of NCCL's operations, as the log names it."""

    name: str
    is_collective: bool
    """False for Send, Recv and the one-sided operations, which involve two ranks only."""
    reduces: bool
    """True if the `op` field of the log line means something."""
    scales_with_ranks: bool
    """True if nccl-tests' message size is count x size x nranks (facts: nccl-tests `src/*.cu`)."""
    is_rooted: bool
    """True if the `root` field names a root; for Send, Recv and one-sided it names the peer."""


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation("AllReduce", True, True, False, False),
    Operation("AllGather", True, False, True, False),
    Operation("ReduceScatter", True, True, True, False),
    Operation("Broadcast", True, False, False, True),
    Operation("Reduce", True, True, False, True),
    Operation("Send", False, False, False, False),
    Operation("Recv", False, False, False, False),
    Operation("AlltoAll", True, False, True, False),
    Operation("Gather", True, False, True, True),
    Operation("Scatter", True, False, True, True),
    Operation("PutSignal", False, False, False, False),
    Operation("Signal", False, False, False, False),
    Operation("WaitSignal", False, False, False, False),
)
"""Every opName of a COLL line, NCCL 2.4 to 2.30. The index in this tuple is the operation's code."""

OPERATION_CODES: Final[Mapping[str, int]] = MappingProxyType(
    {operation.name: code for code, operation in enumerate(OPERATIONS)}
)
UNKNOWN_OPERATION: Final = 255
"""The code of an operation that a newer NCCL may print; such rows are kept, named, and never measured."""


@dataclass(frozen=True, slots=True)
class DataType:
    """One of NCCL's data types."""

    name: str
    size_bytes: int


DATA_TYPES: Final[tuple[DataType, ...]] = (
    DataType("int8", 1),
    DataType("uint8", 1),
    DataType("int32", 4),
    DataType("uint32", 4),
    DataType("int64", 8),
    DataType("uint64", 8),
    DataType("float16", 2),
    DataType("float32", 4),
    DataType("float64", 8),
    DataType("bfloat16", 2),
    DataType("float8e4m3", 1),
    DataType("float8e5m2", 1),
)
"""`ncclDataType_t`: the index is the number in the log line. Source: `src/nccl.h.in`."""

REDUCTIONS: Final[tuple[str, ...]] = ("sum", "prod", "max", "min", "avg")
"""`ncclRedOp_t`: the index is the number in the log line; 5 and more are user operations."""


def reduction_name(number: int) -> str:
    """The name of a reduction number; every number from 5 on is "user".

    User operations are scrambled with a hash of the communicator pointer, so the number itself says
    nothing. Source: NCCL `src/enqueue.cc:ncclUserRedOpMangle`.
    """
    return REDUCTIONS[number] if 0 <= number < len(REDUCTIONS) else "user"


ALGORITHMS: Final[tuple[str, ...]] = (
    "TREE",
    "RING",
    "COLLNET_DIRECT",
    "COLLNET_CHAIN",
    "NVLS",
    "NVLS_TREE",
    "PAT",
)
"""Index = number in TUNING lines up to 2.23. Source: `src/collectives.cc:ncclAlgoToString`."""

PROTOCOLS: Final[tuple[str, ...]] = ("LL", "LL128", "SIMPLE")
"""Index = number in TUNING lines up to 2.23. Source: `src/collectives.cc:ncclProtoToString`."""

INSPECTOR_TIMINGS: Final[tuple[str, ...]] = ("kernel_gpu", "kernel_cpu", "collective_cpu")
"""Origins of NCCL Inspector's durations; the index is the code. Only the first is the GPU's own time.
Source: `plugins/profiler/inspector/inspector.cc:inspectorTimingSourceToString`."""
KERNEL_GPU: Final = 0
UNKNOWN_TIMING: Final = 255
