"""Collectives of several ranks' calls: straight while they agree, aligned where lines were lost, straight again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.number.across_ranks import RANKS, Matrix, align_ranks, first_violation
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_STRAIGHT: Final = 4096
_CELLS: Final = 1_000_000
_SHORTEST: Final = 32
_LONGEST: Final = 160


def window(ranks: int) -> int:
    """Calls of each rank that are aligned at once: what is far from a loss says little about it."""
    return min(max(int((_CELLS / max(1, ranks)) ** 0.5), _SHORTEST), _LONGEST)


@dataclass(frozen=True, slots=True)
class Healed:
    """Collectives that were found."""

    places: Matrix
    """K x R: place of the call of each rank; NO_NUMBER if its line was lost."""
    offsets: Columns
    """As `across_ranks.Aligned`."""
    lost: Counter[str]
    """Lines that were found to be lost, by what showed it."""


def heal(
    calls: Sequence[Columns],
    offsets: Columns,
    hosts: NDArray[np.int32],
    *,
    is_forced: bool,
    is_end: bool,
) -> Healed:
    """Finds the collectives of ranks whose first calls (across_ranks.CALL) do not agree.

    Stops where a rank has too few calls left to tell, unless `is_forced`; `is_end`: these are all that there will be.
    """
    at = np.zeros(len(calls), np.int64)
    lengths = np.asarray([len(of) for of in calls], np.int64)
    size = window(len(calls))
    blocks = [np.empty((0, len(calls)), np.int64)]
    lost, shown_by = Counter[str](), RANKS
    is_dirty = True
    while True:
        left = lengths - at
        live = np.flatnonzero(left > 0)
        if not len(live) or (not is_forced and int(left.min()) < (size if is_dirty else 1)):
            break
        if is_dirty:
            parts = [of[begin : begin + size] for of, begin in zip(calls, at.tolist(), strict=True)]
            aligned = align_ranks(parts, offsets, is_end=is_end and bool((left <= size).all()))
            block, offsets, is_dirty = aligned.places, aligned.offsets, False
            shown_by = aligned.shown_by
            lost[shown_by] += aligned.lost
        else:
            length = min(int(left[live].min()), _STRAIGHT)
            matrix = np.stack([calls[rank][at[rank] : at[rank] + length] for rank in live.tolist()], axis=1)
            count, shown = first_violation(matrix, offsets[live], hosts[live])
            block = np.full((count, len(calls)), NO_NUMBER, np.int64)
            block[:, live] = np.arange(count)[:, None]
            offsets = offsets.copy()
            offsets[live] = shown
            is_dirty = count < length
        blocks.append(np.where(block >= 0, block + at, NO_NUMBER))
        taken = block.max(axis=0, initial=NO_NUMBER) + 1
        at = at + taken
    places = np.concatenate(blocks)
    if is_end and _is_one_end(places[-2:], calls):
        lost[shown_by] -= int(np.count_nonzero(places[-2] < 0))
        places = np.concatenate([places[:-2], places[-2:].max(axis=0)[None]])
    return Healed(places, offsets, lost)


def _is_one_end(last: Matrix, calls: Sequence[Columns]) -> bool:
    """Whether all ranks end, some at the last place and all others at the one before, and no kernel there has ended.

    Some called another operation than the others there, and nobody came further. That it was two, of which each was
    lost by those that logged the other, is less likely.
    """
    is_called = last >= 0
    if len(last) < 2 or is_called.all(axis=0).any() or not is_called.any(axis=0).all():
        return False
    ends = zip(calls, last.max(axis=0).tolist(), strict=True)
    return all(of["end_ns"][at] == NO_TIME_NS for of, at in ends)
