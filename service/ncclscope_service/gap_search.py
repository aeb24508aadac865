"""Where two sequences agree again behind a gap of a few items, if that is the only way in which they may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.pair_hmm import Floats
from ncclscope_service.sides import Compatible, Symbols

LONGEST_GAP: Final = 32
"""Items after which both sides must agree again, where losses are few."""

_NEAR_GAP: Final = 8
"""A gap so small is looked for first, as most are."""

RESUMES: Final = (12, 40)
"""So many items must agree then; more, where with fewer there are several ways."""

_FAR: Final = 128
_SHIFTED: Final = 8
_FAR_RESUMES: Final = 24
"""Several gaps near each other end so far away, with the sides shifted so little, where so many items agree."""

AHEAD: Final = _FAR + _SHIFTED + _FAR_RESUMES
"""Items beyond what agrees that must be there before a gap is looked for."""

_PER_LOSS: Final = 12
"""Items that must not agree for as long before a place counts as much as one more item lost."""


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Gaps of up to so many items on either side, side by side."""

    size: int
    costs: Floats
    """Items that are lost at least, and half of those that may have been."""
    shifts: NDArray[np.int64]

    @classmethod
    def up_to(cls, size: int) -> _Gaps:
        """All of them, ascending by the items of the first side."""
        one = np.arange(size + 1)
        shifts = np.subtract.outer(one, one)
        return cls(size, (np.abs(shifts) + np.minimum.outer(one, one) / 2).ravel(), shifts.ravel())


_NEAR_GAPS: Final = _Gaps.up_to(_NEAR_GAP)
_GAPS: Final = _Gaps.up_to(LONGEST_GAP)
_NEAR_COST: Final = (_NEAR_GAP + 1) / 2 - 1
"""Behind a gap that costs less no larger one is looked for."""


def resync(left: Symbols, right: Symbols, compatible: Compatible) -> tuple[int, int] | None:
    """After how many items of each side both agree again; None if they do nowhere near, or in several ways."""
    for agreeing in RESUMES:
        if min(len(left), len(right)) < LONGEST_GAP + agreeing:
            return None
        gaps, agree = _NEAR_GAPS, _agree_behind(left, right, compatible, _NEAR_GAPS, agreeing)
        if len(agree) == 0 or gaps.costs[agree].min() >= _NEAR_COST:
            gaps, agree = _GAPS, _agree_behind(left, right, compatible, _GAPS, agreeing)
        if len(agree) == 0:
            return None
        costs = gaps.costs[agree]
        cheapest = int(costs.argmin())
        shifts = gaps.shifts[agree]
        if not np.any((costs <= costs[cheapest] + 1) & (shifts != shifts[cheapest])):
            return divmod(int(agree[cheapest]), gaps.size + 1)
    return None


def _agree_behind(
    left: Symbols, right: Symbols, compatible: Compatible, gaps: _Gaps, agreeing: int
) -> NDArray[np.intp]:
    """The gaps behind which so many items agree."""
    size = gaps.size + agreeing
    agree = _in_a_row(compatible[left[:size, None], right[None, :size]], agreeing)
    return np.flatnonzero(agree[: gaps.size + 1, : gaps.size + 1])


def _in_a_row(cells: NDArray[np.bool_], amount: int) -> NDArray[np.bool_]:
    """Where so many cells, one after the other down the diagonal, are true."""
    have = 1
    while have < amount:
        step = min(have, amount - have)
        cells = cells[:-step, :-step] & cells[step:, step:]
        have += step
    return cells


def far_resync(left: Symbols, right: Symbols, compatible: Compatible) -> tuple[int, int] | None:
    """The same where there are several gaps near each other: a longer stretch agrees further away."""
    size = _FAR + _FAR_RESUMES
    if min(len(left), len(right)) < size + _SHIFTED:
        return None
    places = np.arange(size)
    shifts = np.arange(-_SHIFTED, _SHIFTED + 1)[:, None]
    agree = compatible[left[places + np.maximum(-shifts, 0)], right[places + np.maximum(shifts, 0)]]
    have = 1
    while have < _FAR_RESUMES:
        step = min(have, _FAR_RESUMES - have)
        agree = agree[:, :-step] & agree[:, step:]
        have += step
    first = agree.argmax(axis=1)
    costs = np.where(agree.any(axis=1), np.abs(shifts[:, 0]) + first / _PER_LOSS, np.inf)
    best = int(costs.argmin())
    if costs[best] == np.inf or np.count_nonzero(costs <= costs[best] + 1) > 1:
        return None
    shift, place = best - _SHIFTED, int(first[best])
    return place + max(-shift, 0), place + max(shift, 0)
