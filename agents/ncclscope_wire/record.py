"""Records that prove themselves: what the agent's spool and the service's journal are made of.

    record    mark 4, CRC-32 4, length 4, kind 1, then the body; little-endian; the checksum is over what follows it

What a crash cut off, and what the disk turned over, is told from what is whole by checksum: reading goes on at the next
mark behind which a whole record stands. So any cut gives the records before it, and any damage all that it did not
touch, in order and none invented.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from zlib import crc32

MARK: Final = b"\xf5NS\x0a"
"""Begins a record. Not UTF-8, and no msgpack map begins so: bodies rarely hold it, and where one does, the checksum
tells."""
_FRONT: Final = struct.Struct("<4sIIB")
_COVERED: Final = struct.Struct("<IB")
_CHECKED_FROM: Final = _FRONT.size - _COVERED.size
RECORD_BYTES: Final = _FRONT.size
"""What a record costs beside its body."""


@dataclass(slots=True)
class WholeRecord:
    """Where a whole record lies. Not frozen, since that would cost more than reading it."""

    kind: int
    begin: int
    end: int

    def body(self, data: bytes) -> bytes:
        """What it holds, of the bytes that it was found in."""
        return data[self.begin + RECORD_BYTES : self.end]


def encode_record(kind: int, *parts: bytes | memoryview) -> bytes:
    """One record; its body are these parts, one after the other."""
    covered = _COVERED.pack(sum(map(len, parts)), kind)
    checksum = crc32(covered)
    for part in parts:
        checksum = crc32(part, checksum)
    return b"".join((MARK, checksum.to_bytes(4, "little"), covered, *parts))


def whole_records(data: bytes, *, at: int = 0, max_body_bytes: int) -> Iterator[WholeRecord]:
    """The whole records from a place on, in order; what lies between them belongs to none."""
    while at >= 0:
        record = _record_at(data, at, max_body_bytes)
        if record is None:
            at = data.find(MARK, at + 1)
        else:
            yield record
            at = record.end


def _record_at(data: bytes, at: int, max_body_bytes: int) -> WholeRecord | None:
    """The whole record that begins there; None where none does."""
    if at + RECORD_BYTES > len(data):
        return None
    mark, checksum, length, kind = _FRONT.unpack_from(data, at)
    end = at + RECORD_BYTES + length
    if mark != MARK or length > max_body_bytes or end > len(data):
        return None
    is_whole = crc32(memoryview(data)[at + _CHECKED_FROM : end]) == checksum
    return WholeRecord(kind, at, end) if is_whole else None
