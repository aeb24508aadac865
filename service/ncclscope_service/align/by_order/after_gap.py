"""Where order goes on after a hole in what was recorded, by the correlation ids that were used up meanwhile.

Every call of the CUDA API takes one correlation id, so a program that repeats takes as many per launch behind the
hole as before it: how far the ids jumped says about how many launches were not recorded. Of the places near there
whose launches look like the kernels behind the hole, the most likely is taken, and its confidence grows with
how much nearer it is than the others.

A thread whose place is in doubt is placed by those of other threads: correlation ids are counted for a whole process,
and its log file holds the lines of all its threads nearly in the order of the calls. So what one thread launched
between two launches of another was logged between their two lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.coverage import Coverage
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_KEPT: Final = 16384
"""Pairs behind a hole that are kept."""

_SLACK: Final = 2
"""Lines of two threads may be this many launches out of order."""

NEVER: Final = 2**62
"""Behind all operations: there is no bound."""

_HOLE_NS: Final = 50_000_000
"""A shorter hole between captures loses a few launches at most, which aligning sees."""

_HISTORY: Final = 16384
_PATTERN: Final = 256
"""Kernels behind a hole by which their place is recognised; more than most programs' period."""

_SHORTEST: Final = 12
_ORPHANS: Final = 128
ENOUGH_BEHIND: Final = _ORPHANS + _PATTERN
"""Kernels behind a hole beyond which more do not help."""

ENOUGH_BEFORE: Final = 64
"""Pairs before a hole by which its length is known."""

_SPARE: Final = 512
_SURE: Final = 0.8
_GUESS: Final = 0.5
_WORD: Final = 8
_DRIFT: Final = 16
"""Items that may be lost on one side of those that are compared."""
_SIMILAR: Final = 0.4
"""Share of the words that must fit somewhere."""
_MISSING: Final = 0.1
"""Share of the items that may be lost more than at the best place."""
_LOST: Final = 3.0
"""What a lost item tells against a place: one of twenty is lost."""
_FAR: Final = 4.0
"""A place farther than this from the expected one, in standard deviations, is a guess."""

_LEAST_STEPS: Final = 8
"""Launches that were seen in two steps, from which on it is known how many ids a step takes."""

_LEAST_SEEN: Final = 0.5
"""Steps by which the ids of one are known, at least."""

_PART_OF_STEP: Final = 16
"""The ids of a step scatter by this part of them, at least."""

_FARTHEST: Final = 5.0
"""With bounds by other threads, larger deviations cost no more: the expected place may have been wrong before."""

_OUT_OF_PLACE: Final = 0.1
"""Share of launches that may lie outside the bounds by other threads."""


@dataclass(slots=True)
class Anchors:
    """Correlation ids of one thread's kernels behind the last hole, and their lines; the last ones before it first."""

    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Ascending."""
    operations: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The operation of each."""

    def add(self, ids: NDArray[np.int64], operations: NDArray[np.int64]) -> None:
        """Adds further pairs, as long as there is room."""
        room = _KEPT - len(self.ids)
        if room > 0:
            self.ids = np.concatenate([self.ids, ids[:room]])
            self.operations = np.concatenate([self.operations, operations[:room]])

    def restart(self, ids: NDArray[np.int64], operations: NDArray[np.int64]) -> None:
        """Begins behind a hole, with the last pairs before it."""
        self.ids, self.operations = ids[-_SLACK - 1 :], operations[-_SLACK - 1 :]


@dataclass(frozen=True, slots=True)
class Between:
    """Between which operations each of some kernels' lines lie, both excluded."""

    after: NDArray[np.int64]
    before: NDArray[np.int64]

    def violations(self, operations: NDArray[np.int64], places: NDArray[np.intp]) -> NDArray[np.int64]:
        """Of how many kernels the lines lie elsewhere, if the first is at each of some places among operations."""
        found = np.zeros(len(places), dtype=np.int64)
        for offset, (after, before) in enumerate(zip(self.after.tolist(), self.before.tolist(), strict=True)):
            own = operations[places + offset]
            found += (own <= after) | (own >= before)
        return found


def between(anchors: Sequence[Anchors], ids: NDArray[np.int64]) -> Between:
    """Where the lines of kernels with these correlation ids lie, by the pairs of other threads."""
    after, before = np.full(len(ids), -1, dtype=np.int64), np.full(len(ids), NEVER, dtype=np.int64)
    for own in anchors:
        low = np.concatenate([np.full(_SLACK + 1, -1), np.maximum.accumulate(own.operations)])
        high = np.minimum.accumulate(own.operations[::-1])[::-1]
        high = np.concatenate([high, np.full(_SLACK + 1, NEVER)])
        places = np.searchsorted(own.ids, ids)
        after = np.maximum(after, low[places])
        before = np.minimum(before, high[places + _SLACK])
    return Between(after, before)


@dataclass(frozen=True, slots=True)
class GapPlace:
    """Where to go on."""

    skipped: int
    """Launches that were not recorded."""
    trust: float

    @property
    def is_sure(self) -> bool:
        """Whether nothing else need be asked."""
        return self.trust >= _SURE


@dataclass(frozen=True, slots=True)
class BehindGap:
    """Pending items of launches, and the kernels behind a hole, by which their place is recognised."""

    items: NDArray[np.int64]
    """Where each item of the launches begins, with the end appended."""
    operations: NDArray[np.int64]
    """The first operation of each item."""
    left: NDArray[np.int32]
    """Symbol of each item."""
    kernels: Columns
    """The first kernel of each item behind the hole."""
    right: NDArray[np.int32]
    """Their symbols."""
    compatible: NDArray[np.bool_]

    @property
    def begin(self) -> int:
        """The kernel from which on the place is recognised: behind those whose thread may be wrong."""
        orphans = np.flatnonzero(self.kernels["is_orphan"][:_ORPHANS])
        return int(orphans[-1]) + 1 if len(orphans) and orphans[-1] + 1 < len(self.kernels) else 0

    @property
    def length(self) -> int:
        """Kernels from there on that are compared."""
        return min(len(self.right) - self.begin, _PATTERN)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Their correlation ids."""
        ids: NDArray[np.int64] = self.kernels["correlation_id"][self.begin : self.begin + self.length]
        return ids


@dataclass(frozen=True, slots=True)
class Doubt:
    """Kernels of one thread behind a hole whose place is not sure."""

    given: BehindGap
    guess: GapPlace
    """The likeliest place by this thread alone."""

    @property
    def ends_at(self) -> int:
        """The last correlation id by which the place is recognised."""
        return int(self.given.ids[-1])


@dataclass(slots=True)
class GapHistory:
    """Pairs of one thread so far: launch numbers beside correlation ids."""

    _numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Launch number of each pair, counted from the thread's first."""
    _ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Its correlation id."""
    _operations: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Its first operation."""
    anchors: Anchors = field(default_factory=Anchors)
    """The pairs behind the last hole, for other threads."""
    _last_ns: int = NO_TIME_NS

    def remember(
        self,
        kernels: Columns,
        kernel: NDArray[np.int64],
        operations: NDArray[np.int64],
        launches_used: int,
    ) -> None:
        """Records decided pairs: these kernels, and which is that of each launch.

        `operations`: the first one of each launch; `launches_used`: the number of the first launch.
        """
        if len(kernels):
            self._last_ns = max(self._last_ns, int(kernels["time_ns"].max()))
        paired = np.flatnonzero(kernel != NO_NUMBER)
        self._numbers = np.concatenate([self._numbers, paired + launches_used])[-_HISTORY:]
        ids, operations = kernels["correlation_id"][kernel[paired]], operations[paired]
        self._ids = np.concatenate([self._ids, ids])[-_HISTORY:]
        self._operations = np.concatenate([self._operations, operations])[-_HISTORY:]
        self.anchors.add(ids, operations)

    def stretch_of_next(self, kernels: Columns, coverage: Coverage) -> int:
        """Number of the recorded stretch that the first of these kernels is in."""
        return int(coverage.stretch_of(kernels["time_ns"], _HOLE_NS).min())

    def next_border(
        self, kernels: Columns, coverage: Coverage, *, final: bool, is_behind: bool = False
    ) -> tuple[int, bool]:
        """How many kernels come before the next hole, and whether there is one; 0 if it is before the first.

        Kernels of captures that are not over are not counted, unless `final`. `is_behind`: the hole before the
        first kernel is not looked at.
        """
        if len(coverage) == 0 or len(kernels) == 0:
            return len(kernels), False
        times = kernels["time_ns"]
        amount = len(kernels)
        if not final:
            late = np.flatnonzero(times > coverage.known_until_ns)
            amount = int(late[0]) if len(late) else amount
        if amount == 0:
            return 0, False
        stretches = coverage.stretch_of(times, _HOLE_NS)
        stretches = np.minimum.accumulate(stretches[::-1])[::-1][:amount]
        if not is_behind and self._last_ns != NO_TIME_NS:
            before = int(coverage.stretch_of(np.array([self._last_ns]), _HOLE_NS)[0])
            if before < stretches[0]:
                return 0, True
        behind = np.flatnonzero(stretches > stretches[0])
        return (int(behind[0]), True) if len(behind) else (amount, False)

    def find(self, given: BehindGap, used: int, *, step: int, final: bool) -> GapPlace | None:
        """Where the first of these kernels goes on among pending items; None while more launches must come first.

        `used`: launches decided so far; `step`: launches after which the program repeats, 0 if that is not known.
        """
        if len(given.kernels) == 0:
            return None
        expected, deviation = self._expected(given)
        reach = expected - used + 6 * deviation
        if not final and given.items[-1] < reach + given.length + _SPARE:
            return None
        if given.length < _SHORTEST or len(given.left) < given.length:
            return GapPlace(0, _GUESS)
        first = int(np.searchsorted(given.items, max(0, expected - used - 6 * deviation)))
        last = int(np.searchsorted(given.items, max(0, reach))) + 1
        found = _places_within(given, first, last)
        places = found.items
        if len(places) == 0:
            there = int(np.searchsorted(given.items[:-1], max(0.0, expected - used))) - given.begin
            return GapPlace(int(given.items[max(0, there)]) if len(self._ids) >= ENOUGH_BEFORE else 0, _GUESS)
        away = (given.items[places] + used - expected) / deviation
        if step:
            by_steps = self._away_by_steps(given.ids[0], given.items[places] + used, step)
            away = np.where(np.isnan(by_steps), away, by_steps)
        best, trust = found.likeliest(0.5 * away**2)
        if trust < _SURE or abs(away[best]) > _FAR or len(self._ids) < ENOUGH_BEFORE:
            trust = min(_GUESS, trust, 1.0 / len(places) if len(places) > 1 else 1.0)
        return GapPlace(int(given.items[max(0, int(places[best]) - given.begin)]), trust)

    def find_between(
        self, given: BehindGap, bounds: Between, used: int, alone: GapPlace, *, final: bool
    ) -> GapPlace | None:
        """The same with bounds by other threads: between which operations the kernels' lines lie.

        `alone`: the result of `find`, used if there are no bounds. None while more launches must come first.
        """
        if int(bounds.before[0]) >= NEVER or given.length < _SHORTEST:
            return alone
        first = int(np.searchsorted(given.operations, bounds.after[0], side="right"))
        last = int(np.searchsorted(given.operations, bounds.before[0]))
        if not final and len(given.operations) < last + given.length:
            return None
        found = _places_within(given, first, last)
        places = found.items
        if len(places) == 0:
            return alone
        expected, deviation = self._expected(given)
        away = np.minimum(np.abs(given.items[places] + used - expected) / deviation, _FARTHEST)
        astray = bounds.violations(given.operations, places)
        best, trust = found.likeliest(astray + 0.5 * away**2)
        if astray[best] > _OUT_OF_PLACE * given.length:
            trust = min(_GUESS, trust)
        return GapPlace(int(given.items[max(0, int(places[best]) - given.begin)]), trust)

    def close_gap(self, kernels: Columns) -> None:
        """The hole before these kernels is behind us."""
        self._last_ns = int(kernels["time_ns"].min())
        self.anchors.restart(self._ids, self._operations)

    def _away_by_steps(self, correlation_id: int, numbers: NDArray[np.int64], step: int) -> NDArray[np.float64]:
        """How far off (in standard deviations) a kernel's correlation id is if its launch has each of these numbers, by
        the same launch of earlier steps: each step takes as many ids. NaN where that is not known.
        """
        order = np.lexsort((self._numbers, self._numbers % step))
        own, ids = self._numbers[order], self._ids[order]
        is_same = np.diff(own % step, append=-1) == 0
        steps, taken = np.diff(own, append=0)[is_same] // step, np.diff(ids, append=0)[is_same]
        if len(steps) < _LEAST_STEPS:
            return np.full(len(numbers), np.nan)
        rate = taken.sum() / steps.sum()
        scatter = 1.0 + float(np.sqrt(np.mean((taken - rate * steps) ** 2 / steps)))
        last = np.flatnonzero(~is_same)
        phases = own[last] % step
        at = np.minimum(np.searchsorted(phases, numbers % step), len(phases) - 1)
        since = (numbers - own[last[at]]) / step
        seen = max((int(own.max()) - int(own.min())) / step - 1, _LEAST_SEEN)
        deviation = np.maximum(scatter * np.sqrt(np.maximum(since, 1.0) + since**2 / seen), rate / _PART_OF_STEP)
        away = (correlation_id - ids[last[at]] - rate * since) / deviation
        return np.where((phases[at] == numbers % step) & (since > 0), away, np.nan)

    def _expected(self, given: BehindGap) -> tuple[float, float]:
        """Number of the launch of the first kernel by which we recognise, and its deviation."""
        correlation_id = int(given.kernels["correlation_id"][given.begin])
        numbers, ids = self._numbers, self._ids
        if len(ids) < ENOUGH_BEFORE or ids[-1] <= ids[0]:
            return (float(numbers[-1]) if len(numbers) else 0.0), 65536.0
        rate = (numbers[-1] - numbers[0]) / (ids[-1] - ids[0])
        jump = correlation_id - int(ids[-1])
        lag = max(1.0, min(jump, (ids[-1] - ids[0]) / 2))
        begins = ids <= ids[-1] - lag
        ahead = np.interp(ids[begins] + lag, ids, numbers) - numbers[begins]
        deviation = 1.0 + float(np.sqrt(np.mean((ahead - rate * lag) ** 2))) * max(1.0, jump / lag)
        return float(numbers[-1]) + rate * jump, deviation


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the kernels behind a hole may go on, and what that would cost."""

    items: NDArray[np.intp]
    lost: NDArray[np.int64]
    """Rows without a partner between there and the last one compared."""
    _by_drift: NDArray[np.int64]
    """(places, drifts): the same if the last kernel compared is out of step by so many items."""

    def likeliest(self, against: NDArray[np.floating[Any]]) -> tuple[int, float]:
        """Which place is the likeliest, and how likely it is; `against`: what tells against each beside its losses."""
        cost = against + _LOST * self.lost
        weights = np.exp(cost.min() - cost)
        best = int(cost.argmin())
        return best, float(weights[self._meets(best)].sum() / weights.sum())

    def _meets(self, best: int) -> NDArray[np.bool_]:
        """The places from which the alignment comes to the same end as from this one.

        They are one place: between them it is in doubt which of the first few rows were lost, and nothing behind these.
        """
        ends = self.items[:, None] + np.arange(self._by_drift.shape[1])
        are_best = self._by_drift == self.lost[:, None]
        meets: NDArray[np.bool_] = (are_best & np.isin(ends, ends[best][are_best[best]])).any(axis=1)
        return meets


def _places_within(given: BehindGap, first: int, last: int) -> _Places:
    """The items from first to last where the kernels fit nearly as well as where they fit best."""
    last = min(last, len(given.left) - given.length + 1)
    pattern = given.right[given.begin : given.begin + given.length]
    text = given.left[first : last + given.length - 1]
    places = _near_places(text, pattern, given.compatible)
    by_drift = _lost_rows(text, pattern, given.compatible, places)
    lost: NDArray[np.int64] = by_drift.min(axis=1, initial=len(text) + len(pattern))
    is_place = lost <= lost.min(initial=len(pattern)) + _MISSING * len(pattern)
    return _Places(places[is_place] + first, lost[is_place], by_drift[is_place])


def _near_places(
    text: NDArray[np.int32], pattern: NDArray[np.int32], compatible: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """Where words of the pattern fit the text as if few items before them were lost, of either side."""
    amount = len(text) - len(pattern) + 1
    if amount <= 0:
        return np.empty(0, np.intp)
    table = compatible[:, pattern]
    fits = np.zeros(amount, np.int64)
    for begin in range(0, len(pattern) - _WORD + 1, _WORD):
        own = text[max(0, begin - _DRIFT) : begin + amount + _DRIFT + _WORD - 1]
        is_word = np.ones(len(own) - _WORD + 1, np.bool_)
        for nth in range(_WORD):
            is_word &= table[own[nth : nth + len(is_word)], begin + nth]
        at = np.arange(amount) + min(begin, _DRIFT)
        counted = np.concatenate([[0], np.cumsum(is_word)])
        fits += counted[np.minimum(at + _DRIFT + 1, len(is_word))] > counted[np.maximum(at - _DRIFT, 0)]
    best, words = int(fits.max()), len(pattern) // _WORD
    return np.flatnonzero(fits >= max(_SIMILAR * words, best - 2 * _MISSING * words))


def _lost_rows(
    text: NDArray[np.int32], pattern: NDArray[np.int32], compatible: NDArray[np.bool_], places: NDArray[np.intp]
) -> NDArray[np.int64]:
    """(places, drifts): how many items of the text or of the pattern have no partner, if the pattern begins at each of
    these places and ends out of step by -`_DRIFT` to `_DRIFT` items.
    """
    drifts = np.arange(-_DRIFT, _DRIFT + 1)
    far = len(text) + len(pattern)
    lost = np.where(drifts >= 0, drifts, far) + np.zeros((len(places), 1), np.int64)
    for nth, symbol in enumerate(pattern.tolist()):
        at = places[:, None] + nth + drifts
        is_there = (at >= 0) & (at < len(text))
        fits = is_there & compatible[text[np.where(is_there, at, 0)], symbol]
        without_line = np.pad(lost[:, 1:], ((0, 0), (0, 1)), constant_values=far) + 1
        lost = np.minimum(np.where(fits, lost, far), without_line)
        lost = np.minimum.accumulate(lost - drifts, axis=1) + drifts
    return lost
