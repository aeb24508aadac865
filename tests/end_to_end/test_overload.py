"""A service that does not keep up with its agents until logs are emptied unread: shed, counted, told, recovered from.

Agents drop nothing by themselves: what there is no room for waits in the logs, and whoever empties these sheds it.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Final

import pytest
from benchmarks.faults.world import World
from end_to_end.processes import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

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
