"""Recording around a job: what is handed over, and that nothing that nsys does wrong reaches the job.

nsys itself cannot be had on every machine: fake_nsys.py behaves as nsys 2022.4 was seen to. Where a real one is in
PATH, the last test uses it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from end_to_end.processes import PATIENCE_SECONDS, wait_for

_FAKE = Path(__file__).with_name("fake_nsys.py")
_FAST = ("--chunk-seconds", "0.5", "--budget-percent", "50", "--overhead-percent", "100", "--least-free-bytes", "0")


@dataclass
class Stage:
    """A folder with a fake nsys, and a helper that is run in it."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def out(self) -> Path:
        return self.folder / "exports"

    @property
    def nsys(self) -> Path:
        return self.folder / "bin" / "nsys"

    def start(self, *command: str, options: tuple[str, ...] = _FAST) -> subprocess.Popen[str]:
        """Records a job that it starts."""
        return self._run(*options, "--", *command)

    def follow(self, session: str) -> subprocess.Popen[str]:
        """Records a session that is there."""
        (self.folder / "state" / session).mkdir()
        return self._run(*_FAST, "--session", session)

    def _run(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ncclscope_capture", "--out", str(self.out), "--nsys", str(self.nsys), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | self.variables,
            start_new_session=True,
        )

    def chunks(self) -> list[Path]:
        return sorted(self.out.glob("*.sqlite"))

    def calls(self) -> list[str]:
        return [line.split()[0] for line in (self.folder / "state" / "calls").read_text().splitlines()]

    def log(self) -> str:
        return "".join(path.read_text() for path in self.out.glob("*.log"))


def command_of(pid: str) -> bytes:
    """The command line of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def runs(pid: str) -> bool:
    """Whether a process has not ended; its children have another parent when it has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    (tmp_path / "bin").mkdir()
    (tmp_path / "state").mkdir()
    nsys = tmp_path / "bin" / "nsys"
    nsys.write_text(f"#!{sys.executable}\n" + _FAKE.read_text())
    nsys.chmod(0o755)
    return Stage(tmp_path, {"FAKE_NSYS_STATE": str(tmp_path / "state")})


@pytest.mark.slow
def test_chunks_appear_whole_while_the_job_runs_and_its_output_and_status_are_its_own(stage: Stage) -> None:
    job = "trap 'echo end; exit 7' USR1; echo out; echo err >&2; while :; do sleep 0.1; done"
    with stage.start("sh", "-c", job) as process:
        wait_for(lambda: len(stage.chunks()) >= 2, "two chunks")
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (7, "out\nend\n")
    assert err.splitlines() == ["ncclscope capture: records 0.5 s of every 1 s (50.0%)", "err"]
    for chunk in stage.chunks():
        with sqlite3.connect(f"file:{chunk}?mode=ro", uri=True) as database:
            assert database.execute("SELECT count(*) FROM META_DATA_EXPORT").fetchone() == (0,)
        database.close()
    assert not (stage.out / ".ncclscope-capture").exists(), "nothing unfinished stays"


def test_a_recording_that_is_on_when_the_job_ends_is_handed_over(stage: Stage) -> None:
    stage.variables["STATE"] = str(stage.folder / "state")
    job = "until cat $STATE/*/recording 2>/dev/null | grep -q .; do sleep 0.05; done"
    options = ("--chunk-seconds", "60", "--budget-percent", "100", "--least-free-bytes", "0", "--finish-seconds", "120")
    with stage.start("sh", "-c", job, options=options) as process:
        assert process.wait(PATIENCE_SECONDS) == 0
    assert len(stage.chunks()) == 1, stage.log()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no_version", "does not tell its version"),
        ("launch_fails", "nsys did not start the job: it ran without"),
        ("launch_hangs", "nsys did not start the job: it ran without"),
    ],
)
def test_the_job_runs_once_where_nsys_does_not_start_it(stage: Stage, fault: str, said: str) -> None:
    stage.variables["FAKE_NSYS_FAULT"] = fault
    with stage.start("sh", "-c", "echo ran; exit 7", options=(*_FAST, "--launch-seconds", "1")) as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (7, "ran\n")
    assert said in err


@pytest.mark.slow
def test_nsys_that_takes_long_to_start_the_job_records_it_all_the_same(stage: Stage) -> None:
    stage.variables["FAKE_NSYS_FAULT"] = "launch_late"
    with stage.start("sleep", "600") as process:
        wait_for(lambda: len(stage.chunks()) >= 1, "a chunk")
        process.terminate()
        process.wait(PATIENCE_SECONDS)


@pytest.mark.slow
def test_nsys_that_starts_the_job_too_late_does_not_start_it_twice(stage: Stage) -> None:
    stage.variables["FAKE_NSYS_FAULT"] = "launch_late"
    with stage.start("sh", "-c", "echo ran; sleep 3", options=(*_FAST, "--launch-seconds", "1")) as process:
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (0, "ran\n")


def test_the_job_runs_where_there_is_no_nsys_and_where_the_directory_cannot_be_made(stage: Stage) -> None:
    stage.nsys.unlink()
    with stage.start("sh", "-c", "exit 5") as process:
        assert process.wait(PATIENCE_SECONDS) == 5
    shutil.rmtree(stage.out, ignore_errors=True)
    stage.out.write_text("a file")
    with stage.start("sh", "-c", "exit 6") as process:
        assert process.wait(PATIENCE_SECONDS) == 6


_UNTIL_TOLD = "until cat $OUT/*.log 2>/dev/null | grep -q .; do sleep 0.05; done; exit 4"


@pytest.mark.parametrize("fault", ["start_fails", "stop_fails", "export_empty", "export_fails"])
def test_a_recording_that_fails_is_told_and_nothing_half_is_handed_over(stage: Stage, fault: str) -> None:
    stage.variables |= {"FAKE_NSYS_FAULT": fault, "OUT": str(stage.out)}
    with stage.start("sh", "-c", _UNTIL_TOLD) as process:
        assert process.wait(PATIENCE_SECONDS) == 4
    assert stage.chunks() == [] or fault == "stop_fails"
    assert "nsys" in stage.log()


@pytest.mark.slow
def test_old_chunks_are_deleted_beyond_the_bound_and_the_newest_stays(stage: Stage) -> None:
    with stage.start("sleep", "600", options=(*_FAST, "--keep-bytes", "450000")) as process:
        wait_for(lambda: "deleted 1 old" in stage.log(), stage.log())
        process.terminate()
        process.wait(PATIENCE_SECONDS)
    chunks = stage.chunks()
    assert sum(path.stat().st_size for path in chunks) <= 450_000
    assert chunks


def test_nothing_is_recorded_while_the_disk_is_nearly_full(stage: Stage) -> None:
    options = (*_FAST[:-2], "--least-free-bytes", str(2**60))
    stage.variables["OUT"] = str(stage.out)
    with stage.start("sh", "-c", _UNTIL_TOLD, options=options) as process:
        assert process.wait(PATIENCE_SECONDS) == 4
    assert "start" not in stage.calls()
    assert "too little free space" in stage.log()


@pytest.mark.slow
def test_a_signal_goes_to_the_job_and_not_to_nsys_which_would_hide_its_status(stage: Stage) -> None:
    job = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(9)); print('ready', flush=1); time.sleep(99)"
    for group in (False, True):
        with stage.start(sys.executable, "-c", job) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            os.killpg(process.pid, signal.SIGTERM) if group else process.terminate()
            assert process.wait(PATIENCE_SECONDS) == 9


def test_the_job_outlives_an_nsys_that_is_killed(stage: Stage) -> None:
    killed = stage.folder / "killed"
    job = f"echo ready; until [ -e {killed} ]; do sleep 0.05; done; echo still; exit 8"
    with stage.start("sh", "-c", job) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (launcher,) = (pid for pid in children if b"launch" in command_of(pid))
        os.kill(int(launcher), signal.SIGKILL)
        # One that is being killed may still take the job's status, which is then lost.
        wait_for(lambda: not runs(launcher), "the end of the launcher")
        killed.touch()
        assert process.stdout.readline() == "still\n"
        assert process.wait(PATIENCE_SECONDS) == 8


@pytest.mark.slow
def test_a_session_that_is_there_is_recorded_until_it_is_gone(stage: Stage) -> None:
    with stage.follow("mine") as process:
        wait_for(lambda: len(stage.chunks()) >= 1, "a chunk")
        with (stage.folder / "state" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(stage.folder / "state" / "mine")
        _is_told_that_it_is_gone(process)
    assert not (stage.folder / "state" / "mine").exists(), "nsys would make a session that is not there"


def test_a_session_that_ends_just_before_a_start_is_gone_and_the_one_that_nsys_makes_is_not_recorded(
    stage: Stage,
) -> None:
    stage.variables["FAKE_NSYS_FAULT"] = "ends_before_start"
    with stage.follow("mine") as process:
        _is_told_that_it_is_gone(process)
    assert stage.calls().count("start") == 1
    assert not (stage.folder / "state" / "mine").exists()
    assert stage.chunks() == []


def _is_told_that_it_is_gone(process: subprocess.Popen[str]) -> None:
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "no session mine any more" in err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nsys") is None, reason="needs nsys in PATH")
def test_a_real_nsys_records_a_job(stage: Stage) -> None:
    stage.nsys.unlink()
    stage.nsys.symlink_to(str(shutil.which("nsys")))
    with stage.start("sh", "-c", "sleep 6; exit 7", options=(*_FAST, "--trace", "nvtx")) as process:
        assert process.wait(PATIENCE_SECONDS) == 7
    assert stage.chunks(), stage.log()
