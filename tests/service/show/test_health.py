"""What the probes say, and of what."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclscope_service.serve.views import DiskProbe
from ncclscope_service.show.health import MIN_FREE_BYTES, disk_check, liveness, readiness, tick_check


def test_a_service_whose_loop_hangs_should_be_restarted_and_serves_nobody() -> None:
    status, answer = liveness([tick_check(61.0)])
    assert (status, answer.status, answer.reasons) == (503, "failing", ("tick: last pass 61.0 s ago",))
    assert readiness(True, "listening", [tick_check(61.0)])[0] == 503
    assert liveness([tick_check(59.0)])[0] == 200
    assert liveness([tick_check(None)])[0] == 200


def test_a_disk_that_takes_nothing_is_told_but_no_reason_to_restart() -> None:
    full = disk_check(trouble="No space left on device", free_bytes=None)
    status, answer = liveness([tick_check(0.1), full])
    assert (status, answer.status) == (200, "degraded")
    assert answer.reasons == ("disk: write failed: No space left on device",)
    assert answer.checks["tick"] == "last pass 0.1 s ago"
    assert readiness(True, "listening", [full])[0] == 200
    assert liveness([disk_check(trouble=None, free_bytes=MIN_FREE_BYTES - 1)])[1].status == "degraded"
    assert liveness([disk_check(trouble=None, free_bytes=MIN_FREE_BYTES)])[1].status == "ok"


@pytest.mark.asyncio
async def test_the_disk_is_really_written_to(tmp_path: Path) -> None:
    probe = DiskProbe(tmp_path)
    await probe.look()
    assert probe.health_check().message.endswith("MiB free")
    assert os.listdir(tmp_path) == []
    gone = DiskProbe(tmp_path / "gone")
    await gone.look()
    assert gone.health_check().message == "write failed: No such file or directory"
