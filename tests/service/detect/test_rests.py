from __future__ import annotations

import numpy as np

from ncclscope_service.detect.rests import Rest

MARKS = 2
STEP = (-1, -1, 0, -1, 1, -1)
"""Two of the forward pass, a gradient, one more, the norm, and one of the optimizer, behind which the step ends."""
MILLISECOND = 1_000_000


def rest_after(operations: int, portions: int) -> Rest:
    phases = np.tile(np.array(STEP, np.int64), operations // len(STEP) + 1)[:operations]
    gaps = np.where(np.arange(operations) % len(STEP) == 0, 80, 20) * MILLISECOND
    rest, times = Rest(), np.cumsum(gaps)
    for mine in np.array_split(np.arange(operations), portions):
        rest.feed(phases[mine], MARKS, times[mine])
    return rest


def test_a_rank_rests_behind_a_steps_last_mark_and_where_the_longest_gap_between_two_steps_is() -> None:
    resting = [rest_after(operations, 7).is_resting for operations in range(60, 66)]
    assert resting == [True, False, False, False, False, True]


def test_portions_make_no_difference() -> None:
    assert [rest_after(60, portions).is_resting for portions in (1, 5, 60)] == [True, True, True]


def test_nobody_rests_before_some_steps_were_seen() -> None:
    assert not rest_after(6, 1).is_known
    assert not rest_after(6, 1).is_resting
