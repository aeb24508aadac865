"""Report data on iterations: their length, what fills it, and the work of each rank in each of them.

For each kind of communicator it also gives message sizes, and when in an iteration the kind is active.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct, distinct_together
from ncclscope_service.columns.intervals import Integers, Spans, union
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.export.tables.operations_file import operation_column
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

MAX_ITERATIONS: Final = 300
"""Bars and columns of the figures; of longer runs each stands for several iterations."""

MAX_ROWS: Final = 256
"""Ranks of the figures; of larger jobs every n-th is drawn."""

PARTS: Final = ("exposed", "hidden", "communication", "other", "unknown")
"""Parts of an iteration: communication that nothing hid, that other kernels hid, of which that is not recorded; time
without a NCCL kernel; and time of which nothing is recorded."""

_PER_MS: Final = 1e6


class Bins:
    """Iterations put together so that at most `MAX_ITERATIONS` are drawn."""

    def __init__(self, iterations: NDArray[np.integer]) -> None:
        self.first, last = int(iterations.min()), int(iterations.max())
        self.per_bin = -(-(last - self.first + 1) // MAX_ITERATIONS)
        self.count = -(-(last - self.first + 1) // self.per_bin)

    def of(self, iterations: NDArray[np.integer]) -> NDArray[np.intp]:
        """The bin of each iteration."""
        return ((iterations.astype(np.int64) - self.first) // self.per_bin).astype(np.intp)


def iteration_figures(selection: Selection, iterations: Columns) -> dict[str, object] | None:
    """Of `iteration_times.ITERATION` rows; None without any. Of several jobs the one with most operations is drawn.

    `lengths`: milliseconds by part and bin, the mean over the ranks of which most is known there. `shares`: of 1, by
    part and rank, over the iterations of which most is known. `operations`: by rank and bin, mean of an iteration;
    None without any.
    """
    found, job = _of_one_job(selection, iterations)
    if not len(found):
        return None
    bins = Bins(found["iteration"])
    ranks, row_of = _ranks(selection, found)
    every = -(-len(ranks) // MAX_ROWS)
    operations = np.zeros((len(ranks), bins.count))
    seen = np.zeros((len(ranks), bins.count))
    place = bins.of(found["iteration"])
    np.add.at(operations, (row_of, place), found["operations"])
    np.add.at(seen, (row_of, place), 1)
    mean = np.divide(operations, seen, out=np.full(operations.shape, np.nan), where=seen > 0)[::every]
    return {
        "job": job if len(selection.jobs) > 1 else None,
        "first": bins.first,
        "per_bin": bins.per_bin,
        "ranks": ranks[::every],
        "every": every,
        "lengths": _parts(found, place, bins.count, as_share=False),
        "shares": _of_ranks(_parts(found, row_of, len(ranks), as_share=True), every),
        "operations": [[None if np.isnan(value) else round(value, 2) for value in row] for row in mean.tolist()],
    }


def _of_one_job(selection: Selection, iterations: Columns) -> tuple[Columns, str]:
    job_of = np.asarray(selection.store.process_job, dtype=object)
    jobs = job_of[iterations["process"]] if len(iterations) else np.empty(0, dtype=object)
    amounts = {job: int(iterations["operations"][jobs == job].sum()) for job in selection.jobs}
    largest = max(amounts, key=lambda job: amounts[job], default="")
    return iterations[jobs == largest], largest


def _ranks(selection: Selection, found: Columns) -> tuple[list[str], NDArray[np.intp]]:
    """The names of the ranks in order, and the row of each iteration."""
    records = selection.store.processes
    own: list[tuple[int, int]] = list(zip(found["rank"].tolist(), found["process"].tolist(), strict=True))

    def order(pair: tuple[int, int]) -> tuple[bool, int, str, int]:
        record = records[pair[1]]
        return pair[0] == NO_NUMBER, pair[0], record.host, record.pid

    pairs = sorted(set(own), key=order)
    names = [
        f"{rank}" if rank != NO_NUMBER else f"{records[process].host}:{records[process].pid}" for rank, process in pairs
    ]
    row_of = {pair: row for row, pair in enumerate(pairs)}
    return names, np.asarray([row_of[pair] for pair in own], np.intp)


def _parts(found: Columns, place: NDArray[np.intp], places: int, *, as_share: bool) -> dict[str, list[float | None]]:
    """By part and place; of each place, only the iterations of which most is known there are looked at."""
    duration, communication, exposed = (found[name] for name in ("duration_ns", "communication_ns", "exposed_ns"))
    timed = duration > 0
    level = timed.astype(np.int64)
    level += timed & (communication != NO_TIME_NS)
    level += timed & (communication != NO_TIME_NS) & (exposed != NO_TIME_NS)
    best = np.zeros(places, np.int64)
    np.maximum.at(best, place, level)
    chosen = timed & (level == best[place])
    of = {
        "exposed": np.where(level == 3, exposed, 0),
        "hidden": np.where(level == 3, communication - exposed, 0),
        "communication": np.where(level == 2, communication, 0),
        # Kernels may run on after the next iteration was begun.
        "other": np.where(level >= 2, np.maximum(duration - communication, 0), 0),
        "unknown": np.where(level == 1, duration, 0),
    }
    sums = {name: np.bincount(place[chosen], weights=of[name][chosen], minlength=places) for name in PARTS}
    whole = sum(sums.values()) if as_share else np.bincount(place[chosen], minlength=places) * _PER_MS
    digits = 4
    return {
        name: [
            None if of_place <= 0 else round(amount / of_place, digits)
            for amount, of_place in zip(amounts.tolist(), np.asarray(whole).tolist(), strict=True)
        ]
        for name, amounts in sums.items()
        if amounts.any()
    }


def _of_ranks(parts: dict[str, list[float | None]], every: int) -> dict[str, list[float | None]]:
    return {name: values[::every] for name, values in parts.items()}


def per_iteration(selection: Selection) -> dict[str, object] | None:
    """Operations and bytes by iteration and operation; None if no iteration is known."""
    iteration = selection.operations.column("iteration").astype(np.int64)
    known = iteration[iteration >= 0]
    if not len(known):
        return None
    bins = Bins(known)
    counts: dict[str, NDArray[np.int64]] = {}
    for rows in selection.operations.slices():
        view = OperationView(selection.store, rows)
        ops, moved = operation_column(view, "op"), view.moved_bytes()
        words: tuple[str, ...] = ops.words or ()
        inside = ops.is_known & (rows["iteration"] >= 0)
        place = bins.of(rows["iteration"])
        for code in np.unique(ops.values[inside]).tolist():
            mine = inside & (ops.values == code)
            found = counts.setdefault(words[int(code)], np.zeros((2, bins.count), dtype=np.int64))
            np.add.at(found[0], place[mine], 1)
            np.add.at(found[1], place[mine], moved[mine])
    return {
        "first": bins.first,
        "per_bin": bins.per_bin,
        "without": len(iteration) - len(known),
        "ops": {
            op: {"operations": found[0].tolist(), "bytes": found[1].tolist()} for op, found in sorted(counts.items())
        },
    }


NOT_KNOWN: Final = "not known"
PHASES: Final = 240
"""Number of stretches that an iteration is cut into."""

MAX_FOLDED: Final = 1 << 21
"""Operations that are folded onto one iteration: the latest."""

_SIZE_BINS: Final = 64
_LONGEST: Final = 1.1
"""How far behind its begin, in lengths of an iteration, kernels of it are drawn."""


def size_counts(selection: Selection) -> dict[str, object] | None:
    """Operations by power of two of their message size: by operation, and by kind of communicator and operation."""
    kinds = [communicator.parallelism or NOT_KNOWN for communicator in selection.store.communicators]
    counts: dict[tuple[str, str], NDArray[np.int64]] = {}
    for rows in selection.operations.slices():
        view = OperationView(selection.store, rows)
        _add_sizes(view, kinds, counts)
    if not counts:
        return None
    used = np.flatnonzero(np.sum(list(counts.values()), axis=0))
    low, high = int(used.min()), int(used.max()) + 1
    by_op: dict[str, NDArray[np.int64]] = {}
    for (_, op), found in counts.items():
        by_op[op] = by_op.get(op, np.zeros(_SIZE_BINS, np.int64)) + found
    return {
        "low": low,
        "ops": {op: found[low:high].tolist() for op, found in sorted(by_op.items())},
        "groups": {f"{kind} {op}": found[low:high].tolist() for (kind, op), found in sorted(counts.items())},
    }


def _add_sizes(view: OperationView, kinds: list[str], counts: dict[tuple[str, str], NDArray[np.int64]]) -> None:
    ops, sizes = operation_column(view, "op"), operation_column(view, "message_bytes")
    known = np.flatnonzero(ops.is_known & sizes.is_known & (sizes.values > 0))
    words: tuple[str, ...] = ops.words or ()
    powers = np.log2(sizes.values[known].astype(np.float64)).astype(np.int64)
    columns, place = distinct_together(
        view.communicators()[known].astype(np.int64), ops.values[known].astype(np.int64), powers
    )
    amounts: list[int] = np.bincount(place).tolist()
    for row, amount in enumerate(amounts):
        communicator, code, power = (int(column[row]) for column in columns)
        key = kinds[communicator] if communicator >= 0 else NOT_KNOWN, words[code]
        counts.setdefault(key, np.zeros(_SIZE_BINS, np.int64))[power] += amount


def activity(selection: Selection, iterations: Columns) -> dict[str, object] | None:
    """When in an iteration each kind of communicator is active: the share of ranks that run a kernel of it.

    All iterations (`iteration_times.ITERATION` rows) are laid over each other at their begins; a rank counts for a kind
    if it has operations of it. None if kernels or lengths of iterations are not known.
    """
    lengths = iterations["duration_ns"][iterations["duration_ns"] > 0]
    if not len(lengths):
        return None
    length = float(np.median(lengths))
    kernels = _Folded(selection, iterations)
    if not len(kernels.start):
        return None
    borders = np.linspace(0, _LONGEST * length, PHASES + 1).astype(np.int64)
    shares: dict[str, list[float]] = {}
    for kind, name in enumerate(kernels.kinds):
        mine = kernels.kind == kind
        if mine.any():
            spans = union(Spans(kernels.iteration[mine], kernels.start[mine], kernels.end[mine]))
            ranks = len(distinct(kernels.iteration[mine])[0])
            running = np.diff(_run_before(spans, borders)) / (np.diff(borders) * ranks)
            shares[name] = [round(value, 4) for value in running.tolist()]
    return {
        "ms_per_bin": _LONGEST * length / PHASES / 1e6,
        "length_ms": length / 1e6,
        "kinds": dict(sorted(shares.items())),
    }


class _Folded:
    """Kernels of operations whose iteration is known, as columns: when they ran since the iteration's begin."""

    def __init__(self, selection: Selection, iterations: Columns) -> None:
        store, part = selection.store, selection.operations
        latest = slice(max(0, len(part) - MAX_FOLDED), None)
        names = ("member", "process", "iteration", "start_ns", "end_ns")
        columns = {name: part.column(name)[latest].astype(np.int64) for name in names}
        known = (columns["iteration"] != NO_NUMBER) & (columns["start_ns"] != NO_TIME_NS) & (columns["member"] >= 0)
        columns = {name: values[known] for name, values in columns.items()}
        rank_of = np.asarray(
            [NO_NUMBER if each.global_rank is None else each.global_rank for each in store.members], np.int64
        )
        keys = (columns["process"], rank_of[columns["member"]], columns["iteration"])
        row = _rows_of(iterations, *keys)
        begin = np.where(row >= 0, iterations["begin_ns"][row], NO_TIME_NS)
        has_length = (row >= 0) & (iterations["duration_ns"][row] > 0) & (begin != NO_TIME_NS)
        self.kinds = [*dict.fromkeys(each.parallelism or NOT_KNOWN for each in store.communicators)]
        kind_of = np.asarray(
            [self.kinds.index(each.parallelism or NOT_KNOWN) for each in store.communicators], np.int64
        )
        communicator_of = np.asarray([each.communicator for each in store.members], np.int64)
        members = columns["member"][has_length]
        self.kind: Integers = kind_of[communicator_of[members]]
        self.iteration: Integers = row[has_length]
        self.start: Integers = (columns["start_ns"] - begin)[has_length]
        self.end: Integers = (columns["end_ns"] - begin)[has_length]


def _rows_of(iterations: Columns, process: Integers, rank: Integers, iteration: Integers) -> Integers:
    """The row of each (process, rank, iteration); -1 if there is none."""
    own = (iterations["process"], iterations["rank"], iterations["iteration"])
    together = [
        np.concatenate([mine.astype(np.int64), theirs])
        for mine, theirs in zip(own, (process, rank, iteration), strict=True)
    ]
    keys, place = distinct_together(*together)
    row_of = np.full(len(keys[0]), -1, np.int64)
    row_of[place[: len(iterations)]] = np.arange(len(iterations))
    return row_of[place[len(iterations) :]]


def _run_before(spans: Spans, times: Integers) -> NDArray[np.float64]:
    """How long all intervals together had run before each time."""
    total = np.zeros(len(times))
    for ends, sign in ((np.sort(spans.start), 1.0), (np.sort(spans.end), -1.0)):
        passed = np.searchsorted(ends, times)
        sums = np.concatenate([[0.0], np.cumsum(ends, dtype=np.float64)])
        total += sign * (times * passed.astype(np.float64) - sums[passed])
    return total
