"""Global alignment of two symbol sequences inside a band: what is left when runs do not simply agree.

Needleman and Wunsch 1970, with a linear gap; one row of the table at a time, the gaps along the row by a running
maximum, so that a row costs a few array operations however wide the band is.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.intp]
Scores = NDArray[np.float32]

FORBIDDEN: Final = np.float32(-1e6)
"""A score that no alignment can want."""


def align(
    scores: Scores, gap_above: Scores, gap_left: Scores, *, band: int | None = None, is_open_ended: bool = False
) -> tuple[Positions, Positions]:
    """The pairs (row, column) of a best global alignment, ascending in both.

    `scores[i, j]` is what pairing row i with column j is worth; leaving row i out costs `gap_above[i]`, leaving
    column j out `gap_left[j]` (both not positive). `band` limits |i * columns / rows - j|. With `is_open_ended` the
    tail of either sequence may stay out for nothing. Among equals, pairs are preferred, and late gaps.
    Costs O(rows x columns); memory alike.
    """
    rows, columns = scores.shape
    if rows == 0 or columns == 0:
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
    if band is not None:
        scores = _banded(scores, band)
    table = _fill(scores, gap_above, gap_left)
    end_row, end_column = _best_end(table) if is_open_ended else (rows, columns)
    return _trace(table, scores, gap_above, end_row, end_column)


def _fill(scores: Scores, gap_above: Scores, gap_left: Scores) -> Scores:
    rows, columns = scores.shape
    table = np.empty((rows + 1, columns + 1), dtype=np.float32)
    along = np.concatenate([np.zeros(1, dtype=np.float32), np.cumsum(gap_left, dtype=np.float32)])
    table[0] = along
    best = np.empty(columns + 1, dtype=np.float32)
    diagonal = np.empty(columns, dtype=np.float32)
    for row in range(rows):
        previous = table[row]
        np.add(previous, gap_above[row], out=best)
        np.add(previous[:-1], scores[row], out=diagonal)
        np.maximum(best[1:], diagonal, out=best[1:])
        # A gap along the row from j' to j costs along[j] - along[j'], so the best j' is a running maximum.
        best -= along
        np.maximum.accumulate(best, out=best)
        np.add(best, along, out=table[row + 1])
    return table


def _best_end(table: Scores) -> tuple[int, int]:
    last_row, last_column = int(table[-1].argmax()), int(table[:, -1].argmax())
    if table[-1, last_row] >= table[last_column, -1]:
        return table.shape[0] - 1, last_row
    return last_column, table.shape[1] - 1


def _trace(table: Scores, scores: Scores, gap_above: Scores, row: int, column: int) -> tuple[Positions, Positions]:
    paired_rows: list[int] = []
    paired_columns: list[int] = []
    tolerance = 1e-2
    gaps = gap_above.tolist()
    value = table.item
    while row > 0 and column > 0:
        here = value(row, column)
        if here - value(row - 1, column - 1) - scores.item(row - 1, column - 1) <= tolerance:
            row, column = row - 1, column - 1
            paired_rows.append(row)
            paired_columns.append(column)
        elif here - value(row - 1, column) - gaps[row - 1] <= tolerance:
            row -= 1
        else:
            column -= 1
    paired_rows.reverse()
    paired_columns.reverse()
    return np.array(paired_rows, dtype=np.intp), np.array(paired_columns, dtype=np.intp)


def _banded(scores: Scores, band: int) -> Scores:
    rows, columns = scores.shape
    expected = np.arange(rows) * (columns / rows)
    outside = np.abs(expected[:, None] - np.arange(columns)[None, :]) > band
    limited: Scores = np.where(outside, FORBIDDEN, scores).astype(np.float32)
    return limited
