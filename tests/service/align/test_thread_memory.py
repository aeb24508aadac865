"""The thread of a kernel whose launch call is in no export."""

from __future__ import annotations

import numpy as np

from ncclscope_service.align.kernel_queue import CONTEXT, ThreadMemory
from ncclscope_wire.terms import NO_NUMBER


def _recalled(tids: list[int]) -> list[int]:
    kernels = np.array(tids, dtype=np.int64)
    found: list[int] = ThreadMemory().recall(np.arange(len(kernels)), kernels, len(kernels)).tolist()
    return found


def test_the_first_kernel_is_of_the_thread_that_launches_all_that_are_near() -> None:
    assert _recalled([NO_NUMBER, *[7] * CONTEXT]) == [7] * (CONTEXT + 1)


def test_where_several_threads_launch_nothing_is_said() -> None:
    assert _recalled([NO_NUMBER, *[7, 8] * CONTEXT])[0] == NO_NUMBER


def test_a_thread_far_away_does_not_count() -> None:
    assert _recalled([NO_NUMBER, *[7] * (CONTEXT + 1), 8])[0] == 7


def test_the_last_kernel_is_of_the_thread_that_launched_what_came_after_the_same_ones_before() -> None:
    symbols = np.array([5, 1, 2, 3, 5, 1, 5, 1, 5, 1, 2, 3, 5], dtype=np.int64)
    tids = np.array([7, 8, 8, 8, 9, 8, 7, 8, 7, 8, 8, 8, NO_NUMBER], dtype=np.int64)
    assert ThreadMemory().recall(symbols, tids, len(tids))[-1] == 9
