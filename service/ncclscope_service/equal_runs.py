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

from dataclasses import dataclass
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

_DOUBTFUL: Final = 0.002
"""A run is looked at if x times its length squared, which is about what it is expected to hide, is more."""


@dataclass(slots=True)
class EqualRuns:
    """The run that one thread's straight pairs are in, and what all of them may hide since that was last asked."""

    _symbol: int = -1
    _length: int = 0
    _hidden: float = 0.0

    def take(self, symbols: NDArray[np.int32], begin: int, count: int, both_lost: float) -> Floats | None:
        """How sure each of the next straight pairs is, all else aside; None: as sure as can be.

        `symbols`: of the launches, of which `count` from `begin` on are paired; those behind tell where a run ends.
        `both_lost`: what a lost line and a lost kernel are worth beside a pair.
        """
        own = symbols[begin : begin + count]
        starts = np.concatenate([[0], np.flatnonzero(own[1:] != own[:-1]) + 1])
        before = self._length if int(own[0]) == self._symbol else 0
        lengths = np.diff(np.append(starts, count))
        lengths[0] += before
        self._symbol, self._length = int(own[-1]), int(lengths[-1])
        if both_lost < _NEGLIGIBLE:
            return None
        behind = symbols[begin + count : begin + count + LONGEST + 1]
        lengths[-1] += int((behind != own[-1]).argmax()) if (behind != own[-1]).any() else len(behind)
        doubtful = np.flatnonzero(lengths * lengths * both_lost > _DOUBTFUL)
        if len(doubtful) == 0:
            return None
        known = _known(round(_STEPS * float(np.log2(both_lost))))
        sure = np.ones(count)
        for run in doubtful.tolist():
            first = int(starts[run])
            last = int(starts[run + 1]) if run + 1 < len(starts) else count
            place = np.arange(last - first) + (before if run == 0 else 0)
            self._hidden += float(known.hidden[np.minimum(place, LONGEST - 1)].sum())
            sure[first:last] = known.sure(place, int(lengths[run]))
        return sure

    def hidden(self) -> float:
        """Launches and kernels of each side that are expected to be lost unseen since this was asked."""
        hidden, self._hidden = self._hidden, 0.0
        return hidden

    def end(self) -> None:
        """What comes next begins where nothing is in doubt."""
        self._symbol, self._length = -1, 0


def expected_hidden(symbols: NDArray[np.int32], both_lost: float) -> float:
    """Launches and kernels of each side that runs of these symbols are expected to have lost unseen."""
    if both_lost < _NEGLIGIBLE or len(symbols) == 0:
        return 0.0
    starts = np.concatenate([[0], np.flatnonzero(symbols[1:] != symbols[:-1]) + 1])
    lengths = np.diff(np.append(starts, len(symbols)))
    lengths = np.minimum(lengths[lengths * lengths * both_lost > _DOUBTFUL], LONGEST)
    if len(lengths) == 0:
        return 0.0
    return float(_known(round(_STEPS * float(np.log2(both_lost)))).hidden.cumsum()[lengths - 1].sum())


@dataclass(frozen=True, slots=True)
class _Known:
    """What follows for one x."""

    ways: Floats
    """Logarithm of D(n)."""
    growth: float
    """By how much it grows with each n in the end."""
    hidden: Floats
    """Losses of each side that a run is expected to hide more for having one more item behind so many."""

    def sure(self, place: NDArray[np.int64], length: int) -> Floats:
        """How sure the pairs at these places of a run are."""
        place = np.minimum(place, _FARTHEST)
        if length > LONGEST:
            sure: Floats = np.exp(self.ways[place] - self.growth * (place + 1))
        else:
            sure = np.exp(self.ways[place] + self.ways[length - 1 - place] - self.ways[length])
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
