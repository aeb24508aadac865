"""The communication signature of a group: what it calls, how large, how bursty, how often, and when it is silent.

What tells parallel strategies apart in a picture, in numbers: tensor parallelism calls all the time, pipelines in even
steps, data parallelism in one burst per iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.intervals import Integers, Spans, union
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_QUANTILES: Final = (0.1, 0.5, 0.9)
_PAUSE: Final = 20
"""A pause longer than one part in so many of the period ends a burst."""
_LEAST_PAUSE_NS: Final = 1_000_000
"""... where no period is known, one longer than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Operations of one communicator as columns of equal length, in any order."""

    rank: Integers
    op: Integers
    message_bytes: Integers
    """NO_NUMBER where not known."""
    iteration: Integers
    """NO_NUMBER where not known."""
    start_ns: Integers
    """Of the kernel, else the stamp; NO_TIME_NS where there is none. One clock per rank."""
    end_ns: Integers
    """Of the kernel; NO_TIME_NS without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """How one communicator communicates; None where that cannot be told."""

    mix: tuple[tuple[int, int, int], ...]
    """(operation code, operations, bytes), over all ranks, most operations first."""
    sizes: int
    """Different message sizes."""
    p10_bytes: int | None
    median_bytes: int | None
    p90_bytes: int | None
    largest_bytes: int | None
    operations_per_iteration: float | None
    """Of one rank, in iterations in which it communicates at all: median."""
    bytes_per_iteration: float | None
    burstiness: float | None
    """(s - m) / (s + m) of the times between the starts of a rank's operations; m is their mean, s their deviation.

    -1 is a clock, 0 is chance, towards 1 are bursts. *Source:* Goh and Barabasi, EPL 81 (2008) 48002.
    """
    period_ns: float | None
    """From its first operation in an iteration to that in the next one in which it communicates: median."""
    active_ratio: float | None
    """Share of the time from its first to its last kernel in which a kernel of it ran, of a rank: median."""
    bursts_per_iteration: float | None
    """Stretches without a pause, of a rank. A pause is longer than a twentieth of the period."""
    burst_ns: float | None
    """How long these last: median."""
    pause_ns: float | None
    """How long the pauses last: median."""


def signature_of(traffic: Traffic) -> Signature:
    """The signature of one communicator."""
    known = traffic.message_bytes[traffic.message_bytes != NO_NUMBER]
    tenth, half, most = np.quantile(known, _QUANTILES, method="lower").tolist() if len(known) else (None,) * 3
    per_iteration = _per_iteration(traffic)
    period = _period(traffic)
    bursts = _bursts(traffic, period)
    return Signature(
        mix=_mix(traffic),
        sizes=len(np.unique(known)),
        p10_bytes=tenth,
        median_bytes=half,
        p90_bytes=most,
        largest_bytes=int(known.max()) if len(known) else None,
        operations_per_iteration=_median(per_iteration[0]),
        bytes_per_iteration=_median(per_iteration[1]),
        burstiness=_burstiness(traffic),
        period_ns=period,
        active_ratio=_active_ratio(traffic),
        bursts_per_iteration=bursts[2],
        burst_ns=_median(bursts[0]),
        pause_ns=_median(bursts[1]),
    )


def _mix(traffic: Traffic) -> tuple[tuple[int, int, int], ...]:
    codes, place = np.unique(traffic.op, return_inverse=True)
    moved = np.zeros(len(codes), np.int64)
    np.add.at(moved, place, np.maximum(traffic.message_bytes, 0))
    amounts = np.bincount(place, minlength=len(codes))
    rows = zip(codes.tolist(), amounts.tolist(), moved.tolist(), strict=True)
    return tuple(sorted(rows, key=lambda row: (-row[1], row[0])))


def _groups(traffic: Traffic, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
    """(rank, iteration) of these operations as one number each."""
    pairs = np.stack([traffic.rank[chosen], traffic.iteration[chosen]], axis=1)
    place: NDArray[np.intp] = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    return place


def _per_iteration(traffic: Traffic) -> tuple[Integers, Integers]:
    chosen = np.flatnonzero(traffic.iteration != NO_NUMBER)
    if not len(chosen):
        return chosen.astype(np.int64), chosen.astype(np.int64)
    place = _groups(traffic, chosen)
    moved = np.zeros(int(place.max()) + 1, np.int64)
    np.add.at(moved, place, np.maximum(traffic.message_bytes[chosen], 0))
    return np.bincount(place), moved


def _period(traffic: Traffic) -> float | None:
    chosen = np.flatnonzero((traffic.iteration != NO_NUMBER) & (traffic.start_ns != NO_TIME_NS))
    if not len(chosen):
        return None
    place = _groups(traffic, chosen)
    order = np.lexsort((traffic.start_ns[chosen], place))
    first = order[np.concatenate([[True], np.diff(place[order]) > 0])]
    begins, ranks = traffic.start_ns[chosen][first], traffic.rank[chosen][first]
    return _median(np.diff(begins)[ranks[1:] == ranks[:-1]])


def _burstiness(traffic: Traffic) -> float | None:
    gaps = _gaps(traffic.rank, traffic.start_ns, traffic.start_ns)
    if len(gaps) < 2 or not gaps.any():
        return None
    return float((gaps.std() - gaps.mean()) / (gaps.std() + gaps.mean()))


def _gaps(ranks: Integers, starts: Integers, ends: Integers) -> Integers:
    """Time from the end of each to the start of the next of the same rank, where both are known."""
    known = np.flatnonzero(starts != NO_TIME_NS)
    order = known[np.lexsort((starts[known], ranks[known]))]
    same = ranks[order][1:] == ranks[order][:-1]
    gaps: Integers = (starts[order][1:] - ends[order][:-1])[same]
    return gaps


def _active_ratio(traffic: Traffic) -> float | None:
    spans = _running(traffic)
    if not len(spans.group):
        return None
    ranks, place = np.unique(spans.group, return_inverse=True)
    begin, end = np.full(len(ranks), np.iinfo(np.int64).max), np.zeros(len(ranks), np.int64)
    np.minimum.at(begin, place, spans.start)
    np.maximum.at(end, place, spans.end)
    running = np.zeros(len(ranks), np.int64)
    np.add.at(running, place, spans.end - spans.start)
    return _median(running[end > begin] / (end - begin)[end > begin])


def _running(traffic: Traffic) -> Spans:
    """When kernels of it ran, by rank."""
    known = np.flatnonzero((traffic.start_ns != NO_TIME_NS) & (traffic.end_ns != NO_TIME_NS))
    return union(Spans(traffic.rank[known], traffic.start_ns[known], traffic.end_ns[known]))


def _bursts(traffic: Traffic, period: float | None) -> tuple[Integers, Integers, float | None]:
    """Lengths of bursts and of the pauses between them, and how many bursts an iteration has."""
    known = np.flatnonzero(traffic.start_ns != NO_TIME_NS)
    starts = traffic.start_ns[known]
    ends = np.where(traffic.end_ns[known] == NO_TIME_NS, starts, traffic.end_ns[known])
    spans = union(Spans(traffic.rank[known], starts, ends))
    if not len(spans.group):
        return starts, starts, None
    pauses = spans.start[1:] - spans.end[:-1]
    same = spans.group[1:] == spans.group[:-1]
    is_pause = pauses > (_LEAST_PAUSE_NS if period is None else period / _PAUSE)
    opens = np.concatenate([[True], ~same | is_pause])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(spans.group)) - 1
    chosen = np.flatnonzero(traffic.iteration != NO_NUMBER)
    iterations = int(_groups(traffic, chosen).max()) + 1 if len(chosen) else 0
    return (
        spans.end[last] - spans.start[first],
        pauses[same & is_pause],
        len(first) / iterations if iterations else None,
    )


def _median(values: Sequence[float] | NDArray[np.number]) -> float | None:
    return float(np.median(values)) if len(values) else None
