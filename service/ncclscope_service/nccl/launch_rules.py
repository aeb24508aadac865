"""Kernels that NCCL launches for an operation, by version, and the operations that a kernel's name stands for.

One kernel stands for a whole family: reduction, protocol and (from 2.19) most algorithms are not in the
name even if the name spells one.

*Source:* NCCL `src/device/generate.py:best_kernel` (2.19 to 2.30),
`src/enqueue.cc:ncclKerns` (2.8 to 2.18), `src/device/symmetric/generate.py` (2.27 and later).

For each range of NCCL versions the rules give whether an operation launches anything, and under which kernel names.

*Source:* NCCL `src/enqueue.cc` (taskAppend, ncclLaunchPrepare, hostStreamPlanTask), `src/proxy.cc:ncclProxyStart`,
`src/device/onerank.cu`, tag by tag; docs/internals/alignment.md has the table in words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum, auto
from functools import lru_cache
from typing import Final

import numpy as np

from ncclscope_wire.terms import DATA_TYPES, NO_NUMBER, OPERATION_CODES, OPERATIONS


class KernelClass(IntEnum):
    """Operation that a kernel is named after. The first five equal the operation's own code."""

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
    """Meaning of one kernel name."""

    kernel_class: KernelClass
    data_type: int
    """As `merged_data_type` gives it; NO_NUMBER if the name does not say."""
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
"""Type names in kernel names to the number of the type that stands for its kind: names do not show the sign."""

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
"""First match wins; `op` and `type` if the scheme has them."""


@lru_cache(maxsize=4096)
def parse_kernel_name(name: str) -> KernelName:
    """Meaning of a kernel name of any NCCL version from 2.7 on; class UNKNOWN if it is not understood.

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


Version = tuple[int, int, int]

SENDS_AND_RECVS: Final = frozenset(OPERATION_CODES[name] for name in ("Send", "Recv"))
_FLOATING_TYPES: Final = frozenset({"float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"})
_AVG: Final = 4
_FIRST_USER_REDUCTION: Final = 5


class Counting(Enum):
    """When a communicator's opCount moves."""

    NEVER = auto()
    PER_PLAN = auto()
    """With every kernel, once the proxy is connected; never at one rank."""
    WITH_PROXY = auto()
    """Only with kernels that have network (proxy) work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRules:
    """How one range of NCCL versions turns operations into kernels."""

    since: Version
    counting: Counting
    empty_collectives_launch: bool
    one_rank: KernelClass | None
    """Class of the kernel of a one-rank reduction with a user operation; None if no kernel is launched."""
    one_rank_average_launches: bool = False
    """Average on floating types becomes a pre-multiplied sum, which one rank must carry out."""
    shows_send_recv: bool = False
    """Collectives that do not run LL appear under SendRecv's name."""
    internal_stream: bool = False
    """Kernels run on a stream of NCCL's own, so the logged stream says nothing."""
    all_gather_v: bool = False

    def classes_of(self, operation: np.void) -> set[KernelClass]:
        """The kernels that an operation (a row of op, one_rank, reduction, data_type, count) may show as, in a group or
        alone; none if it launches nothing."""
        op = int(operation["op"])
        if op >= len(OPERATIONS):
            return {KernelClass.GENERIC, KernelClass.UNKNOWN}
        kernel_class = operation_class(op)
        if kernel_class is KernelClass.UNKNOWN:
            return set()
        if operation["one_rank"] and op not in SENDS_AND_RECVS:
            return self._one_rank_classes(op, int(operation["reduction"]), int(operation["data_type"]))
        if int(operation["count"]) == 0 and op not in SENDS_AND_RECVS and not self.empty_collectives_launch:
            return set()
        classes: set[KernelClass] = {kernel_class, KernelClass.GENERIC}
        if self.shows_send_recv:
            classes.add(KernelClass.SEND_RECV)
        if self.all_gather_v and kernel_class is KernelClass.BROADCAST:
            classes.add(KernelClass.ALL_GATHER_V)
        return classes

    def _one_rank_classes(self, op: int, reduction: int, data_type: int) -> set[KernelClass]:
        if self.one_rank is None or not OPERATIONS[op].reduces:
            return set()
        is_floating = 0 <= data_type < len(DATA_TYPES) and DATA_TYPES[data_type].name in _FLOATING_TYPES
        averages = self.one_rank_average_launches and reduction == _AVG and is_floating
        return {self.one_rank} if averages or reduction >= _FIRST_USER_REDUCTION else set()


def _rules(since: Version, counting: Counting, one_rank: KernelClass | None, **more: bool) -> LaunchRules:
    empty = more.pop("empty_collectives_launch", True)
    return LaunchRules(since=since, counting=counting, empty_collectives_launch=empty, one_rank=one_rank, **more)


_ONE_RANK: Final = KernelClass.ONE_RANK_REDUCE
_SINCE_2_20: Final = {"empty_collectives_launch": False, "one_rank_average_launches": True}

RULES: Final[tuple[LaunchRules, ...]] = (
    _rules((0, 0, 0), Counting.NEVER, None),
    _rules((2, 9, 0), Counting.WITH_PROXY, None),
    _rules((2, 11, 0), Counting.WITH_PROXY, KernelClass.SEND_RECV),
    _rules((2, 12, 0), Counting.PER_PLAN, KernelClass.SEND_RECV),
    _rules((2, 13, 0), Counting.PER_PLAN, KernelClass.SEND_RECV, shows_send_recv=True, internal_stream=True),
    _rules((2, 14, 0), Counting.PER_PLAN, KernelClass.SEND_RECV, internal_stream=True),
    _rules((2, 15, 0), Counting.PER_PLAN, KernelClass.SEND_RECV),
    _rules((2, 19, 0), Counting.PER_PLAN, _ONE_RANK, one_rank_average_launches=True),
    _rules((2, 20, 3), Counting.PER_PLAN, _ONE_RANK, **_SINCE_2_20),
    _rules((2, 27, 0), Counting.WITH_PROXY, _ONE_RANK, **_SINCE_2_20),
    _rules((2, 29, 0), Counting.WITH_PROXY, _ONE_RANK, **_SINCE_2_20, all_gather_v=True),
)
"""Ascending; a version follows the last row that is not newer. *Source:* NCCL `src/enqueue.cc`, tag by tag."""

PERMISSIVE: Final = _rules((0, 0, 0), Counting.WITH_PROXY, _ONE_RANK, **_SINCE_2_20, all_gather_v=True)
"""For an unknown version: opCount is believed only if it moves."""


def rules_of(version: str | None) -> LaunchRules:
    """The rules of an NCCL version such as "2.21.5"; the permissive ones for None or a text without numbers."""
    numbers = re.match(r"\D*(\d+)\.(\d+)(?:\.(\d+))?", version or "")
    if numbers is None:
        return PERMISSIVE
    wanted = (int(numbers[1]), int(numbers[2]), int(numbers[3] or 0))
    return next(rules for rules in reversed(RULES) if rules.since <= wanted)
