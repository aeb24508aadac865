"""Kernels outside NCCL: ranks that share calls are found by their times, and wait for the last one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.measure.outside import measure_outside
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

Rows = list[tuple[int, int, int]]
"""Rank, start, end."""

WORLD = (0, 1, 2, 3)
PAIRS = ((0, 1), (2, 3))


def _calls(ranks: tuple[int, ...], *, at: int, late: dict[int, int], skew: int = 0, calls: int = 20) -> Rows:
    """Calls of a group, one every 10,000 ns, that last 1,000 ns from the last start on."""
    rows: Rows = []
    for nth in range(calls):
        begins = {rank: at + 10_000 * nth + late.get(rank, 0) for rank in ranks}
        ends = max(begins.values()) + 1_000
        rows += [(rank, begin, ends + skew * rank) for rank, begin in begins.items()]
    return rows


def _measured(rows: Rows, *groups: tuple[int, ...]) -> NDArray[np.void]:
    columns = np.asarray(rows, np.int64)
    return measure_outside(np.zeros(len(rows), np.int32), columns[:, 0], columns[:, 1], columns[:, 2], groups)


def test_ranks_wait_for_the_last_of_their_group() -> None:
    rows = _calls((0, 1), at=0, late={1: 500}) + _calls((2, 3), at=4_000, late={2: 700})
    found = _measured(rows, WORLD, *PAIRS)
    waits = {(rank, int(wait)) for (rank, _, _), wait in zip(rows, found["wait_ns"], strict=True)}
    assert waits == {(0, 500), (1, 0), (2, 0), (3, 700)}
    assert set(found["transfer_ns"].tolist()) == {1_000}
    assert set(found["ranks_seen"].tolist()) == {2}


def test_the_largest_group_that_fits_is_taken() -> None:
    found = _measured(_calls(WORLD, at=0, late={3: 300}), *PAIRS, WORLD)
    assert set(found["ranks_seen"].tolist()) == {4}


def test_ranks_that_were_recorded_over_other_stretches_are_matched_where_both_were() -> None:
    rows = _calls((0, 1), at=0, late={1: 500}, skew=30)
    later = [row for row in rows if row[0] == 0 or row[1] > 45_000]
    found = _measured(later, (0, 1))
    known = found["wait_ns"] != NO_TIME_NS
    assert np.count_nonzero(known) == 30
    assert set(found["transfer_ns"][known].tolist()) == {1_030}


def test_without_ranks_clocks_or_a_common_group_nothing_is_measured() -> None:
    rows = _calls((0, 1), at=0, late={})
    assert (_measured(rows)["wait_ns"] == NO_TIME_NS).all()
    assert (_measured([(NO_NUMBER, a, b) for _, a, b in rows], (0, 1))["wait_ns"] == NO_TIME_NS).all()
    assert (_measured([(rank, NO_TIME_NS, b) for rank, _, b in rows], (0, 1))["wait_ns"] == NO_TIME_NS).all()
    apart = _calls((0,), at=0, late={}) + _calls((1,), at=5_000, late={})
    assert (_measured(apart, (0, 1))["wait_ns"] == NO_TIME_NS).all()
