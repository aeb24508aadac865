"""Silences in which nobody looked."""

from __future__ import annotations

from ncclscope_service.detect.watched import Watched

SECOND_NS = 1_000_000_000


def test_while_looks_are_frequent_the_clock_is_that_of_the_looks() -> None:
    watched = Watched()
    assert [watched.at(now * SECOND_NS, 0) // SECOND_NS for now in (100, 101, 104, 108, 113)] == [
        100,
        101,
        104,
        108,
        113,
    ]


def test_the_time_in_which_nobody_looked_is_no_silence() -> None:
    watched = Watched()
    watched.at(100 * SECOND_NS, 99 * SECOND_NS)
    assert watched.at(130 * SECOND_NS, 99 * SECOND_NS) == 100 * SECOND_NS
    assert watched.at(133 * SECOND_NS, 110 * SECOND_NS) == 103 * SECOND_NS


def test_what_is_written_after_it_ends_the_allowance() -> None:
    watched = Watched()
    watched.at(100 * SECOND_NS, 99 * SECOND_NS)
    watched.at(130 * SECOND_NS, 99 * SECOND_NS)
    assert watched.at(131 * SECOND_NS, 131 * SECOND_NS) == 131 * SECOND_NS


def test_a_silence_that_lasts_is_told_after_a_minute_whoever_stood_still() -> None:
    watched = Watched()
    watched.at(100 * SECOND_NS, 99 * SECOND_NS)
    nows = range(130, 200, 5)
    looks = {now: watched.at(now * SECOND_NS, 99 * SECOND_NS) // SECOND_NS for now in nows}
    assert looks[185] == 155
    assert looks[190] == 190
