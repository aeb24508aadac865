from __future__ import annotations

import sys

from service.detect.test_hang import CONTEXT, GROUPS, Counters

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.hang import Hang
from ncclscope_service.detect.silence import Silence
from ncclscope_service.state import snapshot

SECOND = 1_000_000_000


def looked_at(seconds: int, *, gap_at: int | None = None, since: int = 1_700_000_000) -> Silence:
    """Forty operations a second, but for one silence of ten seconds."""
    silence = Silence()
    for second in range(seconds):
        if gap_at is None or not gap_at < second < gap_at + 10:
            silence.look((since + second) * SECOND, 40 * (second + 1))
    return silence


def test_what_a_channel_does_all_the_time_is_ordinary_and_three_times_its_longest_gap_too() -> None:
    assert Silence().patience_ns() == 20 * SECOND
    assert looked_at(600).patience_ns() == 5 * SECOND
    assert looked_at(600, gap_at=300).patience_ns() == 30 * SECOND
    assert looked_at(600, gap_at=300).patience_ns(others_are_stuck=True) == 30 * SECOND


def test_a_gap_is_forgotten_with_the_looks_that_are_kept() -> None:
    assert looked_at(2000, gap_at=20).patience_ns() == 30 * SECOND
    assert looked_at(2100, gap_at=20).patience_ns() == 5 * SECOND


def test_a_channel_takes_little_memory_however_long_it_is_looked_at() -> None:
    def size(silence: Silence) -> int:
        return sum(sys.getsizeof(getattr(silence, name)) for name in Silence.__slots__)

    assert size(looked_at(10)) < 1_000
    assert size(looked_at(2048)) == size(looked_at(5000)) < 50_000


def test_channels_of_communicators_that_ended_are_forgotten() -> None:
    hang = Hang()
    for second in range(1, 20):
        hang.feed(Counters().at(float(second)), CONTEXT)
    few = dict(list(GROUPS.items())[:1])
    hang.feed(Counters().at(20.0), Context(job="job", groups=few))
    alone = Hang()
    alone.feed(Counters().at(20.0), Context(job="job", groups=few))
    assert len(snapshot(hang)) < 2 * len(snapshot(alone))
    assert hang.findings(20 * SECOND) == []
