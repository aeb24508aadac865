"""A service that is stopped or killed: it ends in time, the next one goes on, the files of its run can be had."""

from __future__ import annotations

import os
import resource
import signal
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from agent.log_samples import operation_line
from benchmarks.ports import free_port
from end_to_end.processes import end, fetch_json, run_command, running, serving, wait_for

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


@pytest.mark.slow
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


def _contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_a_killed_service_leaves_all_files_of_its_job(tmp_path: Path) -> None:
    run, data, out = tmp_path / "run", tmp_path / "data", tmp_path / "out"
    shape = ("--nodes", "1", "--gpus", "2", "--tp", "2", "--pp", "1", "--dp", "1", "--iterations", "3")
    assert run_command("simulate", "--out", str(run), *shape).returncode == 0
    analyzed = run_command("analyze", str(run), "--out", str(tmp_path / "analyzed"))
    assert analyzed.returncode == 0, analyzed.stderr
    expected = orjson.loads((tmp_path / "analyzed" / "summary.json").read_bytes())
    with serving(tmp_path / "service.log", "--data", str(data)) as service:
        assert _operations(service.web) == 0
        sent = run_command(
            *("agent", "--once", "--connect", f"127.0.0.1:{service.agents}", "--job", "train"),
            *("--logs", str(run / "logs" / "*.log"), "--exports", str(run / "nsys")),
        )
        assert sent.returncode == 0, sent.stderr
        refused = run_command("snapshot", "--data", str(data), "--out", str(out))
        assert refused.returncode == 1
        assert "another service" in refused.stderr
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
    before = _contents(data)
    done = run_command("snapshot", "--data", str(data), "--out", str(out), "--job", "train")
    assert done.returncode == 0, done.stderr
    assert _contents(data) == before
    found = orjson.loads((out / "summary.json").read_bytes())
    assert found["jobs"] == ["train"]
    assert {name: found[name] for name in ("ranks", "processes")} == {
        name: expected[name] for name in ("ranks", "processes")
    }
    assert found["match"] == expected["match"]
    other = run_command("snapshot", "--data", str(data), "--out", str(out), "--job", "another")
    assert (other.returncode, "which has train" in other.stderr) == (1, True)


def test_a_folder_without_a_state_is_refused_with_what_to_do(tmp_path: Path) -> None:
    done = run_command("snapshot", "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "no service kept its state here" in done.stderr
