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
    rows = ranges[np.lexsort((-_ends(ranges), ranges["start_ns"]))]
    ends = _ends(rows)
    calls: list[tuple[int, int, int, int, int, int]] = []
    units: list[tuple[int, int]] = []
    depth, inside_until, first_of_group = 0, NO_TIME_NS, 0
    has_closed = False
    for at, (kind, start) in enumerate(zip(rows["kind"].tolist(), rows["start_ns"].tolist(), strict=True)):
        end = int(ends[at])
        if start < inside_until:
            continue
        if kind == GROUP_START:
            depth += 1
            if depth == 1:
                first_of_group = len(calls)
        elif kind == GROUP_END:
            if depth == 0 and not has_closed:
                first_of_group, units = 0, []  # its start was not recorded: all so far is of this group
            if depth > 0 or not has_closed:
                depth = max(0, depth - 1)
                if depth == 0:
                    _close(calls, first_of_group, len(units))
                    units.append((start, end))
                    has_closed = True
        else:
            inside_until = end
            calls.append((kind, int(rows["bytes"][at]), int(rows["communicator"][at]), start, end, len(units)))
            if depth == 0:
                units.append((start, end))
    if depth:  # the group was still open when the capture ended: nothing of it was launched
        _close(calls, first_of_group, len(units))
        units.append((_FOREVER, _FOREVER))
    return ThreadCalls(np.array(calls, CALL), np.array(units, UNIT))


def _close(calls: list[tuple[int, int, int, int, int, int]], first: int, unit: int) -> None:
    for at in range(first, len(calls)):
        calls[at] = (*calls[at][:5], unit)


def _ends(ranges: Columns) -> NDArray[np.int64]:
    return np.where(ranges["end_ns"] == NO_TIME_NS, _FOREVER, ranges["end_ns"])
