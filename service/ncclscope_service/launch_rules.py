"""What each range of NCCL versions launches for an operation: whether anything, and under which kernel names.

*Source:* NCCL `src/enqueue.cc` (taskAppend, ncclLaunchPrepare, hostStreamPlanTask), `src/proxy.cc:ncclProxyStart`,
`src/device/onerank.cu`, tag by tag; docs/alignment.md has the table in words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import numpy as np

from ncclscope_service.kernel_name import KernelClass, operation_class
from ncclscope_wire.terms import DATA_TYPES, OPERATION_CODES, OPERATIONS

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
    """Class of the kernel of a one-rank reduction with a user operation; None where no kernel is launched."""
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


RULES: Final[tuple[LaunchRules, ...]] = (
    _rules((0, 0, 0), Counting.NEVER, None),
    _rules((2, 9, 0), Counting.WITH_PROXY, None),
    _rules((2, 11, 0), Counting.WITH_PROXY, KernelClass.SEND_RECV),
    _rules((2, 12, 0), Counting.PER_PLAN, KernelClass.SEND_RECV),
    _rules((2, 13, 0), Counting.PER_PLAN, KernelClass.SEND_RECV, shows_send_recv=True, internal_stream=True),
    _rules((2, 14, 0), Counting.PER_PLAN, KernelClass.SEND_RECV, internal_stream=True),
    _rules((2, 15, 0), Counting.PER_PLAN, KernelClass.SEND_RECV),
    _rules((2, 19, 0), Counting.PER_PLAN, KernelClass.ONE_RANK_REDUCE, one_rank_average_launches=True),
    _rules(
        (2, 20, 3),
        Counting.PER_PLAN,
        KernelClass.ONE_RANK_REDUCE,
        empty_collectives_launch=False,
        one_rank_average_launches=True,
    ),
    _rules(
        (2, 27, 0),
        Counting.WITH_PROXY,
        KernelClass.ONE_RANK_REDUCE,
        empty_collectives_launch=False,
        one_rank_average_launches=True,
    ),
    _rules(
        (2, 29, 0),
        Counting.WITH_PROXY,
        KernelClass.ONE_RANK_REDUCE,
        empty_collectives_launch=False,
        one_rank_average_launches=True,
        all_gather_v=True,
    ),
)
"""Ascending; a version follows the last row that is not newer. *Source:* NCCL `src/enqueue.cc`, tag by tag."""

PERMISSIVE: Final = _rules(
    (0, 0, 0),
    Counting.WITH_PROXY,
    KernelClass.ONE_RANK_REDUCE,
    empty_collectives_launch=False,
    one_rank_average_launches=True,
    all_gather_v=True,
)
"""For an unknown version: opCount is believed only where it moves."""


def rules_of(version: str | None) -> LaunchRules:
    """The rules of an NCCL version such as "2.21.5"; the permissive ones for None or a text without numbers."""
    numbers = re.match(r"\D*(\d+)\.(\d+)(?:\.(\d+))?", version or "")
    if numbers is None:
        return PERMISSIVE
    wanted = (int(numbers[1]), int(numbers[2]), int(numbers[3] or 0))
    return next(rules for rules in reversed(RULES) if rules.since <= wanted)
