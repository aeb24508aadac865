"""The steps by which ranks are judged: the newest ones of a group, in whole windows, as blames of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from ncclscope_service.detect import lateness
from ncclscope_service.detect.context import Context
from ncclscope_service.detect.lateness import Occasion
from ncclscope_service.detect.margin import Blames
from ncclscope_wire.terms import OPERATION_CODES

WINDOW_NS: Final = 4_000_000_000
WINDOWS: Final = 4
WINDOWS_BAD: Final = 3
_ROOTED: Final = frozenset(OPERATION_CODES[name] for name in ("Broadcast", "Reduce", "Gather", "Scatter"))

BlamesByOp: TypeAlias = dict[int | None, Blames]
"""By operation; None: all of them."""


def _by_operation(considered: list[Occasion], ranks: int) -> list[tuple[int, Blames]]:
    """Blames (occasion by rank) of each kind of operation, where there are several; rooted ones wait for their root."""
    found: dict[int, Blames] = {}
    for place, occasion in enumerate(considered):
        for (rank, op), blame_ns in occasion.blame_by_op.items():
            if op not in _ROOTED and rank < ranks:
                found.setdefault(op, np.zeros((len(considered), ranks)))[place, rank] = blame_ns
    return list(found.items()) if len(found) > 1 else []


def whole(recent: list[Occasion], context: Context) -> list[Occasion]:
    """The newest occasions that make whole windows; none where they are too few."""
    size = per_window(context)
    usable = recent[len(recent) % size :]
    return usable if len(usable) >= WINDOWS_BAD * size else []


def blames_of(occasions: list[Occasion], ranks: int) -> BlamesByOp:
    """Blames (occasion by rank) of all operations together, and of each kind of them where there are several."""
    together = by_rank([occasion.blame_ns for occasion in occasions], ranks)
    return {None: together, **dict(_by_operation(occasions, ranks))}


def by_rank(of_occasions: Sequence[Mapping[int, float]], ranks: int) -> Blames:
    """What each occasion has of some ranks (occasion by rank); 0 for the others. Ranks beyond `ranks` are left out."""
    found = np.zeros((len(of_occasions), ranks))
    for place, values in enumerate(of_occasions):
        for rank, value in values.items():
            if rank < ranks:
                found[place, rank] = value
    return found


def per_window(context: Context) -> int:
    """Occasions per window: four seconds of them, at least two steps."""
    return max(2, round(WINDOW_NS / (context.step_ns or lateness.DEFAULT_STEP_NS)))
