"""Sums by bucket are those of all that came, whenever it came, and whatever the length of the buckets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclscope_service.columns.buckets import (
    BUCKET_NS,
    LEAST_BUCKETS,
    MOST_BUCKETS,
    MOST_CELLS,
    BucketSpans,
    BucketSums,
    Int64s,
    LastingSums,
    Window,
    window_until,
)

_WINDOW = window_until(1_000 * BUCKET_NS)
_EVENTS = st.lists(
    st.tuples(
        st.integers(_WINDOW.begin_ns - 20 * BUCKET_NS, _WINDOW.end_ns + 20 * BUCKET_NS),
        st.integers(0, 200),
        st.integers(0, 10**12),
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(portions=st.lists(_EVENTS, max_size=3))
def test_sums_by_bucket_are_those_of_all_events_in_the_window(portions: list[list[tuple[int, int, int]]]) -> None:
    sums, spans = BucketSums(2), BucketSpans()
    for portion in portions:
        times, of, values = (
            np.array(column, np.int64) for column in (zip(*portion, strict=True) if portion else ((),) * 3)
        )
        sums.add(times, of, values, np.ones(len(values), np.int64))
        spans.add(times, of)
        sums.keep(_WINDOW)
        spans.keep(_WINDOW)
    inside = [each for portion in portions for each in portion if _WINDOW.begin_ns <= each[0] < _WINDOW.end_ns]
    expected = np.zeros((2, 201))
    table = np.zeros((3, _WINDOW.buckets))
    for time_ns, group, value in inside:
        expected[:, group] += value, 1
        table[group % 3, (time_ns - _WINDOW.begin_ns) // BUCKET_NS] += value
    np.testing.assert_array_equal(sums.whole(_WINDOW, 201), expected)
    groups = np.arange(201)
    np.testing.assert_array_equal(sums.by_bucket(0, _WINDOW, groups, groups % 3, 3), table)
    first, last = spans.within(_WINDOW, 201)
    for group in range(201):
        times_of = [time_ns for time_ns, of_group, _ in inside if of_group == group]
        assert (first[group], last[group]) == (min(times_of), max(times_of)) if times_of else first[group] > last[group]


_BEGIN = 1_000_000 * BUCKET_NS
_LONG = st.lists(
    st.tuples(st.integers(_BEGIN, _BEGIN + 20_000 * BUCKET_NS), st.integers(0, 1 << 40), st.integers(1, 10**9)),
    min_size=1,
    max_size=60,
)


def _columns(rows: list[tuple[int, int, int]]) -> tuple[Int64s, Int64s, Int64s]:
    times, of, values = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return times, of, values


def _window_of(sums: LastingSums, last_ns: int) -> Window:
    first_ns = sums.first_ns
    assert first_ns is not None
    return Window(
        begin_ns=first_ns, bucket_ns=sums.bucket_ns, buckets=int((last_ns - first_ns) // sums.bucket_ns) + 1, job="j"
    )


@settings(max_examples=60)
@given(rows=_LONG, cut=st.integers(0, 60))
def test_what_lasts_is_the_sum_of_all_in_whatever_portions_it_comes(rows: list[tuple[int, int, int]], cut: int) -> None:
    whole, portions = LastingSums(2), LastingSums(2)
    times, of, values = _columns(rows)
    whole.add(times, of, values, np.ones(len(values)))
    for part in (rows[cut:], rows[:cut]):
        if part:
            part_times, part_of, part_values = _columns(part)
            portions.add(part_times, part_of, part_values, np.ones(len(part_values)))
    assert whole == portions
    window = _window_of(whole, int(times.max()))
    groups = np.unique(of)
    expected = np.array([[values[of == group].sum(), (of == group).sum()] for group in groups.tolist()]).T
    np.testing.assert_array_equal(whole.whole(window, groups), expected)
    rowed = whole.by_bucket(0, window, groups, np.zeros(len(groups), np.int64), 1)[0]
    table = np.zeros(window.buckets)
    np.add.at(table, window.bucket_of(times), values)
    np.testing.assert_array_equal(rowed, table)


def test_buckets_double_where_there_are_too_many_and_nothing_is_lost() -> None:
    sums = LastingSums(1)
    lengths = [sums.bucket_ns]
    for number in range(3 * MOST_BUCKETS):
        sums.add(np.array([_BEGIN + number * BUCKET_NS]), np.array([7]), np.array([1]))
        assert len(sums.begins()) <= MOST_BUCKETS
        lengths.append(sums.bucket_ns)
    assert sorted(set(lengths)) == [BUCKET_NS, 2 * BUCKET_NS, 4 * BUCKET_NS]
    window = _window_of(sums, _BEGIN + 3 * MOST_BUCKETS * BUCKET_NS)
    assert sums.whole(window, np.array([7, 8])).tolist() == [[3 * MOST_BUCKETS, 0]]
    amounts = sums.by_bucket(0, window, np.array([7]), np.array([0]), 1)[0]
    assert set(amounts[:-1].tolist()) <= {4.0}


def test_many_groups_have_fewer_buckets_so_that_memory_stays_bounded() -> None:
    sums, groups = LastingSums(1), np.arange(MOST_CELLS // LEAST_BUCKETS // 2)
    for number in range(2 * MOST_BUCKETS):
        sums.add(np.full(len(groups), _BEGIN + number * BUCKET_NS), groups, np.ones(len(groups)))
    assert len(sums.begins()) <= 2 * LEAST_BUCKETS
    assert sum(each.size for each in sums.begins().values()) <= 2 * MOST_CELLS


def test_sums_that_differ_in_a_bucket_or_a_group_are_not_equal() -> None:
    def made(*rows: tuple[int, int, int]) -> LastingSums:
        sums = LastingSums(1)
        sums.add(*_columns([(_BEGIN + bucket * BUCKET_NS, group, value) for bucket, group, value in rows]))
        return sums

    assert made((0, 1, 5), (1, 2, 6)) == made((1, 2, 6), (0, 1, 2), (0, 1, 3))
    assert made((0, 1, 5)) != made((1, 1, 5))
    assert made((0, 1, 5)) != made((0, 2, 5))
    assert made((0, 1, 5)) != made((0, 1, 6))
