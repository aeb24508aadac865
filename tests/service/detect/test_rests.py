from __future__ import annotations

import numpy as np

from ncclscope_service.detect.rests import Rests

MARKS = 2
STEP = (-1, -1, 0, -1, 1, -1)
"""Two of the forward pass, a gradient, one more, the norm, and one of the optimizer, behind which the step ends."""
MILLISECOND = 1_000_000


def rest_after(operations: int, portions: int) -> tuple[bool, bool]:
    """Of the first of two ranks, which is a step ahead of the other: whether it is known, and whether it rests."""
    phases = np.tile(np.array(STEP, np.int64), operations // len(STEP) + 1)[:operations]
    gaps = np.where(np.arange(operations) % len(STEP) == 0, 80, 20) * MILLISECOND
    rests, times = Rests(), np.cumsum(gaps)
    ahead = len(STEP)
    phases, times = np.append(np.array(STEP, np.int64), phases), np.append(np.arange(ahead), times)
    for mine in np.array_split(np.arange(operations), portions):
        lanes, marks = np.repeat([7, 9], len(mine)), np.full(2 * len(mine), MARKS)
        own = np.concatenate([mine + ahead, mine])
        rests.feed(lanes, phases[own], marks, times[own])
    lanes, is_known, is_resting = rests.lanes()
    assert lanes.tolist() == [7, 9]
    return bool(is_known[0]), bool(is_resting[0])


def test_a_rank_rests_behind_a_steps_last_mark_and_where_the_longest_gap_between_two_steps_is() -> None:
    resting = [rest_after(operations, 7)[1] for operations in range(60, 66)]
    assert resting == [True, False, False, False, False, True]


def test_portions_make_no_difference() -> None:
    assert [rest_after(60, portions)[1] for portions in (1, 5, 60)] == [True, True, True]


def test_nobody_rests_before_some_steps_were_seen() -> None:
    assert not rest_after(6, 1)[0]
    assert not rest_after(6, 1)[1]
