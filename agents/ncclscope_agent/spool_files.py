"""The spool's directory: locked by one agent, read at its start, written by one thread.

Carries out what `spool.py` decides. The thread is the only one that may block on the disk; everything else of the
agent goes on while it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import structlog

from ncclscope_agent.spool import Spool
from ncclscope_agent.spool_limits import SpoolJob
from ncclscope_agent.spool_records import Frame, scan
from ncclscope_wire.errors import ConfigError

_log = structlog.get_logger(__name__)


class SpoolDirectory:
    """One agent's directory of the spool; `close` gives it free.

    Raises:
        ConfigError: it cannot be made or written to, or another agent has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handles: dict[str, int] = {}
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--spool: {path} cannot be used: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise ConfigError(
                f"--spool: {path} is in use by another agent (process {holder}): two agents for the same files would "
                "send everything twice; stop one of them, or give it another --name"
            ) from error
        with contextlib.suppress(OSError):  # a full disk is no reason not to start
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of all files that may be ours, in the order of their names."""
        for path in sorted(self.path.iterdir()):
            if Spool.is_ours(path.name) and path.is_file():
                try:
                    yield path.name, path.read_bytes()
                except OSError as error:
                    _log.warning("spool_file_unreadable", file=str(path), why=error.strerror)

    def read(self, name: str) -> bytes:
        """A file's bytes as they are now; empty where it cannot be read."""
        try:
            return (self.path / name).read_bytes()
        except OSError:
            return b""

    def perform(self, job: SpoolJob) -> None:
        """Does a job.

        Raises:
            OSError: it could not be done; what was written of it was taken back, where that was possible.
        """
        grown: list[tuple[str, int]] = []
        try:
            for name, data in job.appends:
                handle = self._handle(name)
                grown.append((name, os.fstat(handle).st_size))
                _write_all(handle, data)
            for name in job.syncs:
                os.fsync(self._handle(name))
        except OSError:
            self._take_back(grown)
            raise
        self._close_handles(set(job.removes) | (set(self._handles) - {name for name, _ in grown} if grown else set()))
        for name in job.removes:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).unlink()

    def close(self) -> None:
        """Closes all files, and gives the directory free."""
        self._close_handles(set(self._handles))
        os.close(self._lock)

    def _handle(self, name: str) -> int:
        if name not in self._handles:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._handles[name] = os.open(self.path / name, flags, 0o600)
        return self._handles[name]

    def _close_handles(self, names: set[str]) -> None:
        for name in names & set(self._handles):
            os.close(self._handles.pop(name))

    def _take_back(self, grown: Sequence[tuple[str, int]]) -> None:
        for name, size in grown:
            with contextlib.suppress(OSError):
                os.ftruncate(self._handles[name], size)
                if not size:
                    self._close_handles({name})
                    (self.path / name).unlink()


def _write_all(handle: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]


@dataclass(frozen=True, slots=True)
class _Running:
    job: SpoolJob
    done: Future[None]


class SpoolKeeper:
    """A spool and its directory: has the jobs of the one done in the other, one after the other, in a thread.

    `now_ns` is the spool's clock: the wall clock at the start, and from then on as much later as time has passed.
    """

    def __init__(
        self, spool: Spool, directory: SpoolDirectory, *, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.spool = spool
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._running: _Running | None = None
        self._monotonic_ns = monotonic_ns
        self._began_ns = time.time_ns() - monotonic_ns()
        self._fault: str | None = None

    def __enter__(self) -> SpoolKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def recover(self) -> None:
        """Reads what is there: up to `max_bytes`, so this may take seconds."""
        for name, data in self._directory.files():
            self.spool.recover(name, data)
        known = self.spool.statistics()
        if known.bytes_on_disk:
            left = sum(chapter.last - chapter.acknowledged for chapter in self.spool.chapters)
            _log.info("spool_found", directory=str(self._directory.path), batches=left, bytes=known.bytes_on_disk)
        if known.damaged_bytes or known.unusable_files:
            _log.warning("spool_damaged", bytes=known.damaged_bytes, files=dict(known.unusable_files))

    def now_ns(self) -> int:
        """The spool's clock."""
        return self._began_ns + self._monotonic_ns()

    def nudge(self) -> None:
        """Has done what there is to do; returns at once."""
        if self._running is not None:
            if not self._running.done.done():
                return
            self._finish()
        job = self.spool.take_job(self.now_ns())
        if job is not None:
            self._running = _Running(job, self._thread.submit(self._directory.perform, job))

    def tick(self) -> None:
        """The same, and drops what is too old; to be called about once a second."""
        self.spool.expire(self.now_ns())
        self.nudge()

    def frames(self, name: str) -> Sequence[Frame]:
        """The batches in a file. Blocks."""
        return scan(self._directory.read(name)).frames

    def read(self, name: str) -> bytes:
        """A file's bytes. Blocks."""
        return self._directory.read(name)

    def flush(self, seconds: float) -> bool:
        """Writes and syncs all that waits; whether that could be done in time. Blocks, at the agent's end only."""
        until = time.monotonic() + seconds
        while self._wait(until):
            job = self.spool.take_job(self.now_ns())
            if job is None:
                job = self.spool.take_sync()
            if job is None:
                return self.spool.statistics().pending_bytes == 0
            self._running = _Running(job, self._thread.submit(self._directory.perform, job))
        return False

    def close(self) -> None:
        """Ends the thread, unless the disk blocks it, and gives the directory free."""
        if self._running is None or self._running.done.done():
            self._thread.shutdown()
            self._directory.close()
        else:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _wait(self, until: float) -> bool:
        if self._running is None:
            return True
        with contextlib.suppress(Exception):
            self._running.done.exception(timeout=max(0.0, until - time.monotonic()))
        if not self._running.done.done():
            return False
        self._finish()
        return self._fault is None

    def _finish(self) -> None:
        assert self._running is not None, "no job of the spool is running"
        error, self._running = self._running.done.exception(), None
        if error is not None and not isinstance(error, OSError):
            raise error
        fault = None if error is None else error.strerror or str(error)
        self.spool.on_done(self.now_ns(), fault)
        if fault != self._fault:
            tell = _log.info if fault is None else _log.warning
            said = "written again" if fault is None else "not written: batches are kept in memory until it can be"
            tell("spool", directory=str(self._directory.path), said=said, **({} if fault is None else {"why": fault}))
        self._fault = fault
