"""While a service restores its state it says so, and agents wait for it: none is turned away, and nothing is lost."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
from pathlib import Path
from typing import Any, cast

import pytest
from agent.log_samples import operation_line
from benchmarks.ports import free_port
from end_to_end.processes import end, fetch, fetch_json, running, wait_for

pytestmark = pytest.mark.slow


def _ready(web: int) -> tuple[int, list[str]]:
    """Status and reasons of `/readyz`."""
    try:
        answer, status = fetch(f"http://127.0.0.1:{web}/readyz"), 200
    except urllib.error.HTTPError as error:
        answer, status = error.read(), error.code
    return status, json.loads(answer)["reasons"]


def _operations(web: int) -> int:
    overview = cast("dict[str, Any]", fetch_json(f"http://127.0.0.1:{web}/api/overview"))
    return sum(job["operations"] for job in overview["jobs"])


def _append(log: Path, first: int, amount: int) -> None:
    with log.open("a") as file:
        file.writelines(operation_line(op_count=f"{number:x}") + "\n" for number in range(first, first + amount))


def test_while_the_state_is_restored_the_service_is_not_ready_and_agents_wait(tmp_path: Path) -> None:
    log, data = tmp_path / "nccl.log", tmp_path / "data"
    agents, web = free_port(), free_port()
    serve = ("serve", "--listen", f"127.0.0.1:{agents}", "--http", f"127.0.0.1:{web}", "--data", str(data))
    follow = ("agent", "--logs", str(log), "--connect", f"127.0.0.1:{agents}", "--retry-seconds", "1")
    _append(log, 0, 40)
    with running(tmp_path / "agent.out", *follow) as agent:
        with running(tmp_path / "service.out", *serve) as service:
            wait_for(lambda: _operations(web) == 40, "what was written before the stop")
            assert end(service) == 0
        newest = max((data / "state").glob("*.state"))
        state = newest.read_bytes()
        newest.unlink()
        os.mkfifo(newest)  # the state comes when it is written here: until then it is being restored
        with running(tmp_path / "service.out", *serve) as service:
            why = "ready: the state of before the restart is being restored"
            wait_for(lambda: _ready(web) == (503, [why]), "the HTTP port")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", agents), timeout=5)
            _append(log, 40, 25)
            assert agent.poll() is None
            newest.write_bytes(state)
            wait_for(lambda: _ready(web) == (200, []), "the state")
            wait_for(lambda: _operations(web) == 65, "what was written meanwhile")
            assert end(service) == 0
    assert '"known": true' in (tmp_path / "service.out").read_text().rpartition("restored")[2]
