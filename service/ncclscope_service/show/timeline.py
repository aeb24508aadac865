"""Kernels of a few seconds of one job: a lane for each rank, a bar for each kernel, split into waiting and transfer.

A kernel waits first and transfers then: its bar is cut at start + wait. If the wait is not known (a lone rank, a Send
without its Recv) the bar is not split.

Nothing that was recorded is left out: where there are too many bars, short neighbours of one lane and communicator
become one bar with the sum of their waits and transfers. Time of a lane that no capture covers is named, so that it
does not look idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.clock.estimator import to_true
from ncclscope_service.columns.buckets import Bools, Int64s
from ncclscope_service.columns.intervals import Spans, union
from ncclscope_service.job.ranks import MAX_RANK
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.show.details import JobQuery
from ncclscope_service.store.records import Communicator
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

MAX_BARS: Final = 3_000
MAX_LANES: Final = 32
SEVERAL: Final = "several"
"""The operation of a bar that stands for operations of more than one kind."""

_FINEST: Final = 2_000
"""Parts of the timeline: what is shorter than one is drawn together first where there are too many bars."""
_BEHIND_NS: Final = 30_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Kernels of some seconds; columns of equal length, one entry for each bar."""

    begin_ns: int | None
    """Reference clock: what the times count from. None if no kernel is known."""
    seconds: float
    """As asked for. They end at the time that was asked for, or up to which the waiting of every lane is known."""
    lanes: tuple[str, ...]
    """Name of each lane: a rank, or a communicator of one rank."""
    communicators: tuple[str, ...]
    parallelisms: tuple[str | None, ...]
    """Of each of `communicators`."""
    resolution_us: float
    """Kernels shorter than this are drawn together by communicator and lane; 0: every bar is one kernel."""
    lane: tuple[int, ...]
    communicator: tuple[int, ...]
    op: tuple[str, ...]
    kernels: tuple[int, ...]
    """How many a bar stands for."""
    start_us: tuple[float, ...]
    """Of the first of them."""
    end_us: tuple[float, ...]
    """Of the last of them."""
    wait_us: tuple[float | None, ...]
    """Sum; None if it is not known how much of the bar is waiting."""
    duration_us: tuple[float, ...]
    """Sum: waits and transfers."""
    message_bytes: tuple[int | None, ...]
    """Sum; None if the size of any is not known."""
    unknown_lane: tuple[int, ...]
    """Stretches of lanes that no capture covers, of which nothing is known; columns of equal length."""
    unknown_from_us: tuple[float, ...]
    unknown_to_us: tuple[float, ...]
    sums: tuple[TimelineSum, ...]
    """By communicator, the one with most kernel time first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSum:
    """All kernels of one communicator on the lanes shown that run within the timeline, whole."""

    communicator: str
    parallelism: str | None
    kernels: int
    wait_us: float
    transfer_us: float
    unknown_us: float
    """Kernel time of which it is not known how much is waiting."""
    bytes: int
    """Of those of known size."""


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Lanes, and on which lane each of the newest operations is."""

    names: tuple[str, ...]
    ranks: Int64s
    """The rank of each lane."""
    of_operation: Int64s
    chosen: Bools
    """The operations that are on a lane."""
    do_all_move: bool
    """Each lane is busy all the time, as ranks are and communicators are not."""


@dataclass(frozen=True, slots=True)
class _Bars:
    """Columns of equal length, times in ns of the reference clock."""

    lane: Int64s
    communicator: Int64s
    op: Int64s
    """NO_NUMBER: several."""
    kernels: Int64s
    start: Int64s
    end: Int64s
    wait: Int64s
    """NO_NUMBER: not known."""
    duration: Int64s
    size: Int64s
    """Bytes; NO_NUMBER: not known."""


def timeline_of_ranks(query: JobQuery, seconds: float, until_ns: int | None = None) -> Timeline:
    """Of the ranks that wait least and most, MAX_LANES in all; of the first ranks if no wait is known."""
    waits = query.waits.means_of_job(query.job)
    if len(waits.ranks):
        ranks = waits.ranks[waits.most_telling(MAX_LANES)].tolist()
    else:
        known = query.operations.rank[query.is_own & (query.operations.rank >= 0)]
        ranks = np.unique(known)[:MAX_LANES].tolist()
    return _of_ranks(query, ranks, query.is_own, seconds, until_ns)


def timeline_of_communicator(
    query: JobQuery, communicator: Communicator, seconds: float, until_ns: int | None = None
) -> Timeline:
    """Of one communicator's operations on its first MAX_LANES ranks."""
    ranks = sorted(query.ranks_of(communicator).values())[:MAX_LANES]
    return _of_ranks(query, ranks, query.operations.communicator == communicator.index, seconds, until_ns)


def timeline_of_rank(query: JobQuery, rank: int, seconds: float, until_ns: int | None = None) -> Timeline:
    """Of one rank, a lane for each of its communicators."""
    operations = query.operations
    chosen = query.is_own & (operations.rank == rank) & (operations.communicator >= 0)
    communicators = np.unique(operations.communicator[chosen])[:MAX_LANES]
    chosen &= np.isin(operations.communicator, communicators)
    lanes = _Lanes(
        names=tuple(query.aliases[index] for index in communicators.tolist()),
        ranks=np.full(len(communicators), rank, np.int64),
        of_operation=np.searchsorted(communicators, operations.communicator),
        chosen=chosen,
        do_all_move=False,
    )
    return _timeline(query, lanes, seconds, until_ns)


def _of_ranks(query: JobQuery, ranks: Sequence[int], chosen: Bools, seconds: float, until_ns: int | None) -> Timeline:
    ordered = np.array(sorted(rank for rank in ranks if rank < MAX_RANK), np.int64)
    operations = query.operations
    lanes = _Lanes(
        names=tuple(str(rank) for rank in ordered.tolist()),
        ranks=ordered,
        of_operation=np.searchsorted(ordered, operations.rank),
        chosen=chosen & np.isin(operations.rank, ordered),
        do_all_move=True,
    )
    return _timeline(query, lanes, seconds, until_ns)


def _timeline(query: JobQuery, lanes: _Lanes, seconds: float, until_ns: int | None) -> Timeline:
    operations = query.operations
    end = operations.kernel_ns + operations.duration_ns
    has_kernel = (operations.kernel_ns != NO_TIME_NS) & (operations.duration_ns > 0) & operations.starts_launch
    found = np.flatnonzero(lanes.chosen & has_kernel)
    if not len(found):
        return _empty(lanes.names)
    last = until_ns
    if last is None:
        found = found[np.argsort(end[found], kind="stable")]
        lane = lanes.of_operation[found]
        last = _last_end(end[found], operations.has_wait[found], lane, do_all_move=lanes.do_all_move)
    begin = last - round(seconds * 1e9)
    shown = found[(end[found] > begin) & (operations.kernel_ns[found] < last)]
    shown = shown[np.argsort(operations.kernel_ns[shown], kind="stable")]
    bars = _Bars(
        lane=lanes.of_operation[shown],
        communicator=operations.communicator[shown],
        op=operations.op[shown],
        kernels=np.ones(len(shown), np.int64),
        start=operations.kernel_ns[shown],
        end=end[shown],
        wait=np.where(operations.has_wait[shown], operations.wait_ns[shown], NO_NUMBER),
        duration=operations.duration_ns[shown],
        size=np.where(operations.message_bytes[shown] >= 0, operations.message_bytes[shown], NO_NUMBER),
    )
    drawn, resolution_ns = _drawn_together(bars, begin, last)
    indices, place = np.unique(drawn.communicator, return_inverse=True)
    unknown = _unknown(query, lanes, (begin, last), has_kernel)
    of = query.store.communicators
    parallelisms = [of[index].parallelism if index >= 0 else None for index in indices.tolist()]
    aliases = [query.aliases[index] if index >= 0 else "not known" for index in indices.tolist()]
    return Timeline(
        begin_ns=begin,
        seconds=(last - begin) / 1e9,
        lanes=lanes.names,
        communicators=tuple(aliases),
        parallelisms=tuple(parallelisms),
        resolution_us=resolution_ns / 1e3,
        lane=tuple(drawn.lane.tolist()),
        communicator=tuple(place.tolist()),
        op=tuple(SEVERAL if code == NO_NUMBER else operation_name(code) for code in drawn.op.tolist()),
        kernels=tuple(drawn.kernels.tolist()),
        start_us=_microseconds(drawn.start - begin),
        end_us=_microseconds(drawn.end - begin),
        wait_us=tuple(None if wait < 0 else round(wait / 1e3, 1) for wait in drawn.wait.tolist()),
        duration_us=_microseconds(drawn.duration),
        message_bytes=tuple(size if size >= 0 else None for size in drawn.size.tolist()),
        unknown_lane=tuple(unknown.group.tolist()),
        unknown_from_us=_microseconds(unknown.start - begin),
        unknown_to_us=_microseconds(unknown.end - begin),
        sums=_sums(drawn, place, aliases, parallelisms),
    )


def _drawn_together(bars: _Bars, begin: int, last: int) -> tuple[_Bars, int]:
    """At most MAX_BARS bars by begin, and the length below which kernels were drawn together (0: none was)."""
    if len(bars.start) <= MAX_BARS:
        return bars, 0
    resolution = max(1, (last - begin) // _FINEST)
    base = int(bars.start.min())
    while True:
        is_short = bars.duration < resolution
        cell = (bars.start - base) // resolution * 2 + (bars.wait == NO_NUMBER)
        # What is long keeps a bar of its own: a cell behind all others.
        cell = np.where(is_short, cell, cell.max() + 1 + np.arange(len(cell)))
        order = np.lexsort((bars.start, cell, bars.communicator, bars.lane))
        keys = np.stack([bars.lane[order], bars.communicator[order], cell[order]])
        first = np.flatnonzero(np.concatenate([[True], (np.diff(keys) != 0).any(axis=0)]))
        if len(first) <= MAX_BARS:
            return _joined(bars, order, first), resolution
        resolution *= 2


def _joined(bars: _Bars, order: Int64s, first: Int64s) -> _Bars:
    """One bar for each run of `order` that begins at `first`."""

    def total(values: Int64s) -> Int64s:
        """The sum of each run; NO_NUMBER where one of it is not known."""
        sums = np.add.reduceat(np.maximum(values[order], 0), first)
        return np.where(np.minimum.reduceat(values[order], first) == NO_NUMBER, NO_NUMBER, sums)

    op = bars.op[order]
    is_one = np.minimum.reduceat(op, first) == np.maximum.reduceat(op, first)
    start = np.minimum.reduceat(bars.start[order], first)
    by_time = np.argsort(start, kind="stable")
    return _Bars(
        lane=bars.lane[order][first][by_time],
        communicator=bars.communicator[order][first][by_time],
        op=np.where(is_one, op[first], NO_NUMBER)[by_time],
        kernels=np.add.reduceat(bars.kernels[order], first)[by_time],
        start=start[by_time],
        end=np.maximum.reduceat(bars.end[order], first)[by_time],
        wait=total(bars.wait)[by_time],
        duration=total(bars.duration)[by_time],
        size=total(bars.size)[by_time],
    )


def _sums(
    bars: _Bars, place: Int64s, aliases: Sequence[str], parallelisms: Sequence[str | None]
) -> tuple[TimelineSum, ...]:
    def by_communicator(values: Int64s) -> list[int]:
        sums = np.zeros(len(aliases), np.int64)
        np.add.at(sums, place, values)
        return sums.tolist()

    is_known = bars.wait != NO_NUMBER
    columns = (
        by_communicator(bars.kernels),
        by_communicator(np.where(is_known, bars.wait, 0)),
        by_communicator(np.where(is_known, bars.duration - bars.wait, 0)),
        by_communicator(np.where(is_known, 0, bars.duration)),
        by_communicator(np.maximum(bars.size, 0)),
    )
    rows = [
        TimelineSum(
            communicator=alias, parallelism=parallelism, kernels=kernels, wait_us=wait / 1e3,
            transfer_us=transfer / 1e3, unknown_us=unknown / 1e3, bytes=size,
        )
        for alias, parallelism, kernels, wait, transfer, unknown, size in zip(
            aliases, parallelisms, *columns, strict=True
        )
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -(row.wait_us + row.transfer_us + row.unknown_us)))


def _unknown(query: JobQuery, lanes: _Lanes, bounds: tuple[int, int], has_kernel: Bools) -> Spans:
    """Stretches between the bounds that no capture of a lane's process covers, by lane, on the reference clock.

    A rank that no capture names (Inspector, traces of the PyTorch profiler) is known from its first kernel in memory to
    its last. Gaps too short to be seen are left out.
    """
    begin, last = bounds
    known: dict[int, list[tuple[int, int]]] = {rank: [] for rank in lanes.ranks.tolist()}
    members = [each for each in query.members() if each.global_rank in known]
    processes = {each.process: each.global_rank for each in members if each.global_rank is not None}
    of_seat = {(query.store.processes[p].host, query.store.processes[p].pid): rank for p, rank in processes.items()}
    clocks = query.store.clocks.get(query.job)
    for _, capture in query.store.captures:
        clock = None if clocks is None else clocks.hosts.get(capture.host)
        span = np.array([capture.start_ns, capture.end_ns], np.int64)
        start, end = (span if clock is None else to_true(span, clock)).tolist()
        for pid in capture.pids if end > begin and start < last else ():
            if (rank := of_seat.get((capture.host, pid))) is not None:
                known[rank].append((start, end))
    operations = query.operations
    captured = {pid for _, capture in query.store.captures for pid in capture.pids}
    for rank in [rank for rank, spans in known.items() if not spans]:
        if any(query.store.processes[each.process].pid in captured for each in members if each.global_rank == rank):
            continue
        own = np.flatnonzero(query.is_own & has_kernel & (operations.rank == rank))
        if len(own):
            ends = operations.kernel_ns[own] + operations.duration_ns[own]
            known[rank].append((int(operations.kernel_ns[own].min()), int(ends.max())))
    found: list[tuple[int, int, int]] = []
    for lane, rank in enumerate(lanes.ranks.tolist()):
        found += ((lane, start, end) for start, end in _gaps(known[rank], bounds))
    columns = np.array(found, np.int64).reshape(-1, 3)
    return Spans(columns[:, 0], columns[:, 1], columns[:, 2])


def _gaps(spans: Sequence[tuple[int, int]], bounds: tuple[int, int]) -> list[tuple[int, int]]:
    """Stretches of the bounds that the spans leave, without gaps of less than a thousandth of them."""
    begin, last = bounds
    columns = np.array(spans, np.int64).reshape(-1, 2)
    whole = union(Spans(np.zeros(len(columns), np.int64), columns[:, 0], columns[:, 1]))
    starts = np.clip(np.append(begin, whole.end), begin, last)
    ends = np.clip(np.append(whole.start, last), begin, last)
    return [
        (start, end)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        if end - start > (last - begin) // 1000
    ]


def _last_end(ends: Int64s, is_measured: Bools, lane: Int64s, *, do_all_move: bool) -> int:
    """End of the timeline: the time up to which the waiting of every lane is known, if that is recent.

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
        begin_ns=None, seconds=0.0, lanes=lanes, communicators=(), parallelisms=(), resolution_us=0.0, lane=(),
        communicator=(), op=(), kernels=(), start_us=(), end_us=(), wait_us=(), duration_us=(), message_bytes=(),
        unknown_lane=(), unknown_from_us=(), unknown_to_us=(), sums=(),
    )  # fmt: skip
