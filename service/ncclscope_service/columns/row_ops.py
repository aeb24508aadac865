"""Take, filter, concatenate and copy whole rows of structured arrays, as bytes.

numpy copies a structured row field by field: 100 to 300 ns for a row of 200 bytes, by index, mask or concatenation.
As one opaque item the same row takes 7 to 20 ns. `benchmarks/pipeline.py` shows what that is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.table import AnyRows, Rows
from ncclscope_wire.batch import Columns


def take(rows: Columns, positions: NDArray[np.integer]) -> Columns:
    """A copy of the rows at these positions, in the shape of `positions`."""
    found: Columns = rows.take(positions)
    return found


def take_columns(rows: AnyRows, positions: NDArray[np.integer], names: Sequence[str]) -> Columns:
    """A copy of some columns of the rows at these positions."""
    if isinstance(rows, Rows):
        return rows.take(positions, *names)
    found: Columns = np.empty(len(positions), np.dtype([(name, rows.dtype[name]) for name in names]))
    for name in names:
        found[name] = rows[name][positions]
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


def _opaque(rows: Columns) -> NDArray[np.void]:
    opaque: NDArray[np.void] = rows.view(_bytes(rows.dtype.itemsize))
    return opaque


@cache
def _bytes(amount: int) -> np.dtype[np.void]:
    return np.dtype((np.void, amount))
