from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.align.coverage import Coverage

SECOND = 1_000_000_000


def recorded(*intervals: tuple[float, float]) -> Coverage:
    coverage = Coverage()
    for begin, end in intervals:
        coverage.add(int(begin * SECOND), int(end * SECOND))
    return coverage


def kernels(first: float, *, pause: float, amount: int = 200) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return (first * SECOND + np.arange(amount) * pause * SECOND).astype(np.int64)


def test_a_recording_that_waited_for_the_first_kernel_began_with_the_job() -> None:
    assert recorded((0, 20)).begins_idle(kernels(2.0, pause=0.1))


@pytest.mark.parametrize("first", [0.0, 0.05, 0.3])
def test_one_that_met_the_program_working_did_not(first: float) -> None:
    assert not recorded((0, 20)).begins_idle(kernels(first, pause=0.1))


def test_a_pause_as_long_later_on_takes_it_back() -> None:
    working = kernels(1.0, pause=0.01)
    assert recorded((0, 20)).begins_idle(working)
    assert not recorded((0, 20)).begins_idle(np.concatenate([working, working + 3 * SECOND]))


def test_nothing_is_said_before_enough_was_recorded() -> None:
    assert not recorded((0, 5)).begins_idle(kernels(2.0, pause=0.1))
    assert not recorded((0, 5), (6, 30)).begins_idle(kernels(2.0, pause=0.1))
    assert not Coverage().begins_idle(kernels(2.0, pause=0.1))
    assert not recorded((0, 20)).begins_idle(kernels(2.0, pause=0.1, amount=0))


def test_a_short_hole_is_overlooked_only_behind_a_long_recording() -> None:
    times = np.array([SECOND // 100, SECOND * 6 // 100])
    assert recorded((0, 0.02), (0.05, 0.07)).stretch_of(times, 50_000_000).tolist() == [0, 1]
    times = np.array([SECOND, 3 * SECOND])
    assert recorded((0, 2), (2.03, 4)).stretch_of(times, 50_000_000).tolist() == [0, 0]
    assert recorded((0, 2), (2.06, 4)).stretch_of(times, 50_000_000).tolist() == [0, 1]
