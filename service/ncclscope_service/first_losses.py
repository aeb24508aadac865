"""Whether few launches and kernels were lost, as far as the first ones tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ncclscope_service.agreement import agreeing_items
from ncclscope_service.gap_search import LONGEST_GAP, RESUMES, resync
from ncclscope_service.sides import Compatible, Symbols

FIRST_STRAIGHT: Final = 64
"""So many items must agree before anything is known of losses, else they may agree by chance."""

_FIRST_LOOK: Final = 256
_FEW_SKIPPED: Final = 0.05
"""Losses are few to begin with if no more than this share of the first items must be left out."""


@dataclass(frozen=True, slots=True)
class FirstLosses:
    """What the first items say."""

    are_few: bool
    launches: int = 0
    """Items looked at, where losses are few."""
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
