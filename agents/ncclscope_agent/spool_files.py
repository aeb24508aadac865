"""The spool's directory: locked by one agent, read at its start, then written as `spool.py` decides.

Whoever sends what an agent has left (`left_spools.py`) holds the same lock for as long, and removes the directory with
it. So a lock counts only while its file is the one that stands there, and no link is followed to or in the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog

from ncclscope_agent.spool import Spool
from ncclscope_agent.spool_limits import SpoolJob
from ncclscope_wire.errors import ConfigError

_log = structlog.get_logger(__name__)

_AGENT_ID: Final = re.compile(r".+-[0-9a-f]{12}")
"""As `config.agent_id` makes them: an agent's directory is called by it."""
SPOOL_LOCK: Final = "lock"
_SENDS: Final = "sends"
"""Stands in the lock behind the process of one who only sends what was left."""
_SENDER_SECONDS: Final = 20.0
"""So long an agent waits for such a one: it gives up sooner where there is no service."""
_LOOK_SECONDS: Final = 0.1
_MOST_TRIES: Final = 5
"""To make a directory that is removed by one who sends; where it cannot be made at all, that many are enough too."""
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def agent_directories(folder: Path) -> Iterator[Path]:
    """The directories of agents below the folder of spools, by name; none where it is not there. Links are none.

    Raises:
        ConfigError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"--spool: {folder} cannot be read: {error.strerror or error}") from error
    yield from (folder / name for name in sorted(found) if _AGENT_ID.fullmatch(name))


class SpoolInUseError(ConfigError):
    """Another process has the directory."""


class SpoolDirectory:
    """One agent's directory of the spool; `close` gives it free.

    With `is_left` it is one of this user that is there, and whoever has it is not waited for.

    Raises:
        SpoolInUseError: another agent has it.
        ConfigError: it cannot be made or written to, or is another user's.
    """

    def __init__(self, path: Path, *, is_left: bool = False) -> None:
        self.path = path
        self._handles: dict[str, int] = {}
        self._has_new = False
        try:
            self._folder, self._lock = _taken(path, is_left=is_left)
        except OSError as error:
            raise ConfigError(
                f"--spool: {path} cannot be used: {error.strerror or error}: "
                "name a folder that this user may make or write to"
            ) from error
        with contextlib.suppress(OSError):  # a full disk is no reason not to start
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {_SENDS}".encode() if is_left else str(os.getpid()).encode(), 0)

    def names(self) -> list[str]:
        """The files that may be ours, in the order of their names."""
        with os.scandir(self._folder) as entries:
            return sorted(
                entry.name for entry in entries if Spool.is_ours(entry.name) and entry.is_file(follow_symlinks=False)
            )

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of all of them."""
        for name in self.names():
            try:
                yield name, self._bytes(name)
            except OSError as error:
                _log.warning("spool_file_unreadable", file=str(self.path / name), why=error.strerror)

    def written_ns(self) -> int:
        """When a file of it was written last, of the wall clock; 0 where there is none."""
        return max((self._status(name).st_mtime_ns for name in self.names()), default=0)

    def read(self, name: str) -> bytes:
        """A file's bytes as they are now; empty where it cannot be read."""
        try:
            return self._bytes(name)
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
                os.fsync(self._folder)  # else, a file that is new may be gone after a loss of power
                self._has_new = False
        except OSError:
            self._take_back(grown)
            raise
        self._close_handles(set(job.removes) | (set(self._handles) - {name for name, _ in grown} if grown else set()))
        for name in job.removes:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)

    def remove(self) -> bool:
        """Removes all that is the spool's, the directory last; False where something else lies in it.

        Raises:
            OSError: a file of it cannot be removed.
        """
        self._close_handles(set(self._handles))
        for name in (*self.names(), SPOOL_LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
        try:
            self.path.rmdir()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Closes all files, and gives the directory free."""
        self._close_handles(set(self._handles))
        os.close(self._lock)
        os.close(self._folder)

    def _bytes(self, name: str) -> bytes:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        with open(handle, "rb") as stream:
            return stream.read()

    def _status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._folder, follow_symlinks=False)

    def _handle(self, name: str) -> int:
        if name not in self._handles:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handles[name] = os.open(name, flags, 0o600, dir_fd=self._folder)
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
                    os.unlink(name, dir_fd=self._folder)


def _taken(path: Path, *, is_left: bool) -> tuple[int, int]:
    """The directory and its lock, both open, the lock ours; a directory that is being removed is made anew."""
    until = time.monotonic() + (0.0 if is_left else _SENDER_SECONDS)
    tries = 1 if is_left else _MOST_TRIES
    while True:
        try:
            taken = _taken_now(path, is_left=is_left, may_wait=time.monotonic() < until)
        except FileNotFoundError:
            tries -= 1
            if tries <= 0:
                raise
        else:
            if taken is not None:
                return taken
        time.sleep(_LOOK_SECONDS)


def _taken_now(path: Path, *, is_left: bool, may_wait: bool) -> tuple[int, int] | None:
    """The same, unless it is to be tried again."""
    if not is_left:
        # Not `exist_ok`: that looks again, and fails where the directory was removed in between.
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
    with contextlib.ExitStack() as unless_taken:
        folder = os.open(path, _FOLDER_FLAGS)
        unless_taken.callback(os.close, folder)
        if is_left and (owner := os.fstat(folder).st_uid) != os.geteuid():
            raise ConfigError(f"it belongs to the user {owner}, who alone may send it")
        lock = _locked(folder, path, may_wait=may_wait)
        if lock is None:
            return None
        unless_taken.pop_all()
        return folder, lock


def _locked(folder: int, path: Path, *, may_wait: bool) -> int | None:
    """The lock; None where it is to be tried again: one who sends has it, or has just removed it.

    Raises:
        SpoolInUseError: an agent has it, or it may not be waited for.
    """
    lock = os.open(SPOOL_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        process, _, does = os.pread(lock, 32, 0).decode(errors="replace").partition(" ")
        os.close(lock)
        if does == _SENDS and may_wait:
            return None
        raise SpoolInUseError(
            f"--spool: {path} is in use by another agent (process {process.strip() or 'unknown'}): two agents for the "
            "same files would send everything twice; stop one of them, or give it another --name"
        ) from error
    if _is_there(folder, lock):
        return lock
    os.close(lock)
    return None


def _is_there(folder: int, lock: int) -> bool:
    """Whether a lock that was taken is the one that others would take."""
    ours = os.fstat(lock)
    try:
        theirs = os.stat(SPOOL_LOCK, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino) and stat.S_ISREG(theirs.st_mode)


def _write_all(handle: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]
