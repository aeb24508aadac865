"""Unions and coverage of intervals are those of the moments in them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ncclscope_service.columns.intervals import Coverage, Spans, covered_ns, union


def _random(seed: int, amount: int) -> Spans:
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 200, amount)
    return Spans(rng.integers(0, 3, amount), start, start + rng.integers(0, 20, amount))


def _moments(spans: Spans, group: int) -> set[int]:
    mine = [(s, e) for g, s, e in zip(spans.group, spans.start, spans.end, strict=True) if g == group]
    return {moment for start, end in mine for moment in range(start, end)}


@pytest.mark.parametrize("seed", range(20))
def test_a_union_has_the_same_moments_and_no_overlap(seed: int) -> None:
    spans = _random(seed, 40)
    found = union(spans)
    for group in range(3):
        assert _moments(found, group) == _moments(spans, group)
        assert found.lengths_by_group(3)[group] == len(_moments(spans, group))
        own = np.flatnonzero(found.group == group)
        assert (found.start[own][1:] > found.end[own][:-1]).all()


@pytest.mark.parametrize("seed", range(20))
def test_coverage_counts_the_moments_that_both_have(seed: int) -> None:
    busy = _random(seed, 12)
    busy = union(Spans(np.zeros(12, np.int64), busy.start, busy.end))
    asked = _random(seed + 100, 30)
    found = Coverage(busy.start, busy.end).covered(asked.start, asked.end)
    expected = [
        len(_moments(busy, 0) & set(range(start, end)))
        for start, end in zip(asked.start.tolist(), asked.end.tolist(), strict=True)
    ]
    assert found.tolist() == expected


def test_nothing_covers_nothing() -> None:
    none = np.zeros(0, np.int64)
    assert len(union(Spans(none, none, none)).group) == 0
    assert Coverage(none, none).covered(np.array([3]), np.array([9])).tolist() == [0]


def test_times_of_this_century_keep_their_nanoseconds() -> None:
    base = 1_800_000_000_000_000_000
    spans = Spans(np.array([5, 9, 5]), np.array([base, base, base + 3]), np.array([base + 4, base + 1, base + 9]))
    found = union(spans)
    assert (found.start.tolist(), found.end.tolist()) == ([base, base], [base + 9, base + 1])


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


def test_no_intervals_cover_no_time() -> None:
    empty = np.empty(0, dtype=np.int64)
    assert covered_ns(empty, empty, np.array([0, 5, 9])).tolist() == [0, 0]
    assert covered_ns(empty, empty, empty).tolist() == []
