"""What the probes say, and of what."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclscope_service.disk_probe import DiskProbe
from ncclscope_service.vitals import MIN_FREE_BYTES, disk_vital, liveness, readiness, tick_vital


def test_a_service_whose_loop_hangs_should_be_restarted_and_serves_nobody() -> None:
    status, answer = liveness([tick_vital(61.0)])
    assert (status, answer.status, answer.reasons) == (503, "failing", ("tick: turned 61.0 s ago",))
    assert readiness(True, "listening", [tick_vital(61.0)])[0] == 503
    assert liveness([tick_vital(59.0)])[0] == 200
    assert liveness([tick_vital(None)])[0] == 200


def test_a_disk_that_takes_nothing_is_told_but_no_reason_to_restart() -> None:
    full = disk_vital(trouble="No space left on device", free_bytes=None)
    status, answer = liveness([tick_vital(0.1), full])
    assert (status, answer.status) == (200, "degraded")
    assert answer.reasons == ("disk: cannot be written to: No space left on device",)
    assert answer.checks["tick"] == "turned 0.1 s ago"
    assert readiness(True, "listening", [full])[0] == 200
    assert liveness([disk_vital(trouble=None, free_bytes=MIN_FREE_BYTES - 1)])[1].status == "degraded"
    assert liveness([disk_vital(trouble=None, free_bytes=MIN_FREE_BYTES)])[1].status == "ok"


@pytest.mark.asyncio
async def test_the_disk_is_really_written_to(tmp_path: Path) -> None:
    probe = DiskProbe(tmp_path)
    await probe.look()
    assert probe.vital().told.endswith("MiB are free")
    assert os.listdir(tmp_path) == []
    gone = DiskProbe(tmp_path / "gone")
    await gone.look()
    assert gone.vital().told == "cannot be written to: No such file or directory"
