"""Distinct values of integer columns and the rows that have each, and small integers for keys.

The values are indices (processes, members, templates, codes): small and dense. Counting finds them in 3 ns a row;
sorting, as `numpy.unique` does it, takes 30 ns for one column and 500 ns for structured rows.

`KeyIndex`, `CombinationIndex` and `Interner` number keys, combinations of columns, and strings. Work is then done once
per key and not once per row. Keys of many rows are looked up together in a sorted array; a dictionary of tuples would
be asked for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_wire.batch import Columns

Integers = NDArray[np.integer]

_LEAST_RANGE: Final = 4096
_RANGE_PER_VALUE: Final = 4
"""Counting looks at all numbers from the smallest to the largest; with more of them per row, sorting is cheaper."""


def distinct(values: Integers) -> tuple[Integers, NDArray[np.intp]]:
    """The distinct values, ascending, and for each value its place among them: `numpy.unique` with its inverse."""
    if not len(values):
        return values[:0], np.empty(0, np.intp)
    least, largest = int(values.min()), int(values.max())
    if least == largest:
        return values[:1].copy(), np.zeros(len(values), np.intp)
    if largest - least > max(_LEAST_RANGE, _RANGE_PER_VALUE * len(values)):
        found, inverse = np.unique(values, return_inverse=True)
        return found, inverse
    offsets = values.astype(np.intp)
    offsets -= least
    is_present = np.zeros(largest - least + 1, np.bool_)
    is_present[offsets] = True
    present = np.flatnonzero(is_present)
    if len(present) < len(is_present):
        place = np.empty(len(is_present), np.intp)
        place[present] = np.arange(len(present))
        offsets = place[offsets]
    return (present + least).astype(values.dtype), offsets


def distinct_together(*columns: Integers) -> tuple[list[Integers], NDArray[np.intp]]:
    """The distinct combinations of several columns, in their order, column by column; and each row's place in them."""
    values, inverse = distinct(columns[0])
    found = [values]
    for column in columns[1:]:
        values, place = distinct(column)
        if len(values) == 1:
            found.append(np.repeat(values, len(found[0])))
            continue
        pairs, inverse = distinct(inverse * max(1, len(values)) + place)
        before, own = np.divmod(pairs, max(1, len(values)))
        found = [*(each[before] for each in found), values[own]]
    return found, inverse


def first_positions(values: Integers) -> NDArray[np.intp]:
    """The position of the first row of each distinct value, by value."""
    found, inverse = distinct(values)
    first = np.empty(len(found), np.intp)
    first[inverse[::-1]] = np.arange(len(values))[::-1]  # of several that are written to one place, the last one stays
    return first


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows by value."""

    values: Integers
    """Ascending, each once."""
    order: NDArray[np.intp]
    """The positions of all rows, by value, those of each value ascending."""
    ends: NDArray[np.int64]
    """Where the positions of each value end."""


def sort_into_groups(values: Integers) -> Groups:
    """The rows of each value."""
    found, inverse = distinct(values)
    if len(found) == 1:
        return Groups(found, np.arange(len(values)), np.array([len(values)]))
    # Few values fit the 16 bits that numpy sorts by counting.
    keys = inverse.astype(np.uint16) if len(found) < 2**16 else inverse
    order = np.argsort(keys, kind="stable")
    return Groups(found, order, np.cumsum(np.bincount(inverse, minlength=len(found))))


def group_by(values: Integers) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Each distinct value, ascending, with the positions that have it, ascending."""
    if len(values) and values[0] == values[-1] and (values == values[0]).all():
        yield int(values[0]), np.arange(len(values))
        return
    found = sort_into_groups(values)
    ends = found.ends.tolist()
    for value, begin, end in zip(found.values.tolist(), [0, *ends], ends, strict=False):
        yield value, found.order[begin:end]


def accumulate(by: np.ufunc, totals: NDArray[Any], places: NDArray[np.integer], values: NDArray[Any]) -> None:
    """Adds values to the totals at their places (`by` np.add), or leaves the larger or smaller there (np.maximum, ...).

    `ufunc.at` takes 30 to 100 times as long if the values are of another type than the totals, or a column of rows.
    """
    by.at(totals, places, np.ascontiguousarray(values, totals.dtype))


def distinct_values(values: Integers) -> Sequence[int]:
    """The distinct values, ascending."""
    found: list[int] = distinct(values)[0].tolist()
    return found


@dataclass(slots=True)
class OperationsByProcess:
    """Operations that arrived together, in the order of their processes."""

    operations: NDArray[np.int64]
    """By process, those of each in order of arrival."""
    processes: NDArray[np.int64]
    """Ascending, each once."""
    ends: NDArray[np.int64]
    """Where the operations of each process end."""

    @classmethod
    def from_operations(cls, operations: NDArray[np.int64], processes: NDArray[np.integer]) -> OperationsByProcess:
        """Groups operations; `processes` gives the process of each."""
        found = sort_into_groups(processes)
        return cls(operations[found.order], found.values.astype(np.int64), found.ends)

    def places(self, processes: NDArray[np.int64]) -> NDArray[np.intp]:
        """Which of `self.processes` are among these, which are ascending and each there once."""
        if not len(self.processes) or not len(processes):
            return np.empty(0, np.intp)
        places = np.minimum(np.searchsorted(self.processes, processes), len(self.processes) - 1)
        found: NDArray[np.intp] = places[self.processes[places] == processes]
        return found

    def at(self, place: int) -> NDArray[np.int64]:
        """The operations of one of the processes: a view."""
        operations: NDArray[np.int64] = self.operations[self.ends[place - 1] if place else 0 : self.ends[place]]
        return operations

    def select(self, places: NDArray[np.intp]) -> OperationsByProcess:
        """Those of some processes, by ascending places: a copy."""
        sizes = np.diff(self.ends, prepend=0)
        is_kept = np.zeros(len(sizes), np.bool_)
        is_kept[places] = True
        return OperationsByProcess(
            self.operations[np.repeat(is_kept, sizes)], self.processes[places], np.cumsum(sizes[places])
        )


_Integers = NDArray[np.integer]
_LOW: Final = 0xFFFFFFFF
_FEW: Final = 128
"""Rows up to which a dictionary is asked for each."""
_GROWN: Final = 1.2
"""Keys are sorted again when their number is this many times that of the sorted ones."""
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
"""2^64 / golden ratio: spreads small differences over all bits (Knuth, TAOCP 6.4)."""


class KeyIndex:
    """Numbers the distinct combinations of integer columns from 0, in order of first appearance."""

    def __init__(self, columns: int) -> None:
        """`columns`: of how many integers of 32 bits a combination is; the first of them is not negative."""
        self._steps = [_Step() for _ in range(max(1, columns - 1))]

    def __len__(self) -> int:
        return len(self._steps[-1].index)

    def number(self, *columns: _Integers) -> NDArray[np.intp]:
        """The number of each row; the next ones to those that are new."""
        first, *others = columns
        places = first.astype(np.int64)
        if not others:
            return self._steps[0].places_of(places)
        for step, column in zip(self._steps, others, strict=True):
            places = step.places_of(places << 32 | (column.astype(np.int64) & _LOW))
        return places


class _Step:
    """The number of each key; most of them sorted, to find many in one go."""

    def __init__(self) -> None:
        self.index: dict[int, int] = {}
        self._sorted: NDArray[np.int64] = np.empty(0, np.int64)
        self._places: NDArray[np.int64] = np.empty(0, np.int64)
        """Places of the keys in `_sorted`."""

    def places_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(keys) < _FEW:
            return self._one_by_one(keys)
        if len(self.index) > _GROWN * len(self._sorted):
            every = np.fromiter(self.index, np.int64, len(self.index))
            self._places = np.argsort(every)
            self._sorted = every[self._places]
        if not len(self._sorted):
            return self._one_by_one(keys)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        found = self._places[at]
        others = np.flatnonzero(self._sorted[at] != keys)
        found[others] = self._one_by_one(keys[others])
        return found

    def _one_by_one(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        index = self.index
        return np.asarray([index.setdefault(key, len(index)) for key in keys.tolist()], np.int64)


class CombinationIndex:
    """Numbers the distinct combinations of some columns of structured rows, in order of first appearance.

    Combinations are compared by a 64-bit hash: a collision among a million of them has a probability of 3e-8.
    Numbering n rows costs O(n log(combinations)).
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = tuple(fields)
        self._rows: list[Columns] = []
        self._all: Columns | None = None
        self._hashes = np.empty(0, dtype=np.uint64)
        self._numbers = np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def rows(self) -> Columns:
        """The first row seen of each combination, by number."""
        if self._all is None:
            self._all = np.concatenate(self._rows)
            self._rows = [self._all]
        return self._all

    def number(self, rows: Columns) -> NDArray[np.int32]:
        """The number of each row's combination; new combinations get the next numbers."""
        hashes = self._hash(rows)
        places = np.searchsorted(self._hashes, hashes)
        if len(self._hashes):
            places[places == len(self._hashes)] = 0
            is_new = self._hashes[places] != hashes
        else:
            is_new = np.ones(len(rows), dtype=bool)
        if is_new.any():
            self._add(row_ops.filter_rows(rows, is_new), hashes[is_new])
            places = np.searchsorted(self._hashes, hashes)
        numbers: NDArray[np.int32] = self._numbers[places]
        return numbers

    def _add(self, rows: Columns, hashes: NDArray[np.uint64]) -> None:
        _, first = np.unique(hashes, return_index=True)
        first.sort()
        added = np.arange(len(self._numbers), len(self._numbers) + len(first), dtype=np.int32)
        self._rows.append(row_ops.take(rows, first))
        self._all = None
        all_hashes = np.concatenate([self._hashes, hashes[first]])
        order = np.argsort(all_hashes)
        self._hashes, self._numbers = all_hashes[order], np.concatenate([self._numbers, added])[order]

    def _hash(self, rows: Columns) -> NDArray[np.uint64]:
        mixed = np.zeros(len(rows), dtype=np.uint64)
        for name in self._fields:
            mixed += rows[name].astype(np.uint64)
            mixed *= _MULTIPLIER
            mixed ^= mixed >> np.uint64(29)
        return mixed


class Interner:
    """Values to small integers, in order of first appearance."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._index: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> str:
        return self.values[index]

    def index_of(self, value: str) -> int:
        """The integer of a value; a new one the first time."""
        index = self._index.get(value)
        if index is None:
            index = self._index[value] = len(self.values)
            self.values.append(value)
        return index

    def find(self, value: str) -> int | None:
        """The integer of a value that was seen, else None."""
        return self._index.get(value)
