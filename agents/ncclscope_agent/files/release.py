"""Gives the disk space of what was read of a live log back, without harm to the process that writes it.

    0 ......... block ........................ applied - keep ..... applied ...... size
    |  kept     |  released, in whole blocks   |  kept    |  not applied yet  |

A hole is punched into the file: its size, its end and the writer's position stay; the bytes read as zeros from then on.
The first block stays, because the file is known by it (`tail.py`), and a last stretch stays for people who look at the
end of the log. Nothing is truncated, locked or renamed, and the file is open for writing only during the call. A file
is left alone from the first refusal on.

Who may write logs may put another's file among them. So nothing is released but what its reader found operations of
NCCL in, that has one name, was reached by no link, and belongs to the owner of its folder, to the agent's user, or to
the one user that the operator named.

Known loss: a job that starts again under the same name truncates the file. If it does so and writes more than
the first block in the microseconds between the last look at the file's beginning and the call, what it wrote
there is released unread; whoever reads the file meets the hole and reports a gap ("released").

*Source:* fallocate(2), lseek(2), statfs(2), linux/falloc.h, linux/magic.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Final

import structlog

_log = structlog.get_logger(__name__)

_KEEP_SIZE_PUNCH_HOLE: Final = 0x01 | 0x02
_SHARED_FILE_SYSTEMS: Final = {0x6969: "NFS", 0x517B: "SMB", 0xFE534D42: "SMB", 0xFF534D42: "CIFS"}
"""Types whose clients keep pages of each other's files, so that a writer on another node could write back what was
released."""
_PAGE_BYTES: Final = 4096
_LARGEST_BLOCK_BYTES: Final = 16 << 20
"""Network file systems name the size of their favourite read as that of a block."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_REFUSALS: Final[Mapping[int, tuple[str, str]]] = {
    errno.EOPNOTSUPP: ("not_supported", "this file system cannot punch holes: write logs to ext4, XFS, Btrfs or tmpfs"),
    errno.ENOSYS: ("not_supported", "this kernel or sandbox has no fallocate: rotate the logs instead"),
    errno.EROFS: ("read_only", "the file system is mounted read-only here: mount it read-write for the agent"),
    errno.EACCES: ("not_permitted", "the agent may not write to the file: run it as the user of the job"),
    errno.EPERM: ("not_permitted", "the file is append-only, immutable or sealed (see lsattr): take that away"),
    errno.ETXTBSY: ("busy", "the file is used as swap or as a program"),
    errno.EREMOTE: ("shared", "another node may write to the log: write it to a local disk"),
    errno.ELOOP: ("link", "a link may have led to it: name the folder in which the logs lie"),
    errno.EMLINK: ("two_names", "the file has a second name (a hard link)"),
    errno.EUSERS: ("not_the_owners", "not of the folder's owner, the agent's user or --release-owner"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLimits:
    """How much of a file is kept, and how much is released at once."""

    keep_bytes: int = 1 << 20
    """Kept in front of what the service has not applied: some 4,000 lines."""
    step_bytes: int = 1 << 20
    """Less is not worth a call; above the longest line, so that a hole is never read as a piece of one."""
    piece_bytes: int = 64 << 20
    """Released by one call: the writer waits for it, about 10 ms on ext4."""


class LogReleaser:
    """Releases what was applied of followed logs, and remembers what was refused."""

    def __init__(self, *, limits: ReleaseLimits | None = None, owner: int | None = None) -> None:
        self._limits = limits or ReleaseLimits()
        self._owner = owner
        """The user whose files are released; None: whoever owns the folder, or runs the agent."""
        self._released: dict[str, int] = {}
        self._left_alone: set[str] = set()
        self._reported: set[tuple[int, str]] = set()
        self.refused = Counter[str]()
        """Files that are left alone, by reason."""

    def release(
        self,
        handle: int,
        *,
        key: str,
        name: str,
        applied: int,
        folder_owner: int | None,
        is_same: Callable[[], bool],
    ) -> int:
        """Releases what it can of the file behind an open handle; returns how many bytes that were.

        `applied` is how far the service has it; `folder_owner` the user who owns its folder, None if a link may have
        led to it; `is_same` tells whether it is still the file that was read, and is asked before each call. Never
        raises: a refusal is reported once per disk and reason, and counted per file.
        """
        if key in self._left_alone:
            return 0
        try:
            return self._release(handle, key, applied, folder_owner, is_same)
        except OSError as error:
            unknown = "failed", "nothing more is released of this file"
            reason, advice = _REFUSALS.get(error.errno or 0, unknown)
            self._left_alone.add(key)
            self.refused[reason] += 1
            disk = os.fstat(handle).st_dev, reason
            if disk not in self._reported:
                self._reported.add(disk)
                why = f"{error.strerror or type(error).__name__}: {advice}"
                _log.warning("logs_not_released", file=name, reason=reason, why=why)
            return 0

    def keep_only(self, keys: set[str]) -> None:
        """Forgets all other files: they are not followed any more."""
        self._left_alone &= keys
        self._released = {key: end for key, end in self._released.items() if key in keys}

    def _release(
        self, handle: int, key: str, applied: int, folder_owner: int | None, is_same: Callable[[], bool]
    ) -> int:
        limits, status = self._limits, os.fstat(handle)
        begin, end = releasable(applied, status, self._released.get(key, 0), limits)
        if end - begin < limits.step_bytes:
            return 0
        # What an agent before this one released is a hole already, and may be long.
        begin = min(max(begin, data_after(handle, begin)), end)
        self._released[key] = begin
        if folder_owner is None:
            raise OSError(errno.ELOOP, "links are followed")
        if status.st_nlink > 1:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        if status.st_uid not in ({folder_owner, os.geteuid()} if self._owner is None else {self._owner}):
            raise OSError(errno.EUSERS, f"its owner is user {status.st_uid}")
        if kind := shared_file_system(handle):
            raise OSError(errno.EREMOTE, f"the log lies on {kind}")
        # Through the handle and not by the name, which may lead to another file by now.
        writable = os.open(f"/proc/self/fd/{handle}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for at in range(begin, end, limits.piece_bytes):
                if not is_same():
                    break
                self._released[key] = min(end, at + limits.piece_bytes)
                punch_hole(writable, at, self._released[key])
        finally:
            os.close(writable)
        return self._released[key] - begin


def releasable(applied: int, status: os.stat_result, released: int, limits: ReleaseLimits) -> tuple[int, int]:
    """The whole blocks that may go, as begin and end; empty if it is too early.

    A file that is shorter than what was applied is another one, and nothing of it is released.
    """
    is_block = 0 < status.st_blksize <= _LARGEST_BLOCK_BYTES
    block = lcm(status.st_blksize, _PAGE_BYTES) if is_block else _PAGE_BYTES
    begin = max(block, -(-released // block) * block)
    end = (applied - limits.keep_bytes) // block * block
    return begin, end if applied <= status.st_size else begin


def punch_hole(handle: int, begin: int, end: int) -> None:
    """Punches a hole into the file behind a handle that is open for writing; its size stays.

    Raises:
        OSError: as fallocate(2) refuses.
    """
    fallocate = getattr(_LIBC, "fallocate64", None) or getattr(_LIBC, "fallocate", None)
    failed = errno.ENOSYS
    while fallocate is not None:
        flags, where = ctypes.c_int(_KEEP_SIZE_PUNCH_HOLE), (ctypes.c_int64(begin), ctypes.c_int64(end - begin))
        if fallocate(ctypes.c_int(handle), flags, *where) == 0:
            return
        failed = ctypes.get_errno()
        if failed != errno.EINTR:
            break
    raise OSError(failed, os.strerror(failed))


def shared_file_system(handle: int) -> str | None:
    """The network file system on which an open file or directory lies; None for others.

    Raises:
        OSError: statfs failed.
    """
    buffer = ctypes.create_string_buffer(512)  # struct statfs has 120 bytes; its first word is the type
    if _LIBC.fstatfs(ctypes.c_int(handle), buffer) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return _SHARED_FILE_SYSTEMS.get(ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF)


def data_after(handle: int, offset: int) -> int:
    """Where the first byte at or behind `offset` is that is not in a hole; the file's size if there is none.

    Holes are known if the file system reports them; otherwise this is `offset` itself.
    """
    try:
        return os.lseek(handle, offset, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(handle).st_size if error.errno == errno.ENXIO else offset
