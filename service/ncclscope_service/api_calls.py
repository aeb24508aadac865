"""The calls of NCCL's API that a capture holds for one thread, as sequences with the launches that they hold.

What an outermost range holds is one *unit*: an ungrouped call, or all calls from the outermost ncclGroupStart to its
ncclGroupEnd, inside which they are launched. Ranges inside a range of an operation (up to 2.22 ncclSend and ncclRecv
open a group of their own) are parts of it.

*Source:* NCCL `src/collectives.cc`, `src/group.cc`: every public function is one range of its thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.store import GROUP_END, GROUP_START
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

CALL: Final = np.dtype(
    [
        ("kind", "<i2"),  # code in terms.OPERATIONS
        ("bytes", "<i8"),
        ("communicator", "<u8"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("unit", "<i8"),  # index into units
    ]
)
UNIT: Final = np.dtype(
    [
        ("launch_from_ns", "<i8"),  # where its launches lie
        ("launch_until_ns", "<i8"),
    ]
)

_FOREVER: Final = 2**62


@dataclass(frozen=True, slots=True)
class ThreadCalls:
    """What one thread called in one capture, in order."""

    calls: Columns
    """CALL: operations only."""
    units: Columns
    """UNIT, in order of time; their times do not overlap."""

    def units_at(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The unit in which something was launched then; NO_NUMBER where none was open."""
        at = np.searchsorted(self.units["launch_from_ns"], times_ns, side="right") - 1
        inside = (
            (at >= 0) & (times_ns <= self.units["launch_until_ns"][np.maximum(at, 0)]) if len(self.units) else at > 0
        )
        return np.where(inside, at, NO_NUMBER)


def thread_calls(ranges: Columns) -> ThreadCalls:
    """The calls of one thread in one capture, from its ranges (store.API_CALL) in any order.

    A group whose start was before the capture begins with the capture; a range that was cut lasts forever.
    """
    rows = whole_rows.taken(ranges, np.lexsort((-_ends(ranges), ranges["start_ns"])))
    rows = whole_rows.kept(rows, ~_is_inside_operation(rows))
    kinds, ends = rows["kind"], _ends(rows)
    opens, closes = kinds == GROUP_START, kinds == GROUP_END
    level = np.cumsum(opens.astype(np.int64) - closes)
    depth = level - np.minimum(np.minimum.accumulate(level), 0) if len(rows) else level
    before = np.concatenate([np.zeros(1, np.int64), depth[:-1]]) if len(rows) else depth
    is_operation = ~(opens | closes)
    is_unit = (is_operation & (depth == 0)) | (closes & (before > 0) & (depth == 0))
    closed = np.flatnonzero(closes & (depth == 0))
    if len(closed) and before[closed[0]] == 0:
        is_unit[: closed[0]] = False  # its start was not recorded: all so far is of this group
        is_unit[closed[0]] = True
    calls = np.empty(int(np.count_nonzero(is_operation)), CALL)
    for name in ("kind", "bytes", "communicator", "start_ns"):
        calls[name] = rows[name][is_operation]
    calls["end_ns"] = ends[is_operation]
    calls["unit"] = (np.cumsum(is_unit) - is_unit)[is_operation]
    units = np.full(int(np.count_nonzero(is_unit)) + bool(len(rows) and depth[-1]), _FOREVER, UNIT)
    # The last group may have been open when the capture ended: nothing of it was launched.
    units["launch_from_ns"][: np.count_nonzero(is_unit)] = rows["start_ns"][is_unit]
    units["launch_until_ns"][: np.count_nonzero(is_unit)] = ends[is_unit]
    return ThreadCalls(calls, units)


def _is_inside_operation(rows: Columns) -> NDArray[np.bool_]:
    """Which ranges, in order of time, begin within one of an operation: ranges of a thread lie in each other."""
    is_operation = (rows["kind"] != GROUP_START) & (rows["kind"] != GROUP_END)
    until = np.maximum.accumulate(np.where(is_operation, _ends(rows), NO_TIME_NS)) if len(rows) else rows["end_ns"]
    inside = np.zeros(len(rows), dtype=bool)
    inside[1:] = rows["start_ns"][1:] < until[:-1]
    return inside


def _ends(ranges: Columns) -> NDArray[np.int64]:
    return np.where(ranges["end_ns"] == NO_TIME_NS, _FOREVER, ranges["end_ns"])
