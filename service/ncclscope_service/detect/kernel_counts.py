"""How far Sends and Recvs of a job have come although lines were lost, and whose last lines were.

A kernel that ended shows that both sides enqueued it, whatever their lines say; lines behind the last kernel of a
channel are calls in which their rank still is. A rank whose last kernels have no line may have called more. Where no
kernels tell, what earlier steps lost is known if every step has as many Sends and Recvs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together
from ncclscope_service.detect.progress import PROGRESS, counted_operations
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_COLUMNS: Final = ("process", "member", "template", "line", "coll_seq", "pair_seq", "match", "start_ns", "iteration")


class ShownByKernels(NamedTuple):
    """What is known of ranks although their lines are not all there."""

    exchanged: Columns
    """Sends and Recvs that each rank has enqueued (`PROGRESS`); those of which kernels do not tell are left out."""
    unheard: frozenset[int]
    """Global ranks whose last kernels have no line, and no line is behind them: they may have called more."""


NOTHING_SHOWN: Final = ShownByKernels(np.empty(0, PROGRESS), frozenset())


def shown_by_kernels(store: Store, job: str) -> ShownByKernels:
    """What the kernels of a job show, by all of its operations in memory."""
    is_of_job = np.asarray([each == job for each in store.process_job], np.bool_)
    rows = store.operations.rows
    operations = rows.take(np.flatnonzero(is_of_job[rows["process"]]), *_COLUMNS)
    return ShownByKernels(_exchanged(store, operations), _unheard(store, operations))


def _exchanged(store: Store, operations: Columns) -> Columns:
    pairs = row_ops.filter_rows(operations, operations["coll_seq"] == NO_NUMBER)
    placed = counted_operations(store, pairs)
    counts, of = placed.counts, placed.of_operation
    match, line = pairs["match"][placed.positions], pairs["line"][placed.positions]
    has_kernel = match == Match.MATCHED
    last_line = np.full(len(counts), NO_NUMBER, np.int64)
    np.maximum.at(last_line, of[has_kernel], line[has_kernel])
    is_behind = line > last_line[of]
    is_told = last_line >= 0
    is_told[of[is_behind & (match != Match.UNMATCHED)]] = False
    _, channel = distinct_together(counts["communicator"], counts["sender"], counts["receiver"])
    ended = np.zeros(len(counts), np.int64)
    np.maximum.at(ended, channel[of[has_kernel]], placed.enqueued[has_kernel])
    by_kernels = ended[channel] + np.bincount(of[is_behind], minlength=len(counts))
    by_steps, steps_tell = _by_steps(of, pairs["iteration"][placed.positions], channel)
    is_told, steps_tell = (np.bincount(channel, each, len(counts))[channel] == 2 for each in (is_told, steps_tell))
    counts["operations"] = np.where(is_told, by_kernels, by_steps)
    return row_ops.filter_rows(counts, is_told | steps_tell)


def _by_steps(
    of: NDArray[np.intp], steps: NDArray[np.integer], channel: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Counts of channels whose steps all have as many operations, without what earlier steps lost; and which these are.

    `of`, `steps`: of each operation its row of the counts, and its step; `channel`: of each of these rows.
    """
    counts, is_told = np.zeros(len(channel), np.int64), np.zeros(len(channel), np.bool_)
    known = steps >= 0
    for row in range(len(channel)):
        ours = known & (channel[of] == channel[row])
        found, amounts = np.unique(of[ours] * np.int64(2**32) + steps[ours], return_counts=True)
        mine = found // 2**32 == row
        last, usual = int(found[mine].max(initial=0) % 2**32), int(np.bincount(amounts).argmax()) if len(amounts) else 0
        is_told[row] = mine.any() and usual == amounts.max()
        counts[row] = usual * last + (int(amounts[mine][-1]) if mine.any() else 0)
    return counts, is_told


def _unheard(store: Store, operations: Columns) -> frozenset[int]:
    ran = np.flatnonzero((operations["match"] == Match.MATCHED) | (operations["match"] == Match.LINE_LOST))
    ran = ran[np.lexsort((operations["start_ns"][ran], operations["process"][ran]))]
    last = ran[np.append(np.diff(operations["process"][ran]) != 0, True)[: len(ran)]]
    told = np.flatnonzero(operations["match"] == Match.MATCHED)
    last_line = np.full(len(store.processes), NO_NUMBER, np.int64)
    np.maximum.at(last_line, operations["process"][told], operations["line"][told])
    is_behind = (operations["match"] == Match.UNMATCHED) & (operations["line"] > last_line[operations["process"]])
    is_lost = (operations["match"][last] == Match.LINE_LOST) & ~np.isin(
        operations["process"][last], operations["process"][is_behind]
    )
    lost = last[is_lost]
    members = (store.members[member] for member in operations["member"][lost].tolist())
    return frozenset(each.global_rank for each in members if each.global_rank is not None)
