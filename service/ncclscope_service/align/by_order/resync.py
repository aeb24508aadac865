"""Where two sequences agree, and where they agree again behind a small gap or a hole of any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.pair_hmm import Floats

Symbols = NDArray[np.int32]
Compatible = NDArray[np.bool_]
"""Compatible[launch symbol, kernel symbol]"""

_BLOCK: Final = 8192
_FAR_AWAY: Final = 1 << 40
"""An item that never comes."""

LONGEST_GAP: Final = 32
"""Items after which both sides must agree again, if losses are few."""

_NEAR_GAP: Final = 8
"""Smaller gaps are searched first, as most are."""

RESUMES: Final = (12, 40)
"""Items that must agree behind a gap; the larger number if there are several ways with the smaller."""

_FAR: Final = 128
_SHIFTED: Final = 8
_FAR_RESUMES: Final = 24
"""Several gaps near each other end within this distance, at most this shift, at a place where this many items agree."""

AHEAD: Final = _FAR + _SHIFTED + _FAR_RESUMES
"""Items beyond what agrees that must be there before a gap is looked for."""

_PER_LOSS: Final = 12
"""Items that must not agree for as long before a place counts as much as one more item lost."""

_NEAR_COST: Final = (_NEAR_GAP + 1) / 2 - 1
"""Behind a gap that costs less no larger one is looked for."""

_SEED: Final = 12
STRETCH: Final = 4 * _SEED
"""Items that are searched for."""

STRETCH_REACH: Final = 65536
"""Items in which they are searched."""

FIRST_STRAIGHT: Final = 64
"""Items that must agree before losses are known: fewer may agree by chance."""

_FIRST_LOOK: Final = 256
_FEW_SKIPPED: Final = 0.05
"""Losses are few to begin with if no more than this share of the first items must be left out."""


def changes(symbols: Symbols) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each item and the end, the next item that differs from the one before it, and the last one so far."""
    count = len(symbols)
    is_change = np.zeros(count + 1, dtype=bool)
    is_change[1:count] = symbols[1:] != symbols[:-1]
    places = np.arange(count + 1)
    last = np.maximum.accumulate(np.where(is_change, places, 0))
    following = np.where(is_change, places, _FAR_AWAY)
    return np.minimum.accumulate(following[::-1])[::-1], last


def agreeing_items(left: Symbols, right: Symbols, compatible: Compatible) -> int:
    """How many items from the front agree one by one."""
    count = min(len(left), len(right))
    size, begin = 64, 0
    while begin < count:
        end = min(begin + size, count)
        differs = ~compatible[left[begin:end], right[begin:end]]
        if differs.any():
            return begin + int(differs.argmax())
        begin, size = end, min(4 * size, _BLOCK)
    return count


@dataclass(frozen=True, slots=True)
class _Gaps:
    """All gaps of up to `size` items on either side."""

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
    """Gaps behind which `agreeing` items agree."""
    size = gaps.size + agreeing
    agree = _in_a_row(compatible[left[:size, None], right[None, :size]], agreeing)
    return np.flatnonzero(agree[: gaps.size + 1, : gaps.size + 1])


def _in_a_row(cells: NDArray[np.bool_], amount: int) -> NDArray[np.bool_]:
    """Where `amount` cells in a row down the diagonal are true."""
    have = 1
    while have < amount:
        step = min(have, amount - have)
        cells = cells[:-step, :-step] & cells[step:, step:]
        have += step
    return cells


def far_resync(left: Symbols, right: Symbols, compatible: Compatible) -> tuple[int, int] | None:
    """The same with several gaps near each other: a longer stretch agrees further away."""
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


def find_stretch(text: Symbols, pattern: Symbols) -> tuple[int, int] | None:
    """Where a stretch of the pattern first occurs in the text, both as offsets; None if it does not."""
    if len(pattern) < 2 * _SEED or len(text) < 2 * _SEED:
        return None
    text = text[:STRETCH_REACH]
    wanted, present = _seeds(pattern), _seeds(text)
    places = np.flatnonzero(np.isin(present, wanted))
    for place in places[:64].tolist():
        begin = int(np.flatnonzero(wanted == present[place])[0])
        length = min(len(pattern) - begin, len(text) - place, 2 * _SEED)
        if length >= 2 * _SEED - 4 and np.array_equal(text[place : place + length], pattern[begin : begin + length]):
            return place, begin
    return None


def _seeds(symbols: Symbols) -> NDArray[np.uint64]:
    hashes = np.zeros(len(symbols) - _SEED + 1, dtype=np.uint64)
    for offset in range(_SEED):
        hashes = hashes * np.uint64(0x100000001B3) + symbols[offset : offset + len(hashes)].astype(np.uint64)
    return hashes


@dataclass(frozen=True, slots=True)
class FirstLosses:
    """Losses among the first items."""

    are_few: bool
    launches: int = 0
    """Items compared, if losses are few."""
    kernels: int = 0
    pairs: int = 0


def look_ahead(left: Symbols, right: Symbols, compatible: Compatible, *, final: bool) -> FirstLosses | None:
    """Whether the first items agree but for a few small gaps; None if more data must come first."""
    if not final and min(len(left), len(right)) < _FIRST_LOOK + 2 * (LONGEST_GAP + RESUMES[-1]):
        return None
    at = to = missing = unlogged = 0
    while True:
        agreeing = agreeing_items(left[at : at + _FIRST_LOOK], right[to : to + _FIRST_LOOK], compatible)
        at, to = at + agreeing, to + agreeing
        if min(at, to) >= _FIRST_LOOK or min(len(left) - at, len(right) - to) < LONGEST_GAP + RESUMES[0]:
            break
        skipped = resync(left[at:], right[to:], compatible)
        if skipped is None or missing + unlogged + max(skipped) / 4 > _FEW_SKIPPED * (max(at, to) + _FIRST_LOOK):
            return FirstLosses(are_few=False)
        shift = skipped[0] - skipped[1]
        at, to, missing, unlogged = (
            at + skipped[0],
            to + skipped[1],
            missing + max(shift, 0),
            unlogged + max(-shift, 0),
        )
    if at < FIRST_STRAIGHT and (missing + unlogged or len(left) - at != len(right) - to):
        return FirstLosses(are_few=False)
    return FirstLosses(are_few=True, launches=at, kernels=to, pairs=at - missing)
