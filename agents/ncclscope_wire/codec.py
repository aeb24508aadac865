"""Messages to bytes and back: msgpack maps around columns of raw bytes.

Every map has a `kind`. Tables travel as `[layout, bytes]`: the bytes of the structured array and a checksum of
its dtype, so that two builds that differ in a column refuse each other instead of reading nonsense. Empty
tables are left out. The map of a batch travels compressed, and its tables as steps from row to row (`compression`).
Unknown fields of a map are ignored, and so are facts of unknown types, which are counted as skipped
"unknown_fact": another release may send others. Unknown kinds and tables are errors.

Every map ends with `crc`, the CRC-32 of all its bytes in front of that number. Where it is there, it is checked. What
comes by the network must have it (`is_sent`), but for what peers of other versions say: their Hello, and a refusal.

Decoding holds this: any bytes give a message or ProtocolError, nothing else. What needs to know earlier
batches (do indices point inside the dictionaries?) is the receiver's to check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from typing import Annotated, Final, TypeAlias, TypeVar, cast
from zlib import crc32

import msgpack
import msgspec
import numpy as np

from ncclscope_wire import compression
from ncclscope_wire.batch import DICTIONARY_TABLES, ROW_TABLES, Batch, Columns
from ncclscope_wire.errors import DamagedError, ProtocolError
from ncclscope_wire.facts import FACT_TYPES, Fact
from ncclscope_wire.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    BatchMessage,
    ForeignHello,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Welcome,
)
from ncclscope_wire.records import CaptureSeen, CommunicatorEvent, Counts, Source, SourceGap, VersionSeen
from ncclscope_wire.tables import EARLIER_LAYOUTS
from ncclscope_wire.terms import NO_TIME_NS
from ncclscope_wire.topology import TopologySeen, TuningTableSeen, check_ends

_Record = TypeVar("_Record")
_Container = TypeVar("_Container", dict[str, object], list[object])

_MAX_ITEMS: Final = 1 << 20
"""Arrays, maps and what is in them, of one message: a byte that is an empty map costs 64 in memory."""

_FIRST_BUFFER_BYTES: Final = 16 * 1024
"""Initial buffer; it grows. The packer's own 1 MiB would be mapped and unmapped for each message."""

_PLAIN: Final[Mapping[str, type[Hello | Welcome | Heartbeat | Acknowledge | Goodbye | Refused]]] = {
    "hello": Hello,
    "welcome": Welcome,
    "heartbeat": Heartbeat,
    "acknowledge": Acknowledge,
    "goodbye": Goodbye,
    "refused": Refused,
}
_KINDS: Final = {record: kind for kind, record in _PLAIN.items()}
_BATCH: Final = "batch"
_CRC: Final = "crc"
_NO_CRC: Final = 2**32 - 1
"""Takes four bytes as every number does that comes in its place."""
_CRC_BYTES: Final = 4
_CRC_FIELD: Final = b"\xa3crc\xce"
"""The name, and the first byte of a number of four. *Source:* msgpack spec.md, "str format family", "uint 32"."""
_BATCH_ENCODER: Final = msgspec.msgpack.Encoder()

_TABLES: Final[Mapping[str, np.dtype[np.void]]] = {**DICTIONARY_TABLES, **ROW_TABLES}


def _layout(dtype: np.dtype[np.void]) -> int:
    return crc32(repr(dtype.descr).encode("ascii"))


_LAYOUTS: Final[Mapping[str, int]] = {name: _layout(dtype) for name, dtype in _TABLES.items()}
_tables_of: Final[Callable[[Batch], tuple[Columns, ...]]] = attrgetter(*_TABLES)
"""All tables of a batch, in the order of `_TABLES`."""

_NUMBER_BOUNDS: Final[Mapping[str, tuple[int, int]]] = {
    "pid": (0, 2**32 - 1),
    "tid": (0, 2**32 - 1),
    "line": (0, 2**53),
    "pointer": (0, 2**64 - 1),
    "parent": (0, 2**64 - 1),
    "comm_id": (0, 2**64 - 1),
    "rank": (-1, 2**31 - 1),
    "nranks": (-1, 2**31 - 1),
    "cuda_device": (-1, 2**31 - 1),
    "nvml_device": (-1, 2**31 - 1),
}
"""Bounds of the columns that these fields of records end in; all other integers must fit 64 bits with a sign."""
_SIGNED_64: Final = (-(2**63), 2**63 - 1)


class _StretchMap(msgspec.Struct, frozen=True, kw_only=True):
    """Source and positions of a batch, as they travel."""

    source: Source
    begin: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    end: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    end_line: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    is_last: bool = False
    content_check: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    observed_at_ns: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None


class _BatchMap(_StretchMap, frozen=True, kw_only=True, omit_defaults=True):
    """A batch as it travels."""

    strings: tuple[str, ...] = ()
    tables: dict[str, tuple[int, bytes]] = {}
    communicators: tuple[CommunicatorEvent, ...] = ()
    versions: tuple[VersionSeen, ...] = ()
    captures: tuple[CaptureSeen, ...] = ()
    facts: tuple[tuple[str, dict[str, object]], ...] = ()
    topologies: tuple[TopologySeen, ...] = ()
    tuning_tables: tuple[TuningTableSeen, ...] = ()
    gaps: tuple[SourceGap, ...] = ()
    counts: Counts = msgspec.field(default_factory=Counts)


class _BatchMessageMap(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="batch"):
    sequence: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    batch: _BatchMap
    crc: int = _NO_CRC


_FewCounts: TypeAlias = Annotated[dict[str, int], msgspec.Meta(max_length=256)]


class _PlainCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    understood: _FewCounts
    skipped: _FewCounts


class _PlainBatchMap(_StretchMap, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch of rows and nothing else, as most are."""

    tables: Annotated[dict[str, tuple[int, bytes]], msgspec.Meta(max_length=len(_TABLES))]
    counts: _PlainCounts


class _PlainMessageMap(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="batch", forbid_unknown_fields=True
):
    sequence: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    batch: _PlainBatchMap
    crc: int = _NO_CRC


_PLAIN_DECODER: Final = msgspec.msgpack.Decoder(_PlainMessageMap)


def encode_message(message: Message) -> bytes:
    """The payload of one frame. Lone surrogates in texts become "?"."""
    if isinstance(message, ForeignHello):
        raise AssertionError("a Hello of another version is only ever received")
    if isinstance(message, BatchMessage):
        return _encode_batch(message)
    return _checked(_pack({"kind": _KINDS[type(message)], **_builtins(message), _CRC: _NO_CRC}))


def decode_message(payload: bytes, *, is_sent: bool = False) -> Message:
    """The message of one frame's payload. `is_sent`: it came by the network, and not from a disk that checks it.

    Raises:
        DamagedError: its checksum does not fit; or it `is_sent` and has none.
        ProtocolError: it is not msgpack, of no known kind, or a field is missing, of another type or out of
            bounds; the text says which.
    """
    has_steps = compression.is_compressed(payload)
    is_checked = False
    try:
        content = compression.expanded(payload) if has_steps else payload
        is_checked = _has_crc(content)
        message = _decoded(content, has_steps=has_steps)
    except ProtocolError as error:
        if is_sent and not is_checked:
            raise DamagedError(str(error)) from error
        raise
    if is_sent and not is_checked and not isinstance(message, ForeignHello | Refused):
        raise DamagedError(f"a message of {len(payload)} bytes has no checksum")
    return message


def _has_crc(payload: bytes) -> bool:
    """Whether a map ends with its checksum.

    Raises:
        DamagedError: that is of other bytes.
    """
    if payload[-_CRC_BYTES - len(_CRC_FIELD) : -_CRC_BYTES] != _CRC_FIELD:
        return False
    if crc32(memoryview(payload)[:-_CRC_BYTES]) != int.from_bytes(payload[-_CRC_BYTES:], "big"):
        raise DamagedError(f"a message of {len(payload)} bytes is not what was sent: its checksum does not fit")
    return True


def _checked(packed: bytes) -> bytes:
    """A map whose last field is a checksum, with that."""
    content = memoryview(packed)[:-_CRC_BYTES]
    return b"".join((content, crc32(content).to_bytes(_CRC_BYTES, "big")))


def _decoded(payload: bytes, *, has_steps: bool) -> Message:
    plain = _plain_batch_message(payload, has_steps=has_steps)
    if plain is not None:
        return plain
    content = _unpack(payload)
    kind = content.get("kind")
    if kind == _BATCH:
        return _batch_message(content, has_steps=has_steps)
    # Another version may have named its kinds again; its number is all that is needed to refuse it properly.
    if kind in ("hello", None) and (foreign := _foreign_hello(content)) is not None:
        return foreign
    if not isinstance(kind, str) or kind not in _PLAIN:
        raise ProtocolError(f"a message of unknown kind {str(kind)[:40]!r}")
    message = _convert(content, _PLAIN[kind], kind)
    if isinstance(message, Acknowledge) and message.sequence < 0:
        raise ProtocolError(f"acknowledge: sequence {message.sequence} is below 0")
    return message


def decode_kept_hello(payload: bytes) -> Hello:
    """The Hello in a payload that was kept on disk, of whichever protocol version, as long as its fields are the same.

    Raises:
        ProtocolError: it is none, or its fields are others.
    """
    content = _unpack(payload)
    if content.get("kind") != "hello":
        raise ProtocolError("another message is kept where a Hello must be")
    return _convert(content, Hello, "hello")


def _encode_batch(message: BatchMessage) -> bytes:
    """The map of a batch, compressed; as it is where a receiver would not expand it, for who sends it to see."""
    packed = _packed_batch(message, compression.steps_of)
    if len(packed) <= compression.MAX_EXPANDED_BYTES:
        return compression.compressed(packed)
    return _packed_batch(message, _bytes_of)


def _packed_batch(message: BatchMessage, bytes_of: Callable[[Columns], bytes]) -> bytes:
    content = _BatchMessageMap(sequence=message.sequence, batch=_map_of_batch(message.batch, bytes_of))
    try:
        return _checked(_BATCH_ENCODER.encode(content))
    except UnicodeEncodeError:  # of a lone surrogate
        return _checked(_pack(_builtins(content)))


def _bytes_of(rows: Columns) -> bytes:
    return rows.tobytes()


def _pack(content: dict[str, object]) -> bytes:
    return cast(
        bytes, msgpack.packb(content, use_bin_type=True, unicode_errors="replace", buf_size=_FIRST_BUFFER_BYTES)
    )


def _unpack(payload: bytes) -> dict[str, object]:
    left = _MAX_ITEMS

    def counted(found: _Container) -> _Container:
        nonlocal left
        left -= 1 + len(found)
        if left < 0:
            raise ProtocolError(f"a payload of {len(payload)} bytes holds more than {_MAX_ITEMS} items")
        return found

    try:
        content: object = msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            max_array_len=min(len(payload), _MAX_ITEMS),
            max_map_len=min(len(payload), _MAX_ITEMS),
            max_ext_len=0,
            object_hook=counted,
            list_hook=counted,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a payload of {len(payload)} bytes is not msgpack: {_short(error)}") from error
    if not isinstance(content, dict):
        raise ProtocolError(f"a payload holds a {type(content).__name__}, not a map")
    return cast("dict[str, object]", content)


def _convert(content: object, record: type[_Record], where: str) -> _Record:
    try:
        return msgspec.convert(content, record, builtin_types=(bytes,))
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{where}: {_short(error)}") from error


def _short(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__


def _builtins(record: object) -> dict[str, object]:
    return cast("dict[str, object]", msgspec.to_builtins(record, builtin_types=(bytes,)))


def _foreign_hello(content: Mapping[str, object]) -> ForeignHello | None:
    version = content.get("protocol_version")
    if isinstance(version, int) and not isinstance(version, bool) and version != PROTOCOL_VERSION:
        return ForeignHello(protocol_version=version, host=_text(content, "host"), token=_text(content, "token"))
    return None


def _text(content: Mapping[str, object], name: str) -> str:
    found = content.get(name)
    return found if isinstance(found, str) else ""


def _map_of_batch(batch: Batch, bytes_of: Callable[[Columns], bytes]) -> _BatchMap:
    return _BatchMap(
        source=batch.source,
        begin=batch.begin,
        end=batch.end,
        end_line=batch.end_line,
        is_last=batch.is_last,
        content_check=batch.content_check,
        observed_at_ns=batch.observed_at_ns,
        strings=batch.strings,
        tables={
            name: (layout, bytes_of(table))
            for (name, layout), table in zip(_LAYOUTS.items(), _tables_of(batch), strict=True)
            if len(table)
        },
        communicators=batch.communicators,
        versions=batch.versions,
        captures=batch.captures,
        facts=tuple([(type(fact).__name__, _given(fact)) for fact in batch.facts]),
        topologies=batch.topologies,
        tuning_tables=batch.tuning_tables,
        gaps=batch.gaps,
        counts=batch.counts,
    )


def _plain_batch_message(payload: bytes, *, has_steps: bool) -> BatchMessage | None:
    """The message if it is a batch of rows and nothing is wrong with it; all others are looked at field by field."""
    try:
        decoded = _PLAIN_DECODER.decode(payload)
        content = decoded.batch
        if content.begin > content.end:
            return None
        filled = {name: _columns(name, sent, has_steps=has_steps) for name, sent in content.tables.items()}
        _check_each("counts", "understood", content.counts.understood.values())
        _check_each("counts", "skipped", content.counts.skipped.values())
    except (ValueError, KeyError, ProtocolError, RecursionError):
        return None
    batch = Batch(
        source=content.source,
        begin=content.begin,
        end=content.end,
        end_line=content.end_line,
        is_last=content.is_last,
        content_check=content.content_check,
        observed_at_ns=content.observed_at_ns,
        strings=(),
        communicators=(),
        versions=(),
        captures=(),
        facts=(),
        topologies=(),
        tuning_tables=(),
        gaps=(),
        counts=Counts(understood=content.counts.understood, skipped=content.counts.skipped),
        **filled,
    )
    return BatchMessage(sequence=decoded.sequence, batch=batch)


def _batch_message(content: Mapping[str, object], *, has_steps: bool) -> BatchMessage:
    decoded = _convert(content, _BatchMessageMap, _BATCH)
    if decoded.batch.begin > decoded.batch.end:
        raise ProtocolError(f"batch: begins at {decoded.batch.begin} and ends before that, at {decoded.batch.end}")
    _check_numbers(decoded.batch)
    return BatchMessage(sequence=decoded.sequence, batch=_batch_of_map(decoded.batch, has_steps=has_steps))


def _batch_of_map(content: _BatchMap, *, has_steps: bool) -> Batch:
    for name in content.tables:
        if name not in _TABLES:
            raise ProtocolError(f"batch: unknown table {name[:40]!r}")
    filled = {name: _columns(name, sent, has_steps=has_steps) for name, sent in content.tables.items()}
    for topology in content.topologies:
        check_ends(topology)
    facts = tuple(_convert(fields, FACT_TYPES[name], name) for name, fields in content.facts if name in FACT_TYPES)
    return Batch(
        source=content.source,
        begin=content.begin,
        end=content.end,
        end_line=content.end_line,
        is_last=content.is_last,
        content_check=content.content_check,
        observed_at_ns=content.observed_at_ns,
        strings=content.strings,
        communicators=content.communicators,
        versions=content.versions,
        captures=content.captures,
        facts=facts,
        topologies=content.topologies,
        tuning_tables=content.tuning_tables,
        gaps=content.gaps,
        counts=_with_skipped(content.counts, "unknown_fact", len(content.facts) - len(facts)),
        **filled,
    )


def _with_skipped(counts: Counts, reason: str, amount: int) -> Counts:
    if not amount:
        return counts
    return replace(counts, skipped={**counts.skipped, reason: counts.skipped.get(reason, 0) + amount})


def _given(fact: Fact) -> dict[str, object]:
    """The fields of a fact that are known."""
    return {name: value for name, value in _builtins(fact).items() if value is not None}


def _columns(name: str, sent: tuple[int, bytes], *, has_steps: bool) -> Columns:
    dtype = _TABLES[name]
    layout, data = sent
    if layout != _LAYOUTS[name]:
        earlier = EARLIER_LAYOUTS.get(name)
        if earlier is not None and layout == _layout(earlier):
            return _widened(_rows(name, data, earlier, has_steps=has_steps), dtype)
        raise ProtocolError(f"batch: table {name} has layout {layout:#x}, and {_LAYOUTS[name]:#x} is expected")
    return _rows(name, data, dtype, has_steps=has_steps)


def _widened(rows: Columns, dtype: np.dtype[np.void]) -> Columns:
    """Rows of an earlier layout; the columns that it lacks are times, which are unknown."""
    widened = np.empty(len(rows), dtype)
    for name in dtype.names or ():
        widened[name] = rows[name] if name in (rows.dtype.names or ()) else NO_TIME_NS
    return widened


def _rows(name: str, data: bytes, dtype: np.dtype[np.void], *, has_steps: bool) -> Columns:
    if len(data) % dtype.itemsize:
        raise ProtocolError(f"batch: table {name} has {len(data)} bytes, not a multiple of {dtype.itemsize}")
    if has_steps:
        return compression.rows_of(data, dtype)
    return np.frombuffer(bytearray(data), dtype=dtype)  # rows that may be written to, copied as bytes


def _check_numbers(content: _BatchMap) -> None:
    for records in (content.communicators, content.versions, content.captures, content.gaps):
        for record in records:
            _check_fields(record)
    _check_each("counts", "understood", content.counts.understood.values())
    _check_each("counts", "skipped", content.counts.skipped.values())


def _check_fields(record: CommunicatorEvent | VersionSeen | CaptureSeen | SourceGap) -> None:
    for field in fields(record):
        value: object = getattr(record, field.name)
        if isinstance(value, int):
            _check_each(type(record).__name__, field.name, (value,))
    if isinstance(record, CaptureSeen):
        _check_each("CaptureSeen", "pid", record.pids)


def _check_each(record: str, name: str, values: Iterable[int]) -> None:
    low, high = _NUMBER_BOUNDS.get(name, _SIGNED_64)
    for value in values:
        if not low <= value <= high:
            raise ProtocolError(f"batch: {record}.{name} is {value}, which is not between {low} and {high}")
