"""A service that is stopped under load ends within its time, and the next one goes on with all that it had."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any, cast

import pytest
from agent.log_samples import operation_line
from benchmarks.ports import free_port
from end_to_end.processes import end, fetch_json, running, wait_for

pytestmark = pytest.mark.slow

_OPERATIONS = 200_000
_STOP_SECONDS = 1
_MARGIN_SECONDS = 25
"""For a tick that is under way, and for the HTTP port, on a slow machine; what is left out takes as long again."""


def _operations(web: int) -> int:
    overview = cast("dict[str, Any]", fetch_json(f"http://127.0.0.1:{web}/api/overview"))
    return sum(job["operations"] for job in overview["jobs"])


def _processor_seconds(process: int) -> float:
    """So far. *Source:* proc_pid_stat(5), fields 14 and 15."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _processor_seconds_of_the_ended() -> float:
    """Of all processes that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_service_that_is_stopped_under_load_ends_in_time_and_keeps_all(tmp_path: Path) -> None:
    log = tmp_path / "nccl.log"
    log.write_text("".join(operation_line(op_count=f"{number:x}") + "\n" for number in range(_OPERATIONS)))
    agents, web = free_port(), free_port()
    serve = (
        *("serve", "--listen", f"127.0.0.1:{agents}", "--http", f"127.0.0.1:{web}"),
        *("--data", str(tmp_path / "data"), "--stop-seconds", str(_STOP_SECONDS)),
    )
    follow = ("agent", "--logs", str(log), "--connect", f"127.0.0.1:{agents}", "--retry-seconds", "1")
    with running(tmp_path / "agent.out", *follow):
        for share in (0.2, 0.8):
            with running(tmp_path / "service.out", *serve) as service:
                wait_for(lambda: _operations(web) >= share * _OPERATIONS, "work to do")  # noqa: B023
                before, others = _processor_seconds(service.pid), _processor_seconds_of_the_ended()
                assert end(service) == 0
                took = _processor_seconds_of_the_ended() - others - before
                assert took < _STOP_SECONDS + _MARGIN_SECONDS
        with running(tmp_path / "service.out", *serve):
            wait_for(lambda: _operations(web) >= _OPERATIONS, "the rest")
            assert _operations(web) == _OPERATIONS
    assert (tmp_path / "service.out").read_text().count('"event": "stopped"') == 2
