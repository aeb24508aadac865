"""Finds the files that match patterns, and holds them open: new ones, renamed ones, those that are no logs.

All files are opened read-only and read with positions, so nothing is shared with the process that writes them.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from ncclscope_agent.files import tail
from ncclscope_agent.files.paths import LinkError, PathPatterns
from ncclscope_agent.files.release import data_after
from ncclscope_agent.files.tail import Decision, FileIdentity, Tail
from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.nccl_log.reader import MAX_LINE_BYTES, MAX_TEMPLATES, NcclLogReader

_log = structlog.get_logger(__name__)

_CROWDED_SHARE: Final = 0.75
_FRONT_BYTES: Final = 65_536 + tail.HEAD_BYTES
"""Holes end with a block of the file system: a block, and what is behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowLimits:
    """Bounds of following, with the reason for each default."""

    bytes_per_turn: int = 1 << 18
    """Of one file at a time: about 1,200 lines or a millisecond, so that no file starves the others."""
    bytes_per_poll: int = 8 << 20
    """Of all files in one poll: about 50 ms."""
    poll_ns: int = 250_000_000
    """Of one poll or look, and a file more: a disk that reads slowly keeps no heartbeat and no signal waiting."""
    gathered_bytes: int = 2 << 20
    """Read ahead by `look` and kept as text; more is asked for at once."""
    rescan_interval_ns: int = 2_000_000_000
    """Between two looks for new, renamed and deleted files, unless `nudge` was called: only what no watch reports,
    on network file systems and below wildcards, waits for it."""
    grace_ns: int = 30_000_000_000
    """A file that has no name left is closed after so long a silence: it holds disk space until then."""
    renamed_grace_ns: int = 3_600_000_000_000
    """The same of one that was renamed to what no pattern matches: NCCL, which cannot open its log again, goes on
    writing to it, and pauses for longer than `grace_ns` while its job evaluates or saves a checkpoint."""
    unread_grace_ns: int = 600_000_000_000
    """A file that has no name left is let go after so long without room for what it holds: somebody deleted it to get
    its disk space back."""
    max_files: int = 1024
    """Handles open at once; the usual limit of a process is 1,024 to 65,536."""
    max_line_bytes: int = MAX_LINE_BYTES
    max_templates: int = MAX_TEMPLATES


class OpenFile:
    """One open file, its reader, and what was read from it and not by the reader yet."""

    def __init__(
        self, path: Path, handle: int, state: Tail, *, is_zone_open: bool, folder_owner: int | None = None
    ) -> None:
        self.path = path
        self.handle = handle
        self.folder_owner = folder_owner
        """The user who owns the folder it was found in; None if a link may have led to it."""
        self.tail = state
        self.reader: NcclLogReader | InspectorReader | None = None
        self.must_be_new = False
        """It was truncated: a position known for its key is of the content before."""
        self.emptied_at: int | None = None
        """Where a line would have begun next when it was truncated: there its writer goes on that does not append."""
        self.is_zone_open = is_zone_open
        """Its stamps may be of any zone."""
        self.zone_told_in: int | None = None
        """The quarter of an hour in which its zone was last recognised."""
        self.ahead: list[bytes] = []
        """Read from the file up to the tail's offset, and not by the reader yet."""
        self.last_parsed = b""
        """The last bytes that were given to the reader, or stand in front of where it began: `LAST_BYTES` or all."""
        self.last_decision: Decision | None = None
        """The last decision of a look ahead: its source ends behind what is `ahead`."""
        self.nameless_since_ns: int | None = None
        """Since when it has no name, and there was no room to read it."""

    def head(self) -> bytes:
        """Its first bytes, by which it is known."""
        return os.pread(self.handle, tail.HEAD_BYTES, 0)

    def text(self) -> tuple[int, bytes]:
        """Where its text begins, and the first bytes of that, which zeros precede if it was emptied under its writer.

        NCCL opens its log with mode "w" and not "a", so after a copytruncate it writes where it stood, behind a hole.
        """
        head = self.head()
        if not head.startswith(b"\0"):
            return 0, head
        begin = data_after(self.handle, 0)
        found = os.pread(self.handle, _FRONT_BYTES, begin)
        text = found.lstrip(b"\0")
        return (begin + len(found) - len(text), text[: tail.HEAD_BYTES]) if text else (0, head)

    def size(self) -> int:
        """Bytes in it now."""
        return os.fstat(self.handle).st_size

    def before(self, end: int) -> bytes:
        """The last bytes in front of a position; fewer if it stands near the beginning."""
        begin = max(0, end - tail.LAST_BYTES)
        return os.pread(self.handle, end - begin, begin)

    def give_back(self) -> None:
        """Gives the file back to its disk; the handle stays, of nothing."""
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(nothing, self.handle, inheritable=False)
        os.close(nothing)

    def drain_ahead(self) -> bytes:
        """Takes out the bytes that were read ahead."""
        data = self.ahead[0] if len(self.ahead) == 1 else b"".join(self.ahead)
        self.ahead.clear()
        return data

    def is_same(self) -> bool:
        """Whether it is still the file that was read."""
        return self.tail.is_same(self.head(), self.size())

    def hole_bytes(self) -> int:
        """How many bytes from the tail's offset on are a hole that data follow."""
        end = data_after(self.handle, self.tail.offset)
        return end - self.tail.offset if end < self.size() else 0


class FileFinder:
    """Keeps the open files up to date with what their patterns match; counts what cannot be followed."""

    def __init__(self, patterns: PathPatterns, limits: FollowLimits, skipped: Counter[str], *, has_zones: bool) -> None:
        self._patterns = patterns
        self._limits = limits
        self._skipped = skipped
        self._has_zones = has_zones
        self.files: dict[FileIdentity, OpenFile] = {}
        self._left_alone: dict[FileIdentity, Path] = {}
        """Those that are something else."""
        self._unopened: set[FileIdentity] = set()
        self._nudged = threading.Event()
        self._nudged.set()
        self._scanned_ns = 0

    def nudge(self) -> None:
        """Says, from any thread, that files may have appeared, moved or gone: a scan is due."""
        self._nudged.set()

    def is_due(self, now_ns: int) -> bool:
        """Whether it is time for a scan."""
        return self._nudged.is_set() or not 0 <= now_ns - self._scanned_ns < self._limits.rescan_interval_ns

    def scan(self, now_ns: int) -> None:
        """Looks for new, renamed and deleted files."""
        self._nudged.clear()
        self._scanned_ns = now_ns
        found: dict[FileIdentity, Path] = {}
        for path in self._patterns.paths():
            identity = self._patterns.identity_of(path)
            if self._patterns.is_refused_link(path):
                self._refuse_link(path)
            elif identity is not None:
                found.setdefault(identity, path)
        for identity, file in self.files.items():
            file.path = found.get(identity, file.path)
            file.tail.on_path(identity if identity in found else self._patterns.identity_of(file.path))
        self._left_alone = {
            identity: path for identity, path in self._left_alone.items() if found.get(identity) == path
        }
        for identity, path in found.items():
            if identity not in self.files and identity not in self._left_alone:
                self._open(path)
        self._unopened = found.keys() - self.files.keys() - self._left_alone.keys()

    def _open(self, path: Path) -> None:
        if len(self.files) >= self._limits.max_files:
            self._skipped["file_too_many"] += 1
            return
        try:
            handle, folder_owner = self._patterns.open(path)
        except LinkError:
            self._refuse_link(path)
            return
        except OSError:
            self._skipped["file_unreadable"] += 1
            return
        status = os.fstat(handle)
        identity = FileIdentity(status.st_dev, status.st_ino)
        if not stat.S_ISREG(status.st_mode) or identity in self.files:
            os.close(handle)
            return
        self.files[identity] = OpenFile(
            path, handle, self._tail(identity), is_zone_open=self._has_zones, folder_owner=folder_owner
        )

    def _refuse_link(self, path: Path) -> None:
        """Counts a link, at each look, and reports the first."""
        if not self._skipped["file_is_a_link"]:
            _log.warning("logs_link", file=str(path), said="links are not followed: name its target, or --follow-links")
        self._skipped["file_is_a_link"] += 1

    def _tail(self, identity: FileIdentity) -> Tail:
        limits = self._limits
        return Tail(identity, grace_ns=limits.grace_ns, named_grace_ns=max(limits.grace_ns, limits.renamed_grace_ns))

    def restart(self, file: OpenFile) -> None:
        """Begins again with a file whose content was replaced: it is another source from its beginning on."""
        file.emptied_at = file.tail.offset if file.last_parsed.endswith(b"\n") else None
        file.tail = self._tail(file.tail.identity)
        file.reader = file.last_decision = None
        file.must_be_new = True
        # The new tail knows nothing of the path yet.
        file.tail.on_path(self._patterns.identity_of(file.path))

    def drop(self, file: OpenFile) -> None:
        """Closes a file."""
        os.close(file.handle)
        del self.files[file.tail.identity]

    def leave_alone(self, file: OpenFile) -> None:
        """Closes a file that is something else, and does not open it again."""
        self._left_alone[file.tail.identity] = file.path
        self.drop(file)

    def forget(self) -> None:
        """Closes all files, and looks at all of them again."""
        for file in list(self.files.values()):
            self.drop(file)
        self._left_alone.clear()
        self.nudge()

    @property
    def is_crowded(self) -> bool:
        """Whether so few places are left that files which are away must make room soon."""
        return len(self.files) >= _CROWDED_SHARE * self._limits.max_files

    def unread(self) -> list[FileIdentity]:
        """Files that are there, and of which it is not known yet what they hold."""
        unread = [file.tail.identity for file in self.files.values() if file.reader is None and file.head()]
        return [*unread, *self._unopened]
