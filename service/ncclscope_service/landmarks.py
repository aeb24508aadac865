"""What the pairs of one thread say about where another thread's launches lie in the log.

Correlation ids are counted for a whole process, and its log file holds the lines of all its threads nearly in the
order of the calls. So what one thread launched between two launches of another was logged between their two lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

_KEPT: Final = 16384
"""Pairs behind a hole that are kept."""

_SLACK: Final = 2
"""Lines of two threads may stand in another order than their launches, by so many launches."""

NEVER: Final = 2**62
"""Behind all operations: nothing tells."""


@dataclass(slots=True)
class Landmarks:
    """Correlation ids of one thread's kernels behind the last hole, and their lines; the last ones before it first."""

    ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Ascending."""
    operations: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The operation of each."""

    def add(self, ids: NDArray[np.int64], operations: NDArray[np.int64]) -> None:
        """Takes further pairs, as long as there is room."""
        room = _KEPT - len(self.ids)
        if room > 0:
            self.ids = np.concatenate([self.ids, ids[:room]])
            self.operations = np.concatenate([self.operations, operations[:room]])

    def start(self, ids: NDArray[np.int64], operations: NDArray[np.int64]) -> None:
        """A hole: what was before it is forgotten, but for its last pairs, which are given."""
        self.ids, self.operations = ids[-_SLACK - 1 :], operations[-_SLACK - 1 :]


@dataclass(frozen=True, slots=True)
class Between:
    """Between which operations each of some kernels' lines lie, both excluded."""

    after: NDArray[np.int64]
    before: NDArray[np.int64]

    def violations(self, operations: NDArray[np.int64], places: NDArray[np.intp]) -> NDArray[np.int64]:
        """Of how many kernels the lines lie elsewhere, if the first is at each of some places among operations."""
        found = np.zeros(len(places), dtype=np.int64)
        for offset, (after, before) in enumerate(zip(self.after.tolist(), self.before.tolist(), strict=True)):
            own = operations[places + offset]
            found += (own <= after) | (own >= before)
        return found


def between(landmarks: Sequence[Landmarks], ids: NDArray[np.int64]) -> Between:
    """Where the lines of kernels with these correlation ids lie, by the pairs of other threads."""
    after, before = np.full(len(ids), -1, dtype=np.int64), np.full(len(ids), NEVER, dtype=np.int64)
    for own in landmarks:
        low = np.concatenate([np.full(_SLACK + 1, -1), np.maximum.accumulate(own.operations)])
        high = np.minimum.accumulate(own.operations[::-1])[::-1]
        high = np.concatenate([high, np.full(_SLACK + 1, NEVER)])
        places = np.searchsorted(own.ids, ids)
        after = np.maximum(after, low[places])
        before = np.minimum(before, high[places + _SLACK])
    return Between(after, before)
