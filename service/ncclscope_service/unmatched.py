"""When a process was recorded, and what that means for operations that found no kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.coverage import Coverage
from ncclscope_service.pending import Outcome
from ncclscope_service.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_NEAR_NS: Final = 1_000_000_000
"""Without any word on coverage, a kernel this near says that a capture was running."""

_EDGE: Final = 16
"""Without stamps and coverage, fewer launches than this before the first or after the last kernel count as lost."""

_UNDECIDED: Final = np.dtype(
    [
        ("id", "<i8"),
        ("launch", "<i8"),
        ("track", "<i8"),
        ("logged_at_ns", "<i8"),
        ("before_ns", "<i8"),  # launch of the last matched kernel before it; NO_TIME_NS
        ("after_ns", "<i8"),  # of the next one; NO_TIME_NS while there is none
        ("is_hole", "?"),
    ]
)


@dataclass(slots=True)
class Undecided:
    """Operations that found no kernel, until it can be said whether a capture was running."""

    _rows: Columns = field(default_factory=lambda: np.empty(0, dtype=_UNDECIDED))
    _last_kernel_ns: dict[int, int] = field(default_factory=dict[int, int])

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, track: int, outcome: Outcome, times: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Takes what a thread's step left without a kernel; `times` are the launch times of those that have one."""
        matched = times != NO_TIME_NS
        if matched.any():
            mine = (self._rows["track"] == track) & (self._rows["after_ns"] == NO_TIME_NS)
            self._rows["after_ns"][mine] = int(times[matched][0])
        if not matched.all():
            self._rows = whole_rows.joined([self._rows, self._left(track, outcome, times, sizes)])
        if matched.any():
            self._last_kernel_ns[track] = int(times[matched][-1])

    def _left(self, track: int, outcome: Outcome, times: NDArray[np.int64], sizes: NDArray[np.int64]) -> Columns:
        matched = times != NO_TIME_NS
        places = np.where(matched, np.arange(len(times)), -1)
        before = np.maximum.accumulate(places)
        after = np.minimum.accumulate(np.where(matched, np.arange(len(times)), len(times))[::-1])[::-1]
        before_ns = np.where(before >= 0, times[before], self._last_kernel_ns.get(track, NO_TIME_NS))
        after_ns = np.append(times, NO_TIME_NS)[after]
        of_left = np.flatnonzero(np.repeat(~matched, sizes))
        launch_of_left = np.repeat(np.flatnonzero(~matched), sizes[~matched])
        rows = np.empty(len(of_left), dtype=_UNDECIDED)
        rows["id"], rows["track"] = outcome.ids[of_left], track
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

    def decide(
        self, coverage: Coverage, *, final: bool, before: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], NDArray[np.float32]]:
        """Operation ids, launch ids, matches and confidences of what can be said by now.

        Of all with `final`, and of operations with an id below `before`.
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
        self._rows = whole_rows.kept(rows, ~ready)
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
        for track in np.unique(rows["track"][side]).tolist():
            mine = side & (rows["track"] == track)
            edge |= mine & (np.count_nonzero(mine) <= _EDGE)
    return edge
