"""Gives the disk space of what was read of a live log back, without harm to the process that writes it.

A hole is punched into the file (`fallocate` with FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE): its size, its end
and the writer's position stay, for writers that append and for NCCL's own `fopen(..., "w")` alike; the bytes
read as zeros from then on. Nothing is truncated, locked or renamed, and the file is open for writing only
during the call. What may go is decided in `release_plan.py`; a file is left alone from the first refusal on.

Known loss: a job that starts again under the same name truncates the file. If it does so and writes more than
the first block in the microseconds between the last look at the file's beginning and the call, what it wrote
there is released unread; whoever reads the file meets the hole and says so (a gap, "released").

*Source:* fallocate(2), lseek(2), statfs(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import structlog

from ncclscope_agent.release_plan import ByteRange, ReleaseLimits, block_bytes, pieces, releasable
from ncclscope_wire.errors import SourceError

_log = structlog.get_logger(__name__)

_KEEP_SIZE: Final = 0x01
_PUNCH_HOLE: Final = 0x02
"""*Source:* linux/falloc.h."""
_SHARED_FILE_SYSTEMS: Final[Mapping[int, str]] = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
}
"""Types whose clients keep pages of each other's files, so that a writer on another node could write back what was
released. *Source:* linux/magic.h."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_ADVICE: Final[Mapping[int, tuple[str, str]]] = {
    errno.EOPNOTSUPP: ("not_supported", "this file system cannot punch holes: write logs to ext4, XFS, Btrfs or tmpfs"),
    errno.ENOSYS: ("not_supported", "this kernel or sandbox has no fallocate: rotate the logs instead"),
    errno.EROFS: ("read_only", "the file system is mounted read-only here: mount it read-write for the agent"),
    errno.EACCES: ("not_permitted", "the agent may not write to the file: run it as the user of the job"),
    errno.EPERM: ("not_permitted", "the file is append-only, immutable or sealed (see lsattr): take that away"),
    errno.ETXTBSY: ("busy", "the file is used as swap or as a program"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseStatistics:
    """Counts since the start."""

    released_bytes_total: int = 0
    """Asked to be released; what was a hole already is not counted."""
    refused: Mapping[str, int] = field(default_factory=dict[str, int])
    """Files that are left alone, by reason: "not_supported", "read_only", "not_permitted", "shared", "busy",
    "failed"."""


class LogReleaser:
    """Releases what was applied of followed logs, and remembers what was refused."""

    def __init__(self, *, limits: ReleaseLimits | None = None) -> None:
        self._limits = limits or ReleaseLimits()
        self._released: dict[str, int] = {}
        self._left_alone: set[str] = set()
        self._told: set[tuple[int, str]] = set()
        self._bytes = 0
        self._refused = Counter[str]()

    def release(self, handle: int, *, key: str, name: str, applied: int, is_same: Callable[[], bool]) -> int:
        """Releases what it can of the file behind an open handle; returns how many bytes that were.

        `applied` is how far the service has it; `is_same` tells whether it is still the file that was read, and is
        asked before each call. Never raises: a refusal is told once per disk and reason, and counted per file.
        """
        if key in self._left_alone:
            return 0
        try:
            status = os.fstat(handle)
            block = block_bytes(status.st_blksize)
            wanted = releasable(
                applied=applied,
                size=status.st_size,
                released=self._released.get(key, 0),
                block=block,
                limits=self._limits,
            )
            return 0 if wanted is None else self._release(handle, key, wanted, is_same)
        except OSError as error:
            self._leave_alone(handle, key, name, refusal_of(error))
        except SourceError as refusal:
            self._leave_alone(handle, key, name, refusal)
        return 0

    def keep_only(self, keys: set[str]) -> None:
        """Forgets all other files: they are not followed any more."""
        self._left_alone &= keys
        self._released = {key: end for key, end in self._released.items() if key in keys}

    def statistics(self) -> ReleaseStatistics:
        """A snapshot of the counters."""
        return ReleaseStatistics(released_bytes_total=self._bytes, refused=dict(self._refused))

    def _release(self, handle: int, key: str, wanted: ByteRange, is_same: Callable[[], bool]) -> int:
        # What an agent before this one released is a hole already, and may be long.
        begin = min(max(wanted.begin, data_after(handle, wanted.begin)), wanted.end)
        rest = ByteRange(begin=begin, end=wanted.end)
        self._released[key] = rest.begin
        refuse_shared(handle)
        # Through the handle and not by the name, which may lead to another file by now.
        writable = os.open(f"/proc/self/fd/{handle}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for piece in pieces(rest, self._limits):
                if not is_same():
                    break
                punch_hole(writable, piece)
                self._released[key] = piece.end
                self._bytes += piece.size
        finally:
            os.close(writable)
        return self._released[key] - rest.begin

    def _leave_alone(self, handle: int, key: str, name: str, refusal: SourceError) -> None:
        self._left_alone.add(key)
        self._refused[refusal.reason] += 1
        told = os.fstat(handle).st_dev, refusal.reason
        if told not in self._told:
            self._told.add(told)
            _log.warning("logs_not_released", file=name, reason=refusal.reason, why=str(refusal))


def punch_hole(handle: int, wanted: ByteRange) -> None:
    """Punches a hole into the file behind a handle that is open for writing; its size stays.

    Raises:
        OSError: as fallocate(2) refuses.
    """
    fallocate = getattr(_LIBC, "fallocate64", None) or getattr(_LIBC, "fallocate", None)
    if fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    arguments = ctypes.c_int64(wanted.begin), ctypes.c_int64(wanted.size)
    while fallocate(ctypes.c_int(handle), ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE), *arguments) != 0:
        failed = ctypes.get_errno()
        if failed != errno.EINTR:
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


def refuse_shared(handle: int) -> None:
    """Refuses files that other nodes may write to.

    Raises:
        SourceError: the file lies on a network file system without coherent caches.
        OSError: statfs failed.
    """
    kind = shared_file_system(handle)
    if kind is not None:
        raise SourceError(
            "shared", f"the log lies on {kind}, where another node may write to it: write it to a local disk"
        )


def refusal_of(error: OSError) -> SourceError:
    """Why the system refused, under a short fixed word, and what to do."""
    reason, advice = _ADVICE.get(error.errno or 0, ("failed", "nothing more is released of this file"))
    return SourceError(reason, f"{error.strerror or type(error).__name__}: {advice}")


def data_after(handle: int, offset: int) -> int:
    """Where the first byte at or behind `offset` is that is not in a hole; the file's size where there is none.

    Holes are known where the file system tells of them; elsewhere this is `offset` itself.
    """
    try:
        return os.lseek(handle, offset, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(handle).st_size if error.errno == errno.ENXIO else offset
