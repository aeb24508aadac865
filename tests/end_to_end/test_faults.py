"""A slice of `python -m benchmarks.faults`: real processes that are killed and cut off lose and double nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.faults.matrix import run
from benchmarks.faults.wire import NotHereError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        ("killed_service", 4),
        ("killed_both", 2),
        ("cut", 3),
        ("turned_journal", 2),
        ("torn_journal", 2),
        ("two_services", 1),
        ("pulled_and_killed", 2),
        ("bad_wire", 1),
    ],
)
def test_nothing_is_lost_and_nothing_stored_twice(fault: str, times: int, tmp_path: Path) -> None:
    try:
        result = run(fault, tmp_path / fault, times)
    except NotHereError as error:
        pytest.skip(str(error))
    assert result.times == times
    assert result.sent > 0
    assert (result.lost, result.duplicates, result.stored) == (0, 0, result.sent), result.note
    assert result.note in ("", "by netem", "by tbf")


def test_what_nobody_could_read_is_lost_with_a_gap_for_each_time(tmp_path: Path) -> None:
    result = run("emptied_unread", tmp_path, 2)
    assert result.lost > 0
    assert result.duplicates == 0
    assert result.has_reported_all
    assert result.gaps == {"truncated": 2}
