"""Decides what to do about a followed file: read on, wait, begin again, or finish with it.

Decides from what the shell saw (`files.py` opens, stats and reads); knows no file itself.

    WAITING    the first line is not complete: the file has no identity yet, and nothing is read
    FOLLOWED   its path leads to it
    AWAY       its path leads to another file (rotated) or to none (deleted); the open handle is read on,
               for NCCL keeps writing to the file that it opened, and given up when nothing comes any more: soon if
               the file has no name left, since it takes its disk space as long as it is held, else after an hour
    ENDED      the content was replaced, or AWAY for long enough

A file is truncated when it is shorter than what was read, begins with other bytes than were read, or has others right
in front of where reading goes on. NCCL opens its file with mode "w", so a job that starts again under the same name
truncates, and in a container it writes the same first lines with the same pid: the last bytes tell, as pointers differ.
One that is emptied (copytruncate) while its writer is at rest loses nothing, and leaves no gap. What is written between
the last look and the moment it is emptied is seen by nobody: if the writer was busy, there is one, of 0 bytes or more.
While nobody reads, a checksum of both places is kept with the position (`content_check`).
Known loss: a file that is truncated and grows again to the same bytes in both places is taken for the old one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from typing import Final
from zlib import crc32

FINGERPRINT_BYTES: Final = 256
"""A first line longer than this is fingerprinted by as many bytes only."""
HEAD_BYTES: Final = 1024
"""As many first bytes are compared to tell whether a file is still the one that was read."""
LAST_BYTES: Final = 256
"""As many of the bytes that were read last are compared too: they are read again with what follows them. Enough for a
whole line of an operation: its end alone (communicator, stream) may be the same in every run of a job."""
_HALF_BITS: Final = 32
_REST_NS: Final = 1_000_000_000
_REST_LOOKS: Final = 4
"""A writer was at rest that wrote nothing for `_REST_NS`, and for so many times as long as nobody has looked since,
which is less than `_REST_NS`."""
_KEY: Final = re.compile(r"(\d+)-(\d+)-[0-9a-f]{16}(?:-\d+)?")


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Where a file lies on its disk; given to another file when this one is gone."""

    device: int
    inode: int


def fingerprint(head: bytes, *, is_complete: bool = False) -> str | None:
    """A short hash of the first line that is not blank, newline included, or of the first 256 bytes.

    The same however far the file has grown; None while neither is there. `is_complete`: nothing more is
    expected, so what is there has to do. `head` is the file's first bytes, 256 of them or all.
    """
    begin = len(head) - len(head.lstrip(b"\r\n"))
    end = head.find(b"\n", begin, FINGERPRINT_BYTES)
    if end >= 0:
        told = head[: end + 1]
    elif len(head) >= FINGERPRINT_BYTES or (is_complete and head):
        told = head[:FINGERPRINT_BYTES]
    else:
        return None
    return blake2b(told, digest_size=8).hexdigest()


def source_key(identity: FileIdentity, print_of_head: str, generation: int) -> str:
    """The identity of a source, across renames and restarts: "device-inode-fingerprint".

    A file that was truncated and begins with the same line again has "-1", "-2", ... behind it.
    """
    key = f"{identity.device}-{identity.inode}-{print_of_head}"
    return f"{key}-{generation}" if generation else key


def identity_in(key: str) -> FileIdentity | None:
    """The file that a key of `source_key` names; None for keys of other sources."""
    found = _KEY.fullmatch(key)
    return None if found is None else FileIdentity(int(found[1]), int(found[2]))


def content_check(head: bytes, last: bytes) -> int:
    """A checksum of what was read up to a position, of 63 bits: 31 of its first kilobyte, 32 of its last 256.

    `head`: the first `HEAD_BYTES` in front of the position, `last`: the `LAST_BYTES` right in front of it; or all.
    """
    return (crc32(head) & 0x7FFFFFFF) << _HALF_BITS | crc32(last)


def is_checked_content(check: int, head: bytes, last: bytes) -> bool:
    """Whether bytes of both places are those of which `check` was made.

    Zeros at the beginning of `last` are a hole, whose space was given back: what stood there is not known, and the
    first kilobyte has to do.
    """
    found = content_check(head, last)
    return found >> _HALF_BITS == check >> _HALF_BITS if last.startswith(b"\0") else found == check


class TailState(Enum):
    """Where a followed file stands; see the module."""

    WAITING = auto()
    FOLLOWED = auto()
    AWAY = auto()
    ENDED = auto()


class Verdict(Enum):
    """The next step with a file."""

    WAIT = auto()
    READ = auto()
    BEGIN_ANEW = auto()
    """The content was replaced: end this source, and follow the file from its beginning as another."""
    FINISH = auto()
    """Nothing more comes: end this source and close the handle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A verdict, and what is known to be lost."""

    verdict: Verdict
    reason: str | None = None
    """The reason of the gap that this leaves: "truncated", "deleted" or "unreadable"; None: nothing was lost."""
    lost_bytes: int = 0
    """Bytes that were seen to be there and were never read."""

    @property
    def ends_source(self) -> bool:
        """Whether nothing more is read of this source."""
        return self.verdict in (Verdict.BEGIN_ANEW, Verdict.FINISH)


_WAIT: Final = Decision(verdict=Verdict.WAIT)
_READ: Final = Decision(verdict=Verdict.READ)


class Tail:
    """The state of one followed file.

    `grace_ns`: how long a file that is away may be silent; `named_grace_ns`: the same while it has a name somewhere.
    """

    def __init__(self, identity: FileIdentity, *, grace_ns: int, named_grace_ns: int | None = None) -> None:
        self.identity = identity
        self.offset = 0
        self.state = TailState.WAITING
        self._grace_ns = grace_ns
        self._named_grace_ns = grace_ns if named_grace_ns is None else named_grace_ns
        self._size = 0
        self._verified_size = 0
        self._modified_ns = 0
        self._head = b""
        self._last = b""
        self._is_away = False
        self._silent_since_ns: int | None = None
        self._seen = 0, 0
        self._changed_ns: int | None = None
        self._looked_ns = 0
        self._was_at_rest = False

    @property
    def unread_bytes(self) -> int:
        """Bytes that were there at the last look and are not read."""
        return max(0, self._size - self.offset)

    @property
    def is_away(self) -> bool:
        """Whether the path leads elsewhere."""
        return self._is_away

    def head(self, end: int) -> bytes:
        """The first bytes of what was read, up to that position and `HEAD_BYTES` at most."""
        return self._head[:end]

    @property
    def overlap(self) -> int:
        """How many bytes in front of `offset` are to be read again with what follows them."""
        return len(self._last)

    def start(self, offset: int, head: bytes, last: bytes = b"") -> None:
        """Begins to follow at this offset; `head` is the file's first bytes as they are now, `last` those in front."""
        self.offset = offset
        self._head = head[: min(offset, HEAD_BYTES)]
        self._last = last[-LAST_BYTES:]
        self.state = TailState.AWAY if self._is_away else TailState.FOLLOWED

    def on_path(self, found: FileIdentity | None) -> None:
        """Takes note of the file to which the path leads now; None: to none."""
        self._is_away = found != self.identity
        if self.state in {TailState.FOLLOWED, TailState.AWAY}:
            self.state = TailState.AWAY if self._is_away else TailState.FOLLOWED

    def on_look(self, size: int, now_ns: int, modified_ns: int = 0, *, has_name: bool = False) -> Decision:
        """Decides about a file of this size, last written to at `modified_ns` of its disk's clock.

        `now_ns` is of any clock; only its differences count. `has_name`: it costs nothing to hold it.
        """
        self._note_rest((size, modified_ns), now_ns)
        if size != self._size:
            self._silent_since_ns = None
        self._size = size
        if size < self.offset:
            return self._truncated()
        was_written, self._modified_ns = modified_ns != self._modified_ns, modified_ns
        if (size > self.offset or was_written) and self.state is not TailState.WAITING:
            return _READ  # if there is nothing new, the beginning may be
        return self._finish_if_silent(now_ns, self._named_grace_ns if has_name else self._grace_ns)

    def on_read(self, data: bytes, head: bytes, size: int, last: bytes | None = None) -> Decision:
        """Accepts what was read at `offset`, or rejects it, if the file was replaced meanwhile.

        `size` is of before the read, `head` of after it: the first `HEAD_BYTES` or all there are. A file that begins
        as before was the same all the while between. `last`: the `overlap` bytes in front, read with the data; None
        if they were not.
        """
        # Zeros in front: their space was given back by another agent.
        if last is not None and not self._last.endswith(last.lstrip(b"\0")):
            return self._truncated()
        self._head += data[: HEAD_BYTES - len(self._head)]  # what was read begins so
        decision = self._on_bytes(len(data), head, size)
        if decision.verdict is not Verdict.BEGIN_ANEW:
            self._last = (self._last + data[-LAST_BYTES:])[-LAST_BYTES:]
        return decision

    def on_hole(self, count: int, head: bytes, size: int) -> Decision:
        """Accepts `count` zeros at `offset`, `HEAD_BYTES` or more into the file, that were not read. Else `on_read`."""
        assert self.offset >= HEAD_BYTES, "a hole at the beginning of a file was passed over"
        self._last = b""
        return self._on_bytes(count, head, size)

    def on_notice(self, size: int, head: bytes) -> None:
        """Takes note of a size while nothing is read: what is behind `offset` then, and gone later, is lost."""
        if self.state in {TailState.FOLLOWED, TailState.AWAY} and self.is_same(head, size):
            self._size = self._verified_size = size

    def is_same(self, head: bytes, size: int) -> bool:
        """Whether a file with this beginning and this size is still the one that was read."""
        return size >= self.offset and head.startswith(self._head)

    def _on_bytes(self, count: int, head: bytes, size: int) -> Decision:
        end = self.offset + count
        if not head.startswith(self._head):
            return self._truncated()
        self.offset = end
        self._size = self._verified_size = max(size, end)
        return _READ if size > end else _WAIT

    def give_up(self, reason: str = "unreadable") -> Decision:
        """Ends a file that cannot be read any more, or shall not be held any longer."""
        self.state = TailState.ENDED
        return Decision(verdict=Verdict.FINISH, reason=reason, lost_bytes=self.unread_bytes)

    def _note_rest(self, seen: tuple[int, int], now_ns: int) -> None:
        """Takes note of whether the writer was at rest up to the look before this one."""
        unseen_ns = now_ns - self._looked_ns
        rest_ns = 0 if self._changed_ns is None else self._looked_ns - self._changed_ns
        self._was_at_rest = 0 <= unseen_ns < _REST_NS and rest_ns >= max(_REST_NS, _REST_LOOKS * unseen_ns)
        if seen != self._seen or self._changed_ns is None:
            self._seen, self._changed_ns = seen, now_ns
        self._looked_ns = now_ns

    def _truncated(self) -> Decision:
        self.state = TailState.ENDED
        lost_bytes = max(0, self._verified_size - self.offset)
        if self._was_at_rest and not lost_bytes:
            return Decision(verdict=Verdict.BEGIN_ANEW)
        return Decision(verdict=Verdict.BEGIN_ANEW, reason="truncated", lost_bytes=lost_bytes)

    def _finish_if_silent(self, now_ns: int, grace_ns: int) -> Decision:
        if not self._is_away:
            self._silent_since_ns = None
            return _WAIT
        if self._silent_since_ns is None or now_ns < self._silent_since_ns:
            self._silent_since_ns = now_ns
        if now_ns - self._silent_since_ns < grace_ns:
            return _WAIT
        self.state = TailState.ENDED
        # It was read to its end: nothing is lost. Logs are rotated, and removed with their job, every day.
        return Decision(verdict=Verdict.FINISH)
