"""Calls whose lines were lost, put in where a program that repeats itself makes them.

Training calls the same in every step, down to the buffers, so the texts of one step's lines are those of the next. Once
a thread has logged a few steps, what most of them have in common is its program. Each line is then one of its places,
behind that of the line before, and the places between them lost theirs. What a capture shows (kernels, ranges of NVTX)
is laid beside calls that are whole, which leaves little to guess: what falls to one that was put in lost its line.

A line at a place that is not the next one is of a place further on if the lines behind it agree with that best, else it
is none of the program (a checkpoint), and the program goes on behind it. Calls that are missing, and the same ones
again within a few steps, were not made: an evaluation goes forward only. A whole step that was lost is not seen here. A
program that does not repeat its texts is left as it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf, lgamma, log, log1p
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.common_text import common_text, first_places
from ncclscope_service.columns.group_by import CombinationIndex
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_FIRST_LOOK: Final = 256
_LAST_LOOK: Final = 4096
_LAST_LOOK_FURTHER: Final = 16_384
"""Calls in which a program is looked for: at first, and after as often doubling it at last; and at last one of which
that is a part.
"""
_STEPS: Final = 4
_STEPS_PER_LOSS: Final = 100.0
"""Steps from which it is learnt, at least, and more of them if lines were lost: most of them must have a line of each
call."""
_MOST_LOST: Final = 0.12
"""Share of the calls that steps may have lost: of more, what they have in common is not all of it."""
_FEWEST: Final = 2
"""Recurrences from which on a step is waited for that is as long."""
_SHORTEST: Final = 3
_MOSTLY: Final = 0.5
_EVEN: Final = 0.25
"""Steps are shorter by less than this part of them where lines were lost; longer ones lost their begin or end."""
_AHEAD: Final = 48
"""Calls by which the place of one that is not the next is found."""
_TRIED: Final = 8
_FIRST_TRIED: Final = 64
_REGULAR: Final = 0.8
"""Share of the steps that must be the program but for lost calls."""
_BY_CHANCE: Final = 0.02
"""Probability below which calls are not missing by chance from where they are."""
_MORE_LOST: Final = 0.01
"""Share of all calls that may be missing beyond twice what steps have lost: else what lies between is none of it."""
_MOST_STRANGE: Final = 0.05
"""Share of the first calls that may be none of a program: of more, it is a part of the step."""
_STRANGE: Final = 3
"""Cost of a call that is none of the program, in calls that were lost."""
_MANY: Final = 12.0
_EACH_OF_MANY: Final = 0.01
"""Cost of many calls that were lost, and of each of them: they are lost one by one, or by the hundred."""
_OUT_OF_PLACE: Final = 8
"""Cost of the first call that the program has elsewhere and that is none of it here."""
_LEAST_LOST: Final = 1e-6
"""Share of calls that is lost at least, by which it is judged how many are hardly lost in a row."""
_STEPS_APART: Final = 2.25
"""Within so many steps calls that are left out are left out again: with up to twice the microbatches the program has
two steps where there is one.
"""
_MANY_GAPS: Final = 3
"""So many more times they are hardly lost."""
_ROUGHLY: Final = 2
"""Calls by which what is missing in two steps may differ: those beside it may be lost."""
_REMEMBERED: Final = 256
_MISFITS: Final = 0.5
"""Of so many calls the share that is none of the program, at which it is given up."""


@dataclass(frozen=True, slots=True)
class _Program:
    """The calls of one step, as symbols."""

    symbols: list[int]
    places: dict[int, list[int]]
    """By symbol, ascending."""
    _twice: NDArray[np.int64]
    """The symbols, and once more behind them."""
    _found: dict[tuple[int | None, bool, bytes], tuple[int | None, bool, list[int]]] = field(
        default_factory=dict[tuple[int | None, bool, bytes], tuple[int | None, bool, list[int]]]
    )
    """The last answers of `skipped`: evaluations leave out the same again and again."""

    @classmethod
    def of(cls, symbols: list[int]) -> _Program:
        places: dict[int, list[int]] = {}
        for place, symbol in enumerate(symbols):
            places.setdefault(symbol, []).append(place)
        return cls(symbols, places, np.asarray(2 * symbols, np.int64))

    def ahead(self, symbol: int, place: int) -> list[int]:
        """How many calls are between a place and each of the next ones of a symbol, in order; few of them."""
        own = self.places.get(symbol, [])
        begin, length = bisect_left(own, place + 1), len(self.symbols)
        following = [*own[begin:], *(each + length for each in own[:begin])]
        return [each - place - 1 for each in following[:_TRIED]]

    def behind(self, place: int, amount: int) -> int:
        """The place so many calls behind another."""
        return (place + amount) % len(self.symbols)

    def agreeing(self, symbols: NDArray[np.int64], place: int) -> int:
        """How many calls are those that come behind a place, from the first one on."""
        length = len(self.symbols)
        place = (place + 1) % length
        for begin in range(0, len(symbols), length):
            compared = symbols[begin : begin + length]
            differs = compared != self._twice[place : place + len(compared)]
            first = int(differs.argmax())
            if differs[first]:
                return begin + first
        return len(symbols)

    def leaves_over(self, symbols: NDArray[np.int64]) -> bool:
        """Whether calls behind the first one of it are none of it, several in a row or one again and again.

        Then it is a part of the program.
        """
        is_own = np.isin(symbols, self.symbols)
        others = np.flatnonzero(~is_own)
        others = others[others > is_own.argmax()]
        return bool((np.diff(others) == 1).any()) or len(np.unique(symbols[others])) < len(others)

    def skipped(
        self, place: int | None, symbols: NDArray[np.int64], *, is_strange: bool
    ) -> tuple[int | None, bool, list[int]]:
        """The place of the first of these, which does not come behind a place; whether it is none of the program, as
        the one before it `is_strange`; and the symbols of the calls between, which were lost.
        """
        key = place, is_strange, symbols.tobytes()
        if key not in self._found:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            self._found[key] = self._look_ahead(place, symbols.tolist(), is_strange=is_strange)
        return self._found[key]

    def _look_ahead(
        self, place: int | None, symbols: list[int], *, is_strange: bool
    ) -> tuple[int | None, bool, list[int]]:
        first, behind = symbols[0], symbols[1:]
        if place is None:
            places = self.places.get(first, [])[:_FIRST_TRIED]
            nth, _ = self._cheapest(behind, [(0, each) for each in places])
            return None if nth is None else places[nth], False, []
        ahead = self.ahead(first, place)
        tried = [(min(each, _MANY + _EACH_OF_MANY * each), self.behind(place, each + 1)) for each in ahead]
        nth, least = self._cheapest(behind, tried)
        strange = _STRANGE if is_strange else _OUT_OF_PLACE
        if nth is None or strange + self.cost(behind, place, below=least - strange) < least:
            return place, True, []
        lost = [self.symbols[self.behind(place, each + 1)] for each in range(ahead[nth])]
        return tried[nth][1], False, lost

    def _cheapest(self, symbols: list[int], tried: Sequence[tuple[float, int]]) -> tuple[int | None, float]:
        """Which of these (own cost, place) costs least with what follows it, and that cost; the first of several."""
        found, least = None, inf
        for nth, (own, place) in enumerate(tried):
            cost = own + self.cost(symbols, place, below=least - own)
            if cost < least:
                found, least = nth, cost
        return found, least

    def cost(self, symbols: list[int], place: int, *, below: float) -> int:
        """How many calls were lost, or are strange and cost as much, if the one before these is at a place.

        Ends where it is no longer below a limit.
        """
        own, length = self.symbols, len(self.symbols)
        cost = 0
        for symbol in symbols:
            if cost >= below:
                break
            following = place + 1 if place + 1 < length else 0
            if own[following] == symbol:
                place = following
            elif symbol in self.places:
                skipped = self._between(place, symbol)
                cost += min(_STRANGE, skipped)
                if skipped <= _STRANGE:
                    place = self.behind(place, skipped + 1)
            else:
                cost += _STRANGE
        return cost

    def _between(self, place: int, symbol: int) -> int:
        """How many calls are between a place and the next one of a symbol."""
        own = self.places[symbol]
        nth = bisect_left(own, place + 1)
        following = own[nth] if nth < len(own) else own[0] + len(self.symbols)
        return following - place - 1


@dataclass(frozen=True, slots=True)
class Filled:
    """Calls with those whose lines were lost."""

    rows: Columns
    """Those lost are like others of the step."""
    is_lost: NDArray[np.bool_]
    amount: int
    """How many of the rows that were given these are; what is behind them is not known yet."""
    missed: list[Columns] = field(default_factory=list[Columns])
    """Calls that were lost among earlier ones, as a longer program shows; a row each."""

    @property
    def following(self) -> NDArray[np.intp]:
        """By lost call: the next one that is not lost, which is never the last."""
        present = np.flatnonzero(~self.is_lost)
        return present[np.searchsorted(present, np.flatnonzero(self.is_lost))]


@dataclass(slots=True)
class _Walk:
    """Calls of one thread along a program."""

    program: _Program
    place: int | None = None
    """Of the last call in the program; None if it is not known."""
    strange: int = 0
    """Calls that are none of the program, since it was judged."""
    seen: int = 0
    """Calls since it was judged."""
    is_strange: bool = False
    """Whether the last call is none of the program: then the next one easily is, too."""
    lost: int = 0
    """Calls that were lost, since it was judged."""
    left_out: int = 0
    """Calls that were missing and not made."""
    lost_share: float = _LEAST_LOST
    """Share of all calls that was lost before."""
    calls: int = 0
    """Calls so far."""
    gaps: deque[tuple[int, int, int]] = field(default_factory=deque[tuple[int, int, int]])
    """Where many calls are missing in the last steps and the next: behind how many calls and which place, how many."""
    _scout: _Walk | None = None
    """The same walk `_STEPS_APART` ahead, which finds them."""

    def find_lost(
        self, symbols: NDArray[np.int64], *, judged_after: int, final: bool
    ) -> tuple[int, list[int], list[int]]:
        """How many of these calls are known to be of the program or not; before which others were lost, and these.

        Stops after so many calls since it was judged.
        """
        before: list[int] = []
        lost: list[int] = []
        nth = 0
        while nth < len(symbols) and self.seen < judged_after:
            if self.place is not None:
                compared = symbols[nth : nth + judged_after - self.seen]
                agreeing = self.program.agreeing(compared, self.place)
                self.place = self.program.behind(self.place, agreeing)
                self.is_strange &= not agreeing
                nth, self.seen, self.calls = nth + agreeing, self.seen + agreeing, self.calls + agreeing
                if agreeing == len(compared):
                    continue
            # Microbatches look alike: which of them a log begins with, a whole step tells.
            ahead = _AHEAD if self.place is not None else max(_AHEAD, len(self.program.symbols))
            if not final and nth + ahead >= len(symbols):
                break
            since = self.place, self.strange, self.is_strange
            skipped = self._skipped(symbols[nth : nth + 1 + ahead])
            if since[0] is not None and len(skipped) >= self.many:
                made = self._made(skipped, since[0], symbols[nth + 1 :], final=final)
                if made is None:
                    self.place, self.strange, self.is_strange = since
                    break
                self.left_out += len(skipped) - len(made)
                skipped = made
            before += [nth] * len(skipped)
            lost += skipped
            self.lost += len(skipped)
            nth, self.seen, self.calls = nth + 1, self.seen + 1, self.calls + 1
        return nth, before, lost

    @property
    def many(self) -> int:
        """So many calls in a row are hardly lost one by one, anywhere in a few steps."""
        return ceil(log(_BY_CHANCE / (2 * _STEPS_APART * len(self.program.symbols))) / log(self.lost_share))

    def judge(self) -> bool:
        """Whether the last calls fit; what was lost among them is what is to be expected from now on."""
        fits = self.strange <= _MISFITS * self.seen
        recent = self.lost / (self.seen + self.lost)
        self.lost_share = max(_LEAST_LOST, (self.lost_share + recent) / 2)
        self.strange = self.seen = self.lost = 0
        return fits

    def _made(self, skipped: list[int], before: int, symbols: NDArray[np.int64], *, final: bool) -> list[int] | None:
        """Those of many calls missing behind a place that were made, and so were lost; None if that is not known yet.

        `symbols`: behind the call that follows them, which is at the place now.
        """
        reach = int(_STEPS_APART * len(self.program.symbols))
        while self.gaps and self.calls - self.gaps[0][0] > reach:
            self.gaps.popleft()
        if not final and len(symbols) < reach + 2 * _AHEAD:
            return None
        if self._scout is None or self._scout.calls <= self.calls:
            self._scout = _Walk(self.program, self.place, lost_share=self.lost_share, calls=self.calls + 1)
            self.gaps.append((self.calls, before, len(skipped)))
        self.gaps.extend(self._scout._find_gaps(symbols[self._scout.calls - self.calls - 1 : reach + 2 * _AHEAD]))
        gaps = [(self._apart(before, place), amount) for at, place, amount in self.gaps if at != self.calls]
        roughly = _ROUGHLY if self.many > 1 else 0  # where nothing is lost the same calls are left out
        alike = [each for each in gaps if abs(each[0]) <= roughly and abs(each[1] - len(skipped)) <= 2 * roughly]
        if not alike:
            is_short = len(symbols) < reach + 2 * _AHEAD  # it ends amid an evaluation, or rests there
            several = sum(amount > 1 for _, amount in gaps) if len(skipped) > 1 else 0
            return [] if several >= (1 if is_short else _MANY_GAPS) else skipped
        # What is missing there too was not made; what is missing beside it is lost.
        begin = max(0, *(apart for apart, _ in alike))
        end = min(len(skipped), *(apart + amount for apart, amount in alike))
        return [*skipped[:begin], *skipped[end:]]

    def _find_gaps(self, symbols: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Goes on along these, but for the last few; gives where many calls are missing (`gaps`)."""
        nth = 0
        while nth < len(symbols) - _AHEAD:
            agreeing = self.program.agreeing(symbols[nth:], self.place) if self.place is not None else 0
            if agreeing and self.place is not None:
                self.place = self.program.behind(self.place, agreeing)
            else:
                before = self.place
                skipped = self._skipped(symbols[nth : nth + 1 + _AHEAD])
                if before is not None and len(skipped) >= self.many:
                    yield self.calls, before, len(skipped)
            nth += max(agreeing, 1)
            self.calls += max(agreeing, 1)

    def _apart(self, place: int, other: int) -> int:
        """How many calls one place is behind another, the shorter way round."""
        half = len(self.program.symbols) // 2
        return (other - place + half) % len(self.program.symbols) - half

    def _skipped(self, symbols: NDArray[np.int64]) -> list[int]:
        """The calls (symbols) that were lost before the first of these, which is not the next of the program."""
        self.place, self.is_strange, skipped = self.program.skipped(self.place, symbols, is_strange=self.is_strange)
        self.strange += self.is_strange
        return skipped


@dataclass(slots=True)
class LostCalls:
    """Puts in the calls of one thread whose lines were lost."""

    names: tuple[str, ...]
    """Columns in which calls are equal that come at one place of every step."""
    _index: CombinationIndex = field(init=False)
    _like: list[Columns] = field(default_factory=list[Columns])
    """By symbol: the first call of it."""
    _walk: _Walk | None = None
    """None while there is no program."""
    _look: int | None = _FIRST_LOOK
    """Calls at which a program is looked for, or a longer one; None: no more."""
    _passed: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """The calls since the program was learnt, while a longer one may be."""
    _lost: Counter[int] = field(default_factory=Counter[int])
    """Those lost among them, by symbol."""

    def __post_init__(self) -> None:
        self._index = CombinationIndex(self.names)

    @property
    def step(self) -> int:
        """Calls after which the program repeats; 0 if that is not known."""
        return len(self._walk.program.symbols) if self._walk is not None else 0

    @property
    def many(self) -> int:
        """So many calls in a row are hardly lost one by one; 0 if there is no program."""
        return self._walk.many if self._walk is not None else 0

    def program_rows(self) -> Columns:
        """The calls of one step, each like any of its place; a program is known."""
        assert self._walk is not None
        return row_ops.concat([self._like[symbol] for symbol in self._walk.program.symbols])

    def skip(self) -> None:
        """Calls were given up before they were looked at."""
        if self._walk is not None:
            self._walk.place = None
            self._passed, self._lost = self._passed[:0], Counter()

    def fill(self, rows: Columns, *, final: bool) -> Filled:
        """A thread's next calls as far as they are known by now; all of them with `final`."""
        if (self._look is None and self._walk is None) or (rows["text"] == NO_NUMBER).any():
            return Filled(rows, np.zeros(len(rows), np.bool_), len(rows))
        symbols = self._numbers(rows)
        before: list[int] = []
        lost: list[int] = []
        missed: list[int] = []
        end = 0
        while end < len(rows):
            if self._walk is None:
                self._walk = self._learn(symbols[end:], final=final)
            if self._walk is None:
                end = len(rows) if self._look is None or final else end
                break
            amount, own_before, own_lost = self._walk.find_lost(symbols[end:], judged_after=_REMEMBERED, final=final)
            if not amount:
                break
            before += [end + each for each in own_before]
            lost += own_lost
            if self._look is not None:
                self._passed = np.append(self._passed, symbols[end : end + amount].astype(np.int32))
                self._lost.update(own_lost)
            end += amount
            if self._walk.seen >= _REMEMBERED:
                if not self._walk.judge():
                    self._walk, self._look = None, _FIRST_LOOK
                elif self._look is not None and len(self._passed) >= 2 * self._look:
                    missed += self._look_further()
        every = row_ops.concat([rows[:end], *(self._like[symbol] for symbol in lost)])
        order = np.argsort(np.concatenate([np.arange(end), np.asarray(before) - 0.5]), kind="stable")
        return Filled(row_ops.take(every, order), order >= end, end, [self._like[symbol] for symbol in missed])

    def _numbers(self, rows: Columns) -> NDArray[np.int64]:
        known = len(self._index)
        symbols = self._index.number(rows).astype(np.int64)
        for symbol in range(known, len(self._index)):
            at = int((symbols == symbol).argmax())
            self._like.append(rows[at : at + 1].copy())
        return symbols

    def _learn(self, symbols: NDArray[np.int64], *, final: bool) -> _Walk | None:
        """A walk along the program of the first of these, all that are not filled; None if none was found."""
        while self._look is not None and (final or len(symbols) >= self._look):
            amount = min(len(symbols), self._look)
            found = _walked(symbols[:amount], is_last=amount >= _LAST_LOOK or (final and amount == len(symbols)))
            if found is not None:
                self._passed, self._lost = self._passed[:0], Counter()
                return _Walk(found[0].program, lost_share=found[0].lost_share)
            if final and amount == len(symbols):
                return None
            self._look = 2 * self._look if self._look < _LAST_LOOK else None
        return None

    def _look_further(self) -> list[int]:
        """Goes over to a longer program of which the one so far is a part, if the calls that passed it have one.

        Gives those that were lost among them and not found by the shorter one.
        """
        assert self._walk is not None
        self._look = 2 * self._look if self._look and 2 * self._look < _LAST_LOOK_FURTHER else None
        missed = Counter[int]()
        passed = self._passed.astype(np.int64)
        if self._walk.program.leaves_over(passed):
            found = _walked(passed, is_last=self._look is None)
            if found is not None and len(found[0].program.symbols) > self.step:
                self._walk = found[0]
                self._walk.strange = self._walk.seen = self._walk.lost = 0
                missed = Counter(found[1]) - self._lost
                self._lost = Counter(found[1])
        if self._look is None:
            self._passed, self._lost = np.empty(0, np.int32), Counter()
        return sorted(missed.elements())


def _walked(symbols: NDArray[np.int64], *, is_last: bool) -> tuple[_Walk, list[int]] | None:
    """The walk through all of these along their program, and what was lost of them; None if they have none."""
    for texts, lost in _programs_of(symbols, is_last=is_last):
        walk = _Walk(_Program.of(texts.tolist()), lost_share=max(_LEAST_LOST, lost))
        _, _, missing = walk.find_lost(symbols, judged_after=len(symbols), final=True)
        # A microbatch is the program only of steps that are too long for it.
        missed = len(missing) + (0 if is_last else walk.left_out)
        is_part = not is_last and walk.program.leaves_over(symbols)
        if (
            missed <= (2 * lost + _MORE_LOST) * len(symbols)
            and walk.strange <= _MOST_STRANGE * len(symbols)
            and not is_part
        ):
            return walk, missing
    return None


def _programs_of(symbols: NDArray[np.int64], *, is_last: bool) -> Iterator[tuple[NDArray[np.int64], float]]:
    """Calls that the steps among these have in common, and the share of them that was lost; none if they do not repeat,
    or too few were seen.

    Layers and microbatches repeat within a step: the longest steps come first. `is_last`: of which enough were seen.
    """
    for begins in _begins(symbols, _FEWEST if not is_last else _STEPS):
        lengths = np.diff(begins)
        usual = float(np.median(lengths))
        whole = np.flatnonzero(np.abs(lengths - usual) <= _EVEN * usual)
        steps = [tuple(symbols[begins[each] : begins[each + 1]].tolist()) for each in whole.tolist()]
        program = common_text(steps)
        lost = 1 - float(lengths[whole].mean()) / max(len(program), int(lengths[whole].max()))
        is_enough = lost <= _MOST_LOST and len(whole) >= _STEPS + _STEPS_PER_LOSS * lost
        if is_enough and len(program) >= max(_SHORTEST, (1 - _EVEN) * usual) and _loses_only(steps, program):
            yield program, lost
        if not is_last:
            return


def _loses_only(steps: Sequence[tuple[int, ...]], program: NDArray[np.int64]) -> bool:
    """Whether nearly all steps are the program but for calls that are missing at random.

    A program that calls in another order now and then, or leaves out the same calls in many steps, has not lost them.
    """
    places = [first_places(np.asarray(step, np.int64), program) for step in steps]
    missing = len(steps) - np.bincount(np.concatenate(places), minlength=len(program))
    fit = sum(len(own) == len(step) for own, step in zip(places, steps, strict=True))
    return fit >= _REGULAR * len(steps) and _is_by_chance(int(missing.max()), int(missing.sum()), len(program))


def _is_by_chance(most: int, lost: int, places: int) -> bool:
    """Whether one of these places may have lost most of so many calls, if each was lost at any of them."""
    ways = lgamma(lost + 1)
    here, elsewhere = log(1 / max(places, 2)), log1p(-1 / max(places, 2))
    chances = (
        exp(ways - lgamma(own + 1) - lgamma(lost - own + 1) + own * here + (lost - own) * elsewhere)
        for own in range(most, lost + 1)
    )
    return places * sum(chances) >= _BY_CHANCE


def _begins(symbols: NDArray[np.int64], fewest: int) -> list[NDArray[np.intp]]:
    """Where calls are that come once in each step, so many times or more: at the longest distances first."""
    order = np.argsort(symbols, kind="stable")
    own = symbols[order]
    bounds = np.flatnonzero(np.diff(own, prepend=-1, append=-1))
    found: list[tuple[float, NDArray[np.intp]]] = []
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        distances = np.diff(order[begin:end])
        amount = len(distances)
        if amount < fewest or 2 * int(distances.sum()) < len(symbols):
            continue
        in_order = np.sort(distances)  # of a few: `np.median` takes five times as long
        usual = float(in_order[(amount - 1) // 2] + in_order[amount // 2]) / 2
        evenness = np.count_nonzero(np.abs(distances - usual) <= _EVEN * usual) / amount
        if evenness > _MOSTLY:
            found.append((-evenness * usual, order[begin:end]))
    return [places for _, places in sorted(found, key=lambda each: each[0])]
