"""Which groups have series of their own, so that a scrape stays below `metric_table.MAX_SERIES`.

First come, first served, and for good: a group that is summed as "other" today and has its own series tomorrow would
make two counters jump. Only the series of a job that has been silent for an hour make room, all at once: they are then
not exposed at all, neither apart nor summed, and come back with their totals where the job does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.metric_table import MAX_COMMUNICATORS, MAX_GROUP_SERIES

SILENT_NS: Final = 3_600_000_000_000
"""A job of which nothing came for so long has no series of its groups."""

_BITS: Final = 16
"""Of the lowest bits of a key of series: operation and size class; the communicator is above."""


@dataclass(slots=True)
class _Activity:
    operations: int
    changed_ns: int


class SeriesBudget:
    """Remembers who was let in. Memory: a number per group, at most the limits."""

    def __init__(self, *, max_communicators: int = MAX_COMMUNICATORS, max_group_series: int = MAX_GROUP_SERIES) -> None:
        self._max_communicators = max_communicators
        self._max_group_series = max_group_series
        self._communicators: dict[int, str] = {}
        """Those with series of their own, and their jobs."""
        self._keys: set[int] = set()
        self._activity: dict[str, _Activity] = {}

    def note_activity(self, operations_of: Mapping[str, int], now_ns: int) -> None:
        """How many operations each job has counted so far; lets go of those that have been silent."""
        for job, operations in operations_of.items():
            known = self._activity.get(job)
            if known is None or known.operations != operations:
                self._activity[job] = _Activity(operations, now_ns)
        silent = {job for job in self._activity if self.is_silent(job, now_ns)}
        gone = {index for index, job in self._communicators.items() if job in silent}
        if gone:
            self._communicators = {index: job for index, job in self._communicators.items() if index not in gone}
            self._keys = {key for key in self._keys if key >> _BITS not in gone}

    def is_silent(self, job: str, now_ns: int) -> bool:
        """Whether nothing came of this job for so long that its groups are not exposed."""
        known = self._activity.get(job)
        return known is not None and now_ns - known.changed_ns >= SILENT_NS

    def admit_communicator(self, index: int, job: str) -> bool:
        """Whether this communicator has series of its own; the first time it is asked decides."""
        if index in self._communicators:
            return True
        if len(self._communicators) >= self._max_communicators:
            return False
        self._communicators[index] = job
        return True

    def admit_series(self, communicators: NDArray[np.int64], codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these have series of their own, by communicator and a code (below 2**16) of operation and size."""
        admitted = np.zeros(len(communicators), np.bool_)
        for position, key in enumerate(((communicators << _BITS) | codes).tolist()):
            if key in self._keys:
                admitted[position] = True
            elif len(self._keys) < self._max_group_series and key >> _BITS in self._communicators:
                self._keys.add(key)
                admitted[position] = True
        return admitted
