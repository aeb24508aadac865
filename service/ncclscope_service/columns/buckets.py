"""Sums of groups by buckets of time, added up as rows come.

A bucket takes what it is given whenever it comes, and is forgotten as a whole; one in which nothing happened takes no
memory, any other 8 bytes for each group. `LastingSums` forgets nothing: its buckets grow longer instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import accumulate, distinct, distinct_values, group_by

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

BUCKET_NS: Final = 5_000_000_000
BUCKETS: Final = 60
"""The window that is shown: five minutes, in steps of five seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of time up to now, cut into equal buckets."""

    begin_ns: int
    bucket_ns: int
    buckets: int
    job: str | None = None
    """The job whose whole time it is; None for the last minutes."""

    @property
    def end_ns(self) -> int:
        """The end of the last bucket, which is still filling."""
        return self.begin_ns + self.bucket_ns * self.buckets

    @property
    def bucket_seconds(self) -> float:
        """The length of a bucket in seconds."""
        return self.bucket_ns * 1e-9

    def bucket_of(self, times_ns: Int64s) -> Int64s:
        """The bucket of each time; meaningless outside the window (see `holds`)."""
        return (times_ns - self.begin_ns) // self.bucket_ns

    def holds(self, times_ns: Int64s) -> Bools:
        """Which of these times lie in the window; unknown times do not."""
        return (times_ns >= self.begin_ns) & (times_ns < self.end_ns)


def window_until(now_ns: int, *, bucket_ns: int = BUCKET_NS, buckets: int = BUCKETS) -> Window:
    """The buckets up to and including now; cut at multiples of their length, so that they stand still."""
    end_ns = (now_ns // bucket_ns + 1) * bucket_ns
    return Window(begin_ns=end_ns - bucket_ns * buckets, bucket_ns=bucket_ns, buckets=buckets)


_NEVER: Final = np.iinfo(np.int64).max
_LEAST: Final = 8
"""Groups that a new bucket has room for. Jobs of a few ranks keep hundreds of buckets."""


class BucketSums:
    """Some sums of each group in each bucket. They are exact for whole numbers up to 2**53."""

    bucket_ns: int = BUCKET_NS
    """Length of a bucket; buckets begin at multiples of it."""

    def __init__(self, columns: int) -> None:
        self.bucket_ns = BUCKET_NS
        self._columns = columns
        self._sums: dict[int, Floats] = {}
        """By the number of the bucket since 1970, (columns, groups or more)."""

    def add(self, times_ns: Int64s, of: Int64s, *values: Int64s | Floats) -> None:
        """Adds a value of each column at each of these times to the group that it is of; groups are 0 or more."""
        assert len(values) == self._columns, "as many values as columns"
        for bucket, mine in group_by(times_ns // self.bucket_ns):
            whose = of[mine]
            sums = self._of(bucket, int(whose.max()) + 1)
            for sum_of, value in zip(sums, values, strict=True):
                accumulate(np.add, sum_of, whose, value[mine])

    def begins(self) -> dict[int, Floats]:
        """The sums of all buckets that hold something, (columns, groups or more), by when the bucket begins."""
        return {bucket * self.bucket_ns: sums for bucket, sums in self._sums.items()}

    @property
    def buckets(self) -> Set[int]:
        """Numbers of the buckets that hold something, since 1970."""
        return self._sums.keys()

    @property
    def first_ns(self) -> int | None:
        """When the first bucket that holds something begins; None if none does."""
        return min(self._sums) * self.bucket_ns if self._sums else None

    def keep(self, window: Window) -> list[tuple[int, Floats]]:
        """Forgets the buckets before the window, and gives when each began with its sums, (columns, groups)."""
        first = window.begin_ns // self.bucket_ns
        forgotten = sorted(each for each in self._sums if each < first)
        return [(bucket * self.bucket_ns, self._sums.pop(bucket)) for bucket in forgotten]

    def double(self) -> None:
        """Makes one bucket of every two."""
        halves, self._sums = self._sums, {}
        self.bucket_ns *= 2
        for bucket in sorted(halves):
            sums = halves[bucket]
            self._of(bucket // 2, sums.shape[1])[:, : sums.shape[1]] += sums

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
        assert window.bucket_ns % self.bucket_ns == 0, "a window of other buckets"
        each, first = window.bucket_ns // self.bucket_ns, window.begin_ns // self.bucket_ns
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


MOST_BUCKETS: Final = 256
MOST_CELLS: Final = 1 << 19
"""Buckets times groups: with more than 2,048 groups there are fewer buckets, though not fewer than"""
LEAST_BUCKETS: Final = 32


class LastingSums:
    """Some sums of each group since the start, in a bounded number of buckets: where there would be more, they become
    twice as long. Groups are any numbers.
    """

    def __init__(self, columns: int) -> None:
        self._sums = BucketSums(columns)
        self._seats: dict[int, int] = {}
        """Place of each group in the sums."""

    @property
    def bucket_ns(self) -> int:
        """Length of a bucket now."""
        return self._sums.bucket_ns

    @property
    def first_ns(self) -> int | None:
        """When the first bucket that holds something begins; None if none does."""
        return self._sums.first_ns

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LastingSums) and self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]  # it grows

    def begins(self) -> dict[int, Floats]:
        """The sums of all buckets that hold something, (columns, places of groups), by when the bucket begins."""
        return self._sums.begins()

    def _content(self) -> dict[tuple[int, int], list[float]]:
        """By group and when its bucket begins, what is not 0."""
        return {
            (group, begin_ns): sums[:, seat].tolist()
            for begin_ns, sums in self.begins().items()
            for group, seat in self._seats.items()
            if seat < sums.shape[1] and sums[:, seat].any()
        }

    @property
    def groups(self) -> Int64s:
        """All groups that something was added to."""
        return np.fromiter(self._seats, np.int64, len(self._seats))

    def add(self, times_ns: Int64s, of: Int64s, *values: Int64s | Floats) -> None:
        """Adds a value of each column at each of these times to the group that it is of."""
        if not len(times_ns):
            return
        found, inverse = distinct(of)
        seats = np.array([self._seats.setdefault(each, len(self._seats)) for each in found.tolist()], np.int64)
        most = max(LEAST_BUCKETS, min(MOST_BUCKETS, MOST_CELLS // len(self._seats)))
        while len(self._sums.buckets | set(distinct_values(times_ns // self.bucket_ns))) > most:
            self._sums.double()
        self._sums.add(times_ns, seats[inverse], *values)

    def whole(self, window: Window, chosen: Int64s) -> Floats:
        """The sums of the chosen groups over the window; shape (columns, chosen)."""
        seats = self._seats_of(chosen)
        sums = self._sums.whole(window, len(self._seats))
        found = np.zeros((len(sums), len(chosen)))
        found[:, seats >= 0] = sums[:, seats[seats >= 0]]
        return found

    def by_bucket(self, column: int, window: Window, chosen: Int64s, into: Int64s, count: int) -> Floats:
        """The sums of the chosen groups, each added to a row of `into`; shape (count, buckets of the window)."""
        seats = self._seats_of(chosen)
        known = seats >= 0
        return self._sums.by_bucket(column, window, seats[known], into[known], count)

    def _seats_of(self, groups: Int64s) -> Int64s:
        return np.array([self._seats.get(each, -1) for each in groups.tolist()], np.int64)


class BucketSpans:
    """From when to when something happened of each group, by bucket."""

    def __init__(self) -> None:
        self._spans: dict[int, NDArray[np.int64]] = {}
        """By the number of the bucket, (first and last, groups or more)."""

    def add(self, times_ns: Int64s, of: Int64s) -> None:
        """Something happened of these groups at these times."""
        for bucket, mine in group_by(times_ns // BUCKET_NS):
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
