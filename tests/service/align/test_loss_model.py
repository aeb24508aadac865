from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.loss_model import Repeats, repeats_of
from ncclscope_service.align.expected_launches import LAUNCH
from ncclscope_service.align.thread_backlog import THREAD_KERNEL


def window(symbols: NDArray[np.int64]) -> Repeats | None:
    """A window in which nothing was lost."""
    launches, kernels = np.zeros(len(symbols), LAUNCH), np.zeros(len(symbols), THREAD_KERNEL)
    launches["classes"], kernels["kernel_class"] = 1 << symbols, symbols
    return repeats_of(symbols[:, None] == symbols[None, :], launches, kernels)


def test_calls_drawn_one_by_one_repeat_by_chance() -> None:
    for seed in range(8):
        assert window(np.random.default_rng(seed).integers(0, 4, 400)) is None
        assert window(np.random.default_rng(seed).choice(4, 400, p=[0.7, 0.1, 0.1, 0.1])) is None


def test_calls_in_turn_do_not_repeat() -> None:
    assert window(np.arange(400) % 4) is None


def test_in_runs_what_goes_on_is_no_surprise_and_what_begins_is_one() -> None:
    symbols = np.repeat(np.arange(20) % 2, 20)
    found = window(symbols)
    assert found is not None
    assert 1.5 < found.kernels[5] < 2.5, "half of all are such, and nearly all that come after such"
    assert found.kernels[20] < 0.2
    # After launch 25 of the second run a kernel of it is expected, whatever the kernel before was.
    assert found.turns.to_kernel[25, 20, 0] > 5
    assert found.turns.to_kernel[25, 25, 0] == 1
    # A launch of the second run is as expected behind its own kernels, and not behind others.
    assert found.turns.to_launch[20, 22, 0] > 5
    assert found.turns.to_launch[25, 3, 0] < 0.2


def test_one_launch_or_one_kernel_repeats_nothing() -> None:
    for launches, kernels in ((1, 3), (3, 1), (1, 1)):
        fits = np.ones((launches, kernels), bool)
        assert repeats_of(fits, np.zeros(launches, LAUNCH), np.zeros(kernels, THREAD_KERNEL)) is None
