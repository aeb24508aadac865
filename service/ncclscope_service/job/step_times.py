"""How long each step of a job took, as its operations are numbered: from logs alone, as long as lines have times.

A step begins on a rank with its first operation, and lasts until the first of the next step, on the host's own clock:
no clocks are compared. A step of the job lasts as long as the median of its processes says. It is given when all
processes that began it have begun the next one, or when the job is `_WAITED_STEPS` further.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct, distinct_together, group_by
from ncclscope_service.columns.intervals import Integers
from ncclscope_service.job.iteration_numbering import calls_of_kinds
from ncclscope_service.job.recurrence import LEAST_ITERATIONS, find_cycle
from ncclscope_service.store.retention import Evicted
from ncclscope_service.store.stamp_offsets import StampOffsets
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

_WAITED_STEPS: Final = 10
"""Ranks enqueue ahead of each other by a step or two; one that is further behind has stopped, or lost its log."""
_READ_AT_ONCE: Final = 262_144
"""Operations that are looked at in one go."""

_LOOKED_AT: Final = 8_192
"""Newest records of a process by which its step is recognised."""
_LISTENED: Final = 4
"""Processes whose records tell how long a step is."""
_RECORD: Final = ("line", "dumped_at_ns", "comm_hash", "op", "message_bytes", "peer")

STEP: Final = np.dtype(
    [
        ("iteration", "<i8"),
        ("started_ns", "<i8"),  # service's clock; offline, that of one of the hosts
        ("duration_ns", "<i8"),
        ("operations", "<f8"),  # per process
        ("bytes", "<f8"),  # per process, nccl-tests' S of those whose size is known
    ]
)
"""One step of a job."""


@dataclass(slots=True)
class _OpenStep:
    """One step that has not been given yet."""

    first_ns: Integers
    """When each process began it; NO_TIME_NS."""
    operations: int = 0
    bytes: int = 0

    def record(self, columns: NDArray[np.intp], times: Integers, sizes: Integers) -> None:
        """Operations of processes at these columns."""
        missing = int(columns.max()) + 1 - len(self.first_ns)
        if missing > 0:
            self.first_ns = np.concatenate([self.first_ns, np.full(missing, NO_TIME_NS, np.int64)])
        earliest = np.where(self.first_ns == NO_TIME_NS, np.iinfo(np.int64).max, self.first_ns)
        np.minimum.at(earliest, columns, times)
        self.first_ns = np.where(earliest == np.iinfo(np.int64).max, NO_TIME_NS, earliest)
        self.operations += len(columns)
        self.bytes += int(sizes.sum())


@dataclass(slots=True)
class _JobSteps:
    """The steps of one job that have not been given yet."""

    columns: dict[int, int] = field(default_factory=dict[int, int])
    """By process."""
    open: dict[int, _OpenStep] = field(default_factory=dict[int, _OpenStep])
    """By number."""
    given_before: int = 0
    """Steps with a smaller number were given."""

    def columns_of(self, processes: Integers) -> NDArray[np.intp]:
        """The column of each process, made if it has none."""
        found, inverse = distinct(processes)
        places = [self.columns.setdefault(process, len(self.columns)) for process in found.tolist()]
        return np.asarray(places, np.intp)[inverse]

    def record(self, iteration: int, columns: NDArray[np.intp], times: Integers, sizes: Integers) -> None:
        """Operations of one step; those of a step that was given are too late."""
        if iteration < self.given_before:
            return
        if iteration not in self.open:
            self.open[iteration] = _OpenStep(np.empty(0, np.int64))
        self.open[iteration].record(columns, times, sizes)

    def drain(self, offsets: StampOffsets) -> Columns:
        """Rows of STEP that are complete, in order; `offsets`: those of the lines that `record` got."""
        found: list[tuple[int, int, int, float, float]] = []
        first_columns: list[int] = []
        newest = max(self.open, default=0)
        for number in sorted(self.open):
            step, after = self.open[number], self.open.get(number + 1)
            if number == newest:
                break
            if after is not None:
                width = max(len(step.first_ns), len(after.first_ns))
                begins, ends = (_padded(each.first_ns, width) for each in (step, after))
                begun = begins != NO_TIME_NS
                both = begun & (ends != NO_TIME_NS)
                if (begun != both).any() and newest < number + _WAITED_STEPS:
                    break
                if both.any():
                    amount = int(np.count_nonzero(begun))
                    duration_ns = int(np.median(ends[both] - begins[both]))
                    first_columns.append(int(np.flatnonzero(both)[begins[both].argmin()]))
                    started_ns = int(begins[first_columns[-1]])
                    found.append((number, started_ns, duration_ns, step.operations / amount, step.bytes / amount))
            del self.open[number]
            self.given_before = number + 1
        steps = np.array(found, STEP)
        if found:
            processes = np.asarray(list(self.columns), np.int64)[first_columns]
            steps["started_ns"] = _on_service_clock(offsets, processes, steps["started_ns"])
        return steps


def _on_service_clock(offsets: StampOffsets, processes: Integers, times: Integers) -> Integers:
    """Times of lines: stamps, or when an agent saw them where a process prints no stamps."""
    has_stamps = np.isin(processes, list(offsets.of_stamps()))
    logged = np.where(has_stamps, times, NO_TIME_NS)
    return offsets.times(processes, logged, np.where(has_stamps, NO_TIME_NS, times))


def _padded(times: Integers, width: int) -> Integers:
    return np.concatenate([times, np.full(width - len(times), NO_TIME_NS, np.int64)])


class StepTimes:
    """The steps of all jobs of a store."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._jobs: dict[str, _JobSteps] = {}
        self._read_before = 0
        """Operations with a smaller id were looked at."""

    def drain(self, numbered_before: int) -> dict[str, Columns]:
        """Steps (STEP) of each job that have ended, in order; `numbered_before`: operations up to here are numbered."""
        table = self._store.operations
        begin = max(self._read_before, table.first)
        for at in range(begin, numbered_before, _READ_AT_ONCE):
            self._read(at - table.first, min(at + _READ_AT_ONCE, numbered_before) - table.first)
        self._read_before = max(begin, numbered_before)
        ended = {name: job.drain(self._store.stamp_offsets) for name, job in self._jobs.items()}
        return {name: steps for name, steps in ended.items() if len(steps)}

    def evict(self, gone: Evicted) -> None:
        """Forgets jobs that are gone."""
        for name in gone.jobs:
            self._jobs.pop(name, None)

    def _read(self, begin: int, end: int) -> None:
        rows = self._store.operations.rows[begin:end]
        logged_ns, observed_ns = rows["logged_at_ns"], rows["observed_at_ns"]
        times = np.where(logged_ns == NO_TIME_NS, observed_ns, logged_ns)
        at = np.flatnonzero((rows["iteration"] >= 0) & (times != NO_TIME_NS))
        if not len(at):
            return
        processes, iterations = rows["process"][at], rows["iteration"][at].astype(np.int64)
        times, sizes = times[at], np.maximum(rows["message_bytes"][at], 0)
        found, inverse = distinct(processes)
        names, of_process = np.unique([self._store.process_job[each] for each in found.tolist()], return_inverse=True)
        for job, mine in group_by(of_process[inverse]):
            steps = self._jobs.setdefault(str(names[job]), _JobSteps())
            columns = steps.columns_of(processes[mine].astype(np.int64))
            for iteration, of in group_by(iterations[mine]):
                steps.record(iteration, columns[of], times[mine[of]], sizes[mine[of]])


def inspected_steps_ns(known: Store) -> dict[str, int]:
    """How long a recent step of each job took by NCCL Inspector's records alone: from dump to dump that holds what
    comes once in a step, the median over a few processes; without jobs in which nothing recurs.
    """
    rows = known.inspected.rows
    newest = np.arange(max(0, len(known.inspected) - _READ_AT_ONCE), len(known.inspected))
    processes = rows.values("process", newest)
    listened: defaultdict[str, list[int]] = defaultdict(list)
    for process in distinct(processes)[0].tolist():
        listened[known.process_job[process]].append(process)
    found: dict[str, int] = {}
    for job, of_job in listened.items():
        told = [
            step_ns
            for each in of_job[:_LISTENED]
            if (step_ns := _recorded_step_ns(rows.take(newest[processes == each][-_LOOKED_AT:], *_RECORD))) is not None
        ]
        if told:
            found[job] = int(np.median(told))
    return found


def _recorded_step_ns(records: Columns) -> int | None:
    order = np.lexsort((records["line"], records["dumped_at_ns"]))
    records = records[order]
    (_, ops, sizes, _), kinds = distinct_together(
        *(records[name].astype(np.int64) for name in ("comm_hash", "op", "message_bytes", "peer"))
    )
    cycle = find_cycle(calls_of_kinds(kinds.astype(np.int64), ops, sizes))
    if cycle is None:
        return None
    ends_ns = records["dumped_at_ns"][kinds == cycle.kinds[-1]]
    return int(np.median(np.diff(ends_ns))) if len(ends_ns) > LEAST_ITERATIONS else None
