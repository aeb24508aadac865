"""Rows copied as bytes are the rows that numpy would have copied field by field."""

from __future__ import annotations

import numpy as np

from ncclscope_service.columns import row_ops
from ncclscope_wire.batch import Columns

_ROW = np.dtype([("small", "<u1"), ("large", "<i8"), ("rate", "<f8"), ("flag", "?")])


def _rows(amount: int) -> Columns:
    rows = np.zeros(amount, _ROW)
    rows["small"], rows["large"] = np.arange(amount), -np.arange(amount)
    rows["rate"], rows["flag"] = np.linspace(0, 1, amount), np.arange(amount) % 2
    return rows


def test_rows_are_taken_in_any_order_and_shape() -> None:
    rows, positions = _rows(9), np.array([[5, 0], [5, 8]])
    assert np.array_equal(row_ops.take(rows, positions), rows[positions])


def test_rows_are_kept_by_mask_also_of_a_view() -> None:
    rows, mask = _rows(12)[3:], np.arange(9) % 3 == 0
    assert np.array_equal(row_ops.filter_rows(rows, mask), rows[mask])


def test_named_columns_are_taken_and_no_others() -> None:
    found = row_ops.take_columns(_rows(9), np.array([4, 1]), ("flag", "large"))
    assert found.dtype.names == ("flag", "large")
    assert found.tolist() == [(False, -4), (True, -1)]


def test_parts_are_joined_in_order() -> None:
    rows = _rows(9)
    assert np.array_equal(row_ops.concat([rows[:4], rows[4:4], rows[4:]]), rows)


def test_a_copy_is_its_own() -> None:
    rows = _rows(3)
    copied = row_ops.copy(rows)
    rows["large"] = 7
    assert copied["large"].tolist() == [0, -1, -2]
