"""Groups that can be compared by bandwidth, and the windows of one second that bandwidth detectors judge.

Sizes are compared with their like: a *shape* is a communicator, an operation and a size rounded to an eighth of an
octave, as busbw depends on size and a mix of sizes would read as noise. One sample is the median of log(busbw of the
transfer) over a window of one second with data.

A pair of ranks that exchange by Send and Recv is a *link*, and watched as a group of its own. A pipeline's communicator
spans many hosts, and each of its sends crosses but one pair of them: taken together, three healthy links hide the slow
one, and acquit its host.

Groups can be compared that do the same work, or that cross the same wires. Groups that do the same work (*siblings*)
are a reference from the first minutes, without a baseline.

Groups of one size over the same hosts that run the same operation with messages of one size share their links: together
they show what no single one shows above its noise. What slows the links slows all of them; what slows one group alone
(its card, its algorithm) is that group's own matter, and must not become a fault of all. So the level of their windows
is their upper quartile: it moves only when most of them do.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct_together
from ncclscope_service.detect.context import Context, Group, group_name
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

WINDOW_NS: Final = 1_000_000_000
LEAST_BYTES: Final = 64 * 1024
"""Below, time is latency and busbw says nothing about the wires."""
_BUCKETS_PER_OCTAVE: Final = 8
_SHAPES_PER_COMMUNICATOR: Final = 12
_LATE_WINDOWS: Final = 2
"""Windows that stay open for late collectives."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Operations that are compared over time."""

    communicator: int
    op: int
    bucket: int


def bytes_of(shape: Shape) -> int:
    """Approximate message size of a shape."""
    return round(2 ** (shape.bucket / _BUCKETS_PER_OCTAVE))


@dataclass(frozen=True, slots=True)
class Sample:
    """One window of one shape."""

    shape: Shape
    at_ns: int
    level: float
    """Natural logarithm of busbw in bytes per second."""
    operations: int
    worst_seq: int
    """Number of the slowest of them on its communicator; NO_NUMBER for Send and Recv."""


class _Window(NamedTuple):
    levels: list[float]
    seqs: list[int]


_Open: TypeAlias = dict[int, _Window]


@dataclass(slots=True)
class Levels:
    """Windows of each shape; they close when data two windows younger has come."""

    _open: dict[Shape, _Open] = field(default_factory=dict[Shape, _Open])
    _shapes: dict[int, int] = field(default_factory=dict[int, int])
    _newest: int = 0
    _closed_before: int = 0

    def ingest_collectives(self, collectives: Columns) -> list[Sample]:
        """Takes joined collectives (`rows.COLLECTIVE`) and returns the windows that closed, oldest first."""
        usable = (
            (collectives["busbw"] > 0)
            & (collectives["message_bytes"] >= LEAST_BYTES)
            & (collectives["end_true_ns"] // WINDOW_NS >= self._closed_before)
        )
        for shape, window, values in _segments(collectives[usable]):
            if shape not in self._open and not self._admit(shape):
                continue
            known = self._open.setdefault(shape, {}).setdefault(window, _Window([], []))
            known.levels.extend(values.levels)
            known.seqs.extend(values.seqs)
            self._newest = max(self._newest, window)
        self._closed_before = max(self._closed_before, self._newest - _LATE_WINDOWS + 1)
        return self._close()

    def _admit(self, shape: Shape) -> bool:
        known = self._shapes.get(shape.communicator, 0)
        if known >= _SHAPES_PER_COMMUNICATOR:
            return False
        self._shapes[shape.communicator] = known + 1
        return True

    def _close(self) -> list[Sample]:
        closed: list[Sample] = []
        for shape, windows in self._open.items():
            for window in [window for window in windows if window < self._closed_before]:
                levels, seqs = windows.pop(window)
                worst = seqs[levels.index(min(levels))]
                closed.append(Sample(shape, window * WINDOW_NS, float(np.median(levels)), len(levels), worst))
        return sorted(closed, key=lambda sample: sample.at_ns)


def _segments(rows: Columns) -> Iterator[tuple[Shape, int, _Window]]:
    if not len(rows):
        return
    buckets = np.rint(np.log2(rows["message_bytes"].astype(np.float64)) * _BUCKETS_PER_OCTAVE).astype(np.int64)
    windows = rows["end_true_ns"] // WINDOW_NS
    order = np.lexsort((windows, buckets, rows["op"], rows["communicator"]))
    rows, buckets, windows = rows[order], buckets[order], windows[order]
    values = np.log(rows["busbw"])
    changes = np.zeros(len(rows), dtype=np.bool_)
    for column in (rows["communicator"], rows["op"], buckets, windows):
        changes[1:] |= column[1:] != column[:-1]
    begins = np.concatenate([[0], np.flatnonzero(changes)])
    ends = np.append(begins[1:], len(rows))
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        shape = Shape(int(rows["communicator"][begin]), int(rows["op"][begin]), int(buckets[begin]))
        yield shape, int(windows[begin]), _Window(values[begin:end].tolist(), rows["coll_seq"][begin:end].tolist())


_FIRST_NUMBER: Final = -2
"""Links are numbered downwards from here, below every communicator and NO_NUMBER."""
_MOST_LINKS: Final = 65_536
"""Twice what 4,096 ranks have in pipelines of eight; others stay with their communicator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Group):
    """Two ranks of a communicator that exchange by Send and Recv."""

    @property
    def name(self) -> str:
        """Name of the pair in the sentences of findings."""
        one, other = self.global_ranks
        return f"the link between ranks {one} and {other} of {group_name(self.parallelism, self.comm_id)}"


@dataclass(slots=True)
class Links:
    """Numbers of links, beside the indices of a job's communicators."""

    _numbers: dict[tuple[int, int, int], int] = field(default_factory=dict[tuple[int, int, int], int])
    """By communicator and its two ranks, the lower one first."""

    def with_link_numbers(self, collectives: Columns) -> Columns:
        """The same joined collectives (`rows.COLLECTIVE`), those between two ranks under the number of their link."""
        between = (collectives["coll_seq"] == NO_NUMBER) & (collectives["rank"] >= 0) & (collectives["peer"] >= 0)
        between &= collectives["rank"] != collectives["peer"]
        if not between.any():
            return collectives
        numbered = collectives.copy()
        mine = collectives[between]
        pairs = np.sort([mine["rank"], mine["peer"]], axis=0)
        found, inverse = distinct_together(mine["communicator"], pairs[0], pairs[1])
        numbers = [self._number(key) for key in zip(*(each.tolist() for each in found), strict=True)]
        numbered["communicator"][between] = np.array(numbers)[inverse]
        return numbered

    def context_with_links(self, context: Context) -> Context:
        """The job with its links among the groups, each as a group of two ranks."""
        links = {
            number: _link(group, low, high)
            for (communicator, low, high), number in self._numbers.items()
            if (group := context.groups.get(communicator)) is not None and high < len(group.global_ranks)
        }
        return replace(context, groups={**context.groups, **links}) if links else context

    def _number(self, key: tuple[int, int, int]) -> int:
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MOST_LINKS:
                return key[0]
            number = self._numbers[key] = _FIRST_NUMBER - len(self._numbers)
        return number


def _link(group: Group, low: int, high: int) -> Link:
    return Link(
        comm_id=group.comm_id,
        parallelism=group.parallelism,
        global_ranks=(group.global_ranks[low], group.global_ranks[high]),
        hosts=(group.hosts[low], group.hosts[high]),
        limit=group.limit,
        limit_name=group.limit_name,
    )


BLOCK: Final = 4
BLOCKS: Final = 3
"""A group must be slow in this many blocks of this many windows."""
_OLD_NS: Final = 60_000_000_000
"""Older windows of a group are not compared with its siblings' present ones."""
_EARLY: Final = 3
"""First windows of a shape: warm-up."""
SLOW: Final = 0.20
"""In log busbw: 18 % slower than its siblings."""
_STILL_SLOW: Final = 0.12
"""One that was slow stays so until its median has come this near: no flapping at the border."""
_HEALTHY: Final = 0.08
"""In log busbw: as near to its siblings a group is healthy."""
SPREADS: Final = 6.0
"""Times the spread of the best siblings."""
NOISES: Final = 6.5
"""Times the scatter of single windows: medians of four of a correlated series scatter nearly as much."""
_LEAST_GROUPS: Final = 3
LEAST_HEALTHY: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of comparing a communicator with its siblings in one shape."""

    communicator: int
    is_slow: bool
    """False: healthy. Groups between both are not listed."""
    loss: float
    """Share of the siblings' busbw that it lacks."""
    level: float
    reference: float
    since_ns: int
    healthy_siblings: int


@dataclass(slots=True)
class _Recent:
    samples: deque[Sample] = field(default_factory=lambda: deque[Sample](maxlen=BLOCK * BLOCKS))


class Siblings:
    """The last dozen windows of every shape."""

    def __init__(self) -> None:
        self._recent: dict[Shape, _Recent] = {}
        self._seen: Counter[Shape] = Counter()
        self._newest_ns = 0
        self._slow: set[int] = set()

    def ingest_samples(self, samples: Iterable[Sample]) -> None:
        """Takes closed windows, oldest first. The first of a shape are warm-up and left out."""
        for sample in samples:
            self._seen[sample.shape] += 1
            self._newest_ns = max(self._newest_ns, sample.at_ns)
            if self._seen[sample.shape] > _EARLY:
                self._recent.setdefault(sample.shape, _Recent()).samples.append(sample)

    def verdicts(self, context: Context) -> list[Verdict]:
        """Slow and healthy communicators, at most one verdict each: slow in any shape is slow."""
        families: dict[Hashable, list[tuple[Shape, list[Sample]]]] = defaultdict(list)
        for shape, recent in self._recent.items():
            samples = list(recent.samples)
            group = context.groups.get(shape.communicator)
            if group is None or len(samples) < BLOCK * BLOCKS or samples[0].at_ns < self._newest_ns - _OLD_NS:
                continue
            families[(shape.op, shape.bucket, *_likeness(group))].append((shape, samples))
        by_communicator: dict[int, Verdict] = {}
        for family in families.values():
            for verdict in _compare(family, self._slow):
                known = by_communicator.get(verdict.communicator)
                if known is None or (verdict.is_slow, verdict.loss) > (known.is_slow, known.loss):
                    by_communicator[verdict.communicator] = verdict
        self._slow = {verdict.communicator for verdict in by_communicator.values() if verdict.is_slow}
        return list(by_communicator.values())


def _likeness(group: Group) -> tuple[Hashable, ...]:
    """Groups with equal likeness cross the same kinds of wires."""
    per_host = tuple(sorted(Counter(group.hosts).values()))
    return (group.parallelism, len(group.global_ranks), per_host)


def scatter_of(levels: NDArray[np.float64]) -> float:
    """How much the windows of a family (group by window) scatter, each group around its own median."""
    return 1.4826 * float(np.median(np.abs(levels - np.median(levels, axis=1, keepdims=True))))


def _compare(family: list[tuple[Shape, list[Sample]]], already_slow: set[int]) -> list[Verdict]:
    if len(family) < _LEAST_GROUPS:
        return []
    levels = np.array([[sample.level for sample in samples] for _, samples in family])
    blocks = np.median(levels.reshape(len(family), BLOCKS, BLOCK), axis=2)
    best = np.sort(blocks, axis=0)[-max(LEAST_HEALTHY, len(family) // 3) :]
    reference = np.median(best, axis=0)
    spread = 1.4826 * np.median(np.abs(best - reference), axis=0)
    behind = reference - blocks
    slow = (behind > np.maximum(np.maximum(SLOW, SPREADS * spread), NOISES * scatter_of(levels))).all(axis=1)
    was_slow = np.array([shape.communicator in already_slow for shape, _ in family])
    slow |= was_slow & (np.median(behind, axis=1) > _STILL_SLOW)
    healthy = (behind < _HEALTHY).sum(axis=1) > blocks.shape[1] / 2
    if healthy.sum() < LEAST_HEALTHY:
        return []
    return [
        Verdict(
            communicator=shape.communicator,
            is_slow=bool(slow[place]),
            loss=1.0 - float(np.exp(-np.median(behind[place]))),
            level=float(np.median(blocks[place])),
            reference=float(np.median(reference)),
            since_ns=samples[0].at_ns,
            healthy_siblings=int(healthy.sum()),
        )
        for place, (shape, samples) in enumerate(family)
        if slow[place] or healthy[place]
    ]


QUANTILE: Final = 75
"""Percentile of the groups' levels that is the level of their wires."""
_LEAST_MEMBERS: Final = 2
_SHARE_PRESENT: Final = 0.75
"""Share of the members that were seen: with fewer, a window shows who was late rather than what the wires carry."""
_GONE_NS: Final = 600_000_000_000
"""A member that was not seen for so long is no longer expected: communicators end, and others take their place."""


class Wires(NamedTuple):
    """Groups that cross the same wires with the same operation and size."""

    op: int
    bucket: int
    ranks_of_hosts: tuple[tuple[str, int], ...]
    """Number of ranks by host."""


class Level(NamedTuple):
    """One window of the groups that cross the same wires."""

    wires: Wires
    at_ns: int
    level: float
    """Natural logarithm of busbw in bytes per second."""


@dataclass(slots=True)
class SharedWires:
    """Groups that share wires, and the common level of their windows."""

    _members: dict[Wires, dict[int, int]] = field(default_factory=dict[Wires, "dict[int, int]"])
    """Communicators, and when each was last seen."""

    def ingest_samples(self, samples: Iterable[Sample], context: Context) -> Iterator[Level]:
        """Takes closed windows, and gives the common level of groups that share wires, oldest first."""
        levels: defaultdict[tuple[int, Wires], list[float]] = defaultdict(list)
        for sample in samples:
            wires = Wires(
                sample.shape.op, sample.shape.bucket, _ranks_of_hosts(context.groups[sample.shape.communicator])
            )
            seen = self._members.setdefault(wires, {})
            seen[sample.shape.communicator] = max(sample.at_ns, seen.get(sample.shape.communicator, 0))
            levels[sample.at_ns, wires].append(sample.level)
        for (at_ns, wires), values in levels.items():
            self._forget(wires, at_ns)
            if len(values) >= max(_LEAST_MEMBERS, _SHARE_PRESENT * len(self._members[wires])):
                yield Level(wires, at_ns, float(np.percentile(values, QUANTILE)))

    def members(self, wires: Wires) -> frozenset[int]:
        """The communicators that cross them."""
        return frozenset(self._members.get(wires, ()))

    def _forget(self, wires: Wires, at_ns: int) -> None:
        seen = self._members[wires]
        if min(seen.values()) < at_ns - _GONE_NS:
            self._members[wires] = {one: last_ns for one, last_ns in seen.items() if last_ns >= at_ns - _GONE_NS}


def _ranks_of_hosts(group: Group) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(group.hosts).items()))
