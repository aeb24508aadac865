from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.missing_launches import KernelGaps
from ncclscope_service.align.expected_launches import LAUNCH
from ncclscope_service.align.thread_backlog import THREAD_KERNEL
from ncclscope_wire.batch import Columns

RATE = np.array([0.2])


def kernels(taken: NDArray[np.int64] | list[int]) -> Columns:
    rows = np.zeros(len(taken), THREAD_KERNEL)
    rows["correlation_id"] = 1000 + np.cumsum(taken)
    return rows


def missing(rows: Columns) -> NDArray[np.float64]:
    launches = np.zeros(len(rows), LAUNCH)
    return KernelGaps().missing(launches, rows, None, RATE, 0.0).amount[:, 0]


def test_a_gap_as_wide_as_two_launches_hides_one() -> None:
    taken = np.random.default_rng(0).integers(5, 8, 100)
    taken[50], taken[70] = 12, 18
    found = missing(kernels(taken))
    assert 0.8 < found[50] < 1.2
    assert 1.8 < found[70] < 2.2
    assert np.delete(found, [0, 50, 70, 100]).max() < 0.1


def test_gaps_that_scatter_say_little() -> None:
    taken = np.random.default_rng(0).geometric(1 / 20, 200)
    assert missing(kernels(taken))[1:].max() < 2.0


def test_kinds_of_launches_take_what_their_pairs_took() -> None:
    kinds = np.arange(300) % 3
    rows, launches = kernels(np.array([4, 9, 20])[kinds]), np.zeros(300, LAUNCH)
    launches["text"] = kinds
    gaps = KernelGaps()
    for begin in range(0, 300, 100):
        gaps.learn(launches[begin : begin + 100], rows[begin : begin + 100], np.eye(100), 0.2)
    later = kernels([4, 9, 20, 4, 29, 4])
    later["correlation_id"] += rows["correlation_id"][-1] - 1000
    pairs = np.zeros((7, 6))
    pairs[[0, 1, 2, 3, 5, 6], np.arange(6)] = 1.0
    wanted = launches[:7].copy()
    wanted["text"] = np.arange(7) % 3
    found = gaps.missing(wanted, later, pairs, RATE, 0.0).amount[:, 0]
    assert found[4] > 0.7
    assert np.delete(found, [4, 6]).max() < 0.1


def test_the_right_share_of_losses_is_the_likeliest() -> None:
    rng = np.random.default_rng(0)
    ids = np.cumsum(rng.integers(5, 8, 1000))[rng.random(1000) >= 0.2]
    rows = np.zeros(len(ids), THREAD_KERNEL)
    rows["correlation_id"] = ids
    answers = np.array([0.05, 0.2, 0.4])
    found = KernelGaps().missing(np.zeros(len(rows), LAUNCH), rows, None, answers, 0.0).log_likelihood
    assert found.argmax() == 1
