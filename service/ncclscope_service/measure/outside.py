"""Waiting and transfer of kernels that communicate without NCCL: DeepEP, NVSHMEM, custom all-reduces.

Nothing names their group, their size or their number. What all ranks of a group must take part in, none can end before
the last has come: so the kernels of one call run at the same time on all of its ranks. Ranks are taken for a group if
they share a communicator of NCCL and if nearly every kernel of a name on one has its counterparts on all others, which
overlap it by half of the shorter one at least: neighbours on a stream overlap by the error of the clocks only. The
largest such group is taken. Transfer is then the shortest of the kernels of a call, as of NCCL's collectives, and the
rest of each is waiting. Without clocks, and where ranks do not fit together, there is neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import group_by
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

Times = NDArray[np.int64]

MEASURE: Final = np.dtype([("wait_ns", "<i8"), ("transfer_ns", "<i8"), ("ranks_seen", "<i4")])
"""NO_TIME_NS, and 0 ranks, where a kernel has no group."""

_FITTING: Final = 0.99
"""Share of the kernels of one rank that must have their counterparts."""
_FEWEST: Final = 8
"""Kernels of a name on a rank below which a fit may be chance."""
_LOOKED_BACK: Final = 3
"""Kernels of a rank that may overlap one of another rank: the one before, the one that is meant, the one behind."""


def ranks_of_kernels(store: Store, processes: NDArray[np.integer], devices: NDArray[np.integer]) -> NDArray[np.int64]:
    """The global rank of kernels by process and CUDA ordinal; NO_NUMBER if it is not known."""
    known: dict[int, dict[int | None, int]] = {}
    for member in store.members:
        if member.global_rank is not None:
            known.setdefault(member.process, {})[member.cuda_device] = member.global_rank
    pairs, place = np.unique(np.stack((processes, devices), axis=1), axis=0, return_inverse=True)
    found = np.full(len(pairs), NO_NUMBER, np.int64)
    for at, (process, device) in enumerate(pairs.tolist()):
        ranks = known.get(process, {})
        only = set(ranks.values())
        found[at] = next(iter(only)) if len(only) == 1 else ranks.get(device, NO_NUMBER)
    return found[place.reshape(-1)]


def measure_outside(
    names: NDArray[np.integer],
    ranks: NDArray[np.int64],
    starts_ns: Times,
    ends_ns: Times,
    groups: Sequence[tuple[int, ...]],
) -> Columns:
    """MEASURE of each kernel of one job; times are of the reference clock, NO_TIME_NS if it is not known.

    `groups`: global ranks of the communicators.
    """
    measures = np.zeros(len(names), MEASURE)
    measures["wait_ns"] = measures["transfer_ns"] = NO_TIME_NS
    usable = np.flatnonzero((ranks != NO_NUMBER) & (starts_ns != NO_TIME_NS) & (ends_ns != NO_TIME_NS))
    largest_first = sorted({each for each in groups if len(each) > 1}, key=len, reverse=True)
    for _, of_name in group_by(names[usable]):
        rows = usable[of_name]
        rows = rows[np.argsort(starts_ns[rows], kind="stable")]
        free = {rank: rows[mine] for rank, mine in group_by(ranks[rows]) if len(mine) >= _FEWEST}
        for group in largest_first:
            if all(rank in free for rank in group):
                calls = _calls([free[rank] for rank in group], starts_ns, ends_ns)
                if calls is not None:
                    _measure(measures, calls, starts_ns, ends_ns)
                    for rank in group:
                        del free[rank]
    return measures


def _measure(measures: Columns, calls: NDArray[np.intp], starts_ns: Times, ends_ns: Times) -> None:
    """Fills in what follows from the kernels of each call (rows)."""
    durations = ends_ns[calls] - starts_ns[calls]
    shortest = durations.min(axis=1, keepdims=True)
    measures["wait_ns"][calls] = durations - shortest
    measures["transfer_ns"][calls] = np.broadcast_to(shortest, calls.shape)
    measures["ranks_seen"][calls] = calls.shape[1]


def _calls(by_rank: Sequence[NDArray[np.intp]], starts_ns: Times, ends_ns: Times) -> NDArray[np.intp] | None:
    """The kernels of each call (rows) on each rank (columns); None if the ranks do not fit together.

    Ranks may have been recorded over different stretches: what one lacks is left out.
    """
    first = by_rank[0]
    whole = np.ones(len(first), np.bool_)
    columns = [first]
    for other in by_rank[1:]:
        at = _counterparts(first, other, starts_ns, ends_ns)
        both = (starts_ns[first] >= starts_ns[other[0]]) & (ends_ns[first] <= ends_ns[other[-1]])
        if np.count_nonzero(at[both] == NO_NUMBER) > (1 - _FITTING) * np.count_nonzero(both) or not both.any():
            return None
        whole &= at != NO_NUMBER
        columns.append(other[np.maximum(at, 0)])
    return np.stack(columns, axis=1)[whole] if np.count_nonzero(whole) >= _FEWEST else None


def _counterparts(ours: NDArray[np.intp], theirs: NDArray[np.intp], starts_ns: Times, ends_ns: Times) -> Times:
    """The place in `theirs` of the kernel that runs with each of `ours`; NO_NUMBER if none does.

    Both are by start and do not overlap among themselves.
    """
    start, end, their_start, their_end = starts_ns[ours], ends_ns[ours], starts_ns[theirs], ends_ns[theirs]
    last = np.searchsorted(their_start, end, side="right") - 1
    best, most = np.full(len(ours), NO_NUMBER, np.int64), np.zeros(len(ours), np.int64)
    for back in range(_LOOKED_BACK):
        at = last - back
        there = np.maximum(at, 0)
        shared = np.minimum(end, their_end[there]) - np.maximum(start, their_start[there])
        shorter = np.minimum(end - start, their_end[there] - their_start[there])
        is_better = (at >= 0) & (2 * shared >= shorter) & (shared > most)
        best[is_better], most[is_better] = at[is_better], shared[is_better]
    doubled = np.bincount(best[best != NO_NUMBER], minlength=len(theirs)) > 1
    best[(best != NO_NUMBER) & doubled[np.maximum(best, 0)]] = NO_NUMBER
    return best
