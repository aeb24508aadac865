"""Records that the rows of tables point at: processes, communicators, sources, clocks, findings."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import accumulate, distinct
from ncclscope_service.nccl.topology import Bottleneck
from ncclscope_wire.records import CaptureSeen, Source, SourceGap, SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


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
    """How sure it is that its members are one; below 1 if that was inferred, 0 while its other ranks are unknown."""
    absorbed_by: int | None = None
    """The communicator that its only member was found to belong to: this one is then listed no more."""
    name: str | None = None
    """Of the process group that uses it, as PyTorch prints it; None if no line says it. Groups may share one."""
    possible_names: tuple[str, ...] = ()
    """Of the process groups of just its ranks, where several are, or several communicators: it is that of one."""
    parent_comm_id: str | None = None
    split_count: int | None = None
    color: int | None = None
    parallelism: str | None = None
    """TP, DP, PP, EP, CP, EMBEDDING, WORLD, ...; None if it is not known."""
    parallelism_confidence: float = 0.0
    members: dict[int, int] | None = None
    """Communicator rank to member index, for the ranks that were seen."""
    bottleneck: Bottleneck | None = None
    """Its limit by topology; None if that is not known."""
    comm_hash: int | None = None
    """NCCL's own name of it, as printed or made (`intake.communicators.split_hash`); None if neither is possible."""
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
    """Rank in the communicator; None if no Init line was seen."""
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
    step_sizes_ns: tuple[int, ...] = ()
    """By how much each of them set it; 0 if that is not known."""
    told_by: str = "collectives"
    """`collectives` (if operations tie it to the reference) or `prior` (what agents and kernels say of clocks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClocks:
    """The clocks of the hosts of one job, as they were estimated last.

    Each job has a reference of its own: no operation ties hosts of two jobs, so times of one are to those of another as
    the references' own clocks are.
    """

    reference: str | None = None
    hosts: dict[str, HostClock] = field(default_factory=dict[str, HostClock])
    """By host, where it is known."""
    violation_ratio: float | None = None
    """Share of causality constraints that fail after correction; None if none could be checked."""
    are_trusted: bool = True
    """False while operations contradict causality on the corrected clocks: then no ranks are compared by times."""


class FindingKind(StrEnum):
    """Every kind of finding, the most urgent first; each has a heading in docs/findings.md."""

    MISMATCH = "mismatch"
    HANG = "hang"
    REPORTED_FAILURE = "reported_failure"
    STOPPED_LOGGING = "stopped_logging"
    SLOW_LINK = "slow_link"
    LATE_RANK = "late_rank"
    BANDWIDTH_DROP = "bandwidth_drop"
    BELOW_LIMIT = "below_limit"
    SLOW_STEPS = "slow_steps"
    MISCONFIGURATION = "misconfiguration"
    OFF_PLAN = "off_plan"
    SLOWER_THAN_PLAN = "slower_than_plan"
    SLOW_DRIFT = "slow_drift"
    CLOCK_FAULT = "clock_fault"
    BLIND = "blind"


class Severity(StrEnum):
    """How much a finding hurries."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledgement:
    """Somebody knows of a finding, and looks after it."""

    by: str
    """Empty if nobody said."""
    note: str
    at_ns: int
    """Service's wall clock, as all times of marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mute:
    """Somebody does not want to hear of some findings for a time."""

    id: str
    by: str
    note: str
    at_ns: int
    until_ns: int
    finding: str | None
    """Id of the only finding that it is about; the others are then empty."""
    kind: str | None
    job: str | None
    """Pattern (`*`, `?`); None: any."""
    ranks: tuple[int, ...]
    """A finding fits that names one of them; empty: any."""
    hosts: tuple[str, ...]
    """The same, patterns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a person must know, with the numbers that prove it."""

    kind: FindingKind
    severity: Severity
    job: str
    comm_id: str | None = None
    parallelism: str | None = None
    ranks: tuple[int, ...] = ()
    """Global ranks of the culprits, not everybody."""
    hosts: tuple[str, ...] = ()
    since_ns: int
    """On the reference clock."""
    until_ns: int | None = None
    """Reference clock; None while open."""
    confidence: float
    summary: str
    evidence: dict[str, object]
    id: str = ""
    """Of the fault, in a service that runs: stays as long as it is open, and after a restart."""
    acknowledged: Acknowledgement | None = None
    muted: Mute | None = None
    """The mute that lasts longest."""


STANDING_KEPT: Final = 64
"""Ranks of which a verdict says where they stood; `last_operations.parquet` has all."""


class Ending(StrEnum):
    """Ways in which a job ends."""

    HANG = "hang"
    CRASHED = "crashed"
    KILLED = "killed"
    ENDED_TOGETHER = "ended together"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLine:
    """A log line that says that something failed."""

    rank: int | None
    """Global rank that it is about."""
    host: str | None
    text: str
    at_ns: int | None
    """Logged, else observed; None if neither is known."""
    where: str
    """File and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStanding:
    """Where one rank stood on a group whose ranks stand apart."""

    rank: int
    """Global."""
    host: str | None
    comm_id: str
    parallelism: str | None
    enqueued: int
    """Collectives, or Sends or Recvs of one pair."""
    behind: int
    """How many fewer than the first rank."""
    stopped_at: str
    """The first operation that not all ranks enqueued, as a `collective_id`."""
    waits_for: tuple[int, ...]
    """Global ranks furthest behind there, if it is ahead of them; the first eight."""
    blamed: tuple[int, ...]
    """Global ranks at which its waits end, over all groups (`hang.ends_of_waits`)."""
    last_words: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a job ended, as far as its logs tell."""

    job: str
    ending: Ending
    is_provisional: bool
    """The job is silent but not known to be over."""
    ranks: tuple[int, ...] = ()
    """Global ranks that hung, or that failed first; empty if they are not known."""
    hosts: tuple[str, ...] = ()
    summary: str
    """One sentence: what happened, or why that is unclear."""
    first_failure: FailureLine | None = None
    """Of a job that crashed or was killed."""
    last_words: tuple[FailureLine, ...] = ()
    """By rank, the last line of each that says that something failed."""
    standing: tuple[RankStanding, ...] = ()
    """One for each rank of groups that stand apart, those at which waits end first; the first `STANDING_KEPT`."""


@dataclass(slots=True)
class SourceState:
    """State of one source."""

    source: Source
    agent: str
    position: int = 0
    """Everything before it has been applied."""
    is_complete: bool = False
    zone_name: str | None = None


GAPS_KEPT: Final = 1024
"""Gaps of one source that are kept one by one: a third of a megabyte."""


@dataclass(slots=True)
class SourceGaps:
    """The gaps of one source, in order of arrival; as many as there were are counted, the newest can be asked for."""

    by_reason: Counter[str] = field(default_factory=Counter[str])
    """How many there were, those that are not kept included."""
    _kept: deque[SourceGap] = field(default_factory=lambda: deque[SourceGap](maxlen=GAPS_KEPT))

    def __len__(self) -> int:
        """Number of all gaps, those that are not kept included."""
        return self.by_reason.total()

    def __iter__(self) -> Iterator[SourceGap]:
        """The gaps that are kept."""
        return iter(self._kept)

    def append(self, gap: SourceGap) -> None:
        """Counts a gap and keeps it; the oldest kept one may go."""
        self._kept.append(gap)
        self.by_reason[gap.reason] += 1

    def extend(self, gaps: Iterable[SourceGap]) -> None:
        """Counts and keeps several gaps, in order."""
        for gap in gaps:
            self.append(gap)

    def forgotten(self) -> Counter[str]:
        """Number of gaps that are not kept, by reason."""
        return self.by_reason - Counter(gap.reason for gap in self._kept)


@dataclass(slots=True)
class RetiredSources:
    """Sums over all sources whose places were given to others."""

    kinds: Counter[SourceKind] = field(default_factory=Counter[SourceKind])
    gaps: Counter[str] = field(default_factory=Counter[str])
    """By reason."""
    gaps_of_hosts: Counter[tuple[SourceKind, str]] = field(default_factory=Counter[tuple[SourceKind, str]])
    torn_lines: Counter[str] = field(default_factory=Counter[str])
    """By host."""


@dataclass(slots=True)
class Captures:
    """(source, capture) in order of arrival. Ids are absolute: that of the oldest one kept is `first`."""

    first: int = 0
    """Number of those that were forgotten."""
    newest_ns: int = NO_TIME_NS
    """The latest end of any, on its host's clock."""
    graph_launches: int = 0
    """CUDA graphs that were recorded as a whole, in all of them."""
    gpus: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """By host, what the last one with GPUs says of them (`CaptureSeen.gpu`)."""
    _kept: deque[tuple[int, CaptureSeen]] = field(default_factory=deque[tuple[int, CaptureSeen]])

    @property
    def next_id(self) -> int:
        """The id that the next one will have; how many there were in all."""
        return self.first + len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[int, CaptureSeen]]:
        return iter(self._kept)

    def append(self, source_and_capture: tuple[int, CaptureSeen]) -> None:
        """Adds a capture with its source, and its share of the sums."""
        self._kept.append(source_and_capture)
        self.newest_ns = max(self.newest_ns, source_and_capture[1].end_ns)
        self.graph_launches += source_and_capture[1].graph_launches
        self.gpus[source_and_capture[1].host] = source_and_capture[1].gpu

    def since(self, capture_id: int) -> list[tuple[int, CaptureSeen]]:
        """Those with this id or a later one, as far as they are kept."""
        newer = list(islice(reversed(self._kept), max(0, self.next_id - capture_id)))
        return newer[::-1]

    def drop_before(self, capture_id: int) -> None:
        """Forgets those with a smaller id."""
        while self._kept and self.first < capture_id:
            self._kept.popleft()
            self.first += 1

    def copy(self) -> Captures:
        """A copy that shares nothing that changes."""
        return replace(self, gpus=self.gpus.copy(), _kept=self._kept.copy())


REFERENCED_AT_ONCE: Final = 4096
"""Operations of which one first kernel is kept."""


@dataclass(slots=True)
class KernelReferences:
    """First kernel that each block of operations points at: older kernels may leave memory."""

    _first: dict[int, int] = field(default_factory=dict[int, int])

    def record(self, operations: NDArray[np.int64], kernels: NDArray[np.int64]) -> None:
        """Operations point at these kernels, one each, by row id."""
        blocks, inverse = distinct(operations // REFERENCED_AT_ONCE)
        first = np.full(len(blocks), np.iinfo(np.int64).max)
        accumulate(np.minimum, first, inverse, kernels)
        for block, kernel in zip(blocks.tolist(), first.tolist(), strict=True):
            self._first[block] = min(kernel, self._first.get(block, kernel))

    def first_from(self, first: int, kernels: NDArray[np.int64]) -> int | None:
        """The first kernel that operations from `first` on point at; what older ones point at is forgotten.

        `kernels`: those of these operations, NO_NUMBER for none; only those of the first block are looked at.
        """
        self._first = {block: kernel for block, kernel in self._first.items() if block >= first // REFERENCED_AT_ONCE}
        if (block := first // REFERENCED_AT_ONCE) in self._first:
            own = kernels[: (block + 1) * REFERENCED_AT_ONCE - first]
            own = own[own != NO_NUMBER]
            if len(own):
                self._first[block] = int(own.min())
            else:
                del self._first[block]
        return min(self._first.values(), default=None)
