"""Memory for the copies of a snapshot, asked for beforehand.

A state is copied while nothing else can be done, and most of that time the system finds memory for the copies: on a
virtual machine that has not used it yet 3 seconds for a gigabyte, of which copying takes a twentieth.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SnapshotRoom:
    """Copies one after the other into memory that is there."""

    def __init__(self, size: int) -> None:
        """Room for so many bytes. Blocks until the system has given them, and lets other threads work meanwhile."""
        self._room = np.empty(size, np.uint8)
        self._room.fill(0)  # what is only asked for is not there before it is written to
        self._used = 0

    def copy(self, data: NDArray[np.uint8]) -> memoryview:
        """A copy; in memory of its own where there is no room left."""
        end = self._used + len(data)
        if end > len(self._room):
            return data.copy().data
        part = self._room[self._used : end]
        part[:] = data
        self._used = end
        return part.data
