"""Busy time of devices by computation: the union of kernel intervals, within bounded memory."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]

INTERVAL: Final = np.dtype(
    [("process", "<i8"), ("device", "<i8"), ("start", "<i8"), ("end", "<i8"), ("kernels", "<i8")]
)
"""Kernels of one process (globalPid) on one device that ran without a gap; times as the export prints them."""

Intervals = NDArray[np.void]

_NO_GAP: Final = 0


class BusyUnion:
    """The union of intervals per process and device; they may come in any order.

    If the union has more than `limit` intervals, the shortest gaps are filled until it has not:
    `filled_gap_ns` says up to which length. Memory is bounded by three times the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[Intervals] = []
        self._pending = 0
        self.filled_gap_ns = _NO_GAP

    def ingest_intervals(self, intervals: Intervals) -> None:
        """Adds intervals to the union."""
        part = union_of(intervals, self.filled_gap_ns)
        self._parts.append(part)
        self._pending += len(part)
        if self._pending > 2 * self._limit:
            self._parts = [self._coarsened()]
            self._pending = len(self._parts[0])

    def result(self) -> Intervals:
        """The union so far, by process, device and start."""
        self._parts = [self._coarsened()]
        self._pending = len(self._parts[0])
        return self._parts[0]

    def _coarsened(self) -> Intervals:
        united = union_of(_joined(self._parts), self.filled_gap_ns)
        if len(united) > self._limit:
            self.filled_gap_ns = _gap_to_fill(united, len(united) - self._limit)
            united = union_of(united, self.filled_gap_ns)
        return united


def union_of(intervals: Intervals, filled_gap_ns: int) -> Intervals:
    """The union of intervals, gaps up to `filled_gap_ns` filled, by process, device and start. O(n log n)."""
    if len(intervals) == 0:
        return intervals
    ordered = intervals[np.lexsort((intervals["start"], intervals["device"], intervals["process"]))]
    begins = _where_new(ordered, _reach(ordered), filled_gap_ns)
    united = ordered[begins].copy()
    united["end"] = np.maximum.reduceat(ordered["end"], begins)
    united["kernels"] = np.add.reduceat(ordered["kernels"], begins)
    return united


def _joined(parts: list[Intervals]) -> Intervals:
    return np.concatenate(parts) if parts else np.empty(0, INTERVAL)


def _new_device(ordered: Intervals) -> NDArray[np.bool_]:
    """Rows of another process or device than the row before."""
    changed = np.ones(len(ordered), np.bool_)
    changed[1:] = (ordered["process"][1:] != ordered["process"][:-1]) | (
        ordered["device"][1:] != ordered["device"][:-1]
    )
    return changed


def _reach(ordered: Intervals) -> Times:
    """The latest end up to each row, among the rows of its process and device."""
    reach: Times = ordered["end"].copy()
    firsts = np.flatnonzero(_new_device(ordered)).tolist()
    for first, after in zip(firsts, [*firsts[1:], len(ordered)], strict=True):
        np.maximum.accumulate(reach[first:after], out=reach[first:after])
    return reach


def _where_new(ordered: Intervals, reach: Times, filled_gap_ns: int) -> NDArray[np.intp]:
    """Positions of the rows that begin an interval of the union."""
    is_new = _new_device(ordered)
    is_new[1:] |= ordered["start"][1:] - reach[:-1] > filled_gap_ns
    return np.flatnonzero(is_new)


def _gap_to_fill(united: Intervals, surplus: int) -> int:
    """The gap length up to which at least `surplus` gaps must be filled; all of them if there are fewer."""
    inner = ~_new_device(united)[1:]
    gaps = (united["start"][1:] - united["end"][:-1])[inner]
    if len(gaps) == 0:
        return _NO_GAP
    which = min(surplus, len(gaps)) - 1
    return int(np.partition(gaps, which)[which])
