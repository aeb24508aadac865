"""Take, filter, concatenate and copy whole rows of structured arrays, as bytes.

numpy copies a structured row field by field: 100 to 300 ns for a row of 200 bytes, by index, mask or concatenation.
As one opaque item the same row takes 7 to 20 ns. `benchmarks/pipeline.py` shows what that is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns

_AT_ONCE: Final = 2048
"""Rows that are taken in one go: half a megabyte of the widest."""
_MOVED_AT_ONCE: Final = 2**20
"""Bytes that are moved in one go: they are still in the cache when the next piece follows."""


def take(rows: Columns, positions: NDArray[np.integer]) -> Columns:
    """A copy of the rows at these positions, in the shape of `positions`."""
    found: Columns = rows.take(positions)
    return found


def take_columns(rows: Columns, positions: NDArray[np.integer], names: Sequence[str]) -> Columns:
    """A copy of some columns of the rows at these positions: 4 to 8 ns for each column of a row.

    Rows are wide, and a table of them larger than the caches: each column by itself would fetch all of it from memory
    again, at 20 ns a value. So whole rows are taken, as many at once as stay in the cache until their columns are.
    """
    found: Columns = np.empty(len(positions), np.dtype([(name, rows.dtype[name]) for name in names]))
    if len(names) == 1:
        found[names[0]] = rows[names[0]][positions]
        return found
    for begin in range(0, len(positions), _AT_ONCE):
        near, part = rows.take(positions[begin : begin + _AT_ONCE]), found[begin : begin + _AT_ONCE]
        for name in names:
            part[name] = near[name]
    return found


def filter_rows(rows: Columns, mask: NDArray[np.bool_]) -> Columns:
    """A copy of the rows where the mask is true."""
    found: Columns = rows.take(np.flatnonzero(mask))
    return found


def concat(parts: Sequence[Columns]) -> Columns:
    """One array of all rows; at least one part, all of one dtype."""
    dtype = parts[0].dtype
    if len(parts) == 1:
        return parts[0]
    assert all(part.dtype is dtype or part.dtype == dtype for part in parts), (
        "rows of different dtypes cannot be concatenated"
    )
    filled = [part for part in parts if len(part)]
    if len(filled) < 2:
        return copy(filled[0] if filled else parts[0])
    whole: Columns = np.concatenate([_opaque(part) for part in filled]).view(dtype)
    return whole


def copy(rows: Columns) -> Columns:
    """A copy of all rows."""
    whole: Columns = _opaque(rows).copy().view(rows.dtype)
    return whole


def copy_into(into: Columns, begin: int, rows: Columns) -> None:
    """Writes rows of the same dtype into an array, from a position on."""
    assert into.dtype == rows.dtype, "rows of another dtype cannot be copied in"
    _opaque(into)[begin : begin + len(rows)] = _opaque(rows)


def move_to_front(rows: Columns, begin: int, end: int) -> None:
    """Moves the rows from `begin` to `end` of an array to its front, in the memory that it has.

    If the target overlaps the source, numpy copies to new memory first: so no piece is longer than what lies before
    the first row.
    """
    if not begin:
        return
    opaque = _opaque(rows)
    step = min(begin, max(1, _MOVED_AT_ONCE // rows.itemsize))
    for at in range(begin, end, step):
        piece = opaque[at : min(at + step, end)]
        opaque[at - begin : at - begin + len(piece)] = piece


def _opaque(rows: Columns) -> NDArray[np.void]:
    opaque: NDArray[np.void] = rows.view(_bytes(rows.dtype.itemsize))
    return opaque


@cache
def _bytes(amount: int) -> np.dtype[np.void]:
    return np.dtype((np.void, amount))
