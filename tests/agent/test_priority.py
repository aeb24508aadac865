from __future__ import annotations

import os
import subprocess
import sys

import pytest

_STEP_BACK = """
import ctypes, os, platform, threading
from ncclscope_agent.priority import step_back
os.setpriority(os.PRIO_PROCESS, 0, {before})
print(step_back(nice={nice}, io_priority={io_priority}))
get = {{"x86_64": 252, "aarch64": 31, "ppc64le": 274}}.get(platform.machine())
def show():
    print(os.getpriority(os.PRIO_PROCESS, 0), ctypes.CDLL(None).syscall(get, 1, 0) if get else None)
thread = threading.Thread(target=show)
thread.start()
thread.join()
"""
_BEST_EFFORT = 2 << 13
OWN = os.getpriority(os.PRIO_PROCESS, 0)
"""Niceness with which the tests run: a process that begins with a lower priority than it is to take keeps it."""


def stepped_back(*, nice: int, io_priority: int, before: int = 0) -> list[str]:
    """What was refused; niceness and I/O priority of a thread that was started after."""
    program = _STEP_BACK.format(nice=nice, io_priority=io_priority, before=f"max({before}, os.getpriority(0, 0))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:2]


@pytest.mark.parametrize(("nice", "level"), [(15, 7), (19, 4)])
def test_a_process_that_steps_back_has_low_priority_in_all_its_threads(nice: int, level: int) -> None:
    assert stepped_back(nice=nice, io_priority=level) == ["[]", f"{max(nice, OWN)} {_BEST_EFFORT | level}"]


def test_a_lower_priority_stays_and_that_of_io_can_be_left_alone() -> None:
    refused, kept = stepped_back(nice=5, io_priority=-1, before=17)
    assert refused == "[]"
    assert kept.split()[0] == str(max(17, OWN))


def test_what_is_refused_is_told_and_is_no_error() -> None:
    [refused, _] = stepped_back(nice=19, io_priority=-2)
    assert refused == "['I/O priority -2: Invalid argument']"
