"""The tracks of a Chrome trace: processes, threads and lanes, and slices that never cross on one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Event: TypeAlias = dict[str, object]
"""One trace event as the Chrome Trace Event Format has it.

*Source:* "Trace Event Format", the document that Perfetto's JSON importer follows.
"""

FINDINGS_PID: Final = 1
COMMUNICATORS_PID: Final = 2
FIRST_RANK_PID: Final = 10
"""Process numbers of the trace; the process's own id is in its name, since two hosts may share one."""


@dataclass(frozen=True, slots=True)
class Track:
    """A kind of track of one process; overlapping slices of it get lanes of their own."""

    sort: int
    """Smaller is higher on screen."""
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class PlacedSlices:
    """Slices of one track, in order of their starts."""

    track: Track
    rows: NDArray[np.intp]
    """The row of each, ascending: tracks are numbered in the order of the rows that need them."""
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


@dataclass(slots=True)
class _Lanes:
    ends: list[list[int]] = field(default_factory=list[list[int]])
    """By lane, the ends of the slices that are open, outermost first."""
    tids: list[int] = field(default_factory=list[int])

    def lanes_of(self, placed: PlacedSlices, *, nests: bool) -> NDArray[np.int64]:
        """The lane of each slice: the first on which it crosses no other."""
        starts, ends = placed.starts, placed.ends
        is_free = not self.ends or not self.ends[0] or self.ends[0][-1] <= starts[0]
        if not nests and is_free and np.all(starts[1:] >= np.maximum.accumulate(ends)[:-1]):  # as on a CUDA stream
            self.ends[:1] = [[int(ends[-1])]]
            return np.zeros(len(starts), np.int64)
        columns = zip(starts.tolist(), ends.tolist(), strict=True)
        return np.array([self._lane(start, end, nests=nests) for start, end in columns], np.int64)

    def _lane(self, start_ns: int, end_ns: int, *, nests: bool) -> int:
        for lane, open_ends in enumerate(self.ends):
            while open_ends and open_ends[-1] <= start_ns:
                open_ends.pop()
            if not open_ends or (nests and end_ns <= open_ends[-1]):
                open_ends.append(end_ns)
                return lane
        self.ends.append([end_ns])
        return len(self.ends) - 1


@dataclass(slots=True)
class ProcessTracks:
    """The tracks of one process of the trace; new ones are announced as metadata events."""

    pid: int
    _lanes: dict[Track, _Lanes] = field(default_factory=dict[Track, _Lanes])
    _announced: list[Event] = field(default_factory=list[Event])
    _next_tid: int = 1

    def place(self, placed: Sequence[PlacedSlices], *, nests: bool = False) -> list[NDArray[np.int64]]:
        """The threads on which these slices cross no other.

        With `nests`, a slice may lie inside an open one (as NVTX ranges do); otherwise it gets its own lane.
        """
        found: list[NDArray[np.int64]] = []
        new: list[tuple[int, int, Track, int]] = []
        for order, each in enumerate(placed):
            lanes = self._lanes.setdefault(each.track, _Lanes())
            found.append(lane_of := lanes.lanes_of(each, nests=nests))
            first = (int(each.rows[np.argmax(lane_of == lane)]) for lane in range(len(lanes.tids), len(lanes.ends)))
            new += [(row, order, each.track, lane) for lane, row in enumerate(first, start=len(lanes.tids))]
        for _, _, track, lane in sorted(new, key=lambda each: each[:2]):
            self._lanes[track].tids.append(self._announce(track, lane))
        return [np.asarray(self._lanes[each.track].tids)[lanes] for each, lanes in zip(placed, found, strict=True)]

    def announcements(self) -> list[Event]:
        """The metadata events of tracks that are new since the last call."""
        announced, self._announced = self._announced, []
        return announced

    def _announce(self, track: Track, lane: int) -> int:
        tid = self._next_tid
        self._next_tid += 1
        name = track.name if lane == 0 else f"{track.name} ({lane + 1})"
        self._announced += [
            thread_metadata("thread_name", self.pid, tid, {"name": name}),
            thread_metadata("thread_sort_index", self.pid, tid, {"sort_index": 100 * track.sort + lane}),
        ]
        return tid


def process_metadata(pid: int, name: str, sort_index: int) -> list[Event]:
    """The events that name and order a process."""
    return [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": sort_index}},
    ]


def thread_metadata(kind: str, pid: int, tid: int, args: dict[str, object]) -> Event:
    """An event that names or orders a thread."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


@dataclass(frozen=True, slots=True)
class Axis:
    """The time axis of a trace: microseconds since its origin."""

    origin_ns: int

    def at(self, time_ns: int) -> float:
        """Microseconds since the origin: the shortest decimal that is exact to the nanosecond for 100 days."""
        return (time_ns - self.origin_ns) / 1000

    def slice(self, name: str, pid: int, tid: int, start_ns: int, end_ns: int) -> Event:
        """A complete event without arguments."""
        return {
            "name": name,
            "ph": "X",
            "ts": self.at(start_ns),
            "dur": (end_ns - start_ns) / 1000,
            "pid": pid,
            "tid": tid,
        }
