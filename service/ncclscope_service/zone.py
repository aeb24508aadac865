"""The time zone of a log's stamps: the one that fits the launches of its process best.

NCCL prints local time without a zone. An operation is logged just before its kernel is launched, by the same
clock: so the right zone is the one under which most launches have a stamp shortly before them. Zones are
multiples of a quarter of an hour, from UTC-12 to UTC+14.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_QUARTER_NS: Final = 15 * 60 * 1_000_000_000
_FIRST, _LAST = -12 * 4, 14 * 4
_CLOSE_NS: Final = 1_000_000_000
"""A call is logged microseconds before it launches; inside a group, or behind a busy thread, up to a second."""
_SAMPLE: Final = 2_000


def fit_zone(stamps_ns: NDArray[np.int64], launches_ns: NDArray[np.int64]) -> int | None:
    """Nanoseconds to subtract from the stamps (zone's offset east of UTC); None where nothing fits clearly.

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
