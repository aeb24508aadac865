"""What the report shows of iterations: their length and what fills it, and what each rank did in each of them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.export.operation_view import OperationView
from ncclscope_service.export.operations_file import operation_column
from ncclscope_service.export.selection import Selection
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

MAX_ITERATIONS: Final = 300
"""Bars and columns of the figures; of longer runs each stands for several iterations."""

MAX_ROWS: Final = 256
"""Ranks of the figures; of larger jobs every n-th is drawn."""

PARTS: Final = ("exposed", "hidden", "communication", "other", "unknown")
"""What fills an iteration: communication that nothing hid, that other kernels hid, of which that is not recorded; time
without a NCCL kernel; and time of which nothing is recorded."""

_PER_MS: Final = 1e6


class Bins:
    """Iterations put together so that at most `MAX_ITERATIONS` are drawn."""

    def __init__(self, iterations: NDArray[np.integer]) -> None:
        self.first, last = int(iterations.min()), int(iterations.max())
        self.per_bin = -(-(last - self.first + 1) // MAX_ITERATIONS)
        self.count = -(-(last - self.first + 1) // self.per_bin)

    def of(self, iterations: NDArray[np.integer]) -> NDArray[np.intp]:
        """The bin of each."""
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
    """Operations and bytes by iteration and operation; None where no iteration is known."""
    iteration = selection.operations.column("iteration").astype(np.int64)
    known = iteration[iteration >= 0]
    if not len(known):
        return None
    bins = Bins(known)
    counts: dict[str, NDArray[np.int64]] = {}
    for rows in selection.operations.slices():
        ops = operation_column(OperationView(selection.store, rows), "op")
        words: tuple[str, ...] = ops.words or ()
        inside = ops.is_known & (rows["iteration"] >= 0)
        place = bins.of(rows["iteration"])
        for code in np.unique(ops.values[inside]).tolist():
            mine = inside & (ops.values == code)
            found = counts.setdefault(words[int(code)], np.zeros((2, bins.count), dtype=np.int64))
            np.add.at(found[0], place[mine], 1)
            np.add.at(found[1], place[mine], np.maximum(0, rows["message_bytes"][mine]))
    return {
        "first": bins.first,
        "per_bin": bins.per_bin,
        "without": len(iteration) - len(known),
        "ops": {
            op: {"operations": found[0].tolist(), "bytes": found[1].tolist()} for op, found in sorted(counts.items())
        },
    }
