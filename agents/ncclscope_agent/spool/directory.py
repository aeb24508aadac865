"""The spool's directory: one agent's own, locked by whoever works with it.

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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ncclscope_agent.spool.database import DATABASE_NAME
from ncclscope_wire.errors import ConfigError

_AGENT_ID: Final = re.compile(r".+-[0-9a-f]{12}")
"""As `config.agent_id` makes them: an agent's directory is called by it."""
_DATABASE_FILE: Final = re.compile(r"(spool-\d+)\.(sqlite(-wal|-shm|-journal)?|rebuilt(-wal|-shm|-journal)?)")
_FIRST_FORMAT_FILE: Final = re.compile(r"chapter-\d{6}|frames-\d{10}-\d{6}")
"""As versions before 0.2 wrote them."""
SPOOL_LOCK: Final = "lock"
_SENDS: Final = "sends"
"""Stands in the lock behind the process of one who only sends what was left."""
_SENDER_SECONDS: Final = 20.0
"""So long an agent waits for such a one: it gives up sooner if there is no service."""
_RETRY_SECONDS: Final = 0.1
_MAX_TRIES: Final = 5
"""To make a directory that is removed by one who sends; if it cannot be made at all, that many are enough too."""
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def agent_directories(folder: Path) -> Iterator[Path]:
    """The directories of agents below the folder of spools, by name; none if it is not there. Links are none.

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
    """One agent's directory of the spool, locked until `close`.

    With `is_left` it is one of this user that is there, and whoever has it is not waited for.

    Raises:
        SpoolInUseError: another agent has it.
        ConfigError: it cannot be made or written to, or is another user's.
    """

    def __init__(self, path: Path, *, is_left: bool = False) -> None:
        self.path = path
        try:
            self._folder, self._lock = _open_locked(path, is_left=is_left)
        except OSError as error:
            raise ConfigError(
                f"--spool: {path} cannot be used: {error.strerror or error}: "
                "name a folder that this user may make or write to"
            ) from error
        with contextlib.suppress(OSError):  # a full disk is no reason not to start
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()} {_SENDS}".encode() if is_left else str(os.getpid()).encode(), 0)

    def _names(self) -> list[str]:
        """The files of spools, of this version and of others."""
        with os.scandir(self._folder) as entries:
            return [entry.name for entry in entries if _is_ours(entry.name) and entry.is_file(follow_symlinks=False)]

    def unusable_files(self) -> Counter[str]:
        """Files that this version cannot read, by why."""
        mine = DATABASE_NAME.partition(".")[0] + "."
        return Counter("other_version" for name in self._names() if not name.startswith(mine))

    def written_ns(self) -> int:
        """When a file of it was written last, of the wall clock; 0 if there is none."""
        found = (os.stat(name, dir_fd=self._folder, follow_symlinks=False) for name in self._names())
        return max((status.st_mtime_ns for status in found), default=0)

    def remove(self) -> bool:
        """Removes all that is the spool's, the directory last; False if something else lies in it.

        Raises:
            OSError: a file of it cannot be removed.
        """
        for name in (*self._names(), SPOOL_LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._folder)
        try:
            self.path.rmdir()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Unlocks the directory."""
        os.close(self._lock)
        os.close(self._folder)


def _is_ours(name: str) -> bool:
    return bool(_DATABASE_FILE.fullmatch(name) or _FIRST_FORMAT_FILE.fullmatch(name))


def _open_locked(path: Path, *, is_left: bool) -> tuple[int, int]:
    """The directory and its lock, both open, the lock ours; a directory that is being removed is made again."""
    until = time.monotonic() + (0.0 if is_left else _SENDER_SECONDS)
    tries = 1 if is_left else _MAX_TRIES
    while True:
        try:
            opened = _try_open(path, is_left=is_left, may_wait=time.monotonic() < until)
        except FileNotFoundError:
            tries -= 1
            if tries <= 0:
                raise
        else:
            if opened is not None:
                return opened
        time.sleep(_RETRY_SECONDS)


def _try_open(path: Path, *, is_left: bool, may_wait: bool) -> tuple[int, int] | None:
    """The same; None if it is to be tried again."""
    if not is_left:
        # Not `exist_ok`: that looks again, and fails if the directory was removed in between.
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
    with contextlib.ExitStack() as unless_opened:
        folder = os.open(path, _FOLDER_FLAGS)
        unless_opened.callback(os.close, folder)
        if is_left and (owner := os.fstat(folder).st_uid) != os.geteuid():
            raise ConfigError(f"it belongs to the user {owner}, who alone may send it")
        lock = _try_lock(folder, path, may_wait=may_wait)
        if lock is None:
            return None
        unless_opened.pop_all()
        return folder, lock


def _try_lock(folder: int, path: Path, *, may_wait: bool) -> int | None:
    """The lock; None if it is to be tried again: one who sends has it, or has just removed it.

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
