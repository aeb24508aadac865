"""Writes the journal: entries in groups, each group on disk before its batches are acknowledged.

Entries wait at most `group_seconds` for others; then a thread writes and syncs them together. If that fails, nothing is
dropped: the entries stay in memory, agents get no acknowledgements, and the write is repeated every second, in a new
segment, since nobody knows what a failed sync leaves on disk.

A segment is a header and records:

    record    mark 4, CRC-32 4, length 4, kind 1, number 8, then the content; little-endian; the checksum covers what
              follows it, the length counts number and content

A checksum separates whole records from those that a crash cut off or the disk damaged: reading continues at the next
mark behind which a whole record stands. So any cut gives the records before it, and any damage all that it did not
touch, in order and none invented. Numbers count on over all segments.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final
from zlib import crc32

import anyio
import structlog
from anyio import to_thread

from ncclscope_service.intake.journal_entry import Entry, encode_entry

_ENTRY: Final = 1
"""The kind of all records of a journal."""
MARK: Final = b"\xf5NS\x0a"
"""Begins a record. Not UTF-8, and no msgpack map begins so: contents rarely hold it, and if one does, the checksum
decides."""
_FRONT: Final = struct.Struct("<4sIIBQ")
_COVERED: Final = struct.Struct("<IBQ")
"""The part of `_FRONT` that the checksum covers: length, kind and number."""
_NUMBER_BYTES: Final = 8
_CHECKED_FROM: Final = _FRONT.size - _COVERED.size
RECORD_BYTES: Final = _FRONT.size
"""Of a record, without its content."""
_HEADER: Final = struct.Struct(">16sIQ24sI")
"""Magic, format, first number, era, checksum of these."""
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"ncclscopejournal"
FORMAT: Final = 2
MAX_CONTENT_BYTES: Final = 32 * 1024 * 1024
"""Twice the longest frame."""
ERA_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class Record:
    """One entry as it was written."""

    number: int
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """Format, first number and era of a segment."""

    format: int
    first: int
    """Number of its first record."""
    era: str
    """Which run of numbers it belongs to; ASCII, 24 characters at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRead:
    """Whole records of a segment, and how much of it is damaged."""

    header: SegmentHeader | None
    """None if it is damaged."""
    records: tuple[Record, ...]
    """Whole ones, numbers growing."""
    damaged: int
    """Stretches that hold no whole record and lie before one that is whole."""
    end: int
    """Where the last whole record ends: the bytes after it are torn."""
    torn_bytes: int
    """Bytes after it."""


def encode_header(header: SegmentHeader) -> bytes:
    """How a segment begins."""
    era = header.era.encode("ascii").ljust(ERA_BYTES, b"\0")
    assert len(era) == ERA_BYTES, "an era has 24 characters at most"
    before = struct.pack(">16sIQ24s", _MAGIC, header.format, header.first, era)
    return before + crc32(before).to_bytes(4, "big")


def encode_record(number: int, content: bytes) -> bytes:
    """The bytes of one record."""
    covered = _COVERED.pack(_NUMBER_BYTES + len(content), _ENTRY, number)
    checksum = crc32(content, crc32(covered))
    return b"".join((MARK, checksum.to_bytes(4, "little"), covered, content))


def read_segment(data: bytes) -> SegmentRead:
    """Reads the whole records in the bytes of a segment; never raises."""
    header = _header_of(data)
    if len(data) < HEADER_BYTES:
        return SegmentRead(header=None, records=(), damaged=0, end=0, torn_bytes=len(data))
    records: list[Record] = []
    end = HEADER_BYTES
    damaged = 0
    for found in _records(data):
        if records and found.record.number <= records[-1].number:
            continue  # bytes of an older record that were content
        damaged += found.begin != end
        records.append(found.record)
        end = found.end
    return SegmentRead(header=header, records=tuple(records), damaged=damaged, end=end, torn_bytes=len(data) - end)


@dataclass(slots=True)
class _Found:
    record: Record
    begin: int
    end: int


def _records(data: bytes) -> Iterator[_Found]:
    """The whole records, in order; bytes between them belong to none."""
    at = HEADER_BYTES
    while at >= 0:
        found = _record_at(data, at)
        if found is None:
            at = data.find(MARK, at + 1)
        else:
            yield found
            at = found.end


def _record_at(data: bytes, at: int) -> _Found | None:
    """The whole record that begins there; None if none does."""
    if at + RECORD_BYTES > len(data):
        return None
    mark, checksum, length, kind, number = _FRONT.unpack_from(data, at)
    content_bytes = length - _NUMBER_BYTES
    end = at + RECORD_BYTES + content_bytes
    if mark != MARK or kind != _ENTRY or not 0 <= content_bytes <= MAX_CONTENT_BYTES or end > len(data):
        return None
    if crc32(memoryview(data)[at + _CHECKED_FROM : end]) != checksum:
        return None
    return _Found(Record(number, data[at + RECORD_BYTES : end]), at, end)


def _header_of(data: bytes) -> SegmentHeader | None:
    if len(data) < HEADER_BYTES:
        return None
    magic, version, first, era, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC or checksum != crc32(data[: HEADER_BYTES - 4]):
        return None
    return SegmentHeader(format=version, first=first, era=era.rstrip(b"\0").decode("ascii", "replace"))


_log = structlog.get_logger(__name__)

_RETRY_SECONDS: Final = 1.0
_GROUP_BYTES: Final = 16 * 1024 * 1024
"""Of one write: a sync of more keeps agents waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """When entries reach the disk, and how much of it they take."""

    group_seconds: float = 0.02
    """How long an entry waits for others before it is written."""
    sync: bool = True
    """False: batches are acknowledged when the system has them, which outlives a crash of the service and not one of
    the machine."""
    segment_bytes: int = 32 * 1024 * 1024
    max_bytes: int = 1024 * 1024 * 1024
    """Of all segments: at the limit nothing is acknowledged until a new state makes old segments unnecessary."""
    retained_bytes: int = 0
    """Of segments that a restart does not need, kept for a newer version that cannot read the state (`restoring.py`);
    deleted first if there is no room."""
    max_waiting_bytes: int = 64 * 1024 * 1024
    """Of entries in memory that are not on disk: at the limit nothing is read from agents."""
    slow_seconds: float = 2.0
    """A write that takes longer is trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStatistics:
    """Counts and sizes of the journal at one moment."""

    bytes: int
    """On disk."""
    waiting_bytes: int
    """In memory, not on disk yet."""
    errors_total: int
    write_seconds: float | None
    """Of the last group, or of the one being written if that takes longer."""
    trouble: str
    """Why nothing can be written; empty if all is well."""


class Journal:
    """Appends entries; `run` writes them."""

    def __init__(
        self, folder: Path, *, era: str, next_number: int, settings: JournalSettings, on_durable: Callable[[int], None]
    ) -> None:
        """`on_durable` gets the number of the last entry on disk, on the event loop.

        Raises:
            OSError: the folder cannot be listed.
        """
        self._folder = folder
        self._era = era
        self._settings = settings
        self._on_durable = on_durable
        self._next = next_number
        self._waiting = deque[tuple[int, bytes]]()
        self._waiting_bytes = 0
        self._bytes = sum(path.stat().st_size for path in folder.glob("*.journal"))
        self._segment: _Segment | None = None
        self._cut = 0
        """Entries after this one begin a segment of their own."""
        self._unneeded = 0
        """The last entry that a restart does not need."""
        self._dropping, self._counting = threading.Lock(), threading.Lock()
        self._arrival = anyio.Event()
        self._room = anyio.Event()
        self._room.set()
        self._limiter = anyio.CapacityLimiter(1)
        self._errors = 0
        self._began_at: float | None = None
        self._seconds: float | None = None
        self._trouble = ""

    @property
    def last(self) -> int:
        """Number of the last entry that was appended."""
        return self._next - 1

    def append(self, entry: Entry) -> int:
        """Accepts an entry, to be written soon; returns its number at once."""
        number = self._next
        self._next += 1
        record = encode_record(number, encode_entry(entry))
        self._waiting.append((number, record))
        self._waiting_bytes += len(record)
        if self._waiting_bytes > self._settings.max_waiting_bytes and self._room.is_set():
            self._room = anyio.Event()
        self._arrival.set()
        return number

    async def wait_for_room(self) -> None:
        """Returns when more may be appended: at once, unless the disk does not keep up."""
        await self._room.wait()

    def cut(self) -> int:
        """Lets the next entry begin a segment; returns the number of the one before it."""
        self._cut = self.last
        return self._cut

    def drop_until(self, number: int) -> None:
        """A restart needs no entry up to this one: deletes the oldest segments of such entries but `retained_bytes`.

        Blocks for the time of the deletions.
        """
        self._unneeded = number
        self._drop(self._settings.retained_bytes)

    def _drop(self, retained_bytes: int) -> None:
        """Deletes segments that are not needed until no more than so much is there. In any thread."""
        with self._dropping:
            paths = sorted(self._folder.glob("*.journal"))
            for path, following in pairwise(paths):
                if self._bytes <= retained_bytes or first_of(following) > self._unneeded + 1:
                    break
                self._count(-path.stat().st_size)
                path.unlink()

    def _count(self, size: int) -> None:
        """Segments are written and deleted in different threads."""
        with self._counting:
            self._bytes += size

    async def run(self) -> None:
        """Writes what is appended, until it is cancelled; call `close` then."""
        while True:
            await self._arrival.wait()
            await anyio.sleep(self._settings.group_seconds)
            if not await self._write_group():
                await anyio.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Writes the rest; blocks. Entries that cannot be written then were not acknowledged."""
        try:
            if self._waiting:
                self._write(list(self._waiting))
        except OSError as error:
            _log.warning("journal_not_closed", why=_sentence(error), entries=len(self._waiting))
        self._close_segment()

    def statistics(self) -> JournalStatistics:
        """Counts and sizes of the journal now."""
        return JournalStatistics(
            bytes=self._bytes,
            waiting_bytes=self._waiting_bytes,
            errors_total=self._errors,
            write_seconds=self._slowest(),
            trouble=self._trouble or self._slowness(),
        )

    def _slowest(self) -> float | None:
        if self._began_at is None:
            return self._seconds
        return max(time.monotonic() - self._began_at, self._seconds or 0.0)

    def _slowness(self) -> str:
        slowest = self._slowest()
        if slowest is None or slowest < self._settings.slow_seconds:
            return ""
        return f"the disk of the journal is slow: a write takes {slowest:.0f} s"

    async def _write_group(self) -> bool:
        group = self._group()
        began = self._began_at = time.monotonic()
        # Shielded: a cancelled write would leave open what is on disk.
        with anyio.CancelScope(shield=True):
            try:
                await to_thread.run_sync(self._write, group, limiter=self._limiter)
            except OSError as error:
                self._on_error(error)
                return False
            finally:
                self._seconds, self._began_at = time.monotonic() - began, None
        self._on_written(group)
        return True

    def _group(self) -> list[tuple[int, bytes]]:
        group, size = list[tuple[int, bytes]](), 0
        for each in self._waiting:
            group.append(each)
            size += len(each[1])
            if size >= _GROUP_BYTES:
                break
        return group

    def _on_written(self, group: Sequence[tuple[int, bytes]]) -> None:
        for _ in group:
            self._waiting_bytes -= len(self._waiting.popleft()[1])
        if not self._waiting:
            self._arrival = anyio.Event()
        if self._waiting_bytes <= self._settings.max_waiting_bytes:
            self._room.set()
        if self._trouble:
            _log.info("journal_written_again")
            self._trouble = ""
        self._on_durable(group[-1][0])

    def _on_error(self, error: OSError) -> None:
        self._errors += 1
        why = f"the journal cannot be written: {_sentence(error)}"
        if why != self._trouble:
            _log.warning("journal_not_written", why=_sentence(error))
        self._trouble = why

    # In a thread: one at a time.

    def _write(self, group: Sequence[tuple[int, bytes]]) -> None:
        before = [each for each in group if each[0] <= self._cut]
        parts = [part for part in (before, group[len(before) :]) if part]
        self._check_room(parts)
        try:
            for part in parts:
                self._segment_for(part[0][0]).append(b"".join(record for _, record in part), self._settings.sync)
        except OSError:
            self._close_segment()
            self._drop(0)
            raise
        self._count(sum(len(record) for _, record in group))

    def _check_room(self, parts: Sequence[Sequence[tuple[int, bytes]]]) -> None:
        """Raises OSError if the parts, with the headers of segments that they begin, exceed the limit."""
        size = sum(len(record) for part in parts for _, record in part)
        size += sum(len(self._header(part[0][0])) for part in parts if self._begins_segment(part[0][0]))
        if self._bytes + size > self._settings.max_bytes:
            self._drop(0)
        if self._bytes + size > self._settings.max_bytes:
            raise OSError(errno.EDQUOT, f"it has reached its limit of {self._settings.max_bytes >> 20} MiB")

    def _begins_segment(self, number: int) -> bool:
        known = self._segment
        return known is None or known.size >= self._settings.segment_bytes or known.first <= self._cut < number

    def _segment_for(self, number: int) -> _Segment:
        known = self._segment
        if known is None or self._begins_segment(number):
            self._close_segment()
            known = self._segment = _Segment(self._folder, number, self._header(number))
            self._count(known.size)
        return known

    def _header(self, number: int) -> bytes:
        return encode_header(SegmentHeader(format=FORMAT, first=number, era=self._era))

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class _Segment:
    """One file, open for appending. `size`: up to where it is known to be whole."""

    def __init__(self, folder: Path, first: int, header: bytes) -> None:
        self.first = first
        path = folder / f"{first:016d}.journal"
        # One of that name holds no whole entry: else the number would have been taken.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.size = 0
        try:
            self.append(header, sync=True)
            sync_folder(folder)
        except OSError:
            self.close()
            raise

    def append(self, data: bytes, sync: bool) -> None:
        """Returns when it is on disk (`sync`), or with the system."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self.size + written)
            if sync:
                os.fdatasync(self._file)
        except OSError:
            self._cut_off()
            raise
        self.size += len(data)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _cut_off(self) -> None:
        """Removes the rest of a failed write, which is repeated elsewhere."""
        try:
            os.ftruncate(self._file, self.size)
        except OSError as error:
            _log.warning("journal_not_cut", why=_sentence(error))


def first_of(segment: Path) -> int:
    """Number of the first entry of a segment, by its name; 0 for a name of another kind."""
    return int(segment.stem) if segment.stem.isdigit() else 0


def sync_folder(folder: Path) -> None:
    """Returns when names in this folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sentence(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
