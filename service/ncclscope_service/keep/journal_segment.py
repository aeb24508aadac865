"""The bytes of a journal: segments of records with checksums, and what can be read of damaged ones.

A segment is a header and records:

    record    mark 4, CRC-32 4, length 4, kind 1, number 8, then the content; little-endian; the checksum covers what
              follows it, the length counts number and content

A checksum separates whole records from those that a crash cut off or the disk damaged: reading continues at the next
mark behind which a whole record stands. So any cut gives the records before it, and any damage all that it did not
touch, in order and none invented. Numbers count on over all segments.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from zlib import crc32

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
