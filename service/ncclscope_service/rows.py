"""The service's own rows: what is known of each operation, kernel, communicator and rank.

Tables of these live in `store.py`; every stage of the pipeline fills its own columns and leaves the
rest alone. Unknown is NO_TIME_NS, NO_NUMBER or NaN in a column, and null or None at every edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np

from ncclscope_service.topology import Bottleneck


class Match(IntEnum):
    """What became of an operation in the alignment."""

    PENDING = 0
    """Not decided yet: its capture may still come."""
    MATCHED = 1
    UNMATCHED = 2
    """Inside a capture, but no kernel was found for it."""
    NOT_COVERED = 3
    """No capture recorded its process at that time."""
    NO_KERNEL = 4
    """NCCL launches none: one rank, nothing to move, copy engine."""


class TimingSource(IntEnum):
    """Where an operation's duration and measures are from; its lower-case name is what outputs print."""

    KERNEL = 0
    INSPECTOR = 1


class IterationBy(IntEnum):
    """What an operation's iteration was told by; its lower-case name is what outputs print."""

    MARKS = 0
    """NVTX marks of its process."""
    PERIOD = 1
    """The period of what its rank calls."""


OPERATION: Final = np.dtype(
    [
        # who: filled by intake and communicators
        ("source", "<i4"),  # index into the store's sources
        ("process", "<i4"),  # index into the store's processes
        ("template", "<i4"),  # index into the store's operation templates
        ("member", "<i4"),  # index into the store's members: this communicator as this process knows it
        ("line", "<i8"),
        ("op_count", "<u8"),
        ("seq", "<i8"),  # k-th row of that member, from 0
        ("coll_seq", "<i8"),  # k-th collective of that member; NO_NUMBER for Send/Recv and one-sided
        ("pair_seq", "<i8"),  # k-th Send (or Recv) with that peer; NO_NUMBER for collectives
        ("kind_seq", "<i8"),  # k-th collective of its kind that NCCL launches, which is Inspector's coll_sn; NO_NUMBER
        ("message_bytes", "<i8"),  # nccl-tests' S; NO_NUMBER where the data type is not known
        ("logged_at_ns", "<i8"),
        ("observed_at_ns", "<i8"),
        ("group", "<i8"),  # operations of one ncclGroupStart/End share it; call_groups.ALONE; NO_NUMBER
        ("iteration", "<i4"),
        ("iteration_by", "<i1"),  # IterationBy; NO_NUMBER where the iteration is not known
        ("algorithm", "<i1"),
        ("protocol", "<i1"),
        ("channels", "<i2"),
        # kernel: filled by align
        ("match", "<u1"),  # Match
        ("launch", "<i8"),  # operations that share a kernel share it
        ("kernel", "<i8"),  # row id of the first kernel of its launch
        ("confidence", "<f4"),
        # NCCL Inspector: filled by inspection
        ("inspected_ns", "<i8"),  # duration of its kernel as Inspector prints it; NO_TIME_NS
        ("inspected_confidence", "<f4"),  # that the record is this operation's
        ("inspected", "?"),  # the measures of its collective were counted from Inspector's records
        # times: filled by align (host clock) and clock (reference clock)
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("censored", "?"),
        ("start_true_ns", "<i8"),
        ("end_true_ns", "<i8"),
        ("clock_uncertainty_ns", "<i8"),
        # measures: filled by join and measure
        ("ranks_seen", "<i4"),  # how many ranks' kernels of this collective were seen
        ("wait_ns", "<i8"),
        ("transfer_ns", "<i8"),
        ("algbw", "<f8"),  # bytes per second
        ("busbw", "<f8"),  # of the transfer
        ("busbw_apparent", "<f8"),  # of the whole kernel
        ("limit", "<f8"),  # comparable with busbw
        ("limit_reference", "<i1"),  # LimitReference; NO_NUMBER
        ("bottleneck", "<i4"),  # index into the store's strings: what the limit by topology is of; NO_NUMBER
        ("finished", "?"),  # nothing more will be learnt about this row
    ]
)
"""One logged operation."""


REPLAYED: Final = np.dtype(
    [
        *((name, OPERATION[name]) for name in OPERATION.names or ()),
        ("operation", "<i8"),  # row id of the captured operation
        ("captured_launch", "<i8"),  # launch id of the captured operation
        ("replay", "<i4"),  # k-th launch of its graph that was recorded, from 0
        ("is_first", "?"),  # the captured operation's row names this kernel
    ]
)
"""One replay of a captured operation: its line's columns, with kernel, times and measures of its own. `launch` is one
of its own too: the kernel's row id."""


LOGGED: Final = np.dtype(
    [
        (name, OPERATION[name])
        for name in ("source", "template", "line", "op_count", "logged_at_ns", "observed_at_ns", "group")
    ]
)
"""What a log says of an operation: a fifth of what its row takes once it is worked on."""

PLACED: Final = np.dtype(
    [
        *((name, LOGGED[name]) for name in LOGGED.names or ()),
        *(
            (name, OPERATION[name])
            for name in ("process", "member", "seq", "coll_seq", "pair_seq", "kind_seq", "message_bytes")
        ),
    ]
)
"""The same with its place in its communicator: all that is known of an operation until it is aligned."""


class LimitReference(IntEnum):
    """What a limit was taken from; its lower-case name is what outputs print."""

    TOPOLOGY = 0
    NCCL_MODEL = 1
    BASELINE = 2


KERNEL: Final = np.dtype(
    [
        ("source", "<i4"),
        ("process", "<i4"),
        ("template", "<i4"),  # index into the store's kernel templates
        ("correlation_id", "<i8"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("launch_start_ns", "<i8"),
        ("launch_end_ns", "<i8"),
        ("launch_tid", "<i8"),
        ("graph_node_id", "<i8"),
        ("censored", "?"),
        ("launch", "<i8"),  # launch id; NO_NUMBER while or where it has no operation
        ("replay", "<i4"),  # k-th recorded launch of its graph, 0 outside graphs; NO_NUMBER where it has no launch
    ]
)
"""One NCCL kernel record."""


COLLECTIVE: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("coll_seq", "<i8"),  # of the launch's first collective
        ("op", "<u1"),
        ("size_class", "<u1"),
        ("message_bytes", "<i8"),  # summed over the collectives of the launch
        ("ranks_seen", "<i4"),
        ("first_start_true_ns", "<i8"),  # reference clock
        ("end_true_ns", "<i8"),  # reference clock, of the last arriver's kernel
        ("transfer_ns", "<i8"),
        ("spread_ns", "<i8"),  # the longest wait of any rank
        ("wait_ns", "<i8"),  # summed over the ranks
        ("busy_ns", "<i8"),  # kernel durations summed over the ranks
        ("last_rank", "<i4"),  # communicator rank that arrived last (shortest kernel)
        ("blame_ns", "<i8"),  # how much later than the second last it arrived
        ("busbw", "<f8"),  # bytes per second, of the transfer
        ("confidence", "<f4"),  # smallest of the matches it rests on
        ("rank", "<i4"),  # of sends and receives: communicator rank whose launch it is; else NO_NUMBER
        ("peer", "<i4"),  # and the rank it exchanged with; NO_NUMBER where there were several
    ]
)
"""One launch of collectives that was seen on two ranks or more, joined across the ranks of its communicator; or one
rank's launch of sends and receives, of which every other side was seen: it has no `coll_seq` and no `last_rank`."""

INSPECTED: Final = np.dtype(
    [
        ("source", "<i4"),
        ("process", "<i4"),
        ("line", "<i8"),
        ("comm_hash", "<u8"),
        ("communicator", "<i4"),  # NO_NUMBER until it is known
        ("rank", "<i4"),  # communicator rank
        ("nranks", "<i4"),
        ("op", "<u1"),
        ("timing", "<u1"),
        ("peer", "<i4"),
        ("sequence", "<i8"),
        ("message_bytes", "<i8"),  # nccl-tests' S; NO_NUMBER
        ("duration_ns", "<i8"),  # whole us; NO_TIME_NS
        ("dumped_at_ns", "<i8"),  # host clock
        ("started_at_ns", "<i8"),  # host clock; NO_TIME_NS
        ("busbw", "<f8"),  # as printed
        ("arrived_at_ns", "<i8"),  # service's clock
        ("operation", "<i8"),  # row id of the operation that it tells of; NO_NUMBER
        # measures: filled when the ranks of its collective were joined
        ("ranks_seen", "<i4"),
        ("wait_ns", "<i8"),
        ("transfer_ns", "<i8"),
    ]
)
"""One record of NCCL Inspector: an operation of one rank that has completed."""

SERIES: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("op", "<u1"),
        ("size_class", "<u1"),
        # from the log, counted as they are read, over all ranks
        ("operations", "<i8"),
        ("bytes", "<i8"),
        # from kernels, over all ranks
        ("matched", "<i8"),  # operations with a kernel
        ("duration_ns", "<i8"),
        ("wait_ns", "<i8"),
        ("waiting_duration_ns", "<i8"),  # kernel time of those operations whose wait is known
        # from joined collectives
        ("collectives", "<i8"),
        ("transfer_ns", "<i8"),
        ("busbw", "<f8"),  # median over the last minute with data; NaN before
        ("baseline", "<f8"),  # the best that this series has shown (90th percentile of its windows); NaN
        ("limit", "<f8"),  # by topology; NaN
        # from NCCL Inspector, over all ranks
        ("inspected", "<i8"),  # records
        ("inspected_ns", "<i8"),  # their durations
        ("compared", "<i8"),  # operations whose kernel is known as well
        ("compared_kernel_ns", "<i8"),
        ("compared_inspected_ns", "<i8"),
    ]
)
"""What a (communicator, operation, size class) has done so far: counters since the start, and recent busbw."""

SIZE_CLASS_BOUNDS: Final = (4 * 1024, 64 * 1024, 1024**2, 16 * 1024**2, 256 * 1024**2)
"""Upper bounds (inclusive) of the first size classes in bytes; the last class has none. Six classes keep series few."""

SIZE_CLASSES: Final = ("4KiB", "64KiB", "1MiB", "16MiB", "256MiB", "inf")
"""Names: the upper bound of each class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process that logged or was captured."""

    host: str
    pid: int


class Identity(StrEnum):
    """How a communicator's identity is known."""

    COMM_ID = "comm_id"
    SPLIT = "split"
    INFERRED = "inferred"


@dataclass(slots=True, kw_only=True)
class Communicator:
    """One communicator across all of its processes."""

    index: int
    job: str
    comm_id: str
    size: int
    identity: Identity
    identity_confidence: float = 1.0
    """How sure it is that its members are one; below 1 where that was inferred, 0 while its other ranks are unknown."""
    absorbed_by: int | None = None
    """The communicator that its only member was found to belong to: this one is then listed no more."""
    parent_comm_id: str | None = None
    split_count: int | None = None
    color: int | None = None
    parallelism: str | None = None
    """TP, DP, PP, EP, CP, EMBEDDING, WORLD, ...; None where it cannot be told."""
    parallelism_confidence: float = 0.0
    members: dict[int, int] | None = None
    """Communicator rank to member index, for the ranks that were seen."""
    bottleneck: Bottleneck | None = None
    """Its limit by topology; None where that is not known."""
    comm_hash: int | None = None
    """NCCL's own name of it, as printed or made (`comm_hash.py`); None where neither is possible."""
    model_limit: float | None = None
    """Bus bandwidth that NCCL's tuning table gives large messages of its most used operation, bytes per second."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One rank of a communicator, as its process knows it: (process, pointer, epoch)."""

    index: int
    communicator: int
    process: int
    pointer: int
    epoch: int
    """How many communicators with the same pointer this process had before."""
    rank: int | None
    """Rank in the communicator; None where no Init line was seen."""
    cuda_device: int | None
    bus_id: int | None
    nvml_device: int | None = None
    global_rank: int | None = None
    global_rank_is_inferred: bool = False
    local_rank: int | None = None
    is_alive: bool = True
    """False once its Destroy or Abort line was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClock:
    """A host's clock against the reference clock: `true = t - offset_ns - drift_ppm*1e-6*(t - at_ns)`."""

    offset_ns: float
    """Host clock minus reference clock at `at_ns`."""
    drift_ppm: float
    """More than 0: the host runs fast."""
    at_ns: int
    sigma_ns: float
    interval_lo_ns: float | None
    interval_hi_ns: float | None
    samples: int
    steps: tuple[int, ...] = ()
    """Host times at which a step of the clock was found."""
    told_by: str = "collectives"
    """`collectives` (where operations tie it to the reference) or `prior` (what agents and kernels say of clocks)."""


class FindingKind(StrEnum):
    """Every kind of finding; each has a heading in docs/findings.md."""

    LATE_RANK = "late_rank"
    SLOW_LINK = "slow_link"
    BANDWIDTH_DROP = "bandwidth_drop"
    SLOW_DRIFT = "slow_drift"
    BELOW_LIMIT = "below_limit"
    HANG = "hang"
    MISMATCH = "mismatch"
    REPORTED_FAILURE = "reported_failure"
    STOPPED_LOGGING = "stopped_logging"
    CLOCK_FAULT = "clock_fault"
    BLIND = "blind"


class Severity(StrEnum):
    """How much a finding hurries."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a person must know, with the numbers that prove it."""

    kind: FindingKind
    severity: Severity
    job: str
    comm_id: str | None
    parallelism: str | None
    ranks: tuple[int, ...]
    """Global ranks of the culprits, not everybody."""
    hosts: tuple[str, ...]
    since_ns: int
    """Reference clock."""
    until_ns: int | None
    """Reference clock; None while open."""
    confidence: float
    summary: str
    evidence: dict[str, object]
