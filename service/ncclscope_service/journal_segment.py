"""The bytes of a journal: segments of records that prove themselves, and what can be read of damaged ones.

A segment is a header and records; a record is a mark of four bytes, the length of its content, a checksum, its number
and the content. Numbers count on over all segments. What a crash cut off, and what the disk turned over, is told from
what is whole by checksum: reading goes on at the next mark behind which a whole record follows. So any cut gives the
records before it, and any damage all records that it did not touch, in order and none invented.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final
from zlib import crc32

MARK: Final = b"\xf1\x9cNJ"
"""Begins a record. Not UTF-8, and no msgpack map begins so: content rarely holds it, and where it does, the
checksum tells."""
_RECORD: Final = struct.Struct(">4sIIQ")
"""Mark, length of the content, checksum of number and content, number."""
_NUMBER: Final = struct.Struct(">Q")
RECORD_BYTES: Final = _RECORD.size
"""What a record costs beside its content."""
_HEADER: Final = struct.Struct(">16sIQ24sI")
"""Magic, format, first number, era, checksum of what is before."""
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"ncclscopejournal"
FORMAT: Final = 1
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
    """What a segment says of itself."""

    format: int
    first: int
    """Number of its first record."""
    era: str
    """Which run of numbers it belongs to; ASCII, 24 characters at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRead:
    """What is left of one segment."""

    header: SegmentHeader | None
    """None where it is damaged."""
    records: tuple[Record, ...]
    """Whole ones, numbers growing."""
    damaged: int
    """Stretches that hold no whole record and lie before one that is whole."""
    end: int
    """Where the last whole record ends: what is behind is torn."""
    torn_bytes: int
    """How much is behind."""


def encode_header(header: SegmentHeader) -> bytes:
    """How a segment begins."""
    era = header.era.encode("ascii").ljust(ERA_BYTES, b"\0")
    assert len(era) == ERA_BYTES, "an era has 24 characters at most"
    before = struct.pack(">16sIQ24s", _MAGIC, header.format, header.first, era)
    return before + crc32(before).to_bytes(4, "big")


def encode_record(number: int, content: bytes) -> bytes:
    """One record."""
    return _RECORD.pack(MARK, len(content), _checksum(number, content), number) + content


def read_segment(data: bytes) -> SegmentRead:
    """What is whole in the bytes of a segment; never raises."""
    header = _header_of(data)
    if len(data) < HEADER_BYTES:
        return SegmentRead(header=None, records=(), damaged=0, end=0, torn_bytes=len(data))
    records: list[Record] = []
    at = end = HEADER_BYTES
    damaged = 0
    while (record := _record_at(data, at)) is not None or (at := data.find(MARK, at + 1)) >= 0:
        if record is None:
            continue
        if records and record.number <= records[-1].number:
            at += 1  # bytes of an older record that were content
            continue
        damaged += at != end
        records.append(record)
        at = end = at + RECORD_BYTES + len(record.content)
    return SegmentRead(header=header, records=tuple(records), damaged=damaged, end=end, torn_bytes=len(data) - end)


def _header_of(data: bytes) -> SegmentHeader | None:
    if len(data) < HEADER_BYTES:
        return None
    magic, version, first, era, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC or checksum != crc32(data[: HEADER_BYTES - 4]):
        return None
    return SegmentHeader(format=version, first=first, era=era.rstrip(b"\0").decode("ascii", "replace"))


def _record_at(data: bytes, at: int) -> Record | None:
    """The whole record that begins there; None where none does."""
    begin = at + RECORD_BYTES
    if begin > len(data):
        return None
    mark, length, checksum, number = _RECORD.unpack_from(data, at)
    if mark != MARK or length > MAX_CONTENT_BYTES or begin + length > len(data):
        return None
    content = data[begin : begin + length]
    return Record(number, content) if checksum == _checksum(number, content) else None


def _checksum(number: int, content: bytes) -> int:
    return crc32(content, crc32(_NUMBER.pack(number)))
