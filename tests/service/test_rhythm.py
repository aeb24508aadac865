"""The length of a step from the rhythm of log lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.rhythm import step_ns

MS = 1_000_000


def _step(*kinds: NDArray[np.int64]) -> int | None:
    numbers = np.repeat(np.arange(len(kinds)), [len(times) for times in kinds])
    return step_ns(numbers, np.concatenate(kinds))


def _once_per_step(steps: int, *, lasting_ns: int = 400 * MS, at_ns: int = 0) -> NDArray[np.int64]:
    return np.arange(steps, dtype=np.int64) * lasting_ns + at_ns


def _times_per_step(steps: int, count: int) -> NDArray[np.int64]:
    bursts = [_once_per_step(steps, at_ns=nth * MS) for nth in range(count)]
    return np.sort(np.concatenate(bursts))


def test_what_comes_once_per_step_tells_the_step() -> None:
    assert _step(_times_per_step(30, 24), _once_per_step(30), _times_per_step(30, 3)) == 400 * MS


def test_what_comes_in_bursts_tells_nothing() -> None:
    for count in (2, 3, 4, 24):
        assert _step(_times_per_step(30, count)) is None


def test_lost_lines_and_a_pause_change_nothing() -> None:
    times = _once_per_step(60)
    times[30:] += 3_000 * MS
    assert _step(np.delete(times, [7, 20, 41])) == 400 * MS


def test_few_lines_and_long_gaps_tell_nothing() -> None:
    assert _step(_once_per_step(7)) is None
    assert _step(_once_per_step(20, lasting_ns=61_000 * MS)) is None
    assert _step(np.zeros(20, np.int64)) is None
    assert step_ns(np.empty(0, np.int64), np.empty(0, np.int64)) is None
