"""Growing tables of columns with absolute row ids, and the memory behind the large ones.

A table has one contiguous array for each column, so that a stage pays for the columns that it reads and no others.

A large table reserves much address space, and takes memory only for rows that are written and not yet dropped.

A table that moves to larger memory stands still meanwhile: not for the copying, but since memory that was never written
to has to be found by the system (on a virtual machine up to 3 seconds for a gigabyte). If there is address space behind
its rows, it need not move.

The memory is the system's own kind of pages. numpy asks for huge ones for its large arrays: each is found and cleared
as a whole, which takes less time of the processor, but on a machine whose memory is in pieces stands still for long.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns

Ids = NDArray[np.int64]
"""Row ids."""
_Column: TypeAlias = NDArray[Any]

_FIRST_CAPACITY: Final = 1024
_DROPPED_TO_KEPT: Final = 0.5
"""At the end of its address space a large table moves its rows to the front, if as many as this share were dropped."""
_RELEASED_AT_ONCE: Final = 1 / 8
"""Of the rows that are kept: as many are dropped before their memory is given back."""
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
_PACKED: Final = np.dtype(np.int32)
_LEAST_PACKED: Final = int(np.iinfo(_PACKED).min)
_MOST_PACKED: Final = int(np.iinfo(_PACKED).max)
_MOVED_AT_ONCE: Final = 2**17
"""Values that are moved in one go: they are still in the cache when the next piece follows."""


class Rows:
    """A view of consecutive rows of a table: its columns by name, to read and (but packed ones) to write. Rows that are
    dropped shift it.

    Positions, masks and slices as for a structured array; a mask or positions give a copy of whole rows, which costs
    one pass for each column: better to `take` some columns.

    A column that is asked for by name takes memory for all rows of the view, a copy (`take`, `copy`, `put`) only for
    those between the first and the last that something was written to: values of others are unknown, and take none.
    """

    __slots__ = ("_begin", "_end", "_table", "dtype")

    def __init__(self, table: Table, begin: int, end: int) -> None:
        self.dtype = table.dtype
        self._table = table
        self._begin = begin
        self._end = end

    def __len__(self) -> int:
        return self._end - self._begin

    def __iter__(self) -> Iterator[np.void]:
        return iter(self.copy())

    @overload
    def __getitem__(self, key: str) -> _Column: ...
    @overload
    def __getitem__(self, key: slice) -> Rows: ...
    @overload
    def __getitem__(self, key: int | np.integer) -> np.void: ...
    @overload
    def __getitem__(self, key: list[str] | NDArray[np.integer] | NDArray[np.bool_]) -> Columns: ...
    def __getitem__(
        self, key: str | slice | int | np.integer | list[str] | NDArray[np.integer] | NDArray[np.bool_]
    ) -> _Column | Rows | np.void:
        """A column; a view of a slice; a copy of one row; or a copy of some columns, or of rows by position or mask."""
        if isinstance(key, str):
            return self._table.column(key, self._begin, self._end)
        if isinstance(key, slice):
            begin, end, step = key.indices(len(self))
            assert step == 1, "rows are viewed in order, one after the other"
            return Rows(self._table, self._begin + begin, self._begin + max(begin, end))
        if isinstance(key, list):
            return self.take(np.arange(len(self)), *key)
        if isinstance(key, np.ndarray):
            at: NDArray[np.integer] = np.flatnonzero(key) if key.dtype == np.bool_ else key.astype(np.intp, copy=False)
            return self.take(at)
        row: np.void = self[np.asarray([key])][0]
        return row

    def __setitem__(self, name: str, values: object) -> None:
        """Writes a whole column."""
        self.put(name, np.arange(len(self)), values)

    def copy(self) -> Columns:
        """All rows as a structured array of its own."""
        return self.take(np.arange(len(self)))

    def take(self, positions: NDArray[np.integer], *names: str) -> Columns:
        """A copy of the rows at these positions, in their shape; of these columns only, if some are named."""
        names = names or self.dtype.names or ()
        found: Columns = np.empty(positions.shape, np.dtype([(name, self.dtype[name]) for name in names]))
        for name, values in zip(names, self._values(names, positions), strict=True):
            found[name] = values
        return found

    def values(self, name: str, positions: NDArray[np.integer]) -> _Column:
        """A copy of one column at these positions, in their shape."""
        return next(self._values([name], positions))

    def _values(self, names: Sequence[str], positions: NDArray[np.integer]) -> Iterator[_Column]:
        at = positions + self._begin
        first = int(positions.min()) if positions.size else 0
        if first < 0:
            at[positions < 0] += len(self)
        bounds = (self._begin + first if first >= 0 else int(at.min()), int(at.max())) if at.size else (0, -1)
        return (self._table.values(name, at, bounds) for name in names)

    def put(self, name: str, positions: NDArray[np.integer], values: object) -> None:
        """Writes a column at these positions (0 and above)."""
        if len(positions):
            self._table.put(name, positions + self._begin, np.asarray(values))


AnyRows: TypeAlias = Columns | Rows
"""Rows whose columns have names, wherever they are."""


class Table:
    """Columns that grow at the end and are forgotten from the front.

    What is not known yet takes no memory: a column begins at the first row that something was written to there, and
    ends behind the last one.

    Appending is amortised O(rows); ids are absolute (`first` is the id of the oldest row kept). A large table stays
    where it is and goes on to the end of what it reserved; memory of dropped rows is given back by later appends.
    """

    _since: Mapping[str, int] = MappingProxyType({})
    """Where each column begins: what rows before it have there is unknown. A column that is not named begins at 0."""

    def __init__(
        self,
        dtype: np.dtype[np.void],
        *,
        unknown: Columns | None = None,
        packed: Collection[str] = (),
        large_bytes: int = LARGE_BYTES,
    ) -> None:
        """`unknown`: a row with what columns hold that are not appended; `packed`: columns of integers that take four
        bytes a value until one needs more, and are written by `append` and `put` alone; `large_bytes`: what the table
        may take before it reserves much more than it needs.
        """
        self.dtype = dtype
        self._unknown = unknown
        self._large_bytes = large_bytes
        self._stored = _with_types(dtype, dict.fromkeys(packed, _PACKED))
        """The columns as they are in memory."""
        self._columns = _columns(self._stored, _FIRST_CAPACITY)
        self._reserved: Reserved | None = None
        """The memory of `_columns`, of a large table."""
        self._capacity = _FIRST_CAPACITY
        self._begin = 0
        self._end = 0
        self._since = {}
        self._written = dict.fromkeys(dtype.names or (), 0)
        """Where each column ends: what rows behind have there is unknown."""
        self.first = 0

    @property
    def next_id(self) -> int:
        """The id that the next appended row will have."""
        return self.first + (self._end - self._begin)

    @property
    def used_bytes(self) -> int:
        """The memory that was written to, for rows that are kept and others."""
        begin = self._reserved.begin if self._reserved is not None else 0
        return sum(
            max(0, end - max(begin, self._since.get(name, 0))) * self._stored[name].itemsize
            for name, end in self._written.items()
        )

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def rows(self) -> Rows:
        """A view of all rows kept, oldest first; writing to it changes the table. Valid until the next append."""
        return Rows(self, 0, len(self))

    def append(self, new: AnyRows | Mapping[str, _Column]) -> Ids:
        """Adds rows and returns their ids. Columns that they do not have are unknown."""
        given = list(new if isinstance(new, Mapping) else new.dtype.names or ())
        assert all(new[name].dtype == self.dtype[name] for name in given), "rows of another dtype cannot be appended"
        assert self._unknown is not None or len(given) == len(self._columns), "without unknown values, columns are due"
        for name in given:
            self._fit(name, new[name])
        amount = len(new[given[0]])
        self._make_room(amount)
        end = self._end + amount
        for name in given:
            values = new[name]
            if self._unknown is None or (values != self._unknown[name]).any():
                self._cover(name, self._end, self._end)
                self._columns[name][self._end : end] = values
                self._written[name] = end
        first_id = self.next_id
        self._end = end
        return np.arange(first_id, first_id + amount, dtype=np.int64)

    def at(self, ids: Ids | NDArray[np.intp]) -> NDArray[np.intp]:
        """Positions in `rows` of these ids; ids that were dropped are the caller's fault (AssertionError)."""
        positions = np.asarray(ids, dtype=np.intp) - self.first
        assert len(positions) == 0 or positions.min() >= 0, "a row was asked for after it was dropped"
        return positions

    def take(self, ids: Ids, *names: str) -> Columns:
        """A copy of these rows; of these columns only, if some are named."""
        return self.rows.take(self.at(ids), *names)

    def column(self, name: str, begin: int, end: int) -> _Column:
        """A column between these positions; of a packed column a copy that cannot be written to."""
        if begin < end:
            self._cover(name, self._begin + begin, self._begin + end)
        column = self._columns[name][self._begin + begin : self._begin + end]
        if column.dtype == self.dtype[name]:
            return column
        whole = column.astype(self.dtype[name])
        whole.flags.writeable = False
        return whole

    def values(self, name: str, at: NDArray[np.integer], bounds: tuple[int, int]) -> _Column:
        """A copy of a column at these positions, of which the `bounds` are the least and the largest."""
        begin, end = self._since.get(name, 0) - self._begin, self._written[name] - self._begin
        if begin <= bounds[0] and bounds[1] < end:
            known: _Column = self._whole(name)[self._begin :][at].astype(self.dtype[name], copy=False)
            return known
        assert self._unknown is not None
        assert bounds[1] < len(self), "a row was asked for that does not exist"
        found: _Column = np.full(at.shape, self._unknown[name][0])
        is_written = (begin <= at) & (at < end)
        found[is_written] = self._whole(name)[self._begin :][at[is_written]]
        return found

    def copy(self) -> Table:
        """A table of its own with the same rows and ids."""
        copied = self.compacted()
        copied._columns = {name: column.copy() for name, column in copied._columns.items()}
        return copied

    def compacted(self) -> Table:
        """The same rows, not copied, with no room to grow (for snapshots)."""
        compacted = Table(self.dtype, unknown=self._unknown, large_bytes=self._large_bytes)
        compacted._stored = self._stored
        since = dict[str, int]()
        for name in self._columns:
            begin, end = self._kept(name)
            compacted._columns[name] = self._whole(name)[begin:end]
            since[name], compacted._written[name] = begin - self._begin, end - self._begin
        compacted._since = since
        compacted._capacity = compacted._end = len(self)
        compacted.first = self.first
        return compacted

    def drop_before(self, row_id: int) -> None:
        """Forgets rows with a smaller id."""
        dropped = min(max(0, row_id - self.first), len(self))
        self._begin += dropped
        self.first += dropped

    def put(self, name: str, at: NDArray[np.integer], values: _Column) -> None:
        """Writes a column at these positions."""
        self._fit(name, values)
        self._cover(name, self._begin + int(at.min()), self._begin + int(at.max()) + 1)
        self._columns[name][self._begin :][at] = values

    def _fit(self, name: str, values: _Column) -> None:
        """Sees to it that a packed column can hold these values."""
        packed, full = self._stored[name], self.dtype[name]
        if packed != full and values.size and (values.min() < _LEAST_PACKED or values.max() > _MOST_PACKED):
            self._stored = _with_types(self._stored, {name: full})
            self._move(len(self))

    def _kept(self, name: str) -> tuple[int, int]:
        """Where the values of a column begin and end that are not dropped; nowhere, at the first row, if none is."""
        begin, end = max(self._begin, self._since.get(name, 0)), self._written[name]
        return (begin, end) if begin < end else (self._begin, self._begin)

    def _whole(self, name: str) -> _Column:
        """A column with room for all rows."""
        column = self._columns[name]
        if len(column) < self._capacity:  # of a table that was restored
            whole = np.empty(self._capacity, self._stored[name])
            begin = self._since.get(name, 0)
            whole[begin : begin + len(column)] = column
            self._columns[name] = column = whole
        return column

    def _cover(self, name: str, begin: int, end: int) -> None:
        """Gives unknown values to rows from one place up to another that have none yet, and to all up to those that
        have.
        """
        since, written = self._kept(name)
        if since < written and since <= begin and end <= written:
            return
        if since == written:
            since = written = begin
        for first, last in ((begin, since), (written, end)):
            if first < last:
                assert self._unknown is not None
                self._whole(name)[first:last] = self._unknown[name][0]
        self._since = {**self._since, name: min(since, begin)}
        self._written[name] = max(written, end)

    def _make_room(self, amount: int) -> None:
        """Makes room for `amount` rows behind the last one."""
        if self._reserved is not None and self._begin - self._reserved.begin > _RELEASED_AT_ONCE * len(self):
            self._reserved.release_before(self._begin)
        if self._end + amount <= self._capacity:
            return
        needed = len(self) + amount
        if self._reserved is None or needed > self._capacity or self._begin < _DROPPED_TO_KEPT * len(self):
            self._move(needed)
        else:
            self._move_to_front(self._reserved)

    def _move_to_front(self, reserved: Reserved) -> None:
        """Moves what is kept over what was dropped, in the memory that there is."""
        front, left, since = dict[str, tuple[int, int]](), dict[str, tuple[int, int]](), dict[str, int]()
        for name in self._columns:
            begin, end = self._kept(name)
            _move_to_front(self._whole(name), begin, end, self._begin)
            since[name] = begin - self._begin
            front[name], left[name] = (0, since[name]), (end - self._begin, max(end, self._written[name]))
            self._written[name] = end - self._begin
        reserved.release(front)
        reserved.release(left)
        self._since = since
        reserved.begin, self._begin, self._end = 0, 0, len(self)

    def _move(self, needed: int) -> None:
        """Takes other memory, with room for more than is needed."""
        kept = {name: (self._kept(name), self._whole(name)) for name in self._columns}
        if needed * self.dtype.itemsize >= self._large_bytes:
            self._reserved = reserve(self._stored, needed)
            self._capacity, moved = self._reserved.capacity, self._reserved.columns
        else:
            self._reserved, self._capacity = None, max(_FIRST_CAPACITY, 2 * needed)
            moved = _columns(self._stored, self._capacity)
        since = dict[str, int]()
        for name, ((begin, end), column) in kept.items():
            since[name], self._written[name] = begin - self._begin, end - self._begin
            moved[name][since[name] : self._written[name]] = column[begin:end]
        self._columns, self._since, self._begin, self._end = moved, since, 0, len(self)


class Reserved:
    """Columns of undefined content, and the memory behind them."""

    def __init__(self, dtype: np.dtype[np.void], capacity: int) -> None:
        """Raises OSError if the system refuses that much."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # private: a child of this process does not see what is written
        self.capacity = capacity
        self.begin = 0
        """Rows before it have no memory any more."""
        sizes = {name: _whole_pages(capacity * dtype[name].itemsize) for name in dtype.names or ()}
        self._memory = mmap.mmap(-1, sum(sizes.values()), flags=flags)
        self.columns: dict[str, _Column] = {}
        begin = 0
        for name, size in sizes.items():
            self.columns[name] = np.frombuffer(self._memory, dtype[name], capacity, begin)
            begin += size

    def release_before(self, row: int) -> None:
        """Gives back the memory of all rows before this one."""
        self.release(dict.fromkeys(self.columns, (0, row)))
        self.begin = row

    def release(self, rows: Mapping[str, tuple[int, int]]) -> None:
        """Gives back the pages that hold nothing but these rows of each column, from one up to another.

        The rows may be written again.
        """
        at = 0
        for name, column in self.columns.items():
            begin, end = rows[name]
            first = _whole_pages(begin * column.itemsize)
            last = end * column.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._memory.madvise(mmap.MADV_DONTNEED, at + first, last - first)
            at += _whole_pages(column.nbytes)


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


def _columns(dtype: np.dtype[np.void], capacity: int) -> dict[str, _Column]:
    return {name: np.empty(capacity, dtype[name]) for name in dtype.names or ()}


def _with_types(dtype: np.dtype[np.void], types: Mapping[str, np.dtype[Any]]) -> np.dtype[np.void]:
    return np.dtype([(name, types.get(name, dtype[name])) for name in dtype.names or ()])


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _move_to_front(column: _Column, begin: int, end: int, by: int) -> None:
    """Moves the values from `begin` to `end` by so many places, in the memory that the column has.

    If the target overlaps the source, numpy copies to new memory first: so no piece is longer than that.
    """
    step = min(by, _MOVED_AT_ONCE)
    for at in range(begin, end, step):
        piece = column[at : min(at + step, end)]
        column[at - by : at - by + len(piece)] = piece
