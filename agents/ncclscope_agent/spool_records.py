"""The bytes of a spool's files: records that prove themselves (`record.py`), so that damage costs only what it hit.

    HEADER    first in every file: a msgpack map of `Header`
    FRAME     entries 4 (records of dictionaries up to this one), then the payload of the batch as it goes on the wire
    POSITIONS 4 unused, then a msgpack map of source keys to `Position`: where readers are, of batches that are not here
    ENTRIES   number 4, then a batch with only new dictionary entries, as a message with the frame's sequence number

Numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import msgspec

from ncclscope_wire.frame import MAX_FRAME_BYTES
from ncclscope_wire.messages import Position
from ncclscope_wire.record import encode_record, whole_records

FORMAT_VERSION: Final = 1
"""Of these files; grows with every change that an older agent would misread."""

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
    name: str = ""
    host: str = ""
    job: str = ""
    """As in the agent's `Hello`: for who sends this in its place. Empty where an older version wrote it."""


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
    payload: bytes | memoryview
    """A view where the frame as it is sent is kept besides: one copy is enough."""

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
    return encode_record(RecordKind.HEADER, _PACK.encode(header))


def frame_record(payload: bytes | memoryview, *, entries: int) -> bytes:
    """The bytes of a batch, given as the payload of its frame on the wire."""
    return encode_record(RecordKind.FRAME, _NUMBER.pack(entries), payload)


def entries_record(payload: bytes, *, number: int) -> bytes:
    """The bytes of new dictionary entries; they are numbered from 1 in each session."""
    return encode_record(RecordKind.ENTRIES, _NUMBER.pack(number), payload)


def positions_record(positions: Mapping[str, Position]) -> bytes:
    """The bytes of positions, by source key."""
    return encode_record(RecordKind.POSITIONS, _NUMBER.pack(0), _PACK.encode(positions))


def scan(data: bytes) -> Scanned:
    """The whole records of a file, in order; what lies between them is counted."""
    header: Header | None = None
    frames: list[Frame] = []
    entries: list[Entries] = []
    positions: list[dict[str, Position]] = []
    whole = damaged = 0
    for record in whole_records(data, max_body_bytes=_MAX_BODY_BYTES):
        read = _read(record.kind, record.body(data))
        if read is None:
            continue
        damaged += record.begin - whole
        whole = record.end
        if isinstance(read, Header):
            header = header or read
        elif isinstance(read, Frame):
            frames.append(read)
        elif isinstance(read, Entries):
            entries.append(read)
        else:
            positions.append(read)
    return Scanned(
        header=header,
        frames=tuple(frames),
        entries=tuple(entries),
        positions=tuple(positions),
        damaged_bytes=damaged + len(data) - whole,
        whole_bytes=whole,
    )


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
    except (msgspec.DecodeError, struct.error, ValueError):  # ValueError: a text that is not UTF-8
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
