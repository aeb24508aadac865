"""When a process was recorded, and what that means for operations without a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.thread_backlog import Outcome
from ncclscope_service.columns import row_ops
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_LONGER: Final = 4
"""A recording begins idle if the pause before the first kernel is this many times longer than any after it."""

_AS_LONG: Final = 5
_LONG_ENOUGH_NS: Final = 10_000_000_000
"""Later pauses are searched for this many times the first one, at most this long."""

_LEAST_RECORDED: Final = 10
"""What was recorded before a hole that may be overlooked is this many times longer than the hole."""

INTERVALS_KEPT: Final = 4096
"""Captures of a process that a running service remembers: two weeks of them, one every five minutes."""

_NEAR_NS: Final = 1_000_000_000
"""If coverage is unknown, a kernel this near shows that a capture was running."""

_EDGE: Final = 16
"""Without stamps and coverage, fewer launches than this before the first or after the last kernel count as lost."""

_UNDECIDED: Final = np.dtype(
    [
        ("id", "<i8"),
        ("launch", "<i8"),
        ("tid", "<i8"),
        ("logged_at_ns", "<i8"),
        ("before_ns", "<i8"),  # launch of the last matched kernel before it; NO_TIME_NS
        ("after_ns", "<i8"),  # of the next one; NO_TIME_NS while there is none
        ("is_hole", "?"),
    ]
)


@dataclass(slots=True)
class Coverage:
    """Intervals of the host clock in which a process was recorded, merged if they touch."""

    begins: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ends: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    is_of_profiler: bool = False
    """A profiler that is switched on in a running program made any of it: what it recorded first was not the first."""

    def __len__(self) -> int:
        return len(self.begins)

    def add(self, begin_ns: int, end_ns: int, *, is_of_profiler: bool = False) -> None:
        """Adds one interval; order does not matter."""
        self.is_of_profiler |= is_of_profiler
        if end_ns < begin_ns:
            return
        begins = np.append(self.begins, begin_ns)
        ends = np.append(self.ends, end_ns)
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        starts = np.concatenate([[True], begins[1:] > ends[:-1]])
        self.begins = begins[starts]
        self.ends = ends[np.append(starts[1:], True)]

    def forget_old(self) -> None:
        """Keeps the newest INTERVALS_KEPT."""
        self.begins, self.ends = self.begins[-INTERVALS_KEPT:], self.ends[-INTERVALS_KEPT:]

    def interval_of(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of the interval that holds each time; NO_NUMBER if none does."""
        if len(self.begins) == 0:
            return np.full(len(times), NO_NUMBER, dtype=np.int64)
        place = np.searchsorted(self.begins, times, side="right") - 1
        inside = (place >= 0) & (times <= self.ends[np.maximum(place, 0)])
        return np.where(inside, place, NO_NUMBER).astype(np.int64)

    @property
    def known_until_ns(self) -> int:
        """The end of the last interval; NO_TIME_NS without any."""
        return int(self.ends[-1]) if len(self.ends) else NO_TIME_NS

    def begins_idle(self, times: NDArray[np.int64]) -> bool:
        """Whether the recording began long before the first of these times, of all that was recorded then.

        It did if no pause for as long after it is nearly as long as the one before it: a recording that begins in
        the middle of a program meets it working. One of PyTorch's profiler meets a pause, that of its own start.
        """
        if self.is_of_profiler or len(self.begins) == 0 or len(times) == 0:
            return False
        times = np.sort(times)
        first = int(times[0])
        idle = first - int(self.begins[0])
        until = first + min(_AS_LONG * idle, _LONG_ENOUGH_NS)
        if idle <= 0 or self.ends[0] < until:
            return False
        pauses = np.diff(times[times <= until])
        return bool(len(pauses) > 0 and pauses.max() * _LONGER < idle)

    def stretch_of(self, times: NDArray[np.int64], tolerance_ns: int) -> NDArray[np.int64]:
        """A number that is equal for times with no unrecorded time between them.

        Holes of `tolerance_ns` do not count, if far more than that was recorded before them.
        """
        if len(self.begins) == 0:
            return np.zeros(len(times), dtype=np.int64)
        lost, recorded = self.begins[1:] - self.ends[:-1], self.ends[:-1] - self.begins[:-1]
        is_hole = lost > np.minimum(tolerance_ns, recorded / _LEAST_RECORDED)
        return np.searchsorted(self.ends[:-1][is_hole], times, side="left").astype(np.int64)


@dataclass(slots=True)
class UnmatchedBacklog:
    """Operations without a kernel, until it is known whether a capture was running."""

    _rows: Columns = field(default_factory=lambda: np.empty(0, dtype=_UNDECIDED))
    _last_kernel_ns: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, tid: int, outcome: Outcome, times: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Takes what a thread's step left without a kernel; `times` are the launch times of those that have one."""
        matched = times != NO_TIME_NS
        if matched.any():
            mine = (self._rows["tid"] == tid) & (self._rows["after_ns"] == NO_TIME_NS)
            self._rows["after_ns"][mine] = int(times[matched][0])
        if not matched.all():
            self._rows = row_ops.concat([self._rows, self._left(tid, outcome, times, sizes)])
        if matched.any():
            self._last_kernel_ns[tid] = int(times[matched][-1])

    def _left(self, tid: int, outcome: Outcome, times: NDArray[np.int64], sizes: NDArray[np.int64]) -> Columns:
        matched = times != NO_TIME_NS
        places = np.where(matched, np.arange(len(times)), -1)
        before = np.maximum.accumulate(places)
        after = np.minimum.accumulate(np.where(matched, np.arange(len(times)), len(times))[::-1])[::-1]
        before_ns = np.where(before >= 0, times[before], self._last_kernel_ns.get(tid, NO_TIME_NS))
        after_ns = np.append(times, NO_TIME_NS)[after]
        of_left = np.flatnonzero(np.repeat(~matched, sizes))
        launch_of_left = np.repeat(np.flatnonzero(~matched), sizes[~matched])
        rows = np.empty(len(of_left), dtype=_UNDECIDED)
        rows["id"], rows["tid"] = outcome.ids[of_left], tid
        columns = {
            "launch": outcome.launches["first_op"],
            "logged_at_ns": outcome.launches["logged_at_ns"],
            "before_ns": before_ns,
            "after_ns": after_ns,
            "is_hole": outcome.is_hole,
        }
        for name, values in columns.items():
            rows[name] = values[launch_of_left]
        return rows

    def drain_decided(
        self, coverage: Coverage, *, final: bool, before: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], NDArray[np.float32]]:
        """Operation ids, launch ids, matches and confidences of what is known by now.

        With `final` all; and all operations with an id below `before`.
        """
        rows = self._rows
        if not len(rows):
            none = np.empty(0, np.int64)
            return none, none, np.empty(0, np.uint8), np.empty(0, np.float32)
        stamped = rows["logged_at_ns"] != NO_TIME_NS
        followed = rows["after_ns"] != NO_TIME_NS
        if len(coverage):
            known = np.where(stamped, rows["logged_at_ns"] <= coverage.known_until_ns, followed)
            was_recorded = self._by_coverage(rows, coverage)
        else:
            known = followed
            was_recorded = self._by_neighbours(rows)
        ready = known | final | (rows["id"] < before)
        self._rows = row_ops.filter_rows(rows, ~ready)
        matches = np.where(was_recorded[ready], int(Match.UNMATCHED), int(Match.NOT_COVERED)).astype(np.uint8)
        sure = np.where(stamped[ready] & bool(len(coverage)), 0.95, 0.6).astype(np.float32)
        return rows["id"][ready], rows["launch"][ready], matches, sure

    @staticmethod
    def _by_coverage(rows: Columns, coverage: Coverage) -> NDArray[np.bool_]:
        within: NDArray[np.bool_] = coverage.interval_of(rows["logged_at_ns"]) != NO_NUMBER
        stamped = rows["logged_at_ns"] != NO_TIME_NS
        if stamped.all():
            return within
        before, after = coverage.interval_of(rows["before_ns"]), coverage.interval_of(rows["after_ns"])
        between = (before != NO_NUMBER) & (before == after)
        unstamped = (between | _at_edge(rows)) & ~rows["is_hole"]
        recorded: NDArray[np.bool_] = np.where(stamped, within, unstamped)
        return recorded

    @staticmethod
    def _by_neighbours(rows: Columns) -> NDArray[np.bool_]:
        stamp = rows["logged_at_ns"]
        stamped = stamp != NO_TIME_NS
        since = np.where(rows["before_ns"] != NO_TIME_NS, stamp - rows["before_ns"], _NEAR_NS + 1)
        ahead = np.where(rows["after_ns"] != NO_TIME_NS, rows["after_ns"] - stamp, _NEAR_NS + 1)
        near = np.minimum(np.abs(since), np.abs(ahead)) <= _NEAR_NS
        between = (rows["before_ns"] != NO_TIME_NS) & (rows["after_ns"] != NO_TIME_NS)
        return np.where(stamped, near, (between | _at_edge(rows)) & ~rows["is_hole"])


def _at_edge(rows: Columns) -> NDArray[np.bool_]:
    """Few launches before the first kernel of their thread or after its last: lost there rather than not recorded."""
    first = (rows["before_ns"] == NO_TIME_NS) & (rows["after_ns"] != NO_TIME_NS)
    last = (rows["before_ns"] != NO_TIME_NS) & (rows["after_ns"] == NO_TIME_NS)
    edge = np.zeros(len(rows), dtype=bool)
    for side in (first, last):
        for tid in np.unique(rows["tid"][side]).tolist():
            mine = side & (rows["tid"] == tid)
            edge |= mine & (np.count_nonzero(mine) <= _EDGE)
    return edge
