"""How far two sequences agree, and where one of them changes."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.sides import Compatible, Symbols

_BLOCK: Final = 8192
_FAR_AWAY: Final = 1 << 40
"""An item that never comes."""


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
