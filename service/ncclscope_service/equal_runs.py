"""Runs of one symbol that are as long on both sides: how sure their pairs are, and what they may hide.

Where both sides lose some, a run may have lost as many of each and look whole; what lies between the two places is then
paired one off. Of n launches and n kernels that show, with k more of each gone, there are (n + k)! / ((n - k)! k! k!)
ways to lie, worth x^k each, where x is what a lost line and a lost kernel are worth beside a pair. Their sum is the
Legendre polynomial D(n) = P_n(1 + 2x), and the pair behind b others and before e more is right with a chance of
D(b) D(e) / D(b + 1 + e).

*Source:* NIST Digital Library of Mathematical Functions, 18.5 (Legendre polynomials as sums) and 18.9 (their recurrence
(n + 1) P_(n+1)(y) = (2n + 1) y P_n(y) - n P_(n-1)(y)).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.pair_hmm import Floats

LONGEST: Final = 128
"""Of a longer run nothing is concluded from where it ends."""

_FARTHEST: Final = 1024
"""Items of a run after which one is as unsure as the next."""

_MOST_HIDDEN: Final = 48
_STEPS: Final = 8
"""Answers that are told apart per factor of two of x."""

_NEGLIGIBLE: Final = 1e-8
"""Smaller x make no run of a length that is looked at doubtful."""

_PARTS: Final = 1 << 20
"""Expected losses are summed up in such parts of one, so that sums do not depend on how the data were cut."""

_DOUBTFUL: Final = 0.002
"""A run is looked at if x times its length squared, which is about what it is expected to hide, is more."""


@dataclass(slots=True)
class EqualRuns:
    """The run that the last items of one thread were in, and what those since it was last asked may hide."""

    _symbol: int = -1
    _length: int = 0
    _hidden: int = 0
    """In units of 1 / _PARTS."""

    def ahead(self, symbols: NDArray[np.int32]) -> RunsAhead:
        """The runs of what comes next."""
        count = len(symbols)
        starts = np.concatenate([[0], np.flatnonzero(symbols[1:] != symbols[:-1]) + 1]) if count else np.empty(0, int)
        lengths = np.diff(np.append(starts, count))
        place = np.arange(count) - np.repeat(starts, lengths)
        if count and int(symbols[0]) == self._symbol:
            place[: lengths[0]] += self._length
            lengths[0] += self._length
        return RunsAhead(symbols, place, np.repeat(lengths, np.diff(np.append(starts, count))))

    def hide(self, hidden: int) -> None:
        """Items were taken that are expected to hide so much."""
        self._hidden += hidden

    def hidden(self) -> float:
        """Launches and kernels of each side that are expected to be lost unseen since this was asked."""
        hidden, self._hidden = self._hidden, 0
        return hidden / _PARTS

    def go_on(self, ahead: RunsAhead, used: int) -> None:
        """So many items of what was ahead are decided."""
        if used:
            self._symbol, self._length = int(ahead.symbols[used - 1]), int(ahead.place[used - 1]) + 1


@dataclass(slots=True)
class RunsAhead:
    """The runs of a sequence of symbols, of which items are paired one by one."""

    symbols: NDArray[np.int32]
    place: NDArray[np.int64]
    """How many items of its run are before each."""
    length: NDArray[np.int64]
    """Of the run that each is in, as far as it is seen."""
    _told: dict[int, Doubts | None] = field(default_factory=dict[int, "Doubts | None"])

    def doubts(self, both_lost: float) -> Doubts | None:
        """What the runs make of pairs; None: all are as sure as can be.

        `both_lost`: what a lost line and a lost kernel are worth beside a pair.
        """
        if both_lost < _NEGLIGIBLE:
            return None
        step = round(_STEPS * float(np.log2(both_lost)))
        if step not in self._told:
            self._told[step] = self._doubts(step)
        return self._told[step]

    def _doubts(self, step: int) -> Doubts | None:
        lengths = np.minimum(self.length, LONGEST + 1)
        doubtful = np.flatnonzero(lengths * lengths * 2.0 ** (step / _STEPS) > _DOUBTFUL)
        if len(doubtful) == 0:
            return None
        known = _known(step)
        place, lengths = self.place[doubtful], lengths[doubtful]
        sure, hidden = np.ones(len(self.symbols)), np.zeros(len(self.symbols) + 1, dtype=np.int64)
        sure[doubtful] = known.sure(place, lengths)
        hidden[doubtful + 1] = np.rint(known.hidden[np.minimum(place, LONGEST - 1)] * _PARTS)
        return Doubts(sure, np.cumsum(hidden))


@dataclass(frozen=True, slots=True)
class Doubts:
    """What runs of equal items make of pairs, for one answer to how much is lost."""

    sure: Floats
    """How sure the pair of each item is, all else aside."""
    hidden_before: NDArray[np.int64]
    """Losses of each side that all items before each are expected to hide, in units of 1 / _PARTS."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What follows for one x."""

    ways: Floats
    """Logarithm of D(n)."""
    growth: float
    """By how much it grows with each n in the end."""
    hidden: Floats
    """Losses of each side that a run is expected to hide more for having one more item behind so many."""

    def sure(self, place: NDArray[np.int64], length: NDArray[np.int64]) -> Floats:
        """How sure the pairs at these places of runs of these lengths are."""
        behind = np.where(length > LONGEST, 0, length - 1 - place)
        place = np.minimum(place, _FARTHEST)
        all_ways = np.where(length > LONGEST, self.growth * (place + 1), self.ways[np.minimum(length, LONGEST)])
        sure: Floats = np.exp(self.ways[place] + self.ways[behind] - all_ways)
        return sure


@lru_cache(maxsize=64)
def _known(step: int) -> _Known:
    x = 2.0 ** (step / _STEPS)
    y = 1 + 2 * x
    ratios = [y]
    for n in range(1, _FARTHEST):
        ratios.append(((2 * n + 1) * y - n / ratios[-1]) / (n + 1))
    ways = np.concatenate([[0.0], np.cumsum(np.log(ratios))])
    growth = float(np.log(y + np.sqrt(y * y - 1)))
    lengths, hidden = np.arange(LONGEST + 1), np.arange(_MOST_HIDDEN)
    steps = (lengths[:, None] + hidden + 1) * np.maximum(lengths[:, None] - hidden, 0) / (hidden + 1) ** 2 * x
    shares = np.concatenate([np.ones((len(lengths), 1)), np.cumprod(steps[:, :-1], axis=1)], axis=1)
    expected = shares @ hidden / shares.sum(axis=1)
    return _Known(ways, growth, np.diff(expected))
