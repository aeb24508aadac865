"""The spool's directory: locked by one agent, read at its start, then written as `spool.py` decides."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from ncclscope_agent.spool import Spool
from ncclscope_agent.spool_limits import SpoolJob
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
        self._has_new = False
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"--spool: {path} cannot be used: {error.strerror or error}: "
                "name a folder that this user may make or write to"
            ) from error
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
                os.fdatasync(self._handle(name))
            if job.syncs and self._has_new:
                self._sync_directory()
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

    def _sync_directory(self) -> None:
        """Without it, a file that is new may be gone after a loss of power."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self._has_new = False

    def _handle(self, name: str) -> int:
        if name not in self._handles:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._handles[name] = os.open(self.path / name, flags, 0o600)
            self._has_new = True
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
