"""Growing tables of rows with absolute ids, and the memory behind the large ones.

A large table reserves much address space, and takes memory only for rows that are written.

A table that moves to larger memory stands still meanwhile: not for the copying, but since memory that was never written
to has to be found by the system (on a virtual machine up to 3 seconds for a gigabyte). If there is address space behind
its rows, it need not move.

The memory is the system's own kind of pages. numpy asks for huge ones for its large arrays: each is found and cleared
as a whole, which takes less time of the processor, but on a machine whose memory is in pieces stands still for long.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_wire.batch import Columns

Ids = NDArray[np.int64]
"""Row ids."""

_FIRST_CAPACITY: Final = 1024
_DROPPED_TO_KEPT: Final = 0.5
"""Rows are moved to the front when this share of them was dropped there: each is moved twice at most while it is kept,
and memory is written to for half as many again as are kept."""
_MOST_USED: Final = 3
"""Memory that was written to is given back when it is this many times what is needed: all but half as much."""
LARGE_BYTES: Final = 16 * 2**20
"""Tables of less are moved when they grow: a twentieth of a second."""
_RESERVED_BYTES: Final = 4 * 2**30
"""More than tables grow to within the usual bounds: 4,000,000 operations take 1 GB."""
_ROOM: Final = 4
"""A table that is larger gets this many times what it needs."""
_SHARE: Final = 4
"""No more is reserved than a share of what the system would give: a limit on address space counts for all tables, and
for everything else."""
_LEAST_ROOM: Final = 1.25


class Table:
    """A structured array that grows at the end and is forgotten from the front.

    Appending is amortised O(rows); ids are absolute (`first` is the id of the oldest row kept). A large table stays
    where it is: rows that are kept are moved to the front of it over those that were dropped, before memory is used
    that was never written to.
    """

    def __init__(self, dtype: np.dtype[np.void], *, large_bytes: int = LARGE_BYTES) -> None:
        """`large_bytes`: what it may take before it reserves much more than it needs."""
        self.dtype = dtype
        self._large_bytes = large_bytes
        self._rows: Columns = np.empty(_FIRST_CAPACITY, dtype=dtype)
        self._reserved: Reserved | None = None
        """The memory of `_rows`, of a large table."""
        self._begin = 0
        self._end = 0
        self._used = 0
        """Rows from the front of the memory that were ever written to."""
        self.first = 0

    @property
    def next_id(self) -> int:
        """The id that the next appended row will have."""
        return self.first + (self._end - self._begin)

    @property
    def used_bytes(self) -> int:
        """The memory that was written to, for rows that are kept and others."""
        return self._used * self.dtype.itemsize

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def rows(self) -> Columns:
        """A view of all rows kept, oldest first; writing to it changes the table. Valid until the next append."""
        return self._rows[self._begin : self._end]

    def append(self, new: Columns) -> Ids:
        """Adds rows and returns their ids."""
        self._make_room(len(new))
        row_ops.copy_into(self._rows, self._end, new)
        first_id = self.next_id
        self._end += len(new)
        self._used = max(self._used, self._end)
        return np.arange(first_id, first_id + len(new), dtype=np.int64)

    def at(self, ids: Ids | NDArray[np.intp]) -> NDArray[np.intp]:
        """Positions in `rows` of these ids; ids that were dropped are the caller's fault (AssertionError)."""
        positions = np.asarray(ids, dtype=np.intp) - self.first
        assert len(positions) == 0 or positions.min() >= 0, "a row was asked for after it was dropped"
        return positions

    def take(self, ids: Ids, *names: str) -> Columns:
        """A copy of these rows; of these columns only, if some are named: rows are wide, and columns cheap."""
        if names:
            return row_ops.take_columns(self.rows, self.at(ids), names)
        return row_ops.take(self.rows, self.at(ids))

    def copy(self) -> Table:
        """A table of its own with the same rows and ids."""
        copied = self.compacted()
        copied._rows = row_ops.copy(self.rows)
        return copied

    def compacted(self) -> Table:
        """The same rows, not copied, with no room to grow (for snapshots)."""
        compacted = Table(self.dtype, large_bytes=self._large_bytes)
        compacted._rows = self.rows
        compacted._end = compacted._used = len(self)
        compacted.first = self.first
        return compacted

    def drop_before(self, row_id: int) -> None:
        """Forgets rows with a smaller id."""
        dropped = min(max(0, row_id - self.first), len(self))
        self._begin += dropped
        self.first += dropped

    def _make_room(self, amount: int) -> None:
        """Makes room for `amount` rows behind the last one."""
        needed = len(self) + amount
        is_much = self.used_bytes > max(self._large_bytes, _MOST_USED * needed * self.dtype.itemsize)
        is_new = self._end + amount > self._used
        if (is_new or is_much) and self._begin and self._begin >= _DROPPED_TO_KEPT * len(self):
            row_ops.move_to_front(self._rows, self._begin, self._end)
            self._begin, self._end = 0, len(self)
            if is_much:
                self._give_back(needed)
        if self._end + amount > len(self._rows):
            self._move(needed)

    def _give_back(self, needed: int) -> None:
        """Keeps half of the memory that would be too much: what it takes to go on as long as `needed` rows are kept."""
        if self._reserved is None:
            self._move(needed)
        else:
            self._used = _MOST_USED * needed // 2
            self._reserved.release_from(self._used)

    def _move(self, needed: int) -> None:
        """Takes other memory, with room for more than is needed."""
        if needed * self.dtype.itemsize >= self._large_bytes:
            self._reserved = reserve(self.dtype, needed)
            moved = self._reserved.rows
        else:
            self._reserved, moved = None, np.empty(max(_FIRST_CAPACITY, 2 * needed), dtype=self.dtype)
        row_ops.copy_into(moved, 0, self.rows)
        self._rows, self._begin, self._end = moved, 0, len(self)
        self._used = self._end


class Reserved:
    """Rows of undefined content, and the memory behind them."""

    def __init__(self, dtype: np.dtype[np.void], rows: int) -> None:
        """Raises OSError if the system refuses that much."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # private: a child of this process does not see what is written
        self._memory = mmap.mmap(-1, rows * dtype.itemsize, flags=flags)
        self.rows: Columns = np.frombuffer(self._memory, dtype, rows)

    def release_from(self, row: int) -> None:
        """Gives the memory of all rows from this one on back; they may be written again."""
        begin = -(-row * self.rows.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, begin, len(self._memory) - begin)


def reserve(dtype: np.dtype[np.void], needed: int) -> Reserved:
    """Room for `needed` rows and for many more; for fewer more if the system gives little.

    Raises MemoryError if it does not even give what is needed and a quarter of it.
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
