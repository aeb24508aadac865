"""`trace.perfetto-trace`: the same events as the Chrome trace in Perfetto's own format, for long runs.

Needs the package `perfetto` (extra `perfetto`). Every string is written once and referred to by number, and packets are
compressed in batches as Perfetto's own service does it; so the file is small, and so is what a reader must unpack.

The library makes every message. What repeats (the head of a slice on its track, an argument with its value) is made
once and its bytes are put together: protobuf defines that bytes of two messages one after the other are the merged
message. *Source:* protobuf.dev, "Encoding", "Last One Wins"; Perfetto protos/perfetto/trace/trace_packet.proto.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

from ncclscope_service.export.selection import Selection
from ncclscope_service.export.trace_events import TraceCounts, TraceEvents
from ncclscope_service.export.trace_tracks import Event

_Key = TypeVar("_Key")

_SEQUENCE: Final = 1
_ZLIB_LEVEL: Final = 6
_MAX_INTERNED: Final = 1 << 16
"""Strings that get a number; further ones are written where they stand."""
_MAX_KEPT: Final = 1 << 17
"""Pieces of messages that are kept to be used again."""
_OWN_TEXTS: Final = frozenset({"collective_id"})
"""Arguments that few events share: a number for each would cost more than it saves."""

_TIMESTAMP: Final = b"\x40"  # field 8 of TracePacket, a varint
_TRACK_EVENT: Final = b"\x5a"  # field 11 of TracePacket, with its length
_PACKET: Final = b"\x0a"  # field 1 of Trace, with its length


def write_perfetto_trace(selection: Selection, path: Path) -> TraceCounts:
    """Writes the trace; raises ModuleNotFoundError without the package `perfetto`.

    What the axis means and what was left out (`otherData` of the Chrome trace) stands in the arguments of one instant
    at its beginning.
    """
    trace = TraceEvents(selection)
    packets = _Packets()
    written = 0
    with path.open("wb") as file:
        for events in trace.batches():
            file.write(packets.batch(events))
            written += len(events)
        counts = trace.counts(written)
        file.write(packets.about(trace.metadata(counts)))
    return counts


class _Annotation(Protocol):
    """What is used of the library's message DebugAnnotation."""

    bool_value: bool
    int_value: int
    double_value: float
    string_value: str
    string_value_iid: int
    dict_entries: Any
    array_values: Any


@dataclass(slots=True)
class _Interned:
    """The numbers of the strings of one kind; new ones are told before they are used."""

    kind: str
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    untold: list[str] = field(default_factory=list[str])

    def number(self, text: str) -> int | None:
        """The string's number from 1 on; None where there are too many strings already."""
        number = self.numbers.get(text)
        if number is None and len(self.numbers) < _MAX_INTERNED:
            number = self.numbers[text] = len(self.numbers) + 1
            self.untold.append(text)
        return number


class _Packets:
    """Chrome trace events to packets."""

    def __init__(self) -> None:
        # An extra, and its messages are made at run time: a checker sees other things with and without it.
        messages: Any = importlib.import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
        self._messages = messages
        self._names = _Interned("event_names")
        self._arguments = _Interned("debug_annotation_names")
        self._texts = _Interned("debug_annotation_string_values")
        self._heads: dict[tuple[int, int, str], bytes] = {}
        self._pieces: dict[tuple[str, type, object], bytes] = {}
        self._counters: dict[tuple[int, str], int] = {}
        self._words: dict[tuple[int, int], str] = {}
        """Names of processes and threads until their place is told."""
        self._common = messages.TracePacket(
            trusted_packet_sequence_id=_SEQUENCE,
            sequence_flags=messages.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE,
        ).SerializeToString()
        self._is_begun = False
        self._draw: dict[str, Callable[[Event], bytes]] = {
            "M": self._metadata,
            "X": self._slice,
            "i": self._instant,
            "C": self._counter,
            "s": self._flow,
            "f": self._flow,
        }

    def batch(self, events: list[Event]) -> bytes:
        """One compressed packet with these events, and before them the strings that they are the first to use."""
        body = b"".join([self._draw[str(event["ph"])](event) for event in events])
        return self._compressed(self._told() + body) if body else b""

    def about(self, metadata: dict[str, object]) -> bytes:
        """An instant at the beginning of the axis, on a track of its own, whose arguments are the metadata."""
        uuid = 1
        about = self._descriptor(uuid=uuid, name="about this trace")
        event = self._head(self._messages.TrackEvent.TYPE_INSTANT, uuid, "about this trace")
        body = about + self._packet(0, event + self._annotations(metadata))
        return self._compressed(self._told() + body)

    def _compressed(self, packets: bytes) -> bytes:
        packet = self._messages.TracePacket(compressed_packets=zlib.compress(packets, _ZLIB_LEVEL))
        return _framed(_PACKET, packet.SerializeToString())

    def _told(self) -> bytes:
        """The packet that gives new strings their numbers; the first one also begins the sequence."""
        told = self._messages.TracePacket(
            trusted_packet_sequence_id=_SEQUENCE,
            sequence_flags=self._messages.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
            if self._is_begun
            else self._messages.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED,
        )
        for interned in (self._names, self._arguments, self._texts):
            entries = getattr(told.interned_data, interned.kind)
            for text in interned.untold:
                value = text.encode() if interned is self._texts else text
                entries.add(iid=interned.numbers[text], **{"str" if interned is self._texts else "name": value})
            interned.untold.clear()
        self._is_begun = True
        return _framed(_PACKET, told.SerializeToString())

    def _metadata(self, event: Event) -> bytes:
        """A process or a thread, once its name and its place are both known."""
        pid, tid = _number(event, "pid"), _number(event, "tid")
        args = cast("dict[str, object]", event["args"])
        if "name" in args:
            self._words[pid, tid] = str(args["name"])
            return b""
        name, rank = self._words.pop((pid, tid)), cast("int", args["sort_index"])
        if tid:
            return self._descriptor(uuid=_uuid(pid, tid), parent_uuid=_uuid(pid, 0), name=name, sibling_order_rank=rank)
        process = self._messages.ProcessDescriptor(pid=pid, process_name=name, legacy_sort_index=rank)
        ordering = self._messages.TrackDescriptor.EXPLICIT
        return self._descriptor(uuid=_uuid(pid, 0), process=process, child_ordering=ordering)

    def _slice(self, event: Event) -> bytes:
        uuid, start_ns = _uuid(_number(event, "pid"), _number(event, "tid")), _ns(event, "ts")
        begin = self._head(self._messages.TrackEvent.TYPE_SLICE_BEGIN, uuid, str(event["name"]))
        end = self._head(self._messages.TrackEvent.TYPE_SLICE_END, uuid, "")
        args = self._annotations(cast("dict[str, object]", event.get("args", {})))
        return self._packet(start_ns, begin + args) + self._packet(start_ns + _ns(event, "dur"), end)

    def _instant(self, event: Event) -> bytes:
        uuid = _uuid(_number(event, "pid"), _number(event, "tid"))
        head = self._head(self._messages.TrackEvent.TYPE_INSTANT, uuid, str(event["name"]))
        return self._packet(
            _ns(event, "ts"), head + self._annotations(cast("dict[str, object]", event.get("args", {})))
        )

    def _flow(self, event: Event) -> bytes:
        """An arrow's end is an instant inside the slice, at its exact time: the slice's start is another."""
        uuid = _uuid(_number(event, "pid"), _number(event, "tid"))
        flow = self._messages.TrackEvent()
        ids = flow.flow_ids if event["ph"] == "s" else flow.terminating_flow_ids
        ids.append(_number(event, "id"))
        head = self._head(self._messages.TrackEvent.TYPE_INSTANT, uuid, str(event["name"]))
        return self._packet(_ns(event, "ts"), head + flow.SerializeToString())

    def _counter(self, event: Event) -> bytes:
        pid, name = _number(event, "pid"), str(event["name"])
        [(unit, value)] = cast("dict[str, float]", event["args"]).items()
        packets = b""
        uuid = self._counters.get((pid, name))
        if uuid is None:
            uuid = self._counters[pid, name] = _uuid(pid, (1 << 20) + len(self._counters))
            counter = self._messages.CounterDescriptor(unit_name=unit)
            rank = len(self._counters)
            packets = self._descriptor(
                uuid=uuid, parent_uuid=_uuid(pid, 0), name=name, counter=counter, sibling_order_rank=rank
            )
        point = self._messages.TrackEvent(
            type=self._messages.TrackEvent.TYPE_COUNTER, track_uuid=uuid, double_counter_value=value
        )
        return packets + self._packet(_ns(event, "ts"), point.SerializeToString())

    def _descriptor(self, **fields: object) -> bytes:
        track = self._messages.TrackDescriptor(**fields)
        packet = self._messages.TracePacket(trusted_packet_sequence_id=_SEQUENCE, track_descriptor=track)
        return _framed(_PACKET, packet.SerializeToString())

    def _packet(self, at_ns: int, track_event: bytes) -> bytes:
        body = _TIMESTAMP + _varint(at_ns) + self._common + _framed(_TRACK_EVENT, track_event)
        return _framed(_PACKET, body)

    def _head(self, kind: int, uuid: int, name: str) -> bytes:
        """The part of an event that many on its track share."""
        key = (kind, uuid, name)
        head = self._heads.get(key)
        if head is None:
            event = self._messages.TrackEvent(type=kind, track_uuid=uuid)
            number = self._names.number(name) if name else None
            if number is not None:
                event.name_iid = number
            elif name:
                event.name = name
            head = _kept(self._heads, key, event.SerializeToString())
        return head

    def _annotations(self, args: dict[str, object]) -> bytes:
        return b"".join([self._annotation(name, value) for name, value in args.items()])

    def _annotation(self, name: str, value: object) -> bytes:
        key = (name, type(value), value if isinstance(value, (str, int, float)) else id(value))
        piece = self._pieces.get(key)
        if piece is None:
            event = self._messages.TrackEvent()
            annotation = event.debug_annotations.add()
            number = self._arguments.number(name)
            if number is not None:
                annotation.name_iid = number
            else:
                annotation.name = name
            self._fill(annotation, value, may_intern=name not in _OWN_TEXTS)
            piece = event.SerializeToString()
            if isinstance(value, (str, int, float)):
                _kept(self._pieces, key, piece)
        return piece

    def _fill(self, annotation: _Annotation, value: object, *, may_intern: bool) -> None:
        if isinstance(value, bool):
            annotation.bool_value = value
        elif isinstance(value, int):
            annotation.int_value = value
        elif isinstance(value, float):
            annotation.double_value = value
        elif isinstance(value, (dict, list, tuple)) and not value:
            annotation.string_value = "none"
        elif isinstance(value, dict):
            for name, inner in cast("dict[object, object]", value).items():
                self._fill(annotation.dict_entries.add(name=str(name)), inner, may_intern=may_intern)
        elif isinstance(value, (list, tuple)):
            for inner in cast("list[object]", value):
                self._fill(annotation.array_values.add(), inner, may_intern=False)
        else:
            self._fill_text(annotation, "null" if value is None else str(value), may_intern=may_intern)

    def _fill_text(self, annotation: _Annotation, text: str, *, may_intern: bool) -> None:
        number = self._texts.number(text) if may_intern else None
        if number is None:
            annotation.string_value = text
        else:
            annotation.string_value_iid = number


def _kept(pieces: dict[_Key, bytes], key: _Key, piece: bytes) -> bytes:
    if len(pieces) >= _MAX_KEPT:
        pieces.clear()
    pieces[key] = piece
    return piece


def _uuid(pid: int, tid: int) -> int:
    return pid << 32 | tid


def _number(event: Event, name: str) -> int:
    return cast("int", event.get(name, 0))


def _ns(event: Event, name: str) -> int:
    return round(cast("float", event[name]) * 1000)


def _framed(tag: bytes, body: bytes) -> bytes:
    return tag + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    """As protobuf writes numbers: seven bits a byte, the lowest first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
