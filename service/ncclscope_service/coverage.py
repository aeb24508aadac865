"""When a process was recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_LONGER: Final = 4
"""A recording begins idle if the pause before the first kernel is so many times longer than any after it."""

_AS_LONG: Final = 5
_LONG_ENOUGH_NS: Final = 10_000_000_000
"""For so many times that pause, or this long, others are looked at."""

INTERVALS_KEPT: Final = 4096
"""Captures of a process that a running service remembers: two weeks of them, one every five minutes."""


@dataclass(slots=True)
class Coverage:
    """Intervals of the host clock in which a process was recorded, merged where they touch."""

    begins: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ends: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.begins)

    def add(self, begin_ns: int, end_ns: int) -> None:
        """Takes one interval; order does not matter."""
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
        """Index of the interval that holds each time; NO_NUMBER where none does."""
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
        the middle of a program meets it working.
        """
        if len(self.begins) == 0 or len(times) == 0:
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
        """A number that is equal for times with no unrecorded time between them, but for holes of `tolerance_ns`."""
        if len(self.begins) == 0:
            return np.zeros(len(times), dtype=np.int64)
        is_hole = self.begins[1:] - self.ends[:-1] > tolerance_ns
        return np.searchsorted(self.ends[:-1][is_hole], times, side="left").astype(np.int64)
