"""What the report shows of how each kind of communicator communicates: sizes, and when in an iteration it is active."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import distinct, distinct_together
from ncclscope_service.export.operation_view import OperationView
from ncclscope_service.export.operations_file import operation_column
from ncclscope_service.export.selection import Selection
from ncclscope_service.intervals import Integers, Spans, union
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

NOT_KNOWN: Final = "not known"
PHASES: Final = 240
"""Stretches of an iteration."""

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
    if it has operations of it. None where kernels or lengths of iterations are not known.
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
    """The row of each (process, rank, iteration); -1 where there is none."""
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
