from __future__ import annotations

import sys

import numpy as np
from service.detect.test_hang import CONTEXT, GROUPS, Counters

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.hang import Hang
from ncclscope_service.detect.pauses import ChannelSilence, StepPauses
from ncclscope_service.detect.settings import HangSettings
from ncclscope_service.store.state import snapshot

SECOND = 1_000_000_000


def looked_at(seconds: int, *, gap_at: int | None = None) -> ChannelSilence:
    """Forty operations a second, but for one silence of ten seconds."""
    silence = ChannelSilence()
    for second in range(seconds):
        if gap_at is None or not gap_at < second < gap_at + 10:
            silence.observe((1_700_000_000 + second) * SECOND, 40 * (second + 1))
    return silence


def test_what_a_channel_does_all_the_time_is_ordinary_and_three_times_its_longest_gap_too() -> None:
    assert ChannelSilence().patience_ns(HangSettings()) == 20 * SECOND
    assert looked_at(600).patience_ns(HangSettings()) == 5 * SECOND
    assert looked_at(600, gap_at=300).patience_ns(HangSettings()) == 30 * SECOND
    assert looked_at(600, gap_at=300).patience_ns(HangSettings(), others_are_stuck=True) == 30 * SECOND


def test_a_gap_is_forgotten_with_the_looks_that_are_kept() -> None:
    assert looked_at(2000, gap_at=20).patience_ns(HangSettings()) == 30 * SECOND
    assert looked_at(2100, gap_at=20).patience_ns(HangSettings()) == 5 * SECOND


def test_a_channel_takes_little_memory_however_long_it_is_looked_at() -> None:
    def size(silence: ChannelSilence) -> int:
        return sum(sys.getsizeof(getattr(silence, name)) for name in ChannelSilence.__slots__)

    assert size(looked_at(10)) < 1_000
    assert size(looked_at(2048)) == size(looked_at(5000)) < 50_000


def test_channels_of_communicators_that_ended_are_forgotten() -> None:
    hang = Hang()
    for second in range(1, 20):
        hang.ingest_progress(Counters().at(float(second)), CONTEXT)
    few = dict(list(GROUPS.items())[:1])
    hang.ingest_progress(Counters().at(20.0), Context(job="job", groups=few))
    alone = Hang()
    alone.ingest_progress(Counters().at(20.0), Context(job="job", groups=few))
    assert len(snapshot(hang)) < 2 * len(snapshot(alone))
    assert hang.findings(20 * SECOND) == []


MARKS = 2
STEP = (-1, -1, 0, -1, 1, -1)
"""Two of the forward pass, a gradient, one more, the norm, and one of the optimizer, behind which the step ends."""
MILLISECOND = 1_000_000


def rest_after(operations: int, portions: int, longest: int = 80) -> tuple[bool, bool]:
    """Of the first of two ranks, which is a step ahead of the other: whether it is known, and whether it rests.

    `longest`: the pause in front of a step's first operation, in ms; all others are 20.
    """
    phases = np.tile(np.array(STEP, np.int64), operations // len(STEP) + 1)[:operations]
    gaps = np.where(np.arange(operations) % len(STEP) == 0, longest, 20) * MILLISECOND
    rests, times = StepPauses(), np.cumsum(gaps)
    ahead = len(STEP)
    phases, times = np.append(np.array(STEP, np.int64), phases), np.append(np.arange(ahead), times)
    for mine in np.array_split(np.arange(operations), portions):
        lanes, marks = np.repeat([7, 9], len(mine)), np.full(2 * len(mine), MARKS)
        own = np.concatenate([mine + ahead, mine])
        rests.ingest_operations(lanes, phases[own], marks, times[own])
    lanes, is_known, is_resting = rests.resting_lanes()
    assert lanes.tolist() == [7, 9]
    return bool(is_known[0]), bool(is_resting[0])


def test_a_rank_rests_behind_a_steps_last_mark_and_where_the_longest_gap_between_two_steps_is() -> None:
    resting = [rest_after(operations, 7)[1] for operations in range(60, 66)]
    assert resting == [True, False, False, False, False, True]


def test_of_pauses_that_are_about_equal_none_is_a_rest() -> None:
    assert [rest_after(operations, 7, longest=22)[1] for operations in range(60, 66)] == [False] * 5 + [True]


def test_portions_make_no_difference() -> None:
    assert [rest_after(60, portions)[1] for portions in (1, 5, 60)] == [True, True, True]


def test_nobody_rests_before_some_steps_were_seen() -> None:
    assert not rest_after(6, 1)[0]
    assert not rest_after(6, 1)[1]
