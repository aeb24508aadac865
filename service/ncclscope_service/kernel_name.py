"""What the name of an NCCL kernel tells: which operations it may have run, and on which type.

One kernel stands for a whole family: reduction, protocol and (from 2.19) most algorithms are not in the
name even where the name spells one. Source: NCCL `src/device/generate.py:best_kernel` (2.19 to 2.30),
`src/enqueue.cc:ncclKerns` (2.8 to 2.18), `src/device/symmetric/generate.py` (2.27 and later).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Final

from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES


class KernelClass(IntEnum):
    """What a kernel is named after. The first five equal the operation's own code."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    BROADCAST = 3
    REDUCE = 4
    SEND_RECV = 16
    """Send, Recv, AlltoAll, Gather and Scatter; in 2.13.4 nearly everything."""
    GENERIC = 17
    """The one entry point of filtered builds and of RCCL: says nothing."""
    ONE_RANK_REDUCE = 18
    ALL_GATHER_V = 19
    """Several Broadcasts with different roots in one group."""
    UNKNOWN = 31


class Family(StrEnum):
    """The naming scheme, which says how much of the name can be believed."""

    OLD = "old"
    KERNEL = "kernel"
    DEV_KERNEL = "dev_kernel"
    SYMMETRIC = "symmetric"
    ONE_RANK = "one_rank"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelName:
    """What one kernel name says."""

    kernel_class: KernelClass
    data_type: int
    """As `merged_data_type` gives it; NO_NUMBER where the name does not tell."""
    family: Family


_UNTYPED: Final = frozenset({KernelClass.ALL_GATHER, KernelClass.BROADCAST, KernelClass.SEND_RECV})
"""These move bytes, so their kernels are named after no type, or always after int8_t."""

_CLASSES: Final[dict[str, KernelClass]] = {
    "AllReduce": KernelClass.ALL_REDUCE,
    "AllGather": KernelClass.ALL_GATHER,
    "ReduceScatter": KernelClass.REDUCE_SCATTER,
    "Broadcast": KernelClass.BROADCAST,
    "Reduce": KernelClass.REDUCE,
    "SendRecv": KernelClass.SEND_RECV,
    "AllGatherV": KernelClass.ALL_GATHER_V,
}

_TYPES: Final[dict[str, int]] = {
    **dict.fromkeys(("u8", "i8", "int8_t", "uint8_t"), 1),
    **dict.fromkeys(("u32", "i32", "int32_t", "uint32_t"), 3),
    **dict.fromkeys(("u64", "i64", "int64_t", "uint64_t"), 5),
    **dict.fromkeys(("f16", "half"), 6),
    **dict.fromkeys(("f32", "float"), 7),
    **dict.fromkeys(("f64", "double"), 8),
    **dict.fromkeys(("bf16", "__nv_bfloat16"), 9),
    "f8e4m3": 10,
    "f8e5m2": 11,
}
"""Type names in kernel names to the number of the type that stands for its kind: signedness is not told."""

_SIGNED: Final = {0: 1, 2: 3, 4: 5}

_PATTERNS: Final[tuple[tuple[Family, re.Pattern[str]], ...]] = (
    (Family.ONE_RANK, re.compile(r"oneRankReduce")),
    (
        Family.SYMMETRIC,
        re.compile(r"ncclSymk?DevKernel_(?P<op>AllReduce|AllGather|ReduceScatter)_\w+?(?:_sum_(?P<type>\w+))?\b"),
    ),
    (
        Family.DEV_KERNEL,
        re.compile(
            r"ncclDevKernel(?:Debug)?_(?P<op>AllGatherV|AllGather|Broadcast|SendRecv"
            r"|AllReduce|ReduceScatter|Reduce|Generic)(?:_[A-Z]\w*?_(?P<type>[a-z]+\d+(?:e\dm\d)?))?(?![a-z])"
        ),
    ),
    (
        Family.KERNEL,
        re.compile(
            r"ncclKernel_(?P<op>AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)"
            r"_[A-Z_]+?_(?:LL128|LL|SIMPLE)_[A-Za-z]+?_(?P<type>_*[a-z]\w*)"
        ),
    ),
    (
        Family.OLD,
        re.compile(
            r"nccl(?P<op>AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv)\w*?Kernel_[a-z]+_(?P<type>\w+)"
        ),
    ),
)
"""First match wins; `op` and `type` where the scheme has them."""


@lru_cache(maxsize=4096)
def parse_kernel_name(name: str) -> KernelName:
    """What this kernel name tells, in any NCCL version from 2.7 on; class UNKNOWN where it is not understood.

    Takes short and demangled names alike.
    """
    for family, pattern in _PATTERNS:
        found = pattern.search(name)
        if found is not None:
            return _kernel_name(family, found)
    return KernelName(kernel_class=KernelClass.UNKNOWN, data_type=NO_NUMBER, family=Family.OTHER)


def merged_data_type(data_type: int) -> int:
    """The data type number with signedness removed: signed integers share the unsigned kernel."""
    return _SIGNED.get(data_type, data_type)


def operation_class(op: int) -> KernelClass:
    """The class of the kernel that runs an operation (by code) on its own; UNKNOWN for those that have none."""
    if op <= OPERATION_CODES["Reduce"]:
        return KernelClass(op)
    return KernelClass.SEND_RECV if op <= OPERATION_CODES["Scatter"] else KernelClass.UNKNOWN


def _kernel_name(family: Family, found: re.Match[str]) -> KernelName:
    if family is Family.ONE_RANK:
        return KernelName(kernel_class=KernelClass.ONE_RANK_REDUCE, data_type=NO_NUMBER, family=family)
    kernel_class = _CLASSES.get(found["op"], KernelClass.GENERIC)
    typed = kernel_class not in _UNTYPED
    data_type = _TYPES.get(found["type"] or "", NO_NUMBER) if typed else NO_NUMBER
    return KernelName(kernel_class=kernel_class, data_type=data_type, family=family)
