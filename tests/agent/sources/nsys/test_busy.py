from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.sources.nsys.busy import INTERVAL, BusyUnion, Intervals

SPANS = st.lists(
    st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(0, 60), st.integers(0, 12)), min_size=1, max_size=60
)


def intervals(*spans: tuple[int, int, int, int]) -> Intervals:
    return np.array([(process, device, start, start + length, 1) for process, device, start, length in spans], INTERVAL)


def covered(found: Intervals) -> set[tuple[int, int, int]]:
    """Every (process, device, half nanosecond) inside an interval, ends included."""
    return {
        (process, device, at)
        for process, device, start, end, _ in found.tolist()
        for at in range(2 * start, 2 * end + 1)
    }


@given(SPANS, st.integers(1, 7))
def test_the_union_covers_what_the_intervals_cover_in_any_order_and_cut(
    spans: list[tuple[int, int, int, int]], size: int
) -> None:
    union = BusyUnion(limit=1000)
    for at in range(0, len(spans), size):
        union.ingest_intervals(intervals(*spans[at : at + size]))
    found = union.result()
    assert covered(found) == covered(intervals(*spans))
    assert int(found["kernels"].sum()) == len(spans)
    for before, after in pairwise(found):
        same = before["process"] == after["process"] and before["device"] == after["device"]
        assert not same or after["start"] > before["end"]


def test_touching_kernels_are_one_interval() -> None:
    union = BusyUnion(limit=10)
    union.ingest_intervals(intervals((1, 0, 0, 5), (1, 0, 5, 5), (1, 0, 11, 1)))
    assert union.result()[["start", "end", "kernels"]].tolist() == [(0, 10, 2), (11, 12, 1)]


def test_beyond_the_limit_the_shortest_gaps_are_filled_and_told() -> None:
    union = BusyUnion(limit=2)
    union.ingest_intervals(intervals((1, 0, 0, 10), (1, 0, 12, 10), (1, 0, 100, 10), (1, 0, 111, 9)))
    assert union.result()[["start", "end"]].tolist() == [(0, 22), (100, 120)]
    assert union.filled_gap_ns == 2


def test_the_limit_holds_however_many_intervals_come() -> None:
    union = BusyUnion(limit=50)
    for block in range(40):
        union.ingest_intervals(intervals(*((1, 0, 1000 * block + 10 * k, 3) for k in range(100))))
    found = union.result()
    assert len(found) <= 50
    assert int(found["kernels"].sum()) == 4000


def test_no_kernels_make_no_interval() -> None:
    assert len(BusyUnion(limit=5).result()) == 0
