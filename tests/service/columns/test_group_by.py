"""Distinct values are found as numpy.unique finds them, in any range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_service.columns.group_by import (
    KeyIndex,
    distinct,
    distinct_together,
    distinct_values,
    first_positions,
    group_by,
)

_NUMBERS = st.lists(st.integers(-3, 9) | st.integers(-(2**40), 2**40), max_size=40)


@given(_NUMBERS)
def test_values_and_places_are_those_of_sorting(numbers: list[int]) -> None:
    values = np.asarray(numbers, np.int64)
    expected, places = np.unique(values, return_inverse=True)
    found, inverse = distinct(values)
    assert found.tolist() == expected.tolist() == list(distinct_values(values))
    assert inverse.tolist() == places.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.uint32])
def test_values_keep_their_type(dtype: type[np.integer]) -> None:
    found, _ = distinct(np.asarray([7, 3, 7], dtype))
    assert found.dtype == dtype


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 2), st.integers(0, 255)), max_size=40))
def test_combinations_come_in_their_order(rows: list[tuple[int, int, int]]) -> None:
    columns = [np.asarray([row[column] for row in rows], np.int64) for column in range(3)]
    found, inverse = distinct_together(*columns)
    combinations = list(zip(*(each.tolist() for each in found), strict=True))
    assert combinations == sorted(set(rows))
    assert [combinations[place] for place in inverse.tolist()] == rows


@given(_NUMBERS)
def test_groups_hold_every_position_once_in_order(numbers: list[int]) -> None:
    expected = {value: [at for at, other in enumerate(numbers) if other == value] for value in sorted(set(numbers))}
    found = {value: at.tolist() for value, at in group_by(np.asarray(numbers, np.int64))}
    assert found == expected
    assert list(found) == list(expected)


@given(_NUMBERS)
def test_the_first_of_each_value_is_found(numbers: list[int]) -> None:
    assert first_positions(np.asarray(numbers, np.int64)).tolist() == [
        numbers.index(value) for value in sorted(set(numbers))
    ]


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize("portion", [1, 100, 1000])
def test_each_combination_has_the_number_in_which_it_came_first(columns: int, portion: int) -> None:
    random = np.random.default_rng(3)
    drawn = [random.integers(-1 if column else 0, 9, 3000).astype(np.int32) for column in range(columns)]
    places, known = KeyIndex(columns), dict[tuple[int, ...], int]()
    for begin in range(0, 3000, portion):
        part = [column[begin : begin + portion] for column in drawn]
        keys = list(zip(*(column.tolist() for column in part), strict=True))
        assert places.number(*part).tolist() == [known.setdefault(key, len(known)) for key in keys]
        assert len(places) == len(known)
