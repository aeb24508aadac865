"""How a process is to be paired: by time or by order, and each thread on its own or all as one.

Told once, from its first kernels and the lines that came until then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.align_rows import ALIGN_KERNEL
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_KERNELS: Final = 32
"""Kernels that are looked at."""

_ENOUGH_OPERATIONS: Final = 4096
"""Operations after which the choice is made although stamps and launches do not meet."""

_FINEST_NS: Final = 100_000
"""Stamps that are all multiples of this are too coarse to tell launches apart."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the first kernels and lines show."""

    kernels: Columns
    """The first kernels (ALIGN_KERNEL) in launch order, but for those whose launch call is in no export."""
    is_timed: bool
    """Lines have fine stamps that agree with the launch times."""
    is_threaded: bool
    """Each kernel was launched by a thread that logs."""
    is_enough: bool
    """More lines will say nothing further."""


@dataclass(slots=True)
class FirstLook:
    """The first kernels and stamps of a process, until they tell how to pair."""

    stamped_until_ns: int = NO_TIME_NS
    """The newest stamp of any line, also later."""
    _is_over: bool = False
    _operations: int = 0
    _tids: set[int] = field(default_factory=set[int])
    _stamps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _kernels: Columns = field(default_factory=lambda: np.empty(0, dtype=ALIGN_KERNEL))

    def feed_operations(self, rows: Columns) -> None:
        """Takes further operations (ALIGN_OPERATION)."""
        self.stamped_until_ns = max(self.stamped_until_ns, int(rows["logged_at_ns"].max()))
        if self._is_over:
            return
        self._operations += len(rows)
        self._tids.update(np.unique(rows["tid"]).tolist())
        self._stamps = np.concatenate([self._stamps, rows["logged_at_ns"]])

    def feed_kernels(self, rows: Columns) -> None:
        """Takes further kernels (ALIGN_KERNEL)."""
        self._kernels = whole_rows.joined([self._kernels, rows])

    def seen(self, *, final: bool) -> Seen | None:
        """What there is to choose by; None if it is too early."""
        if self._operations == 0 and not final:
            return None
        rows = self._kernels[np.argsort(self._kernels["correlation_id"], kind="stable")][:_KERNELS]
        if len(rows) < _KERNELS and not final:
            return None
        rows = _without_orphans(rows)
        tids = set(np.unique(rows["launch_tid"]).tolist())
        is_threaded = len(rows) > 0 and tids <= self._tids
        has_stamps = _is_stamped(self._stamps) and bool((rows["launch_start_ns"] != NO_TIME_NS).all())
        waits = not is_threaded or (has_stamps and self.stamped_until_ns < int(rows["launch_start_ns"].max()))
        is_enough = final or self._operations >= _ENOUGH_OPERATIONS
        if waits and not is_enough:
            return None
        is_timed = has_stamps and len(rows) > 0 and _meets(self._stamps, rows["launch_start_ns"])
        return Seen(rows, is_timed, is_threaded, is_enough)

    def close(self) -> Columns:
        """The choice is made: gives all kernels that waited for it."""
        kernels, self._kernels = self._kernels, self._kernels[:0]
        self._is_over, self._stamps = True, self._stamps[:0]
        return kernels


def _without_orphans(rows: Columns) -> Columns:
    """The kernels before the first whose launch call is in no export; or after the last, where those come first."""
    orphans = np.flatnonzero((rows["launch_tid"] == NO_NUMBER) & (rows["launch_start_ns"] == NO_TIME_NS))
    if len(orphans) == 0 or len(orphans) == len(rows):
        return rows
    return rows[: orphans[0]] if orphans[0] >= len(rows) // 2 else rows[orphans[-1] + 1 :]


def _is_stamped(stamps: NDArray[np.int64]) -> bool:
    """Whether nearly every line has a stamp, and a fine one."""
    known = stamps[stamps != NO_TIME_NS]
    return len(known) >= 0.9 * len(stamps) and len(known) > 0 and bool(np.any(known % _FINEST_NS != 0))


def _meets(stamps: NDArray[np.int64], launched: NDArray[np.int64]) -> bool:
    """Whether most launches follow a line within a second: else the stamps are of another zone or clock."""
    known = np.sort(stamps[stamps != NO_TIME_NS])
    before = np.searchsorted(known, launched, side="right") - 1
    near = (before >= 0) & (launched - known[np.maximum(before, 0)] < 1_000_000_000)
    return bool(np.count_nonzero(near) >= 0.5 * len(launched))
