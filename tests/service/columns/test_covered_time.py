"""Time covered by intervals, against counting every nanosecond."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ncclscope_service.columns.intervals import covered_ns


def test_what_intervals_share_counts_once_and_borders_cut_them() -> None:
    covered = covered_ns(np.array([0, 5, 30, 40]), np.array([10, 12, 31, 40]), np.array([0, 8, 10, 20, 50]))
    assert covered.tolist() == [8, 2, 2, 1]


def test_it_agrees_with_counting_every_nanosecond() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        starts = rng.integers(0, 200, 30)
        ends = starts + rng.integers(-3, 25, 30)
        borders = np.unique(rng.integers(-20, 250, 12))
        ticks = np.zeros(400, dtype=np.bool_)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            ticks[start + 50 : max(start, end) + 50] = True
        expected = [int(ticks[a + 50 : b + 50].sum()) for a, b in pairwise(borders.tolist())]
        assert covered_ns(starts, ends, borders).tolist() == expected


def test_nothing_covers_nothing() -> None:
    empty = np.empty(0, dtype=np.int64)
    assert covered_ns(empty, empty, np.array([0, 5, 9])).tolist() == [0, 0]
    assert covered_ns(empty, empty, empty).tolist() == []
