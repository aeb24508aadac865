"""The directory of finished chunks: names, handing over at once, and its bound in bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

_SUFFIX = ".sqlite"
_WORK = ".ncclscope-capture"
"""Hidden: agents leave it alone. Below the directory, since only within one file system a rename is at once."""


class Chunks:
    """Chunks of this host in a directory that an agent follows."""

    def __init__(self, directory: Path, *, host: str, pid: int, keep_bytes: int) -> None:
        self._directory = directory
        self._host = host
        self._pid = pid
        self._keep_bytes = keep_bytes
        self.work = directory / _WORK / f"{host}-{pid}"

    def prepare(self) -> None:
        """Makes the directories.

        Raises:
            OSError: they cannot be made or written to.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "not writable", str(self._directory))

    def name(self, started: float) -> str:
        """The stem of the chunk that began then: host, time in UTC, and the process that recorded it."""
        return f"{self._host}_{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(started))}_{self._pid}"

    def hand_over(self, exported: Path, name: str) -> Path:
        """Puts a finished export under its name, at once: who sees the name, sees all of the file.

        Raises:
            OSError: it cannot be renamed.
        """
        final = self._directory / (name + _SUFFIX)
        exported.rename(final)
        return final

    def prune(self) -> int:
        """Deletes the oldest chunks of this host until all are within the bound; the newest stays. Gives how many.

        Chunks of other helpers on this host count, and are deleted too: the bound is that of the host.
        """
        found = sorted(self._mine())
        total = sum(size for _, _, size in found)
        deleted = 0
        for _, path, size in found[:-1]:
            if total <= self._keep_bytes:
                break
            try:
                path.unlink()
            except OSError:
                continue
            total -= size
            deleted += 1
        return deleted

    def free_bytes(self) -> int:
        """Free space of the disk, for those who are not root."""
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Deletes what is unfinished."""
        for path in self.work.glob("*"):
            path.unlink(missing_ok=True)
        for folder in (self.work, self.work.parent):
            try:
                folder.rmdir()
            except OSError:
                return  # another helper's

    def _mine(self) -> Iterator[tuple[int, Path, int]]:
        for path in self._directory.glob(f"{self._host}_*{_SUFFIX}"):
            try:
                status = path.stat()
            except OSError:
                continue
            yield status.st_mtime_ns, path, status.st_size
