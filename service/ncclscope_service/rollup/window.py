"""The last minutes of the store as columns and as sums over buckets of time.

Everything is vectorised and bounded: the newest rows up to a limit, a fixed number of buckets. At more
operations than the limit the older buckets are empty, which shows as "not recorded" and never as zero.

`BucketSums` and `BucketSpans` add up by bucket and by group as rows come. A bucket takes what it is given whenever it
comes, and is forgotten as a whole; one in which nothing happened takes no memory, any other 8 bytes for each group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import group_by
from ncclscope_service.columns.table import Table
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MAX_OPERATIONS: Final = 300_000
"""Operations looked at for one answer about single operations: keeps it near 0.1 s of one core."""

MAX_COLLECTIVES: Final = 200_000

BUCKET_NS: Final = 5_000_000_000
BUCKETS: Final = 60
"""The window that is shown: five minutes, in steps of five seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of time up to now, cut into equal buckets."""

    begin_ns: int
    bucket_ns: int
    buckets: int

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentOperations:
    """The newest operations as plain columns of equal length, in the store's order."""

    process: Int64s
    communicator: Int64s
    """NO_NUMBER if unknown."""
    rank: Int64s
    """Global; NO_NUMBER if unknown."""
    op: Int64s
    message_bytes: Int64s
    kernel_ns: Int64s
    """Start of the kernel on the reference clock, else on the host's; NO_TIME_NS without a kernel."""
    duration_ns: Int64s
    """0 without a kernel."""
    wait_ns: Int64s
    starts_launch: Bools
    """False for a row that follows another of the same launch: their kernel is counted once."""
    has_wait: Bools
    """Has a kernel and a known wait, and is the first row of its launch."""
    transfer_ns: Int64s
    busbw: Floats
    match: Int64s


_SHOWN: Final = (
    "process", "member", "template", "message_bytes", "match", "launch", "start_ns", "end_ns", "censored",
    "start_true_ns", "wait_ns", "transfer_ns", "busbw",
)  # fmt: skip


def recent_operations(store: Store) -> RecentOperations:
    """The newest operations of the store, MAX_OPERATIONS at most."""
    rows = _newest(store.operations, MAX_OPERATIONS, *_SHOWN)
    templates = store.operation_templates.rows
    start, end = rows["start_ns"].astype(np.int64), rows["end_ns"].astype(np.int64)
    has_kernel = (start != NO_TIME_NS) & (end != NO_TIME_NS) & ~rows["censored"]
    duration = np.where(has_kernel, end - start, 0)
    wait = rows["wait_ns"].astype(np.int64)
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = starts_launch(rows["launch"][:-1], rows["launch"][1:])
    return RecentOperations(
        process=rows["process"].astype(np.int64),
        communicator=_of_member([each.communicator for each in store.members], rows["member"]),
        rank=_of_member(
            [NO_NUMBER if each.global_rank is None else each.global_rank for each in store.members], rows["member"]
        ),
        op=templates["op"][rows["template"]].astype(np.int64),
        message_bytes=rows["message_bytes"].astype(np.int64),
        kernel_ns=first_known(rows["start_true_ns"], start),
        duration_ns=duration,
        wait_ns=wait,
        starts_launch=is_first,
        has_wait=has_kernel & (wait >= 0) & (duration > 0) & is_first,
        transfer_ns=rows["transfer_ns"].astype(np.int64),
        busbw=rows["busbw"].astype(np.float64),
        match=rows["match"].astype(np.int64),
    )


def recent_collectives(store: Store) -> Columns:
    """The newest joined collectives of the store, MAX_COLLECTIVES at most."""
    return _newest(store.collectives, MAX_COLLECTIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthPoints:
    """One point per launch whose bus bandwidth is known."""

    communicator: Int64s
    op: Int64s
    size_class: Int64s
    time_ns: Int64s
    busbw: Floats
    transfer_ns: Floats


def bandwidth_points(collectives: Columns) -> BandwidthPoints:
    """Every launch that was joined and measured."""
    joined = collectives[np.isfinite(collectives["busbw"]) & (collectives["transfer_ns"] > 0)]
    return BandwidthPoints(
        communicator=joined["communicator"].astype(np.int64),
        op=joined["op"].astype(np.int64),
        size_class=joined["size_class"].astype(np.int64),
        time_ns=joined["end_true_ns"].astype(np.int64),
        busbw=joined["busbw"].astype(np.float64),
        transfer_ns=joined["transfer_ns"].astype(np.float64),
    )


def ratio_by_bucket(
    groups: Int64s, times_ns: Int64s, part: Floats | Int64s, whole: Floats | Int64s, *, count: int, window: Window
) -> Floats:
    """Sum of `part` over sum of `whole`, shape (count, buckets); NaN if there is nothing.

    `groups` says the row of each value; values of groups outside 0..count-1 are left out.
    """
    chosen = (groups >= 0) & (groups < count) & window.holds(times_ns)
    cells = groups[chosen] * window.buckets + window.bucket_of(times_ns[chosen])
    amount = count * window.buckets
    parts = np.bincount(cells, weights=part[chosen], minlength=amount)
    wholes = np.bincount(cells, weights=whole[chosen], minlength=amount)
    ratio: Floats = np.divide(parts, wholes, out=np.full(amount, np.nan), where=wholes > 0)
    return ratio.reshape(count, window.buckets)


def _newest(table: Table, limit: int, *names: str) -> Columns:
    return table.rows.take(np.arange(max(0, len(table) - limit), len(table)), *names)


def _of_member(values: list[int], members: NDArray[np.int32]) -> Int64s:
    """The value of each row's member; NO_NUMBER if the row has none."""
    lookup = np.array([*values, NO_NUMBER], np.int64)
    return lookup[np.where(members < 0, len(values), members)]


def first_known(*columns: NDArray[np.int64]) -> Int64s:
    """The first of these times that is known, row by row; NO_TIME_NS if none is."""
    times = columns[0].astype(np.int64)
    for column in columns[1:]:
        times = np.where(times == NO_TIME_NS, column, times)
    return times


def starts_launch(before: NDArray[np.int64], launches: NDArray[np.int64]) -> Bools:
    """False for a row that follows one of the same launch: a kernel is counted once. `before`: of the rows before."""
    starts: Bools = (launches != before) | (launches < 0)
    return starts


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
        for bucket, mine in group_by(times_ns // BUCKET_NS):
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
