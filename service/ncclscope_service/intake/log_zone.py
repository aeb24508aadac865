"""The time zone of a log's stamps: the one that fits the launches of its process best.

NCCL prints local time without a zone. An operation is logged just before its kernel is launched, by the same
clock: so the right zone is the one under which most launches have a stamp shortly before them. Zones are
multiples of a quarter of an hour, from UTC-12 to UTC+14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.store.tables import Store

Fit: TypeAlias = Callable[[NDArray[np.int64], NDArray[np.int64]], int | None]
"""Gives what is to be subtracted from stamps, in ns, by the stamps and the launch times of one process."""

_QUARTER_NS: Final = 15 * 60 * 1_000_000_000
_FIRST, _LAST = -12 * 4, 14 * 4
_CLOSE_NS: Final = 1_000_000_000
"""A call is logged microseconds before it launches; inside a group, or behind a busy thread, up to a second."""
_SAMPLE: Final = 2_000


def fit_zone(stamps_ns: NDArray[np.int64], launches_ns: NDArray[np.int64]) -> int | None:
    """Nanoseconds to subtract from the stamps (zone's offset east of UTC); None if nothing fits clearly.

    `stamps_ns`: stamps read as if they were UTC; `launches_ns`: launch times in UTC, of the same process. A zone
    fits when more than half of the launches have a stamp within the second before them.
    """
    if not len(stamps_ns) or not len(launches_ns):
        return None
    stamps = np.sort(stamps_ns)
    launches = launches_ns[:: max(1, len(launches_ns) // _SAMPLE)]
    best_share, best_offset = 0.0, None
    for quarter in sorted(range(_FIRST, _LAST + 1), key=abs):
        offset = quarter * _QUARTER_NS
        before = np.searchsorted(stamps, launches + offset, side="right") - 1
        lag = launches + offset - stamps[np.maximum(before, 0)]
        share = float(np.mean((before >= 0) & (lag < _CLOSE_NS)))
        if share > best_share + 1e-9:
            best_share, best_offset = share, offset
    return best_offset if best_share > 0.5 else None


def shift_stamps(known: Store, fit: Fit = fit_zone) -> dict[int, int]:
    """Moves the stamps of each process of a store by what `fit` gives; gives these shifts in ns by process."""
    shifts: dict[int, int] = {}
    rows, kernels = known.operations.rows, known.kernels.rows
    processes = known.templates_of(rows)["process"]
    for process in np.unique(kernels["process"]).tolist():
        mine = (processes == process) & (rows["logged_at_ns"] > 0)
        launches = kernels["launch_start_ns"][kernels["process"] == process]
        shift = fit(rows["logged_at_ns"][mine], launches[launches > 0])
        if shift:
            rows["logged_at_ns"][mine] -= shift
            shifts[process] = shift
    return shifts
