"""Slices of `python -m benchmarks.faults`: real processes killed, cut off or starved, lose and double nothing."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Final

import pytest
from benchmarks.faults.matrix import run
from benchmarks.faults.wire import NotHereError
from benchmarks.faults.world import World
from end_to_end.processes import PATIENCE_SECONDS

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


_RATE: Final = 4000
_WAITING: Final = 40_000
"""Operations that come while the service stands still: four batches have room for a few thousand."""


def metric(world: World, name: str, labels: str = "") -> float:
    """The sum of the series whose labels hold this text."""
    text = (world.get("/metrics") or b"").decode()
    found = re.findall(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for its, value in found if labels in its)


def test_what_a_service_is_too_slow_for_waits_in_the_logs_and_what_is_shed_there_is_counted_and_told(
    tmp_path: Path,
) -> None:
    ended = tmp_path / "ended"
    world = World(
        tmp_path,
        rate=_RATE,
        serve=("--state-every", "0.1", "--snapshot-on-end", str(ended)),
        agent=("--window-batches", "4"),
    )
    try:
        assert world.wait_for(lambda: world.shown() > 0, PATIENCE_SECONDS)
        assert metric(world, "ncclscope_gaps_total") == 0
        world.service.signal(signal.SIGSTOP)
        stopped_at = world.writer.written
        assert world.wait_for(lambda: world.writer.written > stopped_at + _WAITING, PATIENCE_SECONDS)
        with world.writer.lock:
            emptied_at, emptied_bytes = world.writer.written, 0
            for log in sorted(world.writer.folder.glob("nccl.*.log")):
                emptied_bytes += log.stat().st_size
                os.truncate(log, 0)
        world.service.signal(signal.SIGCONT)
        truncated = 'reason="truncated"'
        assert world.wait_for(lambda: metric(world, "ncclscope_gaps_total", truncated) == 4, PATIENCE_SECONDS)
        assert world.wait_for(lambda: metric(world, "ncclscope_findings", 'kind="blind"') > 0, PATIENCE_SECONDS)
        behind_it = world.writer.written
        assert world.wait_for(lambda: world.writer.written > behind_it + _RATE, PATIENCE_SECONDS)
        world.writer.stop()
        assert world.wait_for(lambda: metric(world, "ncclscope_agent_unread_bytes") == 0, PATIENCE_SECONDS)
    finally:
        world.end()
    stored = world.stored()
    lost = set(range(1, world.writer.written + 1)) - set(stored)
    assert set(stored.values()) == {1}
    assert _WAITING // 2 < len(lost) <= emptied_at
    assert max(lost) <= emptied_at
    told = [each["amount"] for path in ended.rglob("summary.json") for each in json.loads(path.read_text())["gaps"]]
    assert 0.8 * len(lost) < sum(told) / (emptied_bytes / emptied_at) < 1.1 * len(lost)
