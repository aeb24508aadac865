"""Kernels of a process, until all that were launched before them have come.

Exports are sorted by start, so a kernel that queued long comes long after its launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_service import whole_rows
from ncclscope_service.align_rows import ALIGN_KERNEL, launch_times
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

FAR_FUTURE_NS: Final = 2**62
"""After every launch."""


@dataclass(slots=True)
class KernelQueue:
    """Kernels (ALIGN_KERNEL) in the order of their starts, given out in that of their launches."""

    _waiting: list[Columns] = field(default_factory=list[Columns])
    _newest_start_ns: int = NO_TIME_NS
    _longest_queue_ns: int = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def feed(self, rows: Columns) -> None:
        """Takes further kernels, in any order."""
        launched = rows["launch_start_ns"] != NO_TIME_NS
        if launched.any():
            queue = int((rows["start_ns"] - rows["launch_start_ns"])[launched].max())
            self._longest_queue_ns = max(self._longest_queue_ns, queue)
        self._newest_start_ns = max(self._newest_start_ns, int(rows["start_ns"].max()))
        self._waiting.append(rows)

    def known_until(self, *, final: bool) -> int:
        """The launch time before which all kernels have been fed: half as much again as the longest queue is left."""
        if final:
            return FAR_FUTURE_NS
        if self._newest_start_ns == NO_TIME_NS:
            return NO_TIME_NS
        return self._newest_start_ns - self._longest_queue_ns * 3 // 2 - 1

    def take(self, until_ns: int) -> Columns:
        """The kernels that were launched until then, and leave the queue."""
        if not self._waiting:
            return np.empty(0, dtype=ALIGN_KERNEL)
        rows = whole_rows.joined(self._waiting)
        is_known = launch_times(rows) <= until_ns
        if is_known.all():
            self._waiting = []
            return rows
        self._waiting = [whole_rows.kept(rows, ~is_known)]
        return whole_rows.kept(rows, is_known)
