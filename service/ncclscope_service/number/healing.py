"""Collectives of several ranks' calls: straight while they agree, aligned where lines were lost, straight again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.number.across_ranks import RANKS, STEPS, Matrix, align_ranks, first_violation
from ncclscope_service.number.program import Program
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_STRAIGHT: Final = 4096
_CELLS: Final = 1_000_000
_SHORTEST: Final = 32
_LONGEST: Final = 160
_NONE: Final = np.empty(0, np.int64)


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
    program: Program | None = None,
    ranks: Sequence[int] = (),
) -> Healed:
    """Finds the collectives of ranks whose first calls (across_ranks.CALL) do not agree.

    Stops where a rank has too few calls left to tell, unless `is_forced`; `is_end`: these are all that there will be.
    `program`: by which steps are placed as far as it is known, and `ranks` of these calls in it.
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
        step = None
        if program is not None and len(live):
            rest = {rank: of[begin:] for rank, of, begin in zip(ranks, calls, at.tolist(), strict=True)}
            step = program.place(rest, is_end=is_end)
        if step is not None:
            block = _block([step.get(rank, _NONE) for rank in ranks])
            lost[STEPS] += int(np.count_nonzero(block[:, live] < 0))
            blocks.append(np.where(block >= 0, block + at, NO_NUMBER))
            at, is_dirty = at + np.asarray([len(step.get(rank, _NONE)) for rank in ranks]), True
            continue
        if program is not None and program.waits and not is_forced:
            break
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
        if program is not None:
            program.note({rank: of[: int(end)] for rank, of, end in zip(ranks, calls, at + taken, strict=True)})
        at = at + taken
    places = np.concatenate(blocks)
    if is_end and _is_one_end(places[-2:], calls):
        lost[shown_by] -= int(np.count_nonzero(places[-2] < 0))
        places = np.concatenate([places[:-2], places[-2:].max(axis=0)[None]])
    return Healed(places, offsets, lost)


def _block(steps: list[NDArray[np.int64]]) -> Matrix:
    """K x R places of calls, of each rank's first calls by their collectives."""
    block = np.full((max(int(own[-1]) + 1 if len(own) else 0 for own in steps), len(steps)), NO_NUMBER, np.int64)
    for rank, own in enumerate(steps):
        block[own, rank] = np.arange(len(own))
    return block


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
