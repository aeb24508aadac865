"""How far Sends and Recvs of a job have come although lines were lost, and whose last lines were.

A kernel that ended shows that both sides enqueued it, whatever their lines say; lines behind the last kernel of a
channel are calls in which their rank still is. A rank whose last kernel has no line may have called more. Where no
kernels tell, what earlier steps lost is known if every step has as many Sends and Recvs.

NVTX ranges of NCCL's calls are of the capture, and not of the log: those behind the last kernel show how many of the
lines there are lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together, group_by
from ncclscope_service.detect.progress import PROGRESS, counted_operations
from ncclscope_service.store.rows import Match, has_launch
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATIONS

_COLUMNS: Final = ("process", "member", "template", "line", "coll_seq", "pair_seq", "match", "kernel", "iteration")
_LEAST_KNOWN: Final = 0.75
"""Share of the collectives between its first and its last one of which a rank has lines or kernels."""
_NEVER: Final = np.iinfo(np.int64).max


class ShownByKernels(NamedTuple):
    """What is known of ranks although their lines are not all there."""

    exchanged: Columns
    """Sends and Recvs that each rank has enqueued (`PROGRESS`); those of which kernels do not tell are left out."""
    lacking: Mapping[int, float]
    """By global rank whose last lines are lost: how many at most. As many as NVTX ranges show; without them infinitely
    many where the last kernel has no line, and no line is behind it; and where the log has a hole.
    """
    are_ends_known: bool = False
    """Whether NVTX ranges show of all ranks how many of their last lines are lost, if any."""

    in_a_step: Mapping[int, int] = MappingProxyType({})
    """By global rank the most collectives of one communicator that it enqueued in a step; those without known steps are
    left out.
    """


NOTHING_SHOWN: Final = ShownByKernels(np.empty(0, PROGRESS), {})


def shown_by_kernels(store: Store, job: str) -> ShownByKernels:
    """What the kernels of a job show, by all of its operations in memory."""
    is_of_job = np.asarray([each == job for each in store.process_job], np.bool_)
    rows = store.operations.rows
    operations = rows.take(np.flatnonzero(is_of_job[rows["process"]]), *_COLUMNS)
    lacking, are_ends_known = _lacking(store, operations)
    ranks = {member.process: member.global_rank for member in store.members if lacking[member.process]}
    return ShownByKernels(
        _exchanged(store, operations),
        {rank: lacking[process].item() for process, rank in ranks.items() if rank is not None},
        are_ends_known,
        _in_a_step(store, operations),
    )


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
    known = np.flatnonzero(steps >= 0)
    for _, ours in group_by(channel[of[known]]):
        (rows, found), inverse = distinct_together(of[known[ours]], steps[known[ours]])
        amounts = np.bincount(inverse)
        usual = int(np.bincount(amounts).argmax())
        for row, mine in group_by(rows):
            last = mine[found[mine].argmax()]
            is_told[row] = usual == amounts.max()
            counts[row] = usual * found[last] + amounts[last]
    return counts, is_told


def _lacking(store: Store, operations: Columns) -> tuple[NDArray[np.float64], bool]:
    """By process: how many lines behind its last kernel are lost at most; and whether NVTX ranges tell it of all.

    Without ranges none is where its last kernel has a line, or a line is behind it.
    """
    process, match, line = (operations[name] for name in ("process", "match", "line"))
    amount = len(store.processes)
    kernels = store.kernels.rows
    ran = np.lexsort((kernels["launch_start_ns"], kernels["process"]))
    last = ran[np.append(np.diff(kernels["process"][ran]) != 0, True)[: len(ran)]]
    is_paired = match == Match.MATCHED
    last_line = np.full(amount, NO_NUMBER, np.int64)
    np.maximum.at(last_line, process[is_paired], line[is_paired])
    is_behind = line > last_line[process]
    known = _numbers_behind(operations, is_behind, amount)
    is_heard = np.bincount(process[is_behind], minlength=amount) > 0
    is_heard[kernels["process"][last]] |= np.isin(store.kernels.first + last, operations["kernel"][is_paired])
    launched_ns = np.full(amount, NO_TIME_NS, np.int64)
    numbered = np.flatnonzero(has_launch(match))
    launches = store.kernels.take(operations["kernel"][numbered], "launch_start_ns")["launch_start_ns"]
    np.maximum.at(launched_ns, process[numbered], launches)
    calls = _calls_after(store, launched_ns)
    lacking = np.where(calls == NO_NUMBER, np.where(is_heard, 0, np.inf), np.maximum(calls - known, 0))
    lacking[np.bincount(kernels["process"][last], minlength=amount) == 0] = 0
    lacking[_with_holes(operations)] = np.inf
    every = np.unique(process)
    return lacking, bool((calls[every] >= known[every]).all())


def _numbers_behind(operations: Columns, is_behind: NDArray[np.bool_], processes: int) -> NDArray[np.int64]:
    """By process: how many operations it enqueued with those behind its last kernel, by their numbers."""
    is_pair = operations["coll_seq"] == NO_NUMBER
    (of, _), member = distinct_together(operations["process"], operations["member"])
    before = np.full(len(of), NO_NUMBER, np.int64)
    np.maximum.at(before, member[~is_behind], operations["coll_seq"][~is_behind])
    until = before.copy()
    np.maximum.at(until, member[is_behind], operations["coll_seq"][is_behind])
    found = np.bincount(operations["process"][is_behind & is_pair], minlength=processes)
    np.add.at(found, of, until - before)
    return found


def _with_holes(operations: Columns) -> NDArray[np.integer]:
    """Processes that lost so many lines at once that it is not known how many collectives they called meanwhile."""
    collectives = row_ops.filter_rows(operations, operations["coll_seq"] != NO_NUMBER)
    (processes, _), of = distinct_together(collectives["process"], collectives["member"])
    first, last = np.full(len(processes), _NEVER), np.zeros(len(processes), np.int64)
    np.minimum.at(first, of, collectives["coll_seq"])
    np.maximum.at(last, of, collectives["coll_seq"])
    found: NDArray[np.integer] = processes[np.bincount(of) < _LEAST_KNOWN * (last + 1 - first)]
    return found


def _in_a_step(store: Store, operations: Columns) -> dict[int, int]:
    is_known = (operations["coll_seq"] != NO_NUMBER) & (operations["iteration"] >= 0)
    (members, _), of = distinct_together(operations["member"][is_known], operations["iteration"][is_known])
    found: dict[int, int] = {}
    for member, amount in zip(members.tolist(), np.bincount(of).tolist(), strict=True):
        rank = store.members[member].global_rank
        if rank is not None:
            found[rank] = max(amount, found.get(rank, 0))
    return found


def _calls_after(store: Store, times: NDArray[np.int64]) -> NDArray[np.int64]:
    """By process: calls of NCCL's API that NVTX ranges show after this time; NO_NUMBER where there are no ranges."""
    ranges = store.ranges.rows
    names = [store.strings.find(f"nccl{operation.name}") for operation in OPERATIONS]
    at = np.flatnonzero(np.isin(ranges["text"], [name for name in names if name is not None]))
    process, start_ns = ranges["process"][at], ranges["start_ns"][at]
    calls = np.bincount(process[start_ns > times[process]], minlength=len(times))
    return np.where(np.bincount(process, minlength=len(times)) > 0, calls, NO_NUMBER)
