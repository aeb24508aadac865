"""Sums by bucket of time and by group: what the last minutes come to, without looking at their rows again.

A bucket takes what it is given whenever it comes, and is forgotten as a whole. Groups are small integers (a process, a
member); a bucket in which nothing happened takes no memory, any other 8 bytes for each group and sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import groups as positions_by
from ncclscope_service.window import BUCKET_NS, Floats, Int64s, Window

_NEVER: Final = np.iinfo(np.int64).max
_LEAST: Final = 64


class BucketSums:
    """Some sums of each group in each bucket of BUCKET_NS. They are exact for whole numbers up to 2**53."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._sums: dict[int, Floats] = {}
        """By the number of the bucket since 1970, (columns, groups or more)."""

    def add(self, times_ns: Int64s, of: Int64s, *values: Int64s | Floats) -> None:
        """Adds a value of each column at each of these times to the group that it is of; groups are 0 or more."""
        assert len(values) == self._columns, "as many values as columns"
        for bucket, mine in positions_by(times_ns // BUCKET_NS):
            whose = of[mine]
            sums = self._of(bucket, int(whose.max()) + 1)
            for sum_of, value in zip(sums, values, strict=True):
                np.add.at(sum_of, whose, value[mine])

    def keep(self, window: Window) -> None:
        """Forgets the buckets before the window."""
        first = window.begin_ns // BUCKET_NS
        for bucket in [each for each in self._sums if each < first]:
            del self._sums[bucket]

    def whole(self, window: Window, count: int) -> Floats:
        """The sums of each of the first `count` groups over the window; shape (columns, count)."""
        found = np.zeros((self._columns, count))
        for _, sums in self._inside(window):
            amount = min(count, sums.shape[1])
            found[:, :amount] += sums[:, :amount]
        return found

    def by_bucket(self, column: int, window: Window, chosen: Int64s, into: Int64s, count: int) -> Floats:
        """The sums of the chosen groups, each added to a row of `into`; shape (count, buckets of the window)."""
        found = np.zeros((window.buckets, count))
        for place, sums in self._inside(window):
            known = chosen < sums.shape[1]
            of, rows = (chosen, into) if known.all() else (chosen[known], into[known])
            found[place] = np.bincount(rows, weights=sums[column, of], minlength=count)
        return found.T

    def _inside(self, window: Window) -> Iterator[tuple[int, Floats]]:
        """Buckets of the window with their places in it."""
        assert window.bucket_ns % BUCKET_NS == 0, "a window of other buckets"
        each, first = window.bucket_ns // BUCKET_NS, window.begin_ns // BUCKET_NS
        for bucket in sorted(self._sums):
            if 0 <= bucket - first < each * window.buckets:
                yield (bucket - first) // each, self._sums[bucket]

    def _of(self, bucket: int, groups: int) -> Floats:
        sums = self._sums.get(bucket)
        if sums is None:
            sums = self._sums[bucket] = np.zeros((self._columns, max(_LEAST, groups)))
        elif sums.shape[1] < groups:
            grown = np.zeros((self._columns, max(groups, sums.shape[1] * 3 // 2)))
            grown[:, : sums.shape[1]] = sums
            sums = self._sums[bucket] = grown
        return sums


class BucketSpans:
    """From when to when something happened of each group, by bucket."""

    def __init__(self) -> None:
        self._spans: dict[int, NDArray[np.int64]] = {}
        """By the number of the bucket, (first and last, groups or more)."""

    def add(self, times_ns: Int64s, of: Int64s) -> None:
        """Something happened of these groups at these times."""
        for bucket, mine in positions_by(times_ns // BUCKET_NS):
            whose = of[mine]
            first, last = self._of(bucket, int(whose.max()) + 1)
            np.minimum.at(first, whose, times_ns[mine])
            np.maximum.at(last, whose, times_ns[mine])

    def keep(self, window: Window) -> None:
        """Forgets the buckets before the window."""
        for bucket in [each for each in self._spans if each < window.begin_ns // BUCKET_NS]:
            del self._spans[bucket]

    def within(self, window: Window, count: int) -> tuple[Int64s, Int64s]:
        """First and last time of each of the first `count` groups in the window; the first is later without any."""
        first, last = np.full(count, _NEVER), np.full(count, -_NEVER)
        for bucket, spans in self._spans.items():
            if window.begin_ns <= bucket * BUCKET_NS < window.end_ns:
                amount = min(count, spans.shape[1])
                first[:amount] = np.minimum(first[:amount], spans[0, :amount])
                last[:amount] = np.maximum(last[:amount], spans[1, :amount])
        return first, last

    def _of(self, bucket: int, groups: int) -> NDArray[np.int64]:
        spans = self._spans.get(bucket)
        if spans is None or spans.shape[1] < groups:
            grown = np.empty((2, max(_LEAST, groups * 3 // 2)), np.int64)
            grown[0], grown[1] = _NEVER, -_NEVER
            if spans is not None:
                grown[:, : spans.shape[1]] = spans
            spans = self._spans[bucket] = grown
        return spans
