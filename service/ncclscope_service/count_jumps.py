"""Lines that are missing from a log, by the opCount of those that are there.

Where a communicator counts every launch, the value of a line is the number of launches before it: a step of one says
that nothing was lost since the line before, a larger one how many launches were. So many launches have no line; or one
group took several kernels, which step the count as well.

*Source:* NCCL `src/proxy.cc:ncclProxyStart` (called once per kernel plan in 2.12 to 2.26, else per plan with network
work), `src/enqueue.cc:hostStreamPlanTask`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

FARTHEST: Final = 64
"""A larger step is no loss: replays of a CUDA graph were counted, or the communicator is another one."""


@dataclass(slots=True)
class CountJumps:
    """The opCount of the newest line of each communicator of a process."""

    _newest: dict[int, int] = field(default_factory=dict[int, int])

    def feed(self, rows: Columns) -> NDArray[np.int32]:
        """For each operation that launches (member, op_count; in log order): launches since the line before it of its
        communicator that no line tells of; NO_NUMBER where the count did not move, or not by a loss."""
        if len(rows) == 0:
            return np.empty(0, np.int32)
        # 16 bits are sorted in linear time.
        keys = rows["member"].astype(np.uint16) if rows["member"].max() <= np.iinfo(np.uint16).max else rows["member"]
        order = np.argsort(keys, kind="stable")
        members, counts = rows["member"][order], rows["op_count"][order].astype(np.int64)
        is_first = np.concatenate([[True], members[1:] != members[:-1]])
        steps = np.diff(counts, prepend=counts[0])
        for at in np.flatnonzero(is_first).tolist():
            before = self._newest.get(int(members[at]))
            steps[at] = counts[at] - before if before is not None else 0
        for at in np.flatnonzero(np.append(is_first[1:], True)).tolist():
            self._newest[int(members[at])] = int(counts[at])
        lost = np.empty(len(rows), np.int32)
        lost[order] = np.where((steps >= 1) & (steps <= FARTHEST), steps - 1, NO_NUMBER)
        return lost
