"""What the service knows: growing tables of columns, and the few records they point at.

The pipeline's stages write here and everything that shows (metrics, page, trace, files) reads here.
Row ids are absolute and never reused: `Table.drop_before` forgets old rows, ids of later ones stay.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import rows, whole_rows
from ncclscope_service.captures import Captures
from ncclscope_service.channels import Channels
from ncclscope_service.left_sources import LeftSources
from ncclscope_service.measured_baseline import MeasuredBaseline
from ncclscope_service.named_kernels import NamedKernels
from ncclscope_service.reserved import LARGE_BYTES, Reserved, reserve
from ncclscope_service.rows import Communicator, Finding, HostClock, Member, Process
from ncclscope_service.source_gaps import SourceGaps
from ncclscope_wire.batch import Columns
from ncclscope_wire.facts import Fact
from ncclscope_wire.records import Source
from ncclscope_wire.topology import TopologySeen, TuningTableSeen

Ids = NDArray[np.int64]
"""Row ids."""

_FIRST_CAPACITY: Final = 1024
_DROPPED_TO_KEPT: Final = 0.5
"""Rows are moved to the front when so many of them were dropped there: each is moved twice at most while it is kept,
and memory is written to for half as many again as are kept."""
_MOST_USED: Final = 3
"""Memory that was written to is given back when it is so many times what is needed: all but half as much."""

OPERATION_TEMPLATE: Final = np.dtype(
    [
        ("process", "<i4"),
        ("tid", "<u4"),
        ("device", "<i2"),
        ("op", "<u1"),
        ("op_name", "<i4"),  # index into Store.strings
        ("data_type", "<i2"),
        ("reduction", "<i8"),
        ("root", "<i4"),
        ("nranks", "<i4"),
        ("count", "<u8"),
        ("send_buffer", "<u8"),
        ("recv_buffer", "<u8"),
        ("communicator", "<u8"),
        ("stream", "<u8"),
        ("global_rank", "<i4"),
    ]
)
"""As on the wire, with process and thread resolved."""

KERNEL_TEMPLATE: Final = np.dtype(
    [
        ("process", "<i4"),
        ("device_id", "<i4"),
        ("stream_id", "<i8"),
        ("name", "<i4"),  # index into Store.strings
        ("grid_x", "<i4"),
        ("grid_y", "<i4"),
        ("grid_z", "<i4"),
        ("block_x", "<i4"),
        ("block_y", "<i4"),
        ("block_z", "<i4"),
        ("static_shared_bytes", "<i4"),
        ("dynamic_shared_bytes", "<i4"),
        ("registers", "<i4"),
    ]
)
"""As on the wire, with the process resolved."""

RANGE: Final = np.dtype(
    [
        ("process", "<i4"),
        ("tid", "<u4"),
        ("domain", "<i4"),  # index into Store.strings
        ("text", "<i4"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
    ]
)
"""One NVTX range, on the host's own clock."""

API_CALL: Final = np.dtype(
    [
        ("process", "<i4"),
        ("tid", "<u4"),
        ("kind", "<i2"),  # code in terms.OPERATIONS, GROUP_START or GROUP_END
        ("communicator", "<u8"),  # hash; 0 where it is not told
        ("bytes", "<i8"),  # count x size of the call; NO_NUMBER where it is not told
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),  # NO_TIME_NS where the capture ended first
    ]
)
"""One call of NCCL's API that enqueues, or begins or ends a group: an NVTX range of NCCL's, on the host's own clock."""

GROUP_START: Final = 1000
GROUP_END: Final = 1001

BUSY: Final = np.dtype(
    [("process", "<i4"), ("device_id", "<i4"), ("start_ns", "<i8"), ("end_ns", "<i8"), ("kernels", "<u4")]
)
"""A stretch in which kernels other than NCCL's ran, on the host's own clock."""

TUNING: Final = np.dtype(
    [
        ("process", "<i4"),
        ("tid", "<u4"),
        ("line", "<i8"),
        ("op", "<u1"),
        ("algorithm", "<i1"),
        ("protocol", "<i1"),
        ("channels", "<i2"),
        ("bytes", "<u8"),
        ("expected_us", "<f8"),
    ]
)
"""One TUNING line, with process and thread resolved."""


class Table:
    """A structured array that grows at the end and is forgotten from the front.

    Appending is amortised O(rows); ids are absolute (`first` is the id of the oldest row kept). A large table stays
    where it is: rows that are kept are moved to the front of it over those that were dropped, before memory is used
    that was never written to.
    """

    def __init__(self, dtype: np.dtype[np.void], *, large_bytes: int = LARGE_BYTES) -> None:
        """`large_bytes`: what it may take before it reserves much more than it needs."""
        self.dtype = dtype
        self._large_bytes = large_bytes
        self._rows: Columns = np.empty(_FIRST_CAPACITY, dtype=dtype)
        self._reserved: Reserved | None = None
        """The memory of `_rows`, of a large table."""
        self._begin = 0
        self._end = 0
        self._used = 0
        """Rows from the front of the memory that were ever written to."""
        self.first = 0

    @property
    def next_id(self) -> int:
        """The id that the next appended row will have."""
        return self.first + (self._end - self._begin)

    @property
    def used_bytes(self) -> int:
        """The memory that was written to, for rows that are kept and others."""
        return self._used * self.dtype.itemsize

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def rows(self) -> Columns:
        """A view of all rows kept, oldest first; writing to it changes the table. Valid until the next append."""
        return self._rows[self._begin : self._end]

    def append(self, new: Columns) -> Ids:
        """Adds rows and returns their ids."""
        self._make_room(len(new))
        whole_rows.put(self._rows, self._end, new)
        first_id = self.next_id
        self._end += len(new)
        self._used = max(self._used, self._end)
        return np.arange(first_id, first_id + len(new), dtype=np.int64)

    def at(self, ids: Ids | NDArray[np.intp]) -> NDArray[np.intp]:
        """Positions in `rows` of these ids; ids that were dropped are the caller's fault (AssertionError)."""
        positions = np.asarray(ids, dtype=np.intp) - self.first
        assert len(positions) == 0 or positions.min() >= 0, "a row was asked for after it was dropped"
        return positions

    def take(self, ids: Ids, *names: str) -> Columns:
        """A copy of these rows; of these columns only, where some are named: rows are wide, and columns cheap."""
        if names:
            return whole_rows.columns(self.rows, self.at(ids), names)
        return whole_rows.taken(self.rows, self.at(ids))

    def copy(self) -> Table:
        """A table of its own with the same rows and ids."""
        copied = self.compacted()
        copied._rows = whole_rows.copied(self.rows)
        return copied

    def compacted(self) -> Table:
        """The same rows, not copied, with no room to grow (for snapshots)."""
        compacted = Table(self.dtype, large_bytes=self._large_bytes)
        compacted._rows = self.rows
        compacted._end = compacted._used = len(self)
        compacted.first = self.first
        return compacted

    def drop_before(self, row_id: int) -> None:
        """Forgets rows with a smaller id."""
        dropped = min(max(0, row_id - self.first), len(self))
        self._begin += dropped
        self.first += dropped

    def _make_room(self, amount: int) -> None:
        """So many rows can be written behind the last one after that."""
        needed = len(self) + amount
        is_much = self.used_bytes > max(self._large_bytes, _MOST_USED * needed * self.dtype.itemsize)
        is_new = self._end + amount > self._used
        if (is_new or is_much) and self._begin and self._begin >= _DROPPED_TO_KEPT * len(self):
            whole_rows.move_to_front(self._rows, self._begin, self._end)
            self._begin, self._end = 0, len(self)
            if is_much:
                self._give_back(needed)
        if self._end + amount > len(self._rows):
            self._move(needed)

    def _give_back(self, needed: int) -> None:
        """Keeps half of the memory that would be too much: what it takes to go on as long as so many rows are kept."""
        if self._reserved is None:
            self._move(needed)
        else:
            self._used = _MOST_USED * needed // 2
            self._reserved.release_from(self._used)

    def _move(self, needed: int) -> None:
        """Takes other memory, with room for more than is needed."""
        if needed * self.dtype.itemsize >= self._large_bytes:
            self._reserved = reserve(self.dtype, needed)
            moved = self._reserved.rows
        else:
            self._reserved, moved = None, np.empty(max(_FIRST_CAPACITY, 2 * needed), dtype=self.dtype)
        whole_rows.put(moved, 0, self.rows)
        self._rows, self._begin, self._end = moved, 0, len(self)
        self._used = self._end


class Interner:
    """Values to small integers, in order of first appearance."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._index: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> str:
        return self.values[index]

    def index_of(self, value: str) -> int:
        """The integer of a value; a new one the first time."""
        index = self._index.get(value)
        if index is None:
            index = self._index[value] = len(self.values)
            self.values.append(value)
        return index

    def find(self, value: str) -> int | None:
        """The integer of a value that was seen, else None."""
        return self._index.get(value)


@dataclass(slots=True)
class SourceState:
    """What the service knows of one source."""

    source: Source
    agent: str
    position: int = 0
    """Everything before it has been applied."""
    is_complete: bool = False
    zone_name: str | None = None


@dataclass(frozen=True, slots=True)
class KnownFact:
    """A fact, with where it is from."""

    job: str
    source: int
    fact: Fact


FACTS_KEPT: Final = 4096
"""Facts of one type that are kept, for all jobs: about 2 MB of the most frequent type."""


@dataclass(slots=True)
class Store:
    """All that is known, of all jobs."""

    strings: Interner = field(default_factory=Interner)
    sources: list[SourceState] = field(default_factory=list[SourceState])
    processes: list[Process] = field(default_factory=list[Process])
    process_job: list[str] = field(default_factory=list[str])
    """Job of each process, by process index."""
    process_version: dict[int, str] = field(default_factory=dict[int, str])
    """NCCL version of a process, where a line said it, or else the only one its source or job printed."""
    process_source: dict[int, int] = field(default_factory=dict[int, int])
    """The log in which a process was first seen."""
    source_hosts: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Hosts of which a source told something."""
    job_versions: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    source_versions: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    operation_templates: Table = field(default_factory=lambda: Table(OPERATION_TEMPLATE))
    kernel_templates: Table = field(default_factory=lambda: Table(KERNEL_TEMPLATE))
    operations: Table = field(default_factory=lambda: Table(rows.OPERATION))
    kernels: Table = field(default_factory=lambda: Table(rows.KERNEL))
    named_kernels: NamedKernels = field(default_factory=NamedKernels)
    """Noted wherever `kernel` of an operation is written."""
    replays: Table = field(default_factory=lambda: Table(rows.REPLAYED))
    """Of operations that were captured into CUDA graphs."""
    collectives: Table = field(default_factory=lambda: Table(rows.COLLECTIVE))
    series: Table = field(default_factory=lambda: Table(rows.SERIES))
    """One row per (communicator, op, size class); never dropped, bounded by communicators x 13 x 6."""
    inspected: Table = field(default_factory=lambda: Table(rows.INSPECTED))
    ranges: Table = field(default_factory=lambda: Table(RANGE))
    busy: Table = field(default_factory=lambda: Table(BUSY))

    launches: int = 0
    """Launch ids that were given out."""
    communicators: list[Communicator] = field(default_factory=list[Communicator])
    members: list[Member] = field(default_factory=list[Member])
    iteration_confidence: dict[int, float] = field(default_factory=dict[int, float])
    """By process: how sure the period is by which its operations are numbered."""
    captures: Captures = field(default_factory=Captures)
    """(source, capture) in order of arrival; live, those that came within the window."""
    topologies: dict[tuple[str, str | None], list[TopologySeen]] = field(
        default_factory=dict[tuple[str, str | None], list[TopologySeen]]
    )
    """By (job, host): blocks that differ, in order of arrival; host None for files that nothing ties to a host."""
    topologies_seen: int = 0
    """How many there are in all."""
    tuning_tables: dict[int, TuningTableSeen] = field(default_factory=dict[int, TuningTableSeen])
    channels: dict[int, Channels] = field(default_factory=dict[int, Channels])
    """Rings and trees by communicator, of those that printed them."""
    """By communicator."""
    measured_baseline: MeasuredBaseline | None = None
    """What nccl-tests showed on this machine, if the user gave its output."""
    clocks: dict[str, HostClock] = field(default_factory=dict[str, HostClock])
    """By host."""
    clock_reference: str | None = None
    clock_violation_ratio: float | None = None
    """Share of causality constraints that fail after correction; None where none could be checked."""
    clocks_are_trusted: bool = True
    """False while operations contradict causality on the corrected clocks: then no ranks are compared by times."""
    findings: list[Finding] = field(default_factory=list[Finding])

    facts: defaultdict[str, deque[KnownFact]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=FACTS_KEPT))
    )
    """By type: the latest that the logs said beside operations; older ones are only counted in `understood`."""
    understood: Counter[str] = field(default_factory=Counter[str])
    """Lines and records by family."""
    torn_lines: Counter[int] = field(default_factory=Counter[int])
    """By source."""
    alignment_checked: Counter[str] = field(default_factory=Counter[str])
    """Operations of each job whose alignment was checked against an exact join."""
    alignment_disagreements: Counter[str] = field(default_factory=Counter[str])
    """Those of them to which it gave another kernel, or one where there is none."""
    skipped: Counter[str] = field(default_factory=Counter[str])
    """Lines and records by the reason they were skipped."""
    finished: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """Operations of which nothing more will be learnt, by job and rows.Match, those that were forgotten included."""
    inspector_records: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Records of NCCL Inspector by job and what became of them: "with_operation", "without_operation",
    "not_gpu_timed"."""
    gaps: defaultdict[int, SourceGaps] = field(default_factory=lambda: defaultdict(SourceGaps))
    """By source."""
    left: LeftSources = field(default_factory=LeftSources)
    """What is known of sources whose places others have now."""

    def copy(self) -> Store:
        """What is known now, apart from what comes: tables are copied, so that another thread may read them."""
        copied = replace(self)
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Table | Captures):
                setattr(copied, each.name, value.copy())
            elif isinstance(value, list | dict):
                setattr(copied, each.name, copy(value))
        return copied

    def table_bytes(self) -> int:
        """What the rows of all tables take."""
        tables = [value for each in fields(self) if isinstance(value := getattr(self, each.name), Table)]
        return sum(len(table) * table.dtype.itemsize for table in tables)

    def listed_communicators(self) -> list[Communicator]:
        """All communicators but those that were absorbed by another."""
        return [each for each in self.communicators if each.absorbed_by is None]

    def finish(self, at: NDArray[np.intp]) -> None:
        """Nothing more will be learnt of the operations at these places, each of which is finished once."""
        table = self.operations.rows
        table["finished"][at] = True
        states = len(rows.Match)
        keys = table["process"][at].astype(np.int64) * states + table["match"][at]
        for key, amount in enumerate(np.bincount(keys).tolist()):
            if amount:
                self.finished[self.process_job[key // states], key % states] += amount

    def new_launches(self, amount: int) -> Ids:
        """So many launch ids that are not in use yet."""
        self.launches += amount
        return np.arange(self.launches - amount, self.launches, dtype=np.int64)

    def templates_of(self, operations: Columns, *names: str) -> Columns:
        """The operation template of each of these operations; these columns of it only, where some are named."""
        return self.operation_templates.take(operations["template"], *names)

    def kernel_templates_of(self, kernels: Columns, *names: str) -> Columns:
        """The kernel template of each of these kernels; these columns of it only, where some are named."""
        return self.kernel_templates.take(kernels["template"], *names)
