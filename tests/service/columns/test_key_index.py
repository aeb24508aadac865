"""Combinations of columns are numbered as a dictionary of tuples would."""

from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.columns.group_by import KeyIndex


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
