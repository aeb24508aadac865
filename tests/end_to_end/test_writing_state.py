"""While a process writes the state, it or the service may be killed or stopped: nothing is lost, and none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from agent.log_samples import operation_line
from benchmarks.ports import free_port
from end_to_end.processes import PATIENCE_SECONDS, end, fetch_json, running, wait_for

pytestmark = pytest.mark.slow

_HELD = """
import os, signal, sys
service, sync = os.getpid(), os.fsync
def held(descriptor):
    while os.getpid() != service and os.path.exists(sys.argv[-1] + "/held"):
        signal.sigtimedwait([], 0.05)
    sync(descriptor)
os.fsync = held
from ncclscope.cli import main
main()
"""
"""`ncclscope`, of which a process that writes the state comes to no end while there is a file `held` in the folder."""


class _Job:
    """A log that grows, an agent that follows it, and the folder and ports of a service."""

    def __init__(self, folder: Path) -> None:
        self.log, self.data, self.output = folder / "nccl.log", folder / "data", folder / "service.out"
        self.data.mkdir()
        self.written = 0
        self.agents, self.web = free_port(), free_port()
        self.serve = (
            *("serve", "--listen", f"127.0.0.1:{self.agents}", "--http", f"127.0.0.1:{self.web}"),
            *("--state-every", "0.05", "--data", str(self.data)),
        )
        self.follow = (
            "agent",
            "--logs",
            str(self.log),
            "--connect",
            f"127.0.0.1:{self.agents}",
            "--retry-seconds",
            "1",
        )

    def write(self, amount: int) -> None:
        """More operations."""
        with self.log.open("a") as file:
            numbers = range(self.written, self.written + amount)
            file.writelines(operation_line(op_count=f"{number:x}") + "\n" for number in numbers)
        self.written += amount

    def is_shown(self) -> bool:
        """Whether the service shows all that was written."""
        overview = cast("dict[str, Any]", fetch_json(f"http://127.0.0.1:{self.web}/api/overview"))
        return bool(sum(job["operations"] for job in overview["jobs"]) == self.written)

    def trouble(self) -> str:
        """What `/healthz` says of the journal."""
        health = cast("dict[str, Any]", fetch_json(f"http://127.0.0.1:{self.web}/healthz"))
        return str(health["checks"]["journal"])

    def states(self) -> list[Path]:
        """The state files."""
        return sorted((self.data / "state").glob("*.state"))

    @contextmanager
    def held_service(self) -> Generator[tuple[subprocess.Popen[bytes], int]]:
        """A service in a group of its own that is writing its state, and the process that does it."""
        (self.data / "held").touch()
        with self.output.open("ab") as output:
            command = [sys.executable, "-c", _HELD, *self.serve]
            service = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            wait_for(lambda: bool(_children(service.pid)), "a process that writes the state")
            (child,) = _children(service.pid)
            yield service, child
        finally:
            service.kill()
            service.wait()
            (self.data / "held").unlink(missing_ok=True)


def _children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _is_there(process: int) -> bool:
    """Whether it runs: one that has ended may be listed until somebody takes note, which is not for us to say when."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def job(tmp_path: Path) -> _Job:
    """With operations in its log."""
    job = _Job(tmp_path)
    job.write(500)
    return job


def test_a_service_killed_while_its_state_is_written_starts_at_once_on_the_same_ports_and_folder(job: _Job) -> None:
    with running(job.output, *job.follow):
        with job.held_service() as (service, child):
            wait_for(job.is_shown, "the operations, while the state is written")
            job.write(500)
            wait_for(job.is_shown, "more operations")
            assert _is_there(child)
            service.kill()
            service.wait()
            with running(job.output, *job.serve) as another:
                wait_for(job.is_shown, "all of them again")
                wait_for(lambda: not _is_there(child), "the end of the child")
                job.write(500)
                wait_for(job.is_shown, "what came since")
                wait_for(lambda: len(job.states()) == 2, "states")
                assert not list((job.data / "state").glob("*.part")) or _children(another.pid)
                assert end(another) == 0
        assert "Traceback" not in job.output.read_text()


def test_where_the_process_that_writes_the_state_is_killed_the_service_tells_it_and_writes_again(job: _Job) -> None:
    with running(job.output, *job.follow), job.held_service() as (service, child):
        wait_for(job.is_shown, "the operations")
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: "the state cannot be written: its process was killed" in job.trouble(), "the trouble")
        assert job.states() == []
        (job.data / "held").unlink()
        job.write(500)
        wait_for(lambda: len(job.states()) == 2, "states")
        wait_for(lambda: job.trouble() == "ok", "no trouble")
        wait_for(job.is_shown, "all operations")
        assert end(service) == 0


@pytest.mark.parametrize("to_all", [False, True])
def test_a_service_that_is_stopped_while_its_state_is_written_writes_a_newer_one_itself(
    job: _Job, to_all: bool
) -> None:
    with running(job.output, *job.follow):
        with job.held_service() as (service, child):
            wait_for(job.is_shown, "the operations")
            if to_all:
                os.killpg(service.pid, signal.SIGTERM)
            else:
                service.send_signal(signal.SIGTERM)
            assert service.wait(PATIENCE_SECONDS) == 0
            wait_for(lambda: not _is_there(child), "the end of the child")
            assert len(job.states()) == 1
            assert not list((job.data / "state").glob("*.part"))
        said = [json.loads(line) for line in job.output.read_text().splitlines() if '"stopped"' in line]
        assert [each["level"] for each in said] == ["info"]
        assert "state_not_written" not in job.output.read_text()
        with running(job.output, *job.serve) as again:
            wait_for(job.is_shown, "the operations after the restart")
            assert end(again) == 0
    restored = [json.loads(line) for line in job.output.read_text().splitlines() if '"restored"' in line]
    assert restored[-1]["batches"] == 0
