"""Where a stretch of one sequence is found again in another, beyond a hole of any length."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.sides import Symbols

_SEED: Final = 12
PATTERN: Final = 4 * _SEED
"""Items of which a stretch is looked for."""

REACH: Final = 65536
"""Items in which it is looked for."""


def find(text: Symbols, pattern: Symbols) -> tuple[int, int] | None:
    """Where a stretch of the pattern first occurs in the text, both as offsets; None if it does not."""
    if len(pattern) < 2 * _SEED or len(text) < 2 * _SEED:
        return None
    text = text[:REACH]
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
