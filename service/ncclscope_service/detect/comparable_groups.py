"""Groups that can be compared by bandwidth, and the windows that bandwidth detectors judge.

Sizes are compared with their like: a *shape* is a communicator, an operation and a size rounded to an eighth of an
octave, as busbw depends on size and a mix of sizes would read as noise. One sample is the median of log(busbw of the
transfer) over a window with data: one step of a job of which little was seen, twice as long each time that three dozen
windows were seen, and a second in the end. So a few steps of a clear case suffice, while what is judged always lasts
for a third of what was seen: a slow moment of a long job is no slow group.

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

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together, group_by
from ncclscope_service.detect.context import Context, Group, group_name
from ncclscope_service.detect.settings import SiblingsSettings
from ncclscope_service.detect.statistics import medians
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

WINDOW_NS: Final = 1_000_000_000
"""The longest window, which all are after a minute at most."""
_LEAST_WINDOW_NS: Final = 50_000_000
_BUCKETS_PER_OCTAVE: Final = 8
_SHAPES_PER_COMMUNICATOR: Final = 12
_GROUPS_CACHED: Final = 65_536
"""Distributions of a group's ranks over hosts that are remembered."""
_LATE_SECONDS: Final = 2
"""Seconds that stay open for late collectives."""


class Shape(NamedTuple):
    """Operations that are compared over time."""

    communicator: int
    op: int
    bucket: int


def bytes_of(shape: Shape) -> int:
    """Approximate message size of a shape."""
    return round(2 ** (shape.bucket / _BUCKETS_PER_OCTAVE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows of one length, oldest first."""

    shape: NDArray[np.int64]
    """Number of the shape of each."""
    at_ns: NDArray[np.int64]
    level: NDArray[np.float64]
    """Natural logarithm of busbw in bytes per second."""
    worst_seq: NDArray[np.int64]
    """Number of its slowest collective on its communicator; NO_NUMBER for Send and Recv."""

    def filter(self, mask: NDArray[np.bool_]) -> Windows:
        """Those where the mask is true."""
        return Windows(
            shape=self.shape[mask], at_ns=self.at_ns[mask], level=self.level[mask], worst_seq=self.worst_seq[mask]
        )


_OPEN: Final = np.dtype([("shape", "<i8"), ("at_ns", "<i8"), ("level", "<f8"), ("coll_seq", "<i8")])


class Levels:
    """Windows of each shape; they close when data two seconds younger has come, or when no more comes."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []
        """By number."""
        self._numbers: dict[Shape, int] = {}
        self._amounts: Counter[int] = Counter()
        """Shapes, by communicator."""
        self._open: Columns = np.empty(0, _OPEN)
        """Collectives of open windows."""
        self._newest_ns = 0
        self._closed_before_ns = 0

    def ingest_collectives(
        self, collectives: Columns, window_ns: int, *, least_bytes: int, is_over: bool = False
    ) -> Windows:
        """Takes joined collectives (`rows.COLLECTIVE`) and returns the windows of this length that closed; all of them
        if the job `is_over`: then collectives come by the second.

        Below `least_bytes` time is latency, and busbw says nothing about the wires.
        """
        usable = (
            (collectives["busbw"] > 0)
            & (collectives["message_bytes"] >= least_bytes)
            & (collectives["end_true_ns"] >= self._closed_before_ns)
        )
        new = self._numbered(row_ops.filter_rows(collectives, usable))
        self._newest_ns = max(self._newest_ns, int(new["at_ns"].max(initial=0)))
        open_seconds = 0 if is_over else _LATE_SECONDS
        before_ns = (self._newest_ns // WINDOW_NS + 1 - open_seconds) * WINDOW_NS
        self._closed_before_ns = max(self._closed_before_ns, before_ns)
        waiting = row_ops.concat([self._open, new])
        is_closed = waiting["at_ns"] < self._closed_before_ns
        self._open = row_ops.filter_rows(waiting, ~is_closed)
        closed = row_ops.filter_rows(waiting, is_closed)
        single = Windows(
            shape=closed["shape"], at_ns=closed["at_ns"], level=closed["level"], worst_seq=closed["coll_seq"]
        )
        return joined(single, window_ns)

    def evict(self, numbers: NDArray[np.int64]) -> None:
        """Forgets all shapes but these, which get new numbers in their order."""
        new = np.full(len(self.shapes), NO_NUMBER)
        new[numbers] = np.arange(len(numbers))
        self.shapes = [self.shapes[number] for number in numbers.tolist()]
        self._numbers = {shape: number for number, shape in enumerate(self.shapes)}
        self._amounts = Counter(shape.communicator for shape in self.shapes)
        self._open = self._open[new[self._open["shape"]] != NO_NUMBER]
        self._open["shape"] = new[self._open["shape"]]

    def _numbered(self, collectives: Columns) -> Columns:
        """These collectives by the numbers of their shapes, without those of too many shapes."""
        found = np.empty(len(collectives), _OPEN)
        buckets = np.log2(collectives["message_bytes"].astype(np.float64)) * _BUCKETS_PER_OCTAVE
        columns, inverse = distinct_together(
            collectives["communicator"], collectives["op"], np.rint(buckets).astype(np.int64)
        )
        numbers = [self._number(Shape(*key)) for key in zip(*(each.tolist() for each in columns), strict=True)]
        found["shape"] = np.asarray(numbers, np.int64)[inverse]
        found["at_ns"] = collectives["end_true_ns"]
        found["level"] = np.log(collectives["busbw"])
        found["coll_seq"] = collectives["coll_seq"]
        return row_ops.filter_rows(found, found["shape"] != NO_NUMBER)

    def _number(self, shape: Shape) -> int:
        number = self._numbers.get(shape)
        if number is None:
            if self._amounts[shape.communicator] >= _SHAPES_PER_COMMUNICATOR:
                return NO_NUMBER
            self._amounts[shape.communicator] += 1
            number = self._numbers[shape] = len(self.shapes)
            self.shapes.append(shape)
        return number


def joined(windows: Windows, window_ns: int) -> Windows:
    """Windows of this length from shorter ones, or from single collectives, all of which have come."""
    numbers = windows.at_ns // window_ns
    order = np.lexsort((windows.level, windows.shape, numbers))
    shape, number, level = windows.shape[order], numbers[order], windows.level[order]
    begins = np.flatnonzero((np.diff(shape, prepend=NO_NUMBER) != 0) | (np.diff(number, prepend=-1) != 0))
    sizes = np.diff(begins, append=len(order))
    return Windows(
        shape=shape[begins],
        at_ns=number[begins] * window_ns,
        level=(level[begins + (sizes - 1) // 2] + level[begins + sizes // 2]) / 2,
        worst_seq=windows.worst_seq[order][begins],
    )


BLOCK: Final = 4
BLOCKS: Final = 3
"""A group must be slow in this many blocks of this many windows."""
_JUDGED: Final = BLOCK * BLOCKS
_KEPT: Final = 3 * _JUDGED
"""Windows after which they become twice as long."""
_EARLY: Final = 3
"""First windows of a shape: warm-up."""


class RecentWindows:
    """The last dozen windows of every shape, oldest first."""

    def __init__(self) -> None:
        self.window_ns = 0
        """How long windows are at present; 0: nothing was seen yet."""
        self._seen: NDArray[np.int64] = np.empty(0, np.int64)
        """Windows of each shape so far, in windows of the present length."""
        self._kept: dict[str, NDArray[Any]] = {
            "at_ns": np.empty((0, _KEPT), np.int64),
            "level": np.empty((0, _KEPT)),
            "worst_seq": np.empty((0, _KEPT), np.int64),
        }
        """Shape by window."""
        self.newest_ns = 0

    @property
    def at_ns(self) -> NDArray[np.int64]:
        """Shape by window, as the others."""
        return self._kept["at_ns"][:, -_JUDGED:]

    @property
    def level(self) -> NDArray[np.float64]:
        """Natural logarithm of busbw in bytes per second."""
        return self._kept["level"][:, -_JUDGED:]

    @property
    def worst_seq(self) -> NDArray[np.int64]:
        """The slowest collective of each."""
        return self._kept["worst_seq"][:, -_JUDGED:]

    def next_window_ns(self, step_ns: int | None) -> int:
        """How long the next windows are to be; `step_ns`: None while not known."""
        if not self.window_ns:
            self.window_ns = min(max(step_ns or WINDOW_NS, _LEAST_WINDOW_NS), WINDOW_NS)
        while self.window_ns < WINDOW_NS and self._seen.max(initial=0) >= _EARLY + _KEPT:
            self._join_pairs()
            self.window_ns = min(2 * self.window_ns, WINDOW_NS)
        return self.window_ns

    def ingest_windows(self, windows: Windows, shapes: int) -> None:
        """Takes closed windows of so many shapes. The first of a shape are warm-up and left out."""
        if shapes > len(self._seen):
            more = max(shapes, 2 * len(self._seen)) - len(self._seen)
            self._seen = np.append(self._seen, np.zeros(more, np.int64))
            for name, kept in self._kept.items():
                self._kept[name] = np.concatenate([kept, np.zeros((more, _KEPT), kept.dtype)])
        self.newest_ns = max(self.newest_ns, int(windows.at_ns.max(initial=0)))
        for _, mine in group_by(windows.at_ns):  # in each of them a shape is there once
            self._seen[windows.shape[mine]] += 1
            late = mine[self._seen[windows.shape[mine]] > _EARLY]
            shape = windows.shape[late]
            new = {"at_ns": windows.at_ns, "level": windows.level, "worst_seq": windows.worst_seq}
            for name, kept in self._kept.items():
                kept[shape, :-1] = kept[shape, 1:]
                kept[shape, -1] = new[name][late]

    def seen_since(self, at_ns: int) -> NDArray[np.int64]:
        """How many windows of each shape began then or later, 36 at most; there may be more rows than shapes."""
        amounts: NDArray[np.int64] = (self._kept["at_ns"] >= at_ns).sum(axis=1)
        return amounts

    def full(self) -> NDArray[np.intp]:
        """The shapes of which a dozen windows were seen."""
        return np.flatnonzero(self._seen >= _EARLY + _JUDGED)

    def evict(self, numbers: NDArray[np.int64]) -> None:
        """Forgets all shapes but these, which get new numbers in their order."""
        self._seen = self._seen[numbers]
        self._kept = {name: kept[numbers] for name, kept in self._kept.items()}

    def _join_pairs(self) -> None:
        """Makes one window of each two, of all shapes."""
        level, worst_seq = self._kept["level"], self._kept["worst_seq"]
        pairs = np.zeros_like(level)
        half = _KEPT // 2
        pairs[:, half:] = (level[:, ::2] + level[:, 1::2]) / 2
        for name, of_two in (
            ("at_ns", self._kept["at_ns"][:, ::2]),
            ("worst_seq", np.where(level[:, ::2] <= level[:, 1::2], worst_seq[:, ::2], worst_seq[:, 1::2])),
        ):
            self._kept[name] = np.concatenate([np.zeros_like(of_two), of_two], axis=1)
        self._kept["level"] = pairs
        self._seen = np.minimum(self._seen, _EARLY) + np.maximum(self._seen - _EARLY, 0) // 2


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
        of = group_name(self.parallelism, self.comm_id, self.group_name)
        return f"the link between ranks {one} and {other} of {of}"


@dataclass(slots=True)
class Links:
    """Numbers of links, beside the indices of a job's communicators."""

    _numbers: dict[tuple[int, int, int], int] = field(default_factory=dict[tuple[int, int, int], int])
    """By communicator and its two ranks, the lower one first."""
    _with_links: tuple[Context, int, Context] | None = None
    """A job, the number of links, and the job with them, as they were asked for last."""

    def with_link_numbers(self, collectives: Columns) -> Columns:
        """The same joined collectives (`rows.COLLECTIVE`), those between two ranks under the number of their link."""
        between = (collectives["coll_seq"] == NO_NUMBER) & (collectives["rank"] >= 0) & (collectives["peer"] >= 0)
        between &= collectives["rank"] != collectives["peer"]
        if not between.any():
            return collectives
        numbered = row_ops.copy(collectives)
        mine = row_ops.filter_rows(collectives, between)
        pairs = np.sort([mine["rank"], mine["peer"]], axis=0)
        found, inverse = distinct_together(mine["communicator"], pairs[0], pairs[1])
        numbers = [self._number(key) for key in zip(*(each.tolist() for each in found), strict=True)]
        numbered["communicator"][between] = np.array(numbers)[inverse]
        return numbered

    def context_with_links(self, context: Context) -> Context:
        """The job with its links among the groups, each as a group of two ranks."""
        known = self._with_links
        if known is not None and known[0] is context and known[1] == len(self._numbers):
            return known[2]
        links = {
            number: _link(group, low, high)
            for (communicator, low, high), number in self._numbers.items()
            if (group := context.groups.get(communicator)) is not None and high < len(group.global_ranks)
        }
        found = replace(context, groups={**context.groups, **links}) if links else context
        self._with_links = context, len(self._numbers), found
        return found

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
        group_name=group.group_name,
        global_ranks=(group.global_ranks[low], group.global_ranks[high]),
        hosts=(group.hosts[low], group.hosts[high]),
        limit=group.limit,
        limit_name=group.limit_name,
    )


_OLD_NS: Final = 600_000_000_000
"""Older windows of a group are not compared with its siblings' present ones. Within it, time between captures does not
count: of a cycle of 100 s a capture may show 10 s."""
_OVER_LIMIT: Final = 0.1
"""In logarithms: a limit that is read from the topology may be a little low."""
LEAST_HEALTHY: Final = 2
"""Groups that must agree, but for the one sibling of a group: then more must be missing, as nothing tells how much
groups of the kind differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of comparing a communicator with its siblings in one shape."""

    communicator: int
    shape: int
    """Its number."""
    is_slow: bool
    is_healthy: bool
    """Neither: it is between both."""
    loss: float
    """Share of the siblings' busbw that it lacks."""
    level: float
    reference: float
    noise: float
    """Scatter of single windows of such groups, each around its own median."""
    since_ns: int


class Siblings:
    """Compares the last dozen windows of shapes of groups that do the same work."""

    def __init__(self) -> None:
        self._slow: set[int] = set()

    def verdicts(self, recent: RecentWindows, shapes: Sequence[Shape], context: Context) -> list[Verdict]:
        """The communicators that can be compared, one verdict each: slow in any shape is slow."""
        settings = context.settings.siblings
        full = recent.full()
        full = full[recent.at_ns[full, 0] >= recent.newest_ns - _OLD_NS]
        families: dict[Hashable, list[int]] = defaultdict(list)
        for number in full.tolist():
            shape = shapes[number]
            group = context.groups.get(shape.communicator)
            if group is not None:
                families[(shape.op, shape.bucket, *_likeness(group))].append(number)
        large = [family for family in families.values() if len(family) >= settings.least_groups]
        by_communicator: dict[int, Verdict] = {}
        for family, compared in zip(large, self._compared(large, recent, shapes, context), strict=True):
            wires = {context.groups[shapes[number].communicator].host_set() for number in family}
            if len(wires) < 2 and not any(verdict.is_slow for verdict in compared):
                continue  # a fault of wires that all of them cross slows all of them
            for verdict in compared:
                known = by_communicator.get(verdict.communicator)
                if known is None or _weight(verdict) > _weight(known):
                    by_communicator[verdict.communicator] = verdict
        self._slow = {verdict.communicator for verdict in by_communicator.values() if verdict.is_slow}
        return list(by_communicator.values())

    def _compared(
        self, families: list[list[int]], recent: RecentWindows, shapes: Sequence[Shape], context: Context
    ) -> list[list[Verdict]]:
        """The verdicts on each family, those with as many groups in one go."""
        found: dict[int, Iterator[list[Verdict]]] = {}
        for size in set(map(len, families)):
            alike = [family for family in families if len(family) == size]
            of_each = [[shapes[number].communicator for number in family] for family in alike]
            found[size] = _compare(
                np.array(alike),
                of_each,
                recent,
                np.log([[context.groups[each].limit or math.inf for each in family] for family in of_each]),
                np.array([[each in self._slow for each in family] for family in of_each]),
                context.settings.siblings,
            )
        return [next(found[len(family)]) for family in families]


def _weight(verdict: Verdict) -> tuple[bool, bool, float]:
    return verdict.is_slow, verdict.is_healthy, verdict.loss


def _likeness(group: Group) -> tuple[Hashable, ...]:
    """Groups with equal likeness cross the same kinds of wires."""
    return (group.parallelism, len(group.global_ranks), _sizes_by_host(group.hosts))


@lru_cache(maxsize=_GROUPS_CACHED)
def _sizes_by_host(hosts: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(Counter(hosts).values()))


def _compare(
    families: NDArray[np.int64],
    communicators: list[list[int]],
    recent: RecentWindows,
    limits: NDArray[np.float64],
    was_slow: NDArray[np.bool_],
    settings: SiblingsSettings,
) -> Iterator[list[Verdict]]:
    """Compares groups that do the same work, given by the numbers of their shapes: family by group, as `communicators`
    and all others.

    `limits`: what their wires can carry, as a logarithm. None is slow against siblings that are beyond it: such a
    bandwidth is a mistake of ours (of clocks, or of pairs).
    """
    levels, (amount, size) = recent.level[families], families.shape
    blocks = medians(levels.reshape(amount, size, BLOCKS, BLOCK))
    least_healthy = min(LEAST_HEALTHY, size - 1)
    sought = settings.least_log_loss if size > 2 else max(settings.least_log_loss, settings.pair_log_loss)
    best = np.sort(blocks, axis=1)[:, -max(least_healthy, size // 3) :].swapaxes(1, 2)
    reference = medians(best)
    spread = 1.4826 * medians(np.abs(best - reference[..., None]))
    behind = reference[:, None] - blocks
    middles = medians(behind)
    least = np.maximum(sought, settings.spreads * spread)
    # how much windows scatter, each group around its own median; medians of four windows of a correlated series scatter
    # nearly as much as single ones
    noise = 1.4826 * medians(np.abs(levels - medians(levels)[..., None]).reshape(amount, -1))
    slow = (behind > np.maximum(least, settings.noises * noise[:, None])[:, None]).all(axis=2)
    slow |= was_slow & (middles > settings.healed_log_loss)  # no flapping at the border
    own, middle = medians(blocks), medians(reference)
    slow &= (middle[:, None] <= limits + _OVER_LIMIT) | (own > limits)
    healthy = (behind < settings.healthy_log_loss).sum(axis=2) > BLOCKS / 2
    is_enough = healthy.sum(axis=1) >= least_healthy
    since_ns = recent.at_ns[families, 0]
    for place, of_family in enumerate(communicators):
        columns = (families, slow, healthy, middles, own, since_ns)
        groups = zip(of_family, *(each[place].tolist() for each in columns), strict=True)
        yield [
            Verdict(
                communicator=communicator,
                shape=number,
                is_slow=is_slow,
                is_healthy=is_healthy and not is_slow,
                loss=1.0 - math.exp(-behind_by),
                level=level,
                reference=float(middle[place]),
                noise=float(noise[place]),
                since_ns=began_ns,
            )
            for communicator, number, is_slow, is_healthy, behind_by, level, began_ns in groups
            if is_enough[place]
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

    def ingest_windows(self, windows: Windows, shapes: Sequence[Shape], context: Context) -> Iterator[Level]:
        """Takes closed windows, and gives the common level of groups that share wires, oldest first."""
        levels: defaultdict[tuple[int, Wires], list[float]] = defaultdict(list)
        columns = windows.shape.tolist(), windows.at_ns.tolist(), windows.level.tolist()
        for number, at_ns, level in zip(*columns, strict=True):
            shape = shapes[number]
            wires = Wires(shape.op, shape.bucket, _ranks_of_hosts(context.groups[shape.communicator].hosts))
            seen = self._members.setdefault(wires, {})
            seen[shape.communicator] = max(at_ns, seen.get(shape.communicator, 0))
            levels[at_ns, wires].append(level)
        for (at_ns, wires), values in levels.items():
            self._forget(wires, at_ns)
            if len(values) >= max(_LEAST_MEMBERS, _SHARE_PRESENT * len(self._members[wires])):
                yield Level(wires, at_ns, _quantile(values))

    def members(self, wires: Wires) -> frozenset[int]:
        """The communicators that cross them."""
        return frozenset(self._members.get(wires, ()))

    def _forget(self, wires: Wires, at_ns: int) -> None:
        seen = self._members[wires]
        if min(seen.values()) < at_ns - _GONE_NS:
            self._members[wires] = {one: last_ns for one, last_ns in seen.items() if last_ns >= at_ns - _GONE_NS}


def _quantile(values: list[float]) -> float:
    """As `numpy.percentile` with QUANTILE, for a few values."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * QUANTILE / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@lru_cache(maxsize=_GROUPS_CACHED)
def _ranks_of_hosts(hosts: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(Counter(hosts).items()))
