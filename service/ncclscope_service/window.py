"""The last minutes of the store as columns and as sums over buckets of time.

Everything is vectorised and bounded: the newest rows up to a limit, a fixed number of buckets. At more
operations than the limit the older buckets are empty, which shows as "not recorded" and never as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.rows import SIZE_CLASS_BOUNDS
from ncclscope_service.store import Store, Table
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
"""What is shown of the last minutes: five of them, in steps of five seconds."""


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
    """NO_NUMBER where not known."""
    rank: Int64s
    """Global; NO_NUMBER where not known."""
    op: Int64s
    size_class: Int64s
    message_bytes: Int64s
    logged_ns: Int64s
    """When it was logged, else when its line was read, else when its kernel started: for rates, not for measures."""
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


def recent_operations(store: Store) -> RecentOperations:
    """The newest operations of the store, MAX_OPERATIONS at most."""
    rows = _newest(store.operations, MAX_OPERATIONS)
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
        size_class=size_classes(rows["message_bytes"]),
        message_bytes=rows["message_bytes"].astype(np.int64),
        logged_ns=first_known(rows["logged_at_ns"], rows["observed_at_ns"], rows["start_true_ns"], start),
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


def size_classes(message_bytes: NDArray[np.int64]) -> Int64s:
    """The size class of each message size; the last class where the size is not known."""
    unsigned = np.where(message_bytes < 0, 2**62, message_bytes)
    return np.searchsorted(SIZE_CLASS_BOUNDS, unsigned, side="left").astype(np.int64)


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
    """Sum of `part` over sum of `whole`, shape (count, buckets); NaN where there is nothing.

    `groups` says the row of each value; values of groups outside 0..count-1 are left out.
    """
    chosen = (groups >= 0) & (groups < count) & window.holds(times_ns)
    cells = groups[chosen] * window.buckets + window.bucket_of(times_ns[chosen])
    amount = count * window.buckets
    parts = np.bincount(cells, weights=part[chosen], minlength=amount)
    wholes = np.bincount(cells, weights=whole[chosen], minlength=amount)
    ratio: Floats = np.divide(parts, wholes, out=np.full(amount, np.nan), where=wholes > 0)
    return ratio.reshape(count, window.buckets)


def _newest(table: Table, limit: int) -> Columns:
    return table.rows[max(0, len(table) - limit) :]


def _of_member(values: list[int], members: NDArray[np.int32]) -> Int64s:
    """The value of each row's member; NO_NUMBER where the row has none."""
    lookup = np.array([*values, NO_NUMBER], np.int64)
    return lookup[np.where(members < 0, len(values), members)]


def first_known(*columns: NDArray[np.int64]) -> Int64s:
    """The first of these times that is known, row by row; NO_TIME_NS where none is."""
    times = columns[0].astype(np.int64)
    for column in columns[1:]:
        times = np.where(times == NO_TIME_NS, column, times)
    return times


def starts_launch(before: NDArray[np.int64], launches: NDArray[np.int64]) -> Bools:
    """False for a row that follows one of the same launch: a kernel is counted once. `before`: of the rows before."""
    starts: Bools = (launches != before) | (launches < 0)
    return starts
