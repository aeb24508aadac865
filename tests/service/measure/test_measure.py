from __future__ import annotations

import numpy as np

from ncclscope_service.measure.transfer import (
    ExchangeMeasures,
    Measures,
    measure_all_to_all,
    measure_exchanges,
    measure_rooted,
)
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

HOSTS = np.arange(4, dtype=np.int32)
SIGMA = np.full(4, 10_000.0)


def all_to_all(starts: list[list[int]], ends: list[list[int]], censored: list[list[bool]] | None = None) -> Measures:
    start, end = np.array(starts, np.int64), np.array(ends, np.int64)
    hidden = np.zeros(start.shape, np.bool_) if censored is None else np.array(censored)
    return measure_all_to_all(start, end, hidden, np.full(len(start), 1000, np.int64), np.full(len(start), 1500.0))


def test_the_shortest_kernel_is_the_transfer_and_its_rank_came_last() -> None:
    # the clocks of the ranks are far apart: only durations count
    found = all_to_all([[0, 10**9, 500]], [[700, 10**9 + 300, 700]])
    assert found.transfer_ns.tolist() == [200]
    assert found.last_rank.tolist() == [2]
    assert found.wait_ns.tolist() == [[500, 100, 0]]
    assert found.blame_ns.tolist() == [100]
    assert found.spread_ns.tolist() == [500]
    assert found.algbw.tolist() == [5e9]
    assert found.busbw.tolist() == [7.5e9]
    assert found.busbw_apparent[0, 2] == found.busbw[0]
    assert found.busbw_apparent[0, 0] < found.busbw[0] / 3


def test_one_rank_says_nothing_of_transfer() -> None:
    found = all_to_all([[0, NO_TIME_NS]], [[700, NO_TIME_NS]])
    assert found.ranks_seen.tolist() == [1]
    assert found.transfer_ns.tolist() == found.last_rank.tolist() == found.blame_ns.tolist() == [NO_NUMBER]
    assert found.duration_ns.tolist() == [[700, NO_NUMBER]]
    assert np.isnan(found.busbw).all()
    assert not np.isnan(found.busbw_apparent[0, 0])


def test_kernels_cut_by_the_capture_do_not_count() -> None:
    found = all_to_all([[0, 0, 0]], [[700, 300, 10]], [[False, False, True]])
    assert found.transfer_ns.tolist() == [300]
    assert found.ranks_seen.tolist() == [2]
    assert found.wait_ns.tolist() == [[400, 0, NO_NUMBER]]


def test_no_launches_give_no_measures() -> None:
    empty = np.empty((0, 3), np.int64)
    found = measure_all_to_all(empty, empty, empty.astype(np.bool_), np.empty(0, np.int64), np.empty(0))
    assert len(found.transfer_ns) == 0


def rooted(starts: list[int], ends: list[int], root_sends: bool, root: int = 0) -> Measures:
    ranks = len(starts)
    return measure_rooted(
        np.array([starts], np.int64), np.array([ends], np.int64), np.zeros((1, ranks), np.bool_),
        np.array([root], np.int32), np.array([root_sends]), HOSTS[None, :ranks], SIGMA[None, :ranks],
        np.array([10**6], np.int64), np.array([1e6]),
    )  # fmt: skip


def test_receivers_of_a_broadcast_wait_for_its_root() -> None:
    found = rooted([1_000_000, 0, 400_000], [1_100_000, 1_200_000, 1_200_000], root_sends=True)
    assert found.wait_ns.tolist() == [[NO_NUMBER, 1_000_000, 600_000]]
    assert found.transfer_ns.tolist() == [200_000]
    assert found.last_rank.tolist() == [0]
    assert found.blame_ns.tolist() == [600_000]


def test_the_root_of_a_reduce_waits_for_the_last_sender() -> None:
    found = rooted([0, 300_000, 900_000], [1_000_000, 350_000, 1_000_000], root_sends=False)
    assert found.wait_ns.tolist() == [[900_000, NO_NUMBER, NO_NUMBER]]
    assert found.last_rank.tolist() == [2]


def test_clocks_worse_than_the_difference_conclude_nothing() -> None:
    found = rooted([0, 12_000], [20_000, 22_000], root_sends=True)
    assert found.transfer_ns.tolist() == [NO_NUMBER]
    assert found.last_rank.tolist() == [NO_NUMBER]
    assert np.isnan(found.busbw).all()


def exchange(start: int, end: int, last_peer_start: int, uncertainty: float) -> ExchangeMeasures:
    return measure_exchanges(
        np.array([start]),
        np.array([end]),
        np.zeros(1, np.bool_),
        np.array([last_peer_start]),
        np.array([uncertainty]),
        np.array([1_000_000]),
    )


def test_a_receiver_that_came_early_waits_for_the_sender() -> None:
    found = exchange(0, 600_000, 500_000, 10_000.0)
    assert found.wait_ns.tolist() == [500_000]
    assert found.transfer_ns.tolist() == [100_000]
    assert found.busbw.tolist() == [1e13 / 1e3]
    assert found.busbw_apparent.tolist() == [1e15 / 600_000]


def test_the_one_that_came_last_does_not_wait() -> None:
    found = exchange(500_000, 600_000, 0, 10_000.0)
    assert found.wait_ns.tolist() == [0]
    assert found.transfer_ns.tolist() == [100_000]


def test_an_exchange_without_a_peer_or_with_bad_clocks_has_no_transfer() -> None:
    assert exchange(500_000, 600_000, NO_TIME_NS, 10.0).transfer_ns.tolist() == [NO_NUMBER]
    worse = exchange(0, 600_000, 500_000, 150_000.0)
    assert worse.transfer_ns.tolist() == [NO_NUMBER]
    assert worse.wait_ns.tolist() == [NO_NUMBER]


def test_a_wait_that_lies_outside_its_kernel_is_not_believed() -> None:
    contradicting = rooted([1_000_000, 0, 400_000], [1_100_000, 900_000, 1_200_000], root_sends=True)
    assert contradicting.wait_ns.tolist() == [[NO_NUMBER, NO_NUMBER, 600_000]]
    assert contradicting.transfer_ns.tolist() == [200_000]
