"""Address space for tables that grow: much is asked for, and memory taken only where rows are written.

A table that moves to larger memory stands still meanwhile: not for the copying, but since memory that was never written
to has to be found by the system (on a virtual machine up to 3 seconds for a gigabyte). Where there is address space
behind its rows it need not move.

The memory is the system's own kind of pages. numpy asks for huge ones for its large arrays: each is found and cleared
as a whole, which takes less time of the processor, but on a machine whose memory is in pieces stands still for long.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np

from ncclscope_wire.batch import Columns

LARGE_BYTES: Final = 16 * 2**20
"""Tables of less are moved when they grow: a twentieth of a second."""
_RESERVED_BYTES: Final = 4 * 2**30
"""More than tables grow to within the usual bounds: 4,000,000 operations take 1 GB."""
_ROOM: Final = 4
"""A table that is larger gets so many times what it needs."""
_SHARE: Final = 4
"""No more is reserved than a share of what the system would give: a limit on address space counts for all tables, and
for everything else."""
_LEAST_ROOM: Final = 1.25


class Reserved:
    """Rows of undefined content, and the memory behind them."""

    def __init__(self, dtype: np.dtype[np.void], rows: int) -> None:
        """Raises OSError where the system refuses so much."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # private: a child of this process does not see what is written
        self._memory = mmap.mmap(-1, rows * dtype.itemsize, flags=flags)
        self.rows: Columns = np.frombuffer(self._memory, dtype, rows)

    def release_from(self, row: int) -> None:
        """Gives the memory of all rows from this one on back; they may be written anew."""
        begin = -(-row * self.rows.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, begin, len(self._memory) - begin)


def reserve(dtype: np.dtype[np.void], needed: int) -> Reserved:
    """Room for `needed` rows and for many more; for fewer more where the system gives little.

    Raises MemoryError where it does not even give what is needed and a quarter of it.
    """
    least = int(needed * _LEAST_ROOM)
    rows = max(_RESERVED_BYTES // dtype.itemsize, _ROOM * needed)
    while rows > least:
        try:
            Reserved(dtype, _SHARE * rows)  # at once given back
            return Reserved(dtype, rows)
        except OSError:
            rows //= 2
    try:
        return Reserved(dtype, least)
    except OSError as error:
        raise MemoryError(f"the system gives no {least * dtype.itemsize} bytes for {needed} rows: {error}") from error
