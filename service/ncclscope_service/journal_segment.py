"""The bytes of a journal: segments of records that prove themselves, and what can be read of damaged ones.

A segment is a header and records (`ncclscope_wire.record`), as in the agent's spool; the body of a record is its number
(8 bytes, little-endian) and the content. Numbers count on over all segments.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from ncclscope_service.journal_format_1 import old_records
from ncclscope_wire import record

_ENTRY: Final = 1
"""The kind of all records of a journal."""
_NUMBER: Final = struct.Struct("<Q")
RECORD_BYTES: Final = record.RECORD_BYTES + _NUMBER.size
"""What a record costs beside its content."""
_HEADER: Final = struct.Struct(">16sIQ24sI")
"""Magic, format, first number, era, checksum of what is before."""
HEADER_BYTES: Final = _HEADER.size
_MAGIC: Final = b"ncclscopejournal"
FORMAT: Final = 2
"""What is written. 1 had records of a form of its own (`journal_format_1.py`)."""
READABLE_FORMATS: Final = frozenset({1, FORMAT})
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
    return record.encode_record(_ENTRY, _NUMBER.pack(number), content)


def read_segment(data: bytes) -> SegmentRead:
    """What is whole in the bytes of a segment; never raises."""
    header = _header_of(data)
    if len(data) < HEADER_BYTES:
        return SegmentRead(header=None, records=(), damaged=0, end=0, torn_bytes=len(data))
    records: list[Record] = []
    end = HEADER_BYTES
    damaged = 0
    is_old = header is not None and header.format == 1
    for found in (_old_records if is_old else _records)(data):
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
    for found in record.whole_records(data, at=HEADER_BYTES, max_body_bytes=_NUMBER.size + MAX_CONTENT_BYTES):
        if found.kind == _ENTRY and found.end - found.begin >= RECORD_BYTES:
            body = found.body(data)
            yield _Found(Record(_NUMBER.unpack_from(body)[0], body[_NUMBER.size :]), found.begin, found.end)


def _old_records(data: bytes) -> Iterator[_Found]:
    for found in old_records(data, at=HEADER_BYTES, max_content_bytes=MAX_CONTENT_BYTES):
        yield _Found(Record(found.number, found.content), found.begin, found.end)


def _header_of(data: bytes) -> SegmentHeader | None:
    if len(data) < HEADER_BYTES:
        return None
    magic, version, first, era, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC or checksum != crc32(data[: HEADER_BYTES - 4]):
        return None
    return SegmentHeader(format=version, first=first, era=era.rstrip(b"\0").decode("ascii", "replace"))
