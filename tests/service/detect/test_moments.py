"""Counts at earlier moments of a job, by stamps of hosts whose clocks differ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from service.log_batches import BASE_NS, Line, Reading, init, log_batch

from ncclscope_service.detect.moments import earlier_counts
from ncclscope_service.job.ranks import assign_ranks
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_TIME_NS

_EVERY_NS = 100_000_000
_COLLECTIVES = 200


def _store(stamp: Callable[[int, int], int], *, alone: bool = False) -> Store:
    """Ranks on hosts of their own that enqueue a collective every 100 ms; `stamp` of a rank and a collective."""
    reading = Reading()
    for rank in range(3):
        event = init(line=0, rank=rank, nranks=3, comm_id=1 + rank * alone, host=f"node{rank}")
        lines = [
            Line(line=1 + each, op_count=each, nranks=3, logged_at_ns=stamp(rank, each)) for each in range(_COLLECTIVES)
        ]
        reading.feed(log_batch(lines, host=f"node{rank}", events=[event]), job="j")
    assign_ranks(reading.store)
    return reading.store


def _stamp(rank: int, collective: int) -> int:
    """Clocks are minutes apart; rank 2 enqueues half of a gap later in every fourth collective."""
    late_ns = _EVERY_NS // 2 if rank == 2 and collective % 4 == 0 else 0
    return BASE_NS + rank * 300_000_000_000 + collective * _EVERY_NS + late_ns


def _lags(store: Store) -> NDArray[np.int64]:
    """By moment and rank, how many operations it is behind."""
    counts = np.stack([each["operations"][np.argsort(each["rank"])] for each in earlier_counts(store, "j")])
    lags: NDArray[np.int64] = counts.max(axis=1, keepdims=True) - counts
    return lags


def test_ranks_stand_apart_for_as_long_as_one_is_late_although_clocks_differ() -> None:
    lags = _lags(_store(_stamp))
    assert len(lags) == 400
    assert np.unique(lags[:, 2]).tolist() == [0, 1]
    assert 0.1 < lags[:, 2].mean() < 0.15  # half of every fourth gap
    assert not lags[:, :2].any()


def test_nothing_is_told_without_times_by_coarse_ones_or_of_hosts_that_share_no_collective() -> None:
    assert not earlier_counts(_store(lambda rank, each: NO_TIME_NS), "j")
    assert not earlier_counts(_store(lambda rank, each: _stamp(rank, each) // 10**9 * 10**9), "j")
    assert not earlier_counts(_store(_stamp, alone=True), "j")
    assert not earlier_counts(_store(_stamp), "another job")
