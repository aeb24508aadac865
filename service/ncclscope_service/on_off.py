"""When something runs and when not: the share of each stretch of time that some intervals cover together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
"""Nanoseconds on one clock."""


def covered_ns(starts: Times, ends: Times, borders: Times) -> Times:
    """How much of each stretch between neighbouring borders the intervals cover; what they share counts once.

    `borders` ascend; one stretch fewer comes back. Intervals may overlap and come in any order; one that ends before it
    starts covers nothing.
    """
    is_whole = ends > starts
    order = np.argsort(starts[is_whole], kind="stable")
    begin, end = starts[is_whole][order], ends[is_whole][order]
    if not len(begin):
        return np.zeros(max(0, len(borders) - 1), dtype=np.int64)
    reached = np.maximum.accumulate(end)
    opens = np.ones(len(begin), dtype=np.bool_)
    opens[1:] = begin[1:] > reached[:-1]
    first = np.flatnonzero(opens)
    begin, end = begin[first], reached[np.append(first[1:] - 1, len(reached) - 1)]
    before = np.concatenate([[0], np.cumsum(end - begin)])
    place = np.searchsorted(begin, borders, side="right")
    overshoot = np.where(place > 0, np.maximum(0, end[np.maximum(place - 1, 0)] - borders), 0)
    covered: Times = np.diff(before[place] - overshoot)
    return covered
