"""Tables grow at the end, are forgotten from the front, and ids stay what they were."""

from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.columns.group_by import Interner
from ncclscope_service.columns.table import Table
from ncclscope_wire.batch import Columns

_ROW = np.dtype([("number", "<i8")])


def _rows(begin: int, end: int) -> Columns:
    rows = np.empty(end - begin, _ROW)
    rows["number"] = np.arange(begin, end)
    return rows


def _table(amount: int) -> Table:
    table = Table(_ROW)
    table.append(_rows(0, amount))
    return table


def test_ids_count_up_over_appends() -> None:
    table = Table(_ROW)
    assert table.append(_rows(0, 3)).tolist() == [0, 1, 2]
    assert table.append(_rows(3, 5)).tolist() == [3, 4]
    assert len(table) == table.next_id == 5


def test_nothing_appended_is_no_ids() -> None:
    table = _table(2)
    assert table.append(_rows(0, 0)).tolist() == []
    assert table.next_id == 2


def test_ids_of_later_rows_stay_when_older_ones_are_dropped() -> None:
    table = _table(10)
    table.drop_before(4)
    assert (table.first, table.next_id, len(table)) == (4, 10, 6)
    assert table.take(np.array([9, 4]))["number"].tolist() == [9, 4]
    assert table.append(_rows(10, 12)).tolist() == [10, 11]
    assert table.take(np.array([11]))["number"].tolist() == [11]


def test_dropping_what_was_dropped_before_changes_nothing() -> None:
    table = _table(10)
    table.drop_before(4)
    table.drop_before(2)
    assert table.rows["number"].tolist() == [4, 5, 6, 7, 8, 9]


def test_dropping_past_the_end_empties_the_table_and_no_id_is_given_twice() -> None:
    table = _table(3)
    table.drop_before(100)
    assert len(table) == 0
    assert table.append(_rows(3, 4)).tolist() == [3]


def test_a_dropped_row_cannot_be_asked_for() -> None:
    table = _table(3)
    table.drop_before(2)
    with pytest.raises(AssertionError, match="after it was dropped"):
        table.take(np.array([1]))


def test_rows_survive_any_mix_of_appends_and_drops() -> None:
    rng = np.random.default_rng(3)
    table, begin, end = Table(_ROW), 0, 0
    for _ in range(200):
        amount = int(rng.integers(0, 400))
        table.append(_rows(end, end + amount))
        end += amount
        begin = int(rng.integers(begin, end + 1))
        table.drop_before(begin)
        assert (table.first, table.next_id) == (begin, end)
        assert table.rows["number"].tolist() == list(range(begin, end))


def test_writing_to_rows_changes_the_table_and_taken_rows_are_a_copy() -> None:
    table = _table(3)
    taken = table.take(np.array([1]))
    table.rows["number"][1] = 70
    assert taken["number"].tolist() == [1]
    assert table.take(np.array([1]))["number"].tolist() == [70]


_PAIR = np.dtype([("number", "<i8"), ("rate", "<f8"), ("flag", "?")])


def _pairs() -> Table:
    table = Table(_PAIR, unknown=np.array([(-1, np.nan, True)], _PAIR))
    table.append(np.array([(1, 0.5, False), (2, 1.5, True), (3, 2.5, False)], _PAIR))
    return table


def test_each_column_is_one_contiguous_array() -> None:
    assert all(_pairs().rows[name].flags.c_contiguous for name in ("number", "rate", "flag"))


def test_columns_that_are_not_appended_are_unknown() -> None:
    table = _pairs()
    assert table.append({"number": np.array([4, 5]), "flag": np.array([False, False])}).tolist() == [3, 4]
    added = table.take(np.array([3, 4]))
    assert (added["number"].tolist(), added["flag"].tolist()) == ([4, 5], [False, False])
    assert np.isnan(added["rate"]).all()


def test_columns_of_another_type_are_not_appended() -> None:
    with pytest.raises(AssertionError, match="another dtype"):
        _pairs().append({"number": np.array([4], np.int32)})


def test_a_slice_of_rows_is_a_view_and_rows_by_mask_or_position_are_copies() -> None:
    rows = _pairs().rows
    rows[1:]["number"] = 7
    assert rows["number"].tolist() == [1, 7, 7]
    chosen = rows[rows["flag"]], rows[np.array([1])]
    rows["number"][1] = 9
    assert [each.tolist() for each in chosen] == [[(7, 1.5, True)]] * 2
    assert (rows[1].item(), rows[["flag", "number"]].tolist()[0]) == ((9, 1.5, True), (False, 1))


def test_columns_take_memory_between_the_first_and_the_last_row_that_was_written() -> None:
    table = Table(_PAIR, unknown=np.array([(-1, np.nan, False)], _PAIR))
    table.append({"number": np.arange(1000)})
    bare = table.used_bytes
    assert bare == 8000
    table.rows.put("flag", np.array([99]), values=True)
    table.append({"number": np.arange(3), "flag": np.zeros(3, bool)})
    assert table.used_bytes == 8 * 1003 + 1
    assert table.rows.values("flag", np.array([99, 1002, -1, 98])).tolist() == [True, False, False, False]
    assert np.isnan(table.take(np.arange(1003), "rate")["rate"]).all()
    assert table.used_bytes == 8 * 1003 + 1, "copies take no memory of the table"
    assert np.isnan(table.rows[:10]["rate"]).all()
    assert table.used_bytes == 8 * 1003 + 1 + 80
    assert table.rows[90:101]["flag"].tolist() == [*[False] * 9, True, False]
    assert table.used_bytes == 8 * 1003 + 11 + 80


def test_packed_columns_take_four_bytes_until_a_value_needs_more() -> None:
    table = Table(_PAIR, unknown=np.array([(-1, np.nan, False)], _PAIR), packed=["number"])
    table.append({"number": np.arange(1000)})
    assert table.used_bytes == 4000
    table.drop_before(10)
    assert table.rows["number"].dtype == table.take(np.array([10]))["number"].dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        table.rows["number"][0] = 1
    rows = table.rows[1:]
    rows.put("number", np.array([0]), 2**40)
    rows.put("number", np.array([1]), -7)
    assert table.rows["number"].tolist() == [10, 2**40, -7, *range(13, 1000)]
    table.append({"number": np.array([2**50])})
    assert table.take(np.array([1000]))["number"].tolist() == [2**50]
    assert table.used_bytes == 8 * 991


def test_equal_strings_have_one_number_in_order_of_appearance() -> None:
    strings = Interner()
    assert [strings.index_of(text) for text in ("b", "a", "b", "")] == [0, 1, 0, 2]
    assert (strings[1], len(strings)) == ("a", 3)
    assert strings.find("a") == 1
    assert strings.find("c") is None
