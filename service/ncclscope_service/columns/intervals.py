"""Intervals of time as columns: their union by group, and how much of some others they cover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Intervals, each of a group; columns of equal length, times in ns."""

    group: Integers
    start: Integers
    end: Integers

    def lengths_by_group(self, groups: int) -> Integers:
        """The sum of their lengths for each group from 0 on; a group without any has 0."""
        sums = np.zeros(groups, np.int64)
        np.add.at(sums, self.group, self.end - self.start)
        return sums


def union(spans: Spans) -> Spans:
    """The same time without overlaps, by group and start. O(n log n)."""
    if not len(spans.group):
        return spans
    order = np.lexsort((spans.start, spans.group))
    group, start, end = spans.group[order], spans.start[order], np.maximum(spans.end[order], spans.start[order])
    # One running maximum for all groups: each begins above where the one before it ended.
    is_first = np.concatenate([[True], group[1:] != group[:-1]])
    begins = np.flatnonzero(is_first)
    base = np.repeat(start[begins], np.diff(np.append(begins, len(group))))
    extent = np.maximum.reduceat(end - base, begins) + 1
    shift = np.repeat(np.cumsum(extent) - extent, np.diff(np.append(begins, len(group)))) - base
    reached = np.maximum.accumulate(end + shift)
    opens = np.concatenate([[True], (start + shift)[1:] > reached[:-1]])
    opens |= is_first
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(group)) - 1
    return Spans(group[first], start[first], reached[last] - shift[last])


@dataclass(frozen=True, slots=True)
class Coverage:
    """Intervals that do not overlap, by start."""

    start: Integers
    end: Integers

    def covered(self, begin: Integers, end: Integers) -> Integers:
        """How much of each of these intervals they cover, in ns."""
        return self._before(end) - self._before(begin)

    def _before(self, times: Integers) -> Integers:
        """How much they cover before each time."""
        if not len(self.start):
            return np.zeros(len(times), np.int64)
        whole = np.concatenate([[0], np.cumsum(self.end - self.start)])
        at = np.searchsorted(self.start, times, side="right") - 1
        inside = np.clip(times - self.start[at], 0, (self.end - self.start)[at])
        found: Integers = np.where(at < 0, 0, whole[np.maximum(at, 0)] + inside)
        return found


def covered_ns(starts: Integers, ends: Integers, borders: Integers) -> Integers:
    """How much of each stretch between neighbouring borders the intervals cover; what they share counts once.

    `borders` ascend; one stretch fewer comes back. Intervals may overlap and come in any order; one that ends before it
    starts covers nothing.
    """
    together = union(Spans(np.zeros(len(starts), np.int64), starts, ends))
    return Coverage(together.start, together.end).covered(borders[:-1], borders[1:])
