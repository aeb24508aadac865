"""A job as a child: its exit status, its signals, and nothing else of it is changed. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_RUN = """
import os, sys
from ncclscope_capture.job import Watch, end_as
with Watch() as watch:
    pid = watch.start(sys.argv[1:], os.environ)
    status = watch.wait(pid, lambda: pid)
end_as(status)
"""
_COUNTS = """
import os, signal, sys, time
got = []
def tell(*words):
    os.write(1, (" ".join(words) + "\\n").encode())  # print must not be entered again from within
def count(number, frame):
    got.append(signal.Signals(number).name)
    tell(*got)
    if number == signal.SIGTERM:
        sys.exit(3)
signal.signal(signal.SIGUSR1, count)
signal.signal(signal.SIGTERM, count)
tell("ready")
while True:
    time.sleep(60)
"""


def started(*command: str, group: bool = False) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", _RUN, *command],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=group,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("code", [0, 1, 7, 255])
def test_the_exit_code_is_the_jobs(code: int) -> None:
    with started("sh", "-c", f"exit {code}") as process:
        assert process.wait(120) == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGTERM])
def test_a_job_that_a_signal_ends_ends_us_by_the_same_signal(number: int) -> None:
    with started("sh", "-c", f"kill -{int(number)} $$") as process:
        assert process.wait(120) == -number


def _to_us(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)


def _to_all(process: subprocess.Popen[str], number: int) -> None:
    os.killpg(process.pid, number)


@pytest.mark.parametrize("send", [_to_us, _to_all])
def test_the_job_gets_every_signal_once_whether_it_went_to_us_or_to_the_whole_group(
    send: Callable[[subprocess.Popen[str], int], None],
) -> None:
    with started(sys.executable, "-c", _COUNTS, group=True) as process:
        assert line(process) == "ready"
        send(process, signal.SIGUSR1)
        assert line(process) == "SIGUSR1"
        send(process, signal.SIGTERM)
        assert line(process) == "SIGUSR1 SIGTERM"
        assert process.wait(120) == 3
        assert line(process) == "", "and nothing came twice"


def test_the_job_has_no_signal_blocked_or_ignored_that_it_would_not_have_alone() -> None:
    show = "import re; print(re.findall('Sig(?:Blk|Ign):.*', open('/proc/self/status').read()))"
    with started(sys.executable, "-c", show) as process:
        through_us = line(process)
        assert process.wait(120) == 0
    alone = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert through_us == alone.stdout.strip()


def test_a_program_that_is_not_there_is_told_by_an_error_of_the_system() -> None:
    with started("no such program") as process:
        assert process.wait(120) == 1


def test_nobody_stays_behind_when_we_are_killed_but_the_job(tmp_path: Path) -> None:
    with started(sys.executable, "-c", _COUNTS) as process:
        assert line(process) == "ready"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait(120)
        try:
            assert len(children) == 2
            until = time.monotonic() + 60
            while (left := [pid for pid in children if _runs(pid)]) and len(left) > 1:
                assert time.monotonic() < until, "the canary stayed"
            assert _command(left[0])[2] == _COUNTS
        finally:
            for pid in children:
                if _runs(pid):
                    os.kill(int(pid), signal.SIGKILL)


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _command(pid: str) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
