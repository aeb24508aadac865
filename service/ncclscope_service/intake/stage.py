"""First stage: batches become rows of operations with a communicator and numbers, and are counted.

A thousand small batches a second, of a hundred logs, cost by batch more than by operation. So what they bring is put
together in the order in which it came, and numbered and counted in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together, group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.intake.communicators import Communicators, InitLines
from ncclscope_service.intake.group_names import GroupNames
from ncclscope_service.intake.limits import NameLimits
from ncclscope_service.intake.resolver import Arrived, BatchResolver, logged_operations
from ncclscope_service.intake.tuning import TuningJoin
from ncclscope_service.nccl import bandwidth
from ncclscope_service.rollup.series import SeriesBook
from ncclscope_service.rollup.usage import Patterns, UsageCounts
from ncclscope_service.store.errors import InternalErrors
from ncclscope_service.store.settings import COUNTED_AT_ONCE
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.records import CaptureSeen
from ncclscope_wire.terms import NO_NUMBER

_OF_TEMPLATE: Final = ("process", "op", "count", "data_type", "nranks", "root")
_COUNTED: Final = np.dtype([("member", "<i4"), ("template", "<i4"), ("message_bytes", "<i8")])
"""Columns that identify the series of an operation."""
_WHOLE_GRAPH: Final = "graph_launch_without_kernels"
"""A CUDA graph that was launched while nsys recorded graphs as a whole."""
_SESSION_START: Final = "TARGET_INFO_SESSION_START_TIME"


@dataclass(slots=True)
class _UncountedBacklog:
    """Operations (all rows.LOGGED, or all rows.PLACED) and TUNING lines (rows.TUNING), in order of arrival."""

    rows: int = 0
    _logged: list[Columns] = field(default_factory=list[Columns])
    _tunings: list[Columns] = field(default_factory=list[Columns])

    def append(self, operations: Columns, tunings: Columns) -> None:
        """Adds the rows of one batch."""
        if len(operations) or len(tunings):
            self._logged.append(operations)
            self._tunings.append(tunings)
            self.rows += len(operations) + len(tunings)

    def column(self, name: str) -> NDArray[np.int32]:
        """A column of these operations."""
        return np.concatenate([np.empty(0, np.int32), *(rows[name] for rows in self._logged)])

    def drain(self) -> tuple[Columns, Columns]:
        """All of it, which is forgotten here; there must be something."""
        operations, tunings = row_ops.concat(self._logged), row_ops.concat(self._tunings)
        self._logged, self._tunings, self.rows = [], [], 0
        return operations, tunings


class IntakeStage:
    """Batches of all sources, into one store."""

    def __init__(self, known: Store, errors: InternalErrors) -> None:
        self.names = NameLimits(known)
        self.communicators = Communicators(known, self.names)
        self.group_names = GroupNames(known)
        self.series = SeriesBook(known)
        self.contents = UsageCounts(known)
        self.patterns = Patterns(known)
        self._store = known
        self._errors = errors
        self._resolver = BatchResolver(known, self.names)
        self._tuning = TuningJoin(known)
        self._init_lines = InitLines(known)
        self._unplaced, self._uncounted = _UncountedBacklog(), _UncountedBacklog()
        """Operations without a place in a communicator; and those that have one, and are not in the store."""

    def ingest_batch(self, batch: Batch, *, agent: str, session: str, job: str) -> Arrived:
        """Resolves one batch; its operations wait to be counted, everything else is returned."""
        is_plain = _is_plain(batch)
        if not is_plain:
            self._place()
        arrived = self._resolver.resolve_batch(batch, agent=agent, session=session, job=job)
        if is_plain:
            self._unplaced.append(arrived.operations, arrived.tunings)
        else:
            operations = logged_operations(arrived.operations)
            self.names.source = arrived.source
            self.communicators.place(operations, arrived.events, arrived.event_processes)
            self.names.source = None
            completed = self.communicators.completed
            self._init_lines.ingest_lines(arrived.source, completed, batch.tuning_tables, batch.facts)
            if self.group_names.ingest_lines(job, arrived.source, completed, batch.facts):
                self.communicators.changed.add(job)
            completed.clear()
            self._uncounted.append(operations, arrived.tunings)
        return arrived

    def captured_processes(self, batch: Batch, job: str, source: int) -> Iterator[tuple[CaptureSeen, dict[int, int]]]:
        """Finished captures of a batch, each with the process index of each of its pids."""
        for capture in batch.captures:
            if capture.graph_launches:
                self._store.skipped[_WHOLE_GRAPH] += capture.graph_launches
            if _SESSION_START in capture.missing:
                continue  # its times count from 0: it covers nothing that could be named
            yield capture, {pid: self._resolver.process(job, capture.host, pid, source) for pid in capture.pids}

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be counted that it should be done now."""
        return self._unplaced.rows + self._uncounted.rows > COUNTED_AT_ONCE

    def drain_placed(self) -> Iterator[tuple[Columns, Columns]]:
        """Operations (rows.PLACED) that wait to be counted, and TUNING lines; nothing if there are none."""
        self._place()
        self.names.report_refused()
        if self._uncounted.rows:
            yield self._uncounted.drain()

    def store_operations(self, operations: Columns) -> Ids:
        """Adds operations to the store, with what their templates say; gives their ids."""
        templates = self._store.templates_of(operations, *_OF_TEMPLATE)
        operations["process"] = templates["process"]
        operations["message_bytes"] = bandwidth.message_bytes(
            templates["op"], templates["count"], templates["data_type"], templates["nranks"]
        )
        return self._store.operations.append(operations)

    def count_operations(self, ids: Ids, operations: Columns, tunings: Columns) -> Ids:
        """Counts operations that were stored, and gives them what TUNING lines say of them.

        Gives operations that the copy engine runs: they have no kernel.
        """
        templates = self._store.templates_of(operations, "op", "root")
        self.series.count_run(operations)
        self.contents.count_logged(operations)
        self.patterns.count_logged(operations["member"], templates["op"], templates["root"])
        self._tuning.ingest_lines(ids, tunings)
        return self._tuning.drain_copied()

    def expected_series(self) -> Columns:
        """`Store.series` with what came and is not counted there yet, for a look between two ticks.

        It takes some 5 ms and changes nothing here. New series are left out.
        """
        unplaced = self._unplaced.column("template")
        (templates, members), inverse = distinct_together(
            np.concatenate([unplaced, self._uncounted.column("template")]),
            np.concatenate([self.communicators.members_of(unplaced), self._uncounted.column("member")]),
        )
        known = members != NO_NUMBER
        of = self._store.operation_templates.take(templates.astype(np.int64), *_OF_TEMPLATE)
        operations = np.empty(len(templates), _COUNTED)
        operations["template"], operations["member"] = templates, members
        operations["message_bytes"] = bandwidth.message_bytes(of["op"], of["count"], of["data_type"], of["nranks"])
        amounts = np.bincount(inverse, minlength=len(templates)).astype(np.int64)
        return self.series.expected(operations[known], amounts[known])

    @property
    def unattached_tunings(self) -> int:
        """TUNING lines that fitted no operation."""
        return self._tuning.unattached

    def lose_batch(self, batch: Batch, *, agent: str) -> bool:
        """Records a batch on which our own code failed as a gap; True if its source has to begin another session."""
        self.communicators.completed.clear()
        return self._resolver.lose_batch(batch, agent=agent)

    def lose_rows(self, operations: Columns) -> None:
        """Records operations (rows.LOGGED or rows.PLACED) on which our own code failed as gaps of their sources."""
        for source, rows in group_by(operations["source"]):
            self._resolver.record_lost(source, len(rows))

    def lose_of_process(self, process: int, amount: int) -> None:
        """Records what an internal error has taken from a process as a gap of its log."""
        source = self._store.process_source.get(process)
        if source is not None:
            self._resolver.record_lost(source, amount)

    def evict_sources(self, now_ns: int) -> None:
        """Forgets sources that were read to their end and of which no row is left."""
        gone = self._resolver.evict_sources(now_ns)
        self._init_lines.evict_sources(gone)
        self.group_names.evict_sources(gone)

    def evict_processes(self, processes: Iterable[int]) -> None:
        """Forgets what was learned of these processes."""
        for process in processes:
            self._store.process_source.pop(process, None)
        self._tuning.evict_processes(processes)

    def _place(self) -> None:
        """Numbers what plain batches brought: no communicator has come or gone meanwhile."""
        if not self._unplaced.rows:
            return
        logged, tunings = self._unplaced.drain()
        with self._errors.isolated("settle", f"{len(logged)} operations", partial(self.lose_rows, logged)):
            operations = logged_operations(logged)
            self.communicators.place(operations, (), ())
            self._uncounted.append(operations, tunings)


def _is_plain(batch: Batch) -> bool:
    """Whether a batch brings operations and kernels only: nothing that may change what earlier operations mean."""
    return not (
        batch.communicators
        or batch.facts
        or batch.tuning_tables
        or batch.gaps
        or batch.versions
        or len(batch.inspected)
    )


Fit: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], int | None]
"""Gives what is to be subtracted from stamps, in ns, by the stamps and the launch times of one process."""

_QUARTER_NS: Final = 15 * 60 * 1_000_000_000
_FIRST, _LAST = -12 * 4, 14 * 4
_CLOSE_NS: Final = 1_000_000_000
"""A call is logged microseconds before it launches; inside a group, or behind a busy thread, up to a second."""
_SAMPLE: Final = 2_000


def fit_zone(stamps_ns: NDArray[np.int64], launches_ns: NDArray[np.int64]) -> int | None:
    """Nanoseconds to subtract from the stamps (zone's offset east of UTC); None if nothing fits clearly.

    NCCL prints local time without a zone. An operation is logged just before its kernel is launched, by the same
    clock: so the right zone is the one under which most launches have a stamp shortly before them. Zones are multiples
    of a quarter of an hour, from UTC-12 to UTC+14.

    `stamps_ns`: stamps read as if they were UTC; `launches_ns`: launch times in UTC, of the same process. A zone
    fits when more than half of the launches have a stamp within the second before them.
    """
    if not len(stamps_ns) or not len(launches_ns):
        return None
    stamps = np.sort(stamps_ns)
    launches = launches_ns[:: max(1, len(launches_ns) // _SAMPLE)]
    best_share, best_offset = 0.0, None
    for quarter in sorted(range(_FIRST, _LAST + 1), key=abs):
        offset = quarter * _QUARTER_NS
        before = np.searchsorted(stamps, launches + offset, side="right") - 1
        lag = launches + offset - stamps[np.maximum(before, 0)]
        share = float(np.mean((before >= 0) & (lag < _CLOSE_NS)))
        if share > best_share + 1e-9:
            best_share, best_offset = share, offset
    return best_offset if best_share > 0.5 else None


def shift_stamps(known: Store, fit: Fit = fit_zone) -> dict[int, int]:
    """Moves the stamps of each process of a store by what `fit` gives; gives these shifts in ns by process."""
    shifts: dict[int, int] = {}
    rows, kernels = known.operations.rows, known.kernels.rows
    processes = known.templates_of(rows)["process"]
    for process in np.unique(kernels["process"]).tolist():
        mine = (processes == process) & (rows["logged_at_ns"] > 0)
        launches = kernels["launch_start_ns"][kernels["process"] == process]
        shift = fit(rows["logged_at_ns"][mine], launches[launches > 0])
        if shift:
            rows["logged_at_ns"][mine] -= shift
            shifts[process] = shift
    return shifts
