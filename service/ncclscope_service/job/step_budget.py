"""Where the time of a step goes on each GPU: an identity in nanoseconds, per rank and iteration.

    step = computation + hidden + exposed transfer + waiting + bubble + imbalance + late + exposed + idle

A step lasts on the GPU from the first NCCL kernel of an iteration to that of the next. Each moment in it is of one
part: *computation* alone, communication that computation *hides*, communication that nothing hides (*exposed*), or
neither (*idle*). The beginning of a kernel, until the last rank came, is waiting, the rest is transfer; where that is
not measured it is exposed and no more is said. Where several kernels communicate at once, each has an equal share.
Steps are whole only: every kernel of the iteration is known, and computation was recorded on that GPU.

Of the waiting some is explained: `step_waits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together, first_positions, group_by
from ncclscope_service.columns.intervals import Integers
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.job.step_parts import PART_NAMES, STEP_PART, Part, in_order
from ncclscope_service.job.step_waits import is_late, with_pipeline_waits
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

OPERATION_COLUMNS: Final = (
    *("process", "member", "template", "iteration", "match", "kernel", "coll_seq", "wait_ns", "end_true_ns"),
)
"""Columns of operations that are read."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Rows of STEP_PART by process, iteration, part and parallelism; `parallelism` names the kinds that they index."""

    rows: Columns
    parallelism: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartShare:
    """A part of the mean step of a job."""

    part: str
    parallelism: str | None
    mean_ns: float
    """Of a step of a rank."""
    share: float
    """Of the step, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStep:
    """Where the steps of a job go, on average over its ranks."""

    job: str
    steps: int
    """Each is of one rank."""
    mean_ns: float
    parts: tuple[PartShare, ...]
    """The largest first."""


def mean_step(budget: StepBudget, job: str, mine: NDArray[np.bool_]) -> MeanStep | None:
    """Of these rows, which are the job's; None without any."""
    rows = budget.rows[mine]
    if not len(rows):
        return None
    keys, _ = distinct_together(rows["process"].astype(np.int64), rows["iteration"].astype(np.int64))
    steps, whole = len(keys[0]), int(rows["ns"].sum())
    (parts, kinds), place = distinct_together(rows["part"].astype(np.int64), rows["parallelism"].astype(np.int64))
    sums = np.zeros(len(parts), np.int64)
    np.add.at(sums, place, rows["ns"])
    shares = tuple(
        PartShare(
            part=PART_NAMES[parts[at]],
            parallelism=budget.parallelism[kinds[at]] if kinds[at] >= 0 else None,
            mean_ns=int(sums[at]) / steps,
            share=int(sums[at]) / whole,
        )
        for at in np.argsort(-sums, kind="stable").tolist()
    )
    return MeanStep(job=job, steps=steps, mean_ns=whole / steps, parts=shares)


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of time that carry a label."""

    start: Integers
    end: Integers
    label: Integers


def step_budget(store: Store, operations: AnyRows, iterations: Columns) -> StepBudget:
    """Of the steps whose communication and computation are recorded.

    `operations` has OPERATION_COLUMNS, `iterations` is `iterations.ITERATION`: those with `exposed_ns` are taken.
    Costs 0.1 s of CPU for 65,000 operations with kernels, of however many ranks.
    """
    kinds = [communicator.parallelism for communicator in store.communicators]
    names = tuple(sorted({kind for kind in kinds if kind is not None}))
    known = np.flatnonzero((operations["match"] == Match.MATCHED) & (operations["kernel"] >= store.kernels.first))
    known = known[first_positions(operations["kernel"][known])]  # operations of a group share its kernel
    taken = row_ops.concat([row_ops.take_columns(operations, known, OPERATION_COLUMNS), _replays(store)])
    kernels = store.kernels.take(taken["kernel"], "template", "start_ns", "end_ns")
    start, end = kernels["start_ns"].astype(np.int64), kernels["end_ns"].astype(np.int64)
    steps = _steps(iterations, taken, start)
    devices = store.kernel_templates.take(kernels["template"], "device_id")["device_id"].astype(np.int64)
    lowest, highest = (np.full(len(store.processes), fill) for fill in (np.iinfo(np.int64).max, NO_NUMBER))
    np.minimum.at(lowest, taken["process"], devices)
    np.maximum.at(highest, taken["process"], devices)
    steps = row_ops.filter_rows(steps, lowest[steps["process"]] == highest[steps["process"]])
    if not len(steps):
        return StepBudget(np.zeros(0, STEP_PART), names)
    code_of = {name: code for code, name in enumerate(names)}
    kind_of = np.asarray([code_of.get(kinds[each.communicator] or "", NO_NUMBER) for each in store.members], np.int64)
    wait = np.where(is_late(store, operations, taken), Part.LATE, Part.EXPOSED_WAIT).astype(np.int64)
    communication = _communication(start, end, taken["wait_ns"], wait, kind_of[taken["member"]], taken["process"])
    busy = store.busy.rows
    computing = np.flatnonzero(busy["device_id"] == lowest[busy["process"]])
    lanes = _Lanes.of(steps, len(store.processes))
    labels, amounts = budget(
        lanes.place(steps["process"], steps["begin_ns"]),
        lanes.place(steps["process"], steps["begin_ns"] + steps["duration_ns"]),
        lanes.segments(busy["process"][computing], busy["start_ns"][computing], busy["end_ns"][computing]),
        lanes.segments(communication.process, communication.start, communication.end, communication.label),
    )
    rows = _rows(steps, labels, amounts)
    return StepBudget(with_pipeline_waits(store, operations, rows, names), names)


@dataclass(frozen=True, slots=True)
class _Communication:
    """Stretches in which kernels communicate, as columns; times of their host's clock."""

    process: Integers
    start: Integers
    end: Integers
    label: Integers


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The time of all processes one after the other, each from its first step to its last."""

    first: Integers
    """By process: where its first step begins, on its own clock."""
    length: Integers
    """0 for a process without a step."""
    base: Integers

    @classmethod
    def of(cls, steps: Columns, processes: int) -> _Lanes:
        first, last = np.full(processes, np.iinfo(np.int64).max), np.zeros(processes, np.int64)
        np.minimum.at(first, steps["process"], steps["begin_ns"])
        np.maximum.at(last, steps["process"], steps["begin_ns"] + steps["duration_ns"])
        length = np.maximum(last - first, 0)
        return cls(first, length, np.cumsum(length + 1) - length)

    def place(self, process: Integers, times: Integers) -> Integers:
        """Times of these processes within their lanes; what is outside of one lies at its border."""
        within: Integers = np.clip(times - self.first[process], 0, self.length[process])
        return within + self.base[process]

    def segments(self, process: Integers, start: Integers, end: Integers, label: Integers | None = None) -> Segments:
        """Stretches of these processes; those of which nothing is inside of a lane are left out."""
        begins, ends = self.place(process, start), self.place(process, end)
        inside = np.flatnonzero(begins < ends)
        labels = np.zeros(len(start), np.int64) if label is None else label
        return Segments(begins[inside], ends[inside], labels[inside])


def _steps(iterations: Columns, taken: Columns, start: Integers) -> Columns:
    """STEP_PART rows of whole steps, with begin and duration on the GPU; the rest is not filled in."""
    numbered = np.flatnonzero(taken["iteration"] != NO_NUMBER)
    (process, iteration), place = distinct_together(
        *(taken[name][numbered].astype(np.int64) for name in ("process", "iteration"))
    )
    known = process << 32 | iteration
    first = np.append(np.full(len(known), np.iinfo(np.int64).max), NO_TIME_NS)
    np.minimum.at(first, place, start[numbered])

    def begins(asked: Integers) -> Integers:
        places = np.searchsorted(known, asked)
        return np.where(np.append(known, -1)[places] == asked, first[places], NO_TIME_NS)

    whole = row_ops.filter_rows(iterations, iterations["exposed_ns"] != NO_TIME_NS)
    mine = whole["process"].astype(np.int64) << 32 | whole["iteration"].astype(np.int64)
    begin, end = begins(mine), begins(mine + 1)
    found: Columns = np.zeros(len(whole), STEP_PART)
    for name in ("process", "rank", "iteration"):
        found[name] = whole[name]
    found["begin_ns"], found["duration_ns"] = begin, end - begin
    return row_ops.filter_rows(found, (begin != NO_TIME_NS) & (end != NO_TIME_NS) & (begin < end))


def _communication(
    start: Integers, end: Integers, waits: Integers, wait: Integers, kind: Integers, process: Integers
) -> _Communication:
    """Each kernel as waiting and transfer, or as one stretch where that is not known. Labels: see `_label`.

    `wait`: the part that the waiting of each is.
    """
    is_split = waits != NO_TIME_NS
    border = np.where(is_split, np.minimum(start + np.maximum(waits, 0), end), end)
    head = _label(kind, np.where(is_split, wait, Part.EXPOSED))
    return _Communication(
        np.concatenate([process, process[is_split]]),
        np.concatenate([start, border[is_split]]),
        np.concatenate([border, end[is_split]]),
        np.concatenate([head, _label(kind, Part.EXPOSED_TRANSFER)[is_split]]),
    )


def _label(kind: Integers, part: Part | Integers) -> Integers:
    """Kind of parallelism and part in one number."""
    return (kind + 1) * len(Part) + part


def _rows(steps: Columns, labels: Integers, amounts: NDArray[np.int64]) -> Columns:
    """A row for each part that has any time, in order."""
    step, column = np.nonzero(amounts)
    found: Columns = steps[step]
    found["part"], found["parallelism"] = labels[column] % len(Part), labels[column] // len(Part) - 1
    found["ns"] = amounts[step, column]
    return in_order(found)


def replays_of_their_own(store: Store) -> Columns:
    """Replays (rows.REPLAYED) whose kernel no operation's row names, and is still in the store."""
    replays = store.replays.rows
    own = ~replays["is_first"] & (replays["kernel"] >= store.kernels.first)
    found: Columns = replays[own]
    return found


def _replays(store: Store) -> Columns:
    """Replays of CUDA graphs as OPERATION_COLUMNS, of no iteration: a step begins with an operation of its own."""
    replays = replays_of_their_own(store)
    rows = row_ops.take_columns(replays, np.arange(len(replays)), OPERATION_COLUMNS)
    rows["iteration"] = NO_NUMBER
    return rows


def budget(
    begin: Integers, end: Integers, computing: Segments, communication: Segments
) -> tuple[Integers, NDArray[np.int64]]:
    """Labels, and the ns of each in each of these stretches (a row each), which do not overlap: rows sum up exactly.

    A label is (1 + kind) x parts + part, kind -1 for none. Computation has no label of its own.
    """
    borders = (begin, end, computing.start, computing.end, communication.start, communication.end)
    times, places = np.unique(np.concatenate(borders), return_inverse=True)
    first, last, *runs = np.split(places, np.cumsum([len(each) for each in borders])[:-1])
    lengths = np.diff(times)
    is_busy = _running(runs[0], runs[1], len(times)) > 0
    at_once = _running(runs[2], runs[3], len(times))
    found: dict[int, Integers] = {}

    def add(label: int, at: NDArray[np.intp], amounts: Integers) -> None:
        sums = np.concatenate([[0], np.cumsum(amounts)])
        spent = sums[np.searchsorted(at, last)] - sums[np.searchsorted(at, first)]
        found[label] = found[label] + spent if label in found else spent

    for part, is_so in ((Part.COMPUTATION, is_busy), (Part.IDLE, ~is_busy)):
        alone = np.flatnonzero(is_so & (at_once == 0))
        add(int(part), alone, lengths[alone])
    before = np.zeros(len(lengths), np.int64)
    for label, of in group_by(communication.label):
        running = _running(runs[2][of], runs[3][of], len(times))
        at = np.flatnonzero(running)
        # Equal shares of whole nanoseconds: what this label adds to the share of all labels up to it.
        until = before[at] + running[at]
        amounts = lengths[at] * until // at_once[at] - lengths[at] * before[at] // at_once[at]
        before[at] = until
        hidden = is_busy[at]
        add(label // len(Part) * len(Part) + Part.HIDDEN, at[hidden], amounts[hidden])
        add(label, at[~hidden], amounts[~hidden])
    order = sorted(found)
    return np.asarray(order, np.int64), np.stack([found[label] for label in order], axis=1)


def _running(start: NDArray[np.intp], end: NDArray[np.intp], times: int) -> Integers:
    """How many of these stretches run from each time on, but the last; borders are places among the times."""
    change = np.bincount(start, minlength=times) - np.bincount(end, minlength=times)
    return np.cumsum(change[:-1])
