"""Training iterations from NVTX marks: which one each operation belongs to, and how long each one took.

Frameworks mark iterations with ranges or marks such as "iteration 12", "step_12" or "train_step #12"; the operation
belongs to the last one that began before the operation was enqueued. Without such marks `iteration_numbering` finds it
from the period of the calls. Marks may come after an operation was aligned: recently aligned operations are kept for
them.

*Summary.* For each iteration of each rank: its duration, how much of it was communication, and how much of that was
exposed. An iteration lasts from the enqueuing of its first operation to that of the next iteration's first, on the
host's own clock: the launch call where nsys recorded it, else the stamp of the line. Communication is the time in which
any NCCL kernel of the iteration ran, waiting included, each moment counted once; so is that of kernels that communicate
without NCCL, which belong to the iteration in which they were launched: by NVTX marks, else between first operations.
Exposed is what of it no other kernel of that GPU covered; it is known only if computation was recorded.
Processes of which only kernels and marks are known have iterations too, from mark to mark.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import OperationsByProcess, distinct_together, distinct_values, group_by
from ncclscope_service.columns.intervals import Coverage, Integers, Spans, union
from ncclscope_service.columns.table import AnyRows, Ids
from ncclscope_service.job.step_budget import MeanStep, mean_step, replays_of_their_own, step_budget
from ncclscope_service.job.utilization import Utilization, utilization_of
from ncclscope_service.rollup.window import MAX_OPERATIONS
from ncclscope_service.store.rows import IterationBy, Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


@dataclass(slots=True)
class _Part:
    """Operations that were aligned together."""

    at_ns: int
    operations: Ids
    rows: OperationsByProcess | None = None
    """The same operations by process, made on first use: without marks there is none."""


@dataclass(slots=True)
class Numbered:
    """Kept for as long as marks may come."""

    _parts: deque[_Part] = field(default_factory=deque[_Part])
    """Oldest first."""

    def add(self, operations: Ids, now_ns: int) -> None:
        """Takes what was decided, before anything of it leaves the store."""
        if len(operations):
            self._parts.append(_Part(now_ns, operations))

    def forget_before(self, at_ns: int) -> None:
        """Lets go of what was decided before that time."""
        while self._parts and self._parts[0].at_ns < at_ns:
            self._parts.popleft()

    def of(self, processes: Iterable[int], known: Store) -> Ids:
        """Those of these processes that are still in the store."""
        asked = np.asarray(sorted(processes), np.int64)
        found = [np.empty(0, np.int64)]
        for part in self._parts:
            rows = part.rows
            if rows is None:
                here = part.operations[part.operations >= known.operations.first]
                rows = part.rows = OperationsByProcess.from_operations(
                    here, known.operations.take(here, "process")["process"]
                )
                part.operations = rows.operations
            found += [rows.at(place) for place in rows.places(asked).tolist()]
        operations: Ids = np.concatenate(found)
        return operations[operations >= known.operations.first]


_MARK: Final = re.compile(
    r"^(?:train(?:ing)?[ _]?|Profiler)?(?:iteration|iter|step|batch)[ _#:=]*(\d{1,9})$", re.IGNORECASE
)

_RECENT_MARKS: Final = 20
_A_LONG_STEP_NS: Final = 60_000_000_000
"""Longest duration of an iteration of which only the beginning is known."""


@dataclass(slots=True)
class _Marks:
    """Iteration marks of one process, by start."""

    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    numbers: NDArray[np.int32]

    def step_ns(self) -> int | None:
        """The duration of a recent iteration, from marks of consecutive iterations; None if there are none."""
        consecutive = np.diff(self.numbers) == 1
        steps = np.diff(self.starts_ns)[consecutive][-_RECENT_MARKS:]
        return int(np.median(steps)) if len(steps) else None

    def is_sure(self) -> NDArray[np.bool_]:
        """Whether the end of each iteration was recorded, or the beginning of the next."""
        sure: NDArray[np.bool_] = self.ends_ns != NO_TIME_NS
        sure[:-1] |= np.diff(self.numbers) == 1
        return sure

    def valid_until_ns(self) -> NDArray[np.int64]:
        """The end of each iteration. One that was not recorded lasts as long as usual, and a half more."""
        step = self.step_ns()
        usual = self.starts_ns + (_A_LONG_STEP_NS if step is None else step * 3 // 2)
        return np.where(self.ends_ns == NO_TIME_NS, usual, self.ends_ns)


class Iterations:
    """Follows the iteration marks in a store's ranges and numbers operations by them."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._read_upto = 0
        self._number_of_text: dict[int, int | None] = {}
        self._marks: dict[int, _Marks] = {}
        self._steps_ns: dict[int, int] = {}
        """Duration of a recent iteration by process, if its marks show it."""

    def assign(self, operations: Ids) -> None:
        """Sets `iteration` of these operations if a mark gives it."""
        self.read_marks()
        if not self._marks or not len(operations):
            return
        rows = self._store.operations.take(operations, "process", "logged_at_ns", "kernel")
        enqueued_at = self._enqueued_at(rows)
        for process, mine in group_by(rows["process"]):
            marks = self._marks.get(process)
            if marks is None:
                continue
            chosen = mine[enqueued_at[mine] != NO_TIME_NS]
            times = enqueued_at[chosen]
            at = np.searchsorted(marks.starts_ns, times, side="right") - 1
            inside = (at >= 0) & (times <= marks.valid_until_ns()[np.maximum(at, 0)])
            at = at[inside]
            self._write(self._store.operations.at(operations[chosen[inside]]), marks.numbers[at], marks.is_sure()[at])

    def _write(self, positions: NDArray[np.intp], numbers: NDArray[np.int32], sure: NDArray[np.bool_]) -> None:
        """If only the length of an iteration says that it still lasts, the period knows better."""
        rows = self._store.operations.rows
        rows.put("iteration_by", positions[sure], IterationBy.MARKS)
        telling = sure | (rows.values("iteration_by", positions) != IterationBy.PERIOD)
        rows.put("iteration", positions[telling], numbers[telling])

    def numbers_at(self, process: int, times: Integers) -> Integers | None:
        """The iterations of a process at these times by its marks, NO_NUMBER where none is; None without marks."""
        marks = self._marks.get(process)
        if marks is None:
            return None
        at = np.searchsorted(marks.starts_ns, times, side="right") - 1
        inside = (at >= 0) & (times <= marks.valid_until_ns()[np.maximum(at, 0)])
        return np.where(inside, marks.numbers[np.maximum(at, 0)], NO_NUMBER).astype(np.int64)

    def rows_of(self, process: int) -> Columns:
        """ITERATION rows of a process by its marks alone, each number once; of communication nothing is said."""
        marks = self._marks.get(process)
        if marks is None:
            return np.zeros(0, ITERATION)
        numbers, first = np.unique(marks.numbers, return_index=True)
        rows = np.zeros(len(numbers), ITERATION)
        rows["process"], rows["iteration"], rows["rank"] = process, numbers, NO_NUMBER
        rows["by"] = IterationBy.MARKS
        rows["begin_ns"], rows["duration_ns"] = marks.starts_ns[first], NO_TIME_NS
        follows = np.flatnonzero(np.diff(numbers) == 1)
        rows["duration_ns"][follows] = np.diff(rows["begin_ns"])[follows]
        return rows

    def steps_ns(self) -> dict[str, int]:
        """How long a recent iteration of each job took: the median over processes; without jobs that have no marks."""
        by_job: defaultdict[str, list[int]] = defaultdict(list)
        for process, step_ns in self._steps_ns.items():
            by_job[self._store.process_job[process]].append(step_ns)
        return {job: int(np.median(found)) for job, found in by_job.items()}

    def _enqueued_at(self, rows: NDArray[np.void]) -> NDArray[np.int64]:
        """Host time of the launch call, else of the log line."""
        times: NDArray[np.int64] = rows["logged_at_ns"].copy()
        with_kernel = np.flatnonzero(rows["kernel"] >= self._store.kernels.first)
        launched = self._store.kernels.take(rows["kernel"][with_kernel], "launch_start_ns")["launch_start_ns"]
        times[with_kernel] = np.where(launched != NO_TIME_NS, launched, times[with_kernel])
        return times

    def read_marks(self) -> set[int]:
        """Reads the ranges that came since the last call; gives the processes of which marks are among them."""
        ranges = self._store.ranges
        new = ranges.rows[max(0, self._read_upto - ranges.first) :]
        self._read_upto = ranges.next_id
        if not len(new):
            return set()
        texts, inverse = np.unique(new["text"], return_inverse=True)
        numbers = np.asarray([self._number(text) for text in texts.tolist()], np.int64)[inverse]
        marked = new[numbers != NO_NUMBER]
        numbers = numbers[numbers != NO_NUMBER]
        for process, mine in group_by(marked["process"]):
            self._add(process, marked[mine], numbers[mine])
        return set(marked["process"].tolist())

    def _number(self, text: int) -> int:
        if text not in self._number_of_text:
            found = _MARK.match(self._store.strings[text])
            self._number_of_text[text] = int(found[1]) if found else None
        number = self._number_of_text[text]
        return NO_NUMBER if number is None else number

    def _add(self, process: int, new: NDArray[np.void], numbers: NDArray[np.int64]) -> None:
        ends = new["end_ns"].copy()
        ends[ends == new["start_ns"]] = NO_TIME_NS  # a mark has no end
        old = self._marks.get(process)
        starts, all_ends, all_numbers = new["start_ns"], ends, numbers.astype(np.int32)
        if old is not None:
            starts = np.concatenate([old.starts_ns, starts])
            all_ends = np.concatenate([old.ends_ns, all_ends])
            all_numbers = np.concatenate([old.numbers, all_numbers])
        order = np.argsort(starts, kind="stable")
        marks = self._marks[process] = _Marks(starts[order], all_ends[order], all_numbers[order])
        step_ns = marks.step_ns()
        if step_ns is None:
            self._steps_ns.pop(process, None)
        else:
            self._steps_ns[process] = step_ns


ITERATION: Final = np.dtype(
    [
        ("process", "<i4"),
        ("rank", "<i4"),  # global; NO_NUMBER
        ("iteration", "<i4"),
        ("by", "<i1"),  # rows.IterationBy of its first operation
        ("begin_ns", "<i8"),  # first operation enqueued, host's clock; NO_TIME_NS
        ("duration_ns", "<i8"),  # NO_TIME_NS where its begin or that of the next iteration is not known
        ("operations", "<i8"),
        ("bytes", "<i8"),
        ("launching", "<i8"),  # operations for which NCCL launches a kernel
        ("matched", "<i8"),  # of those, whose kernel is known
        ("communication_ns", "<i8"),  # NO_TIME_NS unless all of those kernels are known
        ("outside_ns", "<i8"),  # of that, by kernels that are none of NCCL's
        ("exposed_ns", "<i8"),  # NO_TIME_NS also where computation was not recorded
    ]
)
"""One iteration of one rank."""

OPERATION_COLUMNS: Final = (
    "process", "member", "iteration", "iteration_by", "message_bytes", "logged_at_ns", "kernel", "match"
)  # fmt: skip
"""Columns of operations that are read."""

_NEVER: Final = np.iinfo(np.int64).max
_P90: Final = 0.9
ITERATIONS_KEPT_NS: Final = 5_000_000_000
"""Age at which the summary of iterations is renewed: reading MAX_OPERATIONS takes 10 to 100 ms of CPU."""
STEP_KEPT_NS: Final = 60_000_000_000
"""The same of where a step goes, which takes half a second of CPU for MAX_OPERATIONS with kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSummary:
    """The iterations of one job; None if not known."""

    iterations: int
    """Count of the different iteration numbers."""
    median_ns: float | None
    p90_ns: float | None
    communication_ratio: float | None
    """Time with a NCCL kernel on a rank as a share of its iterations'."""
    exposed_ratio: float | None
    """Of that, time without another kernel, as a share of its iterations'."""
    step: MeanStep | None
    """Where a step goes, of those whose kernels are all known."""
    utilization: Utilization | None = None
    """Of the GPUs' peak."""


def iteration_times(store: Store, operations: AnyRows) -> Columns:
    """ITERATION rows by process, rank and iteration; operations without an iteration are left out.

    `operations` has OPERATION_COLUMNS. Costs 0.3 s and 100 MB for a million operations with kernels.
    """
    known = np.flatnonzero(operations["iteration"] != NO_NUMBER)
    taken = row_ops.take_columns(operations, known, OPERATION_COLUMNS)
    rank_of = np.asarray(
        [NO_NUMBER if each.global_rank is None else each.global_rank for each in store.members], np.int32
    )
    ranks = rank_of[taken["member"]] if len(rank_of) else np.empty(0, np.int32)
    communicator_of = np.asarray([*(each.communicator for each in store.members), NO_NUMBER], np.int64)
    keys, place = distinct_together(taken["process"], ranks, taken["iteration"])
    found: Columns = np.zeros(len(keys[0]), ITERATION)
    for name, key in zip(("process", "rank", "iteration"), keys, strict=True):
        found[name] = key
    found["by"][place[::-1]] = taken["iteration_by"][::-1]
    matched = (taken["match"] == Match.MATCHED) & (taken["kernel"] >= store.kernels.first)
    for name, amount in (
        ("operations", np.ones(len(known), np.int64)),
        ("bytes", store.moved_bytes(communicator_of[taken["member"]], taken["message_bytes"])),
        ("launching", (taken["match"] != Match.NO_KERNEL).astype(np.int64)),
        ("matched", matched.astype(np.int64)),
    ):
        sums = np.zeros(len(found), np.int64)
        np.add.at(sums, place, amount)  # a tenth of what adding to a column of wide rows takes
        found[name] = sums
    _add_durations(found, place, _enqueued_at(store, taken["logged_at_ns"], taken["kernel"]))
    unlogged = _unlogged(store)
    whole = row_ops.concat([found, unlogged])
    _add_communication(store, whole, place[matched].astype(np.int64), taken["kernel"][matched], len(unlogged))
    return whole


def summarise(iterations: Columns, step: MeanStep | None = None) -> IterationSummary:
    """Times and shares over all ranks and iterations of one job; `step` is passed on."""
    durations = iterations["duration_ns"][iterations["duration_ns"] != NO_TIME_NS]
    return IterationSummary(
        iterations=len(np.unique(iterations["iteration"])),
        median_ns=float(np.median(durations)) if len(durations) else None,
        p90_ns=float(np.quantile(durations, _P90)) if len(durations) else None,
        communication_ratio=share(iterations, "communication_ns"),
        exposed_ratio=share(iterations, "exposed_ns"),
        step=step,
    )


def mean_step_beyond(store: Store, job: str, limit_ns: float) -> MeanStep | None:
    """Where those steps of a job go that took longer than this, of the newest MAX_OPERATIONS operations.

    Takes half a second of CPU for as many with kernels.
    """
    operations = store.operations.rows[-MAX_OPERATIONS:]
    budget = step_budget(store, operations, iteration_times(store, operations))
    is_mine = np.asarray([each == job for each in store.process_job], np.bool_)
    rows = budget.rows
    return mean_step(budget, job, is_mine[rows["process"]] & (rows["duration_ns"] > limit_ns))


class IterationSummaries:
    """The iterations of each job, over the newest MAX_OPERATIONS operations, at most ITERATIONS_KEPT_NS old.

    Where a step goes is at most STEP_KEPT_NS old.
    """

    def __init__(self) -> None:
        self._at_ns: int | None = None
        self._steps_at_ns: int | None = None
        self._by_job: dict[str, IterationSummary] = {}
        self._steps: dict[str, MeanStep | None] = {}

    def summaries(self, store: Store, jobs: Sequence[str], now_ns: int) -> Mapping[str, IterationSummary]:
        """By job, in this order; computed again if a job is new."""
        is_new = list(self._by_job) != list(jobs)
        if is_new or not _is_fresh(self._at_ns, now_ns, ITERATIONS_KEPT_NS):
            operations = store.operations.rows[-MAX_OPERATIONS:]
            found = iteration_times(store, operations)
            if is_new or not _is_fresh(self._steps_at_ns, now_ns, STEP_KEPT_NS):
                budget = step_budget(store, operations, found)
                of_part = _jobs_of(store, jobs, budget.rows)
                self._steps = {job: mean_step(budget, job, of_part == place) for place, job in enumerate(jobs)}
                self._steps_at_ns = now_ns
            of_iteration = _jobs_of(store, jobs, found)
            self._by_job = {}
            for place, job in enumerate(jobs):
                of = summarise(found[of_iteration == place], self._steps[job])
                self._by_job[job] = replace(of, utilization=utilization_of(store, job, of.median_ns))
            self._at_ns = now_ns
        return self._by_job


def _is_fresh(at_ns: int | None, now_ns: int, kept_ns: int) -> bool:
    return at_ns is not None and 0 <= now_ns - at_ns < kept_ns


def _jobs_of(store: Store, jobs: Sequence[str], rows: Columns) -> Integers:
    """The place of each row's job among these."""
    places = {job: place for place, job in enumerate(jobs)}
    of_process = np.asarray([places[job] for job in store.process_job], np.int64)
    found: Integers = of_process[rows["process"]]
    return found


def share(iterations: Columns, name: str) -> float | None:
    """A time as a share of the duration, over the iterations of which both are known; None without any."""
    known = (iterations[name] != NO_TIME_NS) & (iterations["duration_ns"] > 0)
    whole = int(iterations["duration_ns"][known].sum())
    return int(iterations[name][known].sum()) / whole if whole else None


def _enqueued_at(store: Store, stamps: Integers, kernels: Integers) -> Integers:
    """Host time of the launch call, else of the log line."""
    times: Integers = stamps.copy()
    with_kernel = np.flatnonzero(kernels >= store.kernels.first)
    launched = store.kernels.take(kernels[with_kernel], "launch_start_ns")["launch_start_ns"]
    times[with_kernel] = np.where(launched != NO_TIME_NS, launched, times[with_kernel])
    return times


def _add_durations(found: Columns, place: NDArray[np.intp], times: Integers) -> None:
    begin = np.full(len(found), _NEVER)
    np.minimum.at(begin, place, np.where(times == NO_TIME_NS, _NEVER, times))
    found["begin_ns"] = np.where(begin == _NEVER, NO_TIME_NS, begin)
    found["duration_ns"] = NO_TIME_NS
    follows = (
        (np.diff(found["iteration"]) == 1)
        & (found["process"][1:] == found["process"][:-1])
        & (found["rank"][1:] == found["rank"][:-1])
        & (begin[1:] != _NEVER)
        & (begin[:-1] != _NEVER)
    )
    at = np.flatnonzero(follows)
    found["duration_ns"][at] = begin[at + 1] - begin[at]


def _unlogged(store: Store) -> Columns:
    """Iterations of processes with marks and kernels, and without operations, whose communication is to be found."""
    logged, processes = (set(distinct_values(of.rows["process"])) for of in (store.operations, store.kernels))
    processes -= logged
    if not processes:
        return np.zeros(0, ITERATION)
    marks = Iterations(store)
    marks.read_marks()
    rows = row_ops.concat([np.zeros(0, ITERATION), *(marks.rows_of(process) for process in sorted(processes))])
    return row_ops.filter_rows(rows, _is_recorded(store, rows))


def _is_recorded(store: Store, rows: Columns) -> NDArray[np.bool_]:
    """Whether one capture of its process covers the iteration from its begin to that of the next."""
    ends = rows["begin_ns"] + rows["duration_ns"]
    found = np.zeros(len(rows), np.bool_)
    for process, mine in group_by(rows["process"]):
        of = store.processes[process]
        for _, capture in store.captures:
            if capture.host == of.host and of.pid in capture.pids:
                inside = (rows["begin_ns"][mine] >= capture.start_ns) & (ends[mine] <= capture.end_ns)
                found[mine] |= inside & (rows["duration_ns"][mine] != NO_TIME_NS)
    return found


def _add_communication(store: Store, found: Columns, place: Integers, kernels: Integers, unlogged: int) -> None:
    """`unlogged`: how many rows at the end are of processes without operations: all of their kernels count."""
    rows = store.kernels.take(kernels, "process", "template", "start_ns", "end_ns")
    is_unlogged = np.arange(len(found)) >= len(found) - unlogged
    outside, outside_devices, is_whole = _outside(store, found, is_unlogged)
    spans = union(
        Spans(
            np.concatenate([place, outside.group]),
            np.concatenate([rows["start_ns"].astype(np.int64), outside.start]),
            np.concatenate([rows["end_ns"].astype(np.int64), outside.end]),
        )
    )
    is_whole &= (found["matched"] == found["launching"]) & (found["matched"] > 0) | is_unlogged
    is_whole &= ~np.isin(found["process"], _with_graphs_as_wholes(store))
    communication = spans.lengths_by_group(len(found))
    found["communication_ns"] = np.where(is_whole, communication, NO_TIME_NS)
    devices = np.full(len(found), NO_NUMBER, np.int64)
    devices[place] = store.kernel_templates.take(rows["template"], "device_id")["device_id"]
    is_placed = devices != NO_NUMBER
    devices[outside.group] = np.where(is_placed[outside.group], devices[outside.group], outside_devices)
    hidden, is_recorded = _hidden(store, found, devices, spans)
    found["exposed_ns"] = np.where(is_whole & is_recorded, communication - hidden, NO_TIME_NS)


def _outside(store: Store, found: Columns, is_unlogged: NDArray[np.bool_]) -> tuple[Spans, Integers, NDArray[np.bool_]]:
    """When kernels ran that communicate and are no operation's own, by iteration; their devices; and for which
    iterations that is certain: kernels of other libraries, whose time is filled in, those of replays of CUDA graphs,
    and NCCL's of processes without operations.

    Without marks it is not where the next iteration is not known: what was launched since may be of any.
    """
    table = row_ops.take_columns(store.outside.rows, np.arange(len(store.outside.rows)), _PLACED_BY)
    replayed = replays_of_their_own(store)["kernel"]
    if len(replayed):
        table = row_ops.concat([table, store.kernels.take(replayed, *_PLACED_BY)])
    if is_unlogged.any():
        of_nccl = np.flatnonzero(np.isin(store.kernels.rows["process"], found["process"][is_unlogged]))
        table = row_ops.concat([table, row_ops.take_columns(store.kernels.rows, of_nccl, _PLACED_BY)])
    marks = Iterations(store)
    if len(table):
        marks.read_marks()
    launched = np.where(table["launch_start_ns"] == NO_TIME_NS, table["start_ns"], table["launch_start_ns"])
    place = np.full(len(table), NO_NUMBER, np.int64)
    is_certain = np.ones(len(found), np.bool_)
    theirs = dict(group_by(found["process"]))
    for process, mine in group_by(table["process"]):
        if process not in theirs:
            continue
        numbers = marks.numbers_at(process, launched[mine])
        if numbers is not None:
            at = theirs[process]
            at = at[np.argsort(found["iteration"][at], kind="stable")]
            nth = np.minimum(np.searchsorted(found["iteration"][at], numbers), len(at) - 1)
            place[mine] = np.where(found["iteration"][at[nth]] == numbers, at[nth], NO_NUMBER)
            continue
        at = theirs[process][found["begin_ns"][theirs[process]] != NO_TIME_NS]
        at = at[np.argsort(found["begin_ns"][at], kind="stable")]
        if len(at):
            is_certain[at[:-1]] = found["duration_ns"][at[:-1]] != NO_TIME_NS
            nth = np.searchsorted(found["begin_ns"][at], launched[mine], side="right") - 1
            place[mine] = np.where(nth >= 0, at[np.maximum(nth, 0)], NO_NUMBER)
    known = np.flatnonzero(place != NO_NUMBER)
    spans = Spans(place[known], table["start_ns"][known].astype(np.int64), table["end_ns"][known].astype(np.int64))
    of_library = known < len(store.outside.rows)
    libraries = Spans(spans.group[of_library], spans.start[of_library], spans.end[of_library])
    found["outside_ns"] = union(libraries).lengths_by_group(len(found))
    return spans, store.kernel_templates.take(table["template"][known], "device_id")["device_id"], is_certain


def _with_graphs_as_wholes(store: Store) -> Integers:
    """Processes of which CUDA graphs were recorded as wholes: what their kernels did is not known."""
    by_place = {(process.host, process.pid): index for index, process in enumerate(store.processes)}
    found = [
        by_place[capture.host, pid]
        for _, capture in store.captures
        if capture.graph_launches
        for pid in capture.pids
        if (capture.host, pid) in by_place
    ]
    return np.asarray(found, np.int64)


_PLACED_BY: Final = ("process", "template", "start_ns", "end_ns", "launch_start_ns")
"""Columns of kernels by which those without an operation are put into iterations."""


def _hidden(store: Store, found: Columns, devices: Integers, spans: Spans) -> tuple[Integers, NDArray[np.bool_]]:
    """Time of these spans that other kernels of the GPU cover, by iteration; and whether any were recorded there."""
    hidden, is_recorded = np.zeros(len(found), np.int64), np.zeros(len(found), np.bool_)
    busy = store.busy.rows
    lane_of_busy = busy["process"].astype(np.int64) << 16 | (busy["device_id"].astype(np.int64) & 0xFFFF)
    lane_of_span = (found["process"].astype(np.int64) << 16 | (devices & 0xFFFF))[spans.group]
    by_lane = dict(group_by(lane_of_busy))
    for lane, mine in group_by(lane_of_span):
        if lane not in by_lane:
            continue
        theirs = by_lane[lane]
        union_of = union(Spans(np.zeros(len(theirs), np.int64), busy["start_ns"][theirs], busy["end_ns"][theirs]))
        covered = Coverage(union_of.start, union_of.end).covered(spans.start[mine], spans.end[mine])
        np.add.at(hidden, spans.group[mine], covered)
        is_recorded[spans.group[mine]] = True
    return hidden, is_recorded
