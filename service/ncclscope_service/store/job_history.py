"""The history of a job for its charts: sums since its start, in a bounded number of buckets of time.

Sums of the last minutes (`rollup.recent_sums`) come here bucket by bucket as the minutes pass, and time that is lost to
ranks (`detect.lost_time_history`) as its steps end. A job of 64 ranks takes a megabyte or two, whatever its length.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ncclscope_service.columns.buckets import MOST_BUCKETS, LastingSums, Window
from ncclscope_wire.terms import NO_TIME_NS

LOST: Final = 0
STEPS: Final = 1
"""Columns of `JobHistory.lost_time`: ns that others lost to a rank, and in how many steps that was measured."""


@dataclass(slots=True)
class JobHistory:
    """One job since its start."""

    bytes: LastingSums = field(default_factory=partial(LastingSums, 1))
    """Logged, by communicator."""
    waits: LastingSums = field(default_factory=partial(LastingSums, 2))
    """By member, columns as in `RecentSums.waits`."""
    bandwidths: LastingSums = field(default_factory=partial(LastingSums, 2))
    """By `recent_sums.series_key`, columns as in `RecentSums.bandwidths`."""
    lost_time: LastingSums = field(default_factory=partial(LastingSums, 2))
    """By global rank."""
    is_lost_per_step: bool = False
    """Else per second, as long as the length of a step is not known; what was known by then is dropped."""
    lost_until_ns: int = NO_TIME_NS
    """Steps that ended before are in `lost_time`."""

    @property
    def first_ns(self) -> int | None:
        """When the first bucket begins; None while there is none."""
        begins = [each.first_ns for each in self._sums if each.first_ns is not None]
        return min(begins, default=None)

    def window(self, job: str, begin_ns: int, now_ns: int, *, most: int = MOST_BUCKETS) -> Window:
        """Equal buckets from `begin_ns` to now, at most so many, of a length into which every sum fits."""
        bucket_ns = max(each.bucket_ns for each in self._sums)
        while now_ns // bucket_ns - begin_ns // bucket_ns >= most:
            bucket_ns *= 2
        first = begin_ns // bucket_ns
        return Window(
            begin_ns=first * bucket_ns, bucket_ns=bucket_ns, buckets=max(1, now_ns // bucket_ns - first + 1), job=job
        )

    @property
    def _sums(self) -> tuple[LastingSums, ...]:
        return self.bytes, self.waits, self.bandwidths, self.lost_time


JobHistories = defaultdict[str, JobHistory]
"""By job."""
