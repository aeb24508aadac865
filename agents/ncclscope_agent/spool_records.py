"""The bytes of a spool's files: records with a mark and a checksum, so that damage costs only what it hit.

    record    mark 4, CRC-32 4, length 4, kind 1, then the body; little-endian; the checksum is over what follows it
    HEADER    first in every file: a msgpack map of `Header`
    FRAME     entries 4 (records of dictionaries up to this one), then the payload of the batch as it goes on the wire
    POSITIONS 4 unused, then a msgpack map of source keys to `Position`: where readers are, of batches that are not here
    ENTRIES   number 4, then a batch with only new dictionary entries, as a message with the frame's sequence number

A record that was cut, or in which a bit flipped, is passed over: the next one is found by its mark and believed for
its checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final
from zlib import crc32

import msgspec

from ncclscope_wire.frame import MAX_FRAME_BYTES
from ncclscope_wire.messages import Position

FORMAT_VERSION: Final = 1
"""Of these files; grows with every change that an older agent would misread."""

_MARK: Final = b"\xf5NS\x0a"
_RECORD: Final = struct.Struct("<4sIIB")
_COVERED: Final = struct.Struct("<IB")
_NUMBER: Final = struct.Struct("<I")
_MAX_BODY_BYTES: Final = MAX_FRAME_BYTES + 4096


class RecordKind(IntEnum):
    """What a record holds."""

    HEADER = 1
    FRAME = 2
    ENTRIES = 3
    POSITIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file of the spool says of itself."""

    format_version: int
    protocol_version: int
    """Of the batches in it."""
    agent_id: str
    session_id: str
    chapter: int
    """Sessions of a spool are numbered in their order, over restarts."""
    created_ns: int
    positions: dict[str, Position] = field(default_factory=dict[str, Position])
    """Where readers were when the file was begun, by source key."""


@dataclass(slots=True)
class Frame:
    """One batch, encoded, and where in its source it lies. Not frozen, since that would cost more than the spool."""

    sequence: int
    key: str
    begin: int
    end: int
    end_line: int
    is_last: bool
    observed_at_ns: int | None
    entries: int
    """Records of dictionaries that its session had up to this batch, its own one included."""
    payload: bytes

    @property
    def position(self) -> Position:
        """Where its source is read on."""
        return Position(end=self.end, end_line=self.end_line, is_complete=self.is_last)


@dataclass(frozen=True, slots=True)
class Entries:
    """New dictionary entries, as an encoded batch that has nothing else; its sequence is that of the batch."""

    number: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """What a file holds."""

    header: Header | None
    """None: it is no file of a spool, or its beginning is damaged."""
    frames: tuple[Frame, ...] = ()
    entries: tuple[Entries, ...] = ()
    positions: tuple[dict[str, Position], ...] = ()
    """Beside those in the header."""
    damaged_bytes: int = 0
    """Bytes that belong to no whole record."""
    whole_bytes: int = 0
    """Up to where the last whole record goes."""


class _Source(msgspec.Struct):
    key: str


class _Extent(msgspec.Struct):
    source: _Source
    begin: int
    end: int
    end_line: int = 0
    is_last: bool = False
    observed_at_ns: int | None = None


class _Extents(msgspec.Struct):
    sequence: int
    batch: _Extent


_EXTENTS: Final = msgspec.msgpack.Decoder(_Extents)
_HEADERS: Final = msgspec.msgpack.Decoder(Header)
_POSITIONS: Final = msgspec.msgpack.Decoder(dict[str, Position])
_PACK: Final = msgspec.msgpack.Encoder()


def header_record(header: Header) -> bytes:
    """The bytes of a header."""
    return _record(RecordKind.HEADER, b"", _PACK.encode(header))


def frame_record(payload: bytes, *, entries: int) -> bytes:
    """The bytes of a batch, given as the payload of its frame on the wire."""
    return _record(RecordKind.FRAME, _NUMBER.pack(entries), payload)


def entries_record(payload: bytes, *, number: int) -> bytes:
    """The bytes of new dictionary entries; they are numbered from 1 in each session."""
    return _record(RecordKind.ENTRIES, _NUMBER.pack(number), payload)


def positions_record(positions: Mapping[str, Position]) -> bytes:
    """The bytes of positions, by source key."""
    return _record(RecordKind.POSITIONS, _NUMBER.pack(0), _PACK.encode(positions))


def scan(data: bytes) -> Scanned:
    """The whole records of a file, in order; what lies between them is counted."""
    header: Header | None = None
    frames: list[Frame] = []
    entries: list[Entries] = []
    positions: list[dict[str, Position]] = []
    at = whole = damaged = 0
    while at < len(data):
        end = _record_end(data, at)
        read = None if end is None else _read(data[at + 12], data[at + _RECORD.size : end])
        if end is None or read is None:
            found = data.find(_MARK, at + 1)
            after = len(data) if found < 0 else found
            damaged += after - at
            at = after
            continue
        if isinstance(read, Header):
            header = header or read
        elif isinstance(read, Frame):
            frames.append(read)
        elif isinstance(read, Entries):
            entries.append(read)
        else:
            positions.append(read)
        at = whole = end
    return Scanned(
        header=header,
        frames=tuple(frames),
        entries=tuple(entries),
        positions=tuple(positions),
        damaged_bytes=damaged,
        whole_bytes=whole,
    )


def _record(kind: RecordKind, number: bytes, content: bytes) -> bytes:
    covered = _COVERED.pack(len(number) + len(content), kind)
    checksum = crc32(content, crc32(number, crc32(covered)))
    return b"".join((_MARK, checksum.to_bytes(4, "little"), covered, number, content))


def _record_end(data: bytes, at: int) -> int | None:
    """Where the record that begins here ends; None where none does."""
    if at + _RECORD.size > len(data):
        return None
    mark, checksum, length, _ = _RECORD.unpack_from(data, at)
    end = at + _RECORD.size + length
    if mark != _MARK or length > _MAX_BODY_BYTES or end > len(data):
        return None
    return int(end) if crc32(memoryview(data)[at + 8 : end]) == checksum else None


def _read(kind: int, body: bytes) -> Header | Frame | Entries | dict[str, Position] | None:
    """What a whole record says; None where it is of another version of us."""
    try:
        if kind == RecordKind.HEADER:
            return _HEADERS.decode(body)
        number = int(_NUMBER.unpack_from(body)[0])
        if kind == RecordKind.ENTRIES:
            return Entries(number, body[_NUMBER.size :])
        if kind == RecordKind.FRAME:
            return _frame(number, body[_NUMBER.size :])
        if kind == RecordKind.POSITIONS:
            return _POSITIONS.decode(body[_NUMBER.size :])
    except (msgspec.DecodeError, struct.error):
        return None
    return None


def _frame(entries: int, payload: bytes) -> Frame:
    known = _EXTENTS.decode(payload)
    batch = known.batch
    return Frame(
        known.sequence,
        batch.source.key,
        batch.begin,
        batch.end,
        batch.end_line,
        batch.is_last,
        batch.observed_at_ns,
        entries,
        payload,
    )
