"""The files of a run can be had of a service that was killed, and its folder stays as it was."""

from __future__ import annotations

import signal
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from end_to_end.processes import fetch_json, run_command, serving


def _operations(web: int) -> int:
    overview = cast("dict[str, Any]", fetch_json(f"http://127.0.0.1:{web}/api/overview"))
    return sum(job["operations"] for job in overview["jobs"])


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
