"""A child has the memory of its parent at one moment, and nothing else of it; what becomes of it is told."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint
from end_to_end.processes import wait_for

from ncclscope_service.keep.persistence import Child, ChildError

_PATIENCE = 60.0


def _is_there(process: int) -> bool:
    """Whether there is such a process, other than one that has ended and waits for its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _result(work: Callable[[int], int], path: Path, within: float = _PATIENCE) -> int:
    """What a child gives that does this with a file."""

    async def made() -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            child = Child(lambda: work(descriptor), descriptor=descriptor)
        finally:
            os.close(descriptor)
        return await child.result(within)

    return anyio.run(made)


def _hang() -> int:
    while True:
        signal.pause()


def test_a_child_sees_memory_as_it_was_while_its_parent_goes_on(tmp_path: Path) -> None:
    known, path = np.zeros(3_000_000, np.int64), tmp_path / "file"

    async def both() -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)

        def work() -> int:
            while not os.fstat(descriptor).st_size:
                pass
            return os.pwrite(descriptor, known.tobytes(), 0)

        child = Child(work, descriptor=descriptor)
        known.fill(7)
        os.pwrite(descriptor, b"go on", 0)
        os.close(descriptor)
        return await child.result(_PATIENCE)

    assert anyio.run(both) == known.nbytes
    assert not np.fromfile(path, np.int64).any()


def test_a_child_holds_only_its_file_of_all_that_its_parent_has_open(tmp_path: Path) -> None:
    def work(descriptor: int) -> int:
        listed = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if int(each) > 2]
        return os.write(descriptor, "\n".join(listed).encode())

    with socket.create_server(("127.0.0.1", 0)), (tmp_path / "other").open("w"):
        assert _result(work, tmp_path / "file") > 0
    names = [Path(each).name for each in (tmp_path / "file").read_text().splitlines()]
    gone = [each for each in names if each.isdigit()]  # with which they were listed
    assert len(gone) == 1
    assert sorted(each.partition(":")[0] for each in names if each not in gone) == ["file", "pipe"]


def test_signals_to_the_group_are_the_parents_alone(tmp_path: Path) -> None:
    def work(_: int) -> int:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), each)
        return 3

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        assert _result(work, tmp_path / "file") == 3
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGTERM, handler)
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    ours.close()
    theirs.close()


def test_what_fails_in_a_child_is_told(tmp_path: Path) -> None:
    def full(_: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wrong(_: int) -> int:
        raise ValueError("no such thing")

    def killed(_: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 1

    def ended(_: int) -> int:
        os._exit(4)

    for work, why in (
        (full, "No space left on device"),
        (wrong, "ValueError: no such thing"),
        (killed, "its process was killed; the system does that if memory is short"),
        (ended, "its process ended with status 4"),
    ):
        with pytest.raises(ChildError) as told:
            _result(work, tmp_path / "file")
        assert str(told.value) == why


def test_a_child_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    def work(descriptor: int) -> int:
        os.write(descriptor, str(os.getpid()).encode())
        return _hang()

    with pytest.raises(ChildError, match=r"has not ended within 0\.5 s"):
        _result(work, tmp_path / "file", within=0.5)
    wait_for(lambda: not _is_there(int((tmp_path / "file").read_text() or 0)), "the end of the child")


def test_a_child_that_nobody_waits_for_any_more_is_killed(tmp_path: Path) -> None:
    async def cancelled() -> int:
        child = Child(_hang, descriptor=2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child.result, _PATIENCE)
            await checkpoint()
            tasks.cancel_scope.cancel()
        return child._pid  # pyright: ignore[reportPrivateUsage]

    process = anyio.run(cancelled)
    wait_for(lambda: not _is_there(process), "the end of the child")


def test_a_child_works_whatever_other_threads_of_its_parent_do(tmp_path: Path) -> None:
    is_done = threading.Event()

    def import_again() -> None:
        while not is_done.is_set():
            sys.modules.pop("colorsys", None)
            __import__("colorsys")

    def ask_for_memory() -> None:
        while not is_done.is_set():
            _ = np.arange(10_000).astype(str)

    threads = [threading.Thread(target=each) for each in (import_again, ask_for_memory)]
    for each in threads:
        each.start()
    try:
        for _ in range(4):
            assert _result(lambda file: os.write(file, np.arange(1000).tobytes()), tmp_path / "file") == 8000
    finally:
        is_done.set()
        for each in threads:
            each.join()


_PARENT = """
import os, signal, sys, time
from ncclscope_service.keep.persistence import Child
def work():
    os.write(1, str(os.getpid()).encode() + b"\\n")
    while True:
        signal.pause()
child = Child(work, descriptor=1)
time.sleep(1000)
"""


def test_a_child_dies_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        assert _is_there(process)
        parent.kill()
    wait_for(lambda: not _is_there(process), "the end of the child")


def test_where_no_process_is_given_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", refused)
    with pytest.raises(BlockingIOError):
        Child(_hang, descriptor=1)
    assert set(os.listdir("/proc/self/fd")) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
