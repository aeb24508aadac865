"""The last seconds as bars: a lane for each rank, a bar for each kernel, waiting and transfer told apart.

A kernel waits first and transfers then: its bar is cut at start + wait. Where the wait is not known (a lone rank,
a Send without its Recv) the whole bar is said to be neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.rows import Communicator
from ncclscope_service.tally import operation_name
from ncclscope_service.views_of_job import JobAsked, newest
from ncclscope_service.wait_map import MAX_RANK
from ncclscope_service.window import Bools, Int64s
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

MAX_BARS: Final = 3_000
MAX_LANES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Kernels of the last seconds that were captured; columns of equal length, one entry for each bar."""

    begin_ns: int | None
    """Reference clock: what the times count from. None where no kernel is known."""
    seconds: float
    """From `begin_ns` to where it is known of every lane what was waiting; less than asked for where there would be too
    many bars."""
    lanes: tuple[str, ...]
    """What each lane is of: a rank, or a communicator of one rank."""
    communicators: tuple[str, ...]
    parallelisms: tuple[str | None, ...]
    """Of each of `communicators`."""
    lane: tuple[int, ...]
    communicator: tuple[int, ...]
    op: tuple[str, ...]
    start_us: tuple[float, ...]
    wait_us: tuple[float | None, ...]
    """None where it is not known how much of the bar is waiting."""
    duration_us: tuple[float, ...]
    message_bytes: tuple[int | None, ...]


def timeline_of_ranks(asked: JobAsked, seconds: float) -> Timeline:
    """Of the ranks that wait least and most, MAX_LANES in all; of the first ranks where no wait is known."""
    waits = asked.waits.means_of_job(asked.job)
    if len(waits.ranks):
        ranks = waits.ranks[waits.most_telling(MAX_LANES)].tolist()
    else:
        known = asked.operations.rank[asked.is_own & (asked.operations.rank >= 0)]
        ranks = np.unique(known)[:MAX_LANES].tolist()
    return _of_ranks(asked, ranks, asked.is_own, seconds)


def timeline_of_communicator(asked: JobAsked, communicator: Communicator, seconds: float) -> Timeline:
    """Of one communicator's operations on its first MAX_LANES ranks."""
    ranks = sorted(asked.ranks_of(communicator).values())[:MAX_LANES]
    return _of_ranks(asked, ranks, asked.operations.communicator == communicator.index, seconds)


def timeline_of_rank(asked: JobAsked, rank: int, seconds: float) -> Timeline:
    """Of one rank, a lane for each of its communicators."""
    operations = asked.operations
    chosen = asked.is_own & (operations.rank == rank) & (operations.communicator >= 0)
    communicators = np.unique(operations.communicator[chosen])[:MAX_LANES]
    lanes = tuple(asked.aliases[index] for index in communicators.tolist())
    lane = np.searchsorted(communicators, operations.communicator)
    chosen &= np.isin(operations.communicator, communicators)
    return _timeline(asked, lanes, lane, chosen, seconds, do_all_move=False)


def _of_ranks(asked: JobAsked, ranks: Sequence[int], chosen: Bools, seconds: float) -> Timeline:
    ordered = np.array(sorted(rank for rank in ranks if rank < MAX_RANK), np.int64)
    operations = asked.operations
    chosen = chosen & np.isin(operations.rank, ordered)
    lane = np.searchsorted(ordered, operations.rank)
    return _timeline(asked, tuple(str(rank) for rank in ordered.tolist()), lane, chosen, seconds, do_all_move=True)


def _timeline(
    asked: JobAsked, lanes: tuple[str, ...], lane: Int64s, chosen: Bools, seconds: float, *, do_all_move: bool
) -> Timeline:
    operations = asked.operations
    end = operations.kernel_ns + operations.duration_ns
    chosen = chosen & (operations.kernel_ns != NO_TIME_NS) & (operations.duration_ns > 0) & operations.starts_launch
    bars = newest(end, chosen, MAX_BARS + 1)
    if not len(bars):
        return _empty(lanes)
    oldest = int(end[bars[0]]) if len(bars) > MAX_BARS else None
    last = _last_end(end[bars], operations.has_wait[bars], lane[bars], do_all_move=do_all_move)
    bars = bars[end[bars] <= last]
    begin = last - round(seconds * 1e9)
    if oldest is not None:  # what is older was left out, which must not look as if there were nothing
        begin = max(begin, oldest)
    bars = bars[end[bars] > begin]
    bars = bars[np.argsort(operations.kernel_ns[bars], kind="stable")]
    known = operations.communicator[bars]
    communicators, place = np.unique(known, return_inverse=True)
    of = asked.store.communicators
    indices = communicators.tolist()
    waits = np.where(operations.has_wait[bars], operations.wait_ns[bars], NO_NUMBER)
    return Timeline(
        begin_ns=begin,
        seconds=(last - begin) * 1e-9,
        lanes=lanes,
        communicators=tuple(asked.aliases[index] if index >= 0 else "not known" for index in indices),
        parallelisms=tuple(of[index].parallelism if index >= 0 else None for index in indices),
        lane=tuple(lane[bars].tolist()),
        communicator=tuple(place.tolist()),
        op=tuple(operation_name(code) for code in operations.op[bars].tolist()),
        start_us=_microseconds(operations.kernel_ns[bars] - begin),
        wait_us=tuple(None if wait < 0 else round(wait / 1e3, 1) for wait in waits.tolist()),
        duration_us=_microseconds(operations.duration_ns[bars]),
        message_bytes=tuple(size if size >= 0 else None for size in operations.message_bytes[bars].tolist()),
    )


_BEHIND_NS: Final = 30_000_000_000


def _last_end(ends: Int64s, is_measured: Bools, lane: Int64s, *, do_all_move: bool) -> int:
    """Where the timeline ends: up to where it is known of every lane what was waiting, if that is not long ago.

    Captures of other hosts come later, and only then it is known who waited for whom. A lane that has nothing newer
    holds the end back only if `do_all_move` (ranks do, communicators are used now and then). `ends` ascend.
    """
    newest_end = int(ends[-1])
    known: list[int] = []
    for one in np.unique(lane).tolist():
        measured = ends[(lane == one) & is_measured]
        if not len(measured):
            continue
        last = int(measured[-1])
        is_behind = do_all_move or bool((ends[(lane == one) & ~is_measured] > last).any())
        if newest_end - last < _BEHIND_NS:
            known.append(last if is_behind else newest_end)
    return min(known, default=newest_end)


def _microseconds(values: Int64s) -> tuple[float, ...]:
    return tuple(round(value / 1e3, 1) for value in values.tolist())


def _empty(lanes: tuple[str, ...]) -> Timeline:
    return Timeline(
        begin_ns=None, seconds=0.0, lanes=lanes, communicators=(), parallelisms=(), lane=(), communicator=(), op=(),
        start_us=(), wait_us=(), duration_us=(), message_bytes=(),
    )  # fmt: skip
