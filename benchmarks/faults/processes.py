"""Agent and service as processes that can be killed at any moment."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Given = TypeVar("_Given")

_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["ncclscope.cli", "ncclscope.serve", "ncclscope.agent", "ncclscope_service.app", "ncclscope_agent.app"]
)
_NEW_NETWORK: Final = 0x40000000
"""CLONE_NEWNET. *Source:* linux/sched.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Faults of the machine that a process believes to be on."""

    sync_seconds: float = 0.0
    """What a sync to disk takes longer: fsync and fdatasync of the service, a synced transaction of the spool."""
    read_bytes_per_s: float = 0.0
    """What is read of logs, batches of the spool, journal and state takes as long as on such a disk; 0: as it is."""
    clock_file: Path | None = None
    """Holds how far the wall clock is off, in seconds; or "x RATE" for one that runs so much faster."""
    namespace: str | None = None
    """The network namespace in which it runs, by its name below /run/netns."""


SLOW_DISK: Final = Hooks(sync_seconds=5, read_bytes_per_s=1e6)


class Running:
    """One process of the command."""

    def __init__(self, arguments: list[str], output: Path, hooks: Hooks | None = None) -> None:
        self._process: BaseProcess = _CONTEXT.Process(target=_run, args=(arguments, output, hooks or Hooks()))
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.join()

    def signal(self, number: signal.Signals) -> None:
        """Any signal."""
        os.kill(self.pid, number)

    def end(self, within: float = 120) -> int | None:
        """SIGTERM; gives the exit status."""
        if self.is_running:
            self.signal(signal.SIGTERM)
        self._process.join(within)
        if self.is_running:
            self.kill()
        return self._process.exitcode

    def memory_bytes(self) -> int:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        """Open files."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def _run(arguments: list[str], output: Path, hooks: Hooks) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if hooks.namespace is not None:
        _enter(hooks.namespace)
    if hooks.sync_seconds:
        for name in ("fsync", "fdatasync"):
            setattr(os, name, _slowed(getattr(os, name), lambda _: hooks.sync_seconds))
        _slow_spool(hooks.sync_seconds)
    if hooks.read_bytes_per_s:
        _slow_reads(hooks.read_bytes_per_s)
    if hooks.clock_file is not None:
        _set_clock(hooks.clock_file)
    from ncclscope.cli import main  # noqa: PLC0415  (the clock must be set before)

    sys.argv = ["ncclscope", *arguments]
    main()


def _enter(namespace: str) -> None:
    """*Source:* setns(2); `os.setns` is there from Python 3.12 on only."""
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(handle, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(handle)


def _slowed(call: Callable[_Arguments, _Given], seconds: Callable[[_Given], float]) -> Callable[_Arguments, _Given]:
    """A function that takes so much longer, by what it gives."""

    def slow(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Given:
        given = call(*arguments, **named)
        time.sleep(seconds(given))
        return given

    return slow


def _slow_reads(bytes_per_s: float) -> None:
    """SQLite reads by itself: batches are counted when they are read from it."""
    from ncclscope_agent.spool.database import SpoolDatabase  # noqa: PLC0415  (only this process is slow)
    from ncclscope_agent.spool.records import Frame  # noqa: PLC0415

    def of_frames(read: tuple[list[Frame], int]) -> float:
        return sum(len(frame.payload) for frame in read[0]) / bytes_per_s

    setattr(os, "pread", _slowed(os.pread, lambda data: len(data) / bytes_per_s))  # noqa: B010
    setattr(Path, "read_bytes", _slowed(Path.read_bytes, lambda data: len(data) / bytes_per_s))  # noqa: B010
    setattr(SpoolDatabase, "frames", _slowed(SpoolDatabase.frames, of_frames))  # noqa: B010


def _slow_spool(seconds: float) -> None:
    """SQLite syncs by itself."""
    from ncclscope_agent.spool.database import SpoolDatabase  # noqa: PLC0415  (only this process is slow)
    from ncclscope_agent.spool.records import DiskState, Transaction  # noqa: PLC0415

    commit = SpoolDatabase.commit

    def slow(database: SpoolDatabase, wanted: Transaction) -> DiskState:
        time.sleep(seconds * wanted.is_synced)
        return commit(database, wanted)

    setattr(SpoolDatabase, "commit", slow)  # noqa: B010


def _set_clock(file: Path) -> None:
    """A wall clock that is set by a file, looked at ten times a second. The process was forked for this alone."""
    true_ns, began_ns = time.time_ns, time.time_ns()
    looked_ns, rate, offset_ns = 0, 0.0, 0

    def time_ns() -> int:
        nonlocal looked_ns, rate, offset_ns
        now_ns = true_ns()
        if now_ns - looked_ns > 100_000_000:
            looked_ns, text = now_ns, file.read_text()
            rate = float(text[2:]) - 1 if text.startswith("x ") else 0.0
            offset_ns = 0 if text.startswith("x ") else int(float(text or 0) * 1e9)
        return now_ns + offset_ns + int((now_ns - began_ns) * rate)

    time.time_ns = time_ns
    time.time = lambda: time_ns() * 1e-9
    for name in [name for name in sys.modules if name.startswith("ncclscope")]:
        del sys.modules[name]  # their defaults hold the true clock
