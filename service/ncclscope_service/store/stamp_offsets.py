"""How far the stamps of logs are from their arrival: so all lines have times on one axis, the service's clock.

A stamp may be hours from the service's clock: another time zone, a host whose clock is off, lines that an agent brings
when it comes back, a file that is replayed. So no stamp is ever compared with a clock. The newest line of a process
that comes in a pass came then; stamps only say how much earlier the lines before it were written. What an agent saw of
lines without a stamp (`observed_at_ns`, its own clock) is treated alike, with an offset of its own.

The offset changes as lines come sooner after their stamps than any before, or later by more than `_JITTER_NS`. It is
reported as changed once it has held still. Offline nothing arrives: offsets are 0.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

_JITTER_NS: Final = 2_000_000_000
"""Agents send and the service looks about once a second."""
_SETTLED_NS: Final = 30_000_000_000
"""An agent that comes back has sent what waited by then, mostly."""
_CHANGED_NS: Final = 60_000_000_000
"""Smaller changes are those of slow agents, and of clocks that drift."""

_OFFSET: Final = np.dtype(
    [
        ("offset_ns", "<i8"),  # arrival minus stamp; NO_TIME_NS
        ("settled_ns", "<i8"),  # the same as reported; NO_TIME_NS
        ("moved_at_ns", "<i8"),  # when it changed by more than _JITTER_NS
    ]
)


class StampOffsets:
    """The offset of every process: of its stamps, and of what its agent saw where lines have none."""

    def __init__(self) -> None:
        self._rows: Columns = np.empty(0, _OFFSET)
        """By twice the number of the process; behind the offset of its stamps is that of what was seen."""
        self._arrived_ns = NO_TIME_NS
        """When the newest lines came; NO_TIME_NS offline."""
        self._changes: dict[int, int] = {}

    @property
    def is_live(self) -> bool:
        """Whether lines have arrived, and were not read offline."""
        return self._arrived_ns != NO_TIME_NS

    def learn(self, operations: Columns, now_ns: int) -> None:
        """Takes operations (rows.PLACED), of each process in order, that came by `now_ns` of the service's clock."""
        self._arrived_ns = now_ns
        times, keys = _stamps(operations["process"], operations["logged_at_ns"], operations["observed_at_ns"])
        timed = np.flatnonzero(times != NO_TIME_NS)[::-1]
        found, at = np.unique(keys[timed], return_index=True)
        delays = now_ns - times[timed[at]]
        more = int(keys.max(initial=-1)) + 2 - len(self._rows)
        if more > 0:
            self._rows = np.concatenate(
                [self._rows, np.full(more, np.array((NO_TIME_NS, NO_TIME_NS, now_ns), _OFFSET))]
            )
        rows = row_ops.take(self._rows, found)
        offsets, reported = rows["offset_ns"], rows["settled_ns"]
        is_new = offsets == NO_TIME_NS
        known = np.where(is_new, delays, offsets)
        has_moved = (delays < known - _JITTER_NS) | (delays > known + _JITTER_NS)
        offsets = np.where(has_moved, delays, np.minimum(delays, known))
        rows["moved_at_ns"][has_moved] = now_ns
        is_settled = now_ns - rows["moved_at_ns"] >= _SETTLED_NS
        has_changed = (
            is_settled
            & (reported != NO_TIME_NS)
            & (np.abs(offsets - np.where(reported == NO_TIME_NS, 0, reported)) > _CHANGED_NS)
        )
        self._changes.update(
            zip((found[has_changed] // 2).tolist(), (reported - offsets)[has_changed].tolist(), strict=True)
        )
        rows["offset_ns"], rows["settled_ns"] = offsets, np.where(is_settled, offsets, reported)
        self._rows[found] = rows

    def times(
        self, processes: NDArray[np.integer], logged_ns: NDArray[np.int64], observed_ns: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """When lines were written, by the service's clock; offline, by their stamps. NO_TIME_NS where nothing says it.

        `logged_ns`: their stamps; `observed_ns`: when an agent saw them; both NO_TIME_NS where not known.
        """
        stamps, keys = _stamps(processes, logged_ns, observed_ns)
        if not self.is_live:
            return stamps
        offsets = np.concatenate([self._rows["offset_ns"], [NO_TIME_NS]])[np.minimum(keys, len(self._rows))]
        arrived = np.minimum(stamps + np.where(offsets == NO_TIME_NS, 0, offsets), self._arrived_ns)
        arrived[offsets == NO_TIME_NS] = self._arrived_ns
        return np.where(stamps == NO_TIME_NS, NO_TIME_NS, arrived)

    def time_of(self, process: int | None, logged_ns: int, observed_ns: int) -> int:
        """The same of one line, also of one of a process that is not known, which live has no time."""
        if process is None and self.is_live:
            return NO_TIME_NS
        columns = (np.asarray([value], np.int64) for value in (process or 0, logged_ns, observed_ns))
        return int(self.times(*columns)[0])

    def of_stamps(self) -> dict[int, int]:
        """By process: stamp minus arrival of its newest lines, in ns."""
        offsets = self._rows["offset_ns"][::2]
        return {process: -int(offsets[process]) for process in np.flatnonzero(offsets != NO_TIME_NS).tolist()}

    def drain_changes(self) -> dict[int, int]:
        """By process: by how many ns its stamps are later against their arrival than they were, each change once."""
        changes, self._changes = self._changes, {}
        return changes


def _stamps(
    processes: NDArray[np.integer], logged_ns: NDArray[np.int64], observed_ns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The times as they are in the log, else as an agent saw them; and the row of the offset of each."""
    is_seen = logged_ns == NO_TIME_NS
    return np.where(is_seen, observed_ns, logged_ns), 2 * processes.astype(np.int64) + is_seen
