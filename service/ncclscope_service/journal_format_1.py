"""The records of journals of format 1, which earlier builds wrote: read after an upgrade, never written.

record    mark 4, length 4, CRC-32 4, number 8, then the content; big-endian; the checksum is over number and content
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from zlib import crc32

_MARK: Final = b"\xf1\x9cNJ"
_RECORD: Final = struct.Struct(">4sIIQ")
_NUMBER: Final = struct.Struct(">Q")


@dataclass(slots=True)
class OldRecord:
    """A whole record, and where it lies."""

    number: int
    content: bytes
    begin: int
    end: int


def old_records(data: bytes, *, at: int, max_content_bytes: int) -> Iterator[OldRecord]:
    """The whole records from a place on, in order; what lies between them belongs to none."""
    while at >= 0:
        record = _record_at(data, at, max_content_bytes)
        if record is None:
            at = data.find(_MARK, at + 1)
        else:
            yield record
            at = record.end


def _record_at(data: bytes, at: int, max_content_bytes: int) -> OldRecord | None:
    begin = at + _RECORD.size
    if begin > len(data):
        return None
    mark, length, checksum, number = _RECORD.unpack_from(data, at)
    if mark != _MARK or length > max_content_bytes or begin + length > len(data):
        return None
    content = data[begin : begin + length]
    is_whole = crc32(content, crc32(_NUMBER.pack(number))) == checksum
    return OldRecord(number, content, at, begin + length) if is_whole else None
