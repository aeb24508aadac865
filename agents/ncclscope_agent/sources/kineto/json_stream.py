"""A Chrome trace as a stream: its events one by one, and the other members of its one object, in bounded memory.

Kineto writes one JSON object; its member `traceEvents` is an array of hundreds of megabytes, the others are small. What
the profiler was killed in the middle of has no end: what is there is read, and `is_whole` says so.
*Source:* Kineto `libkineto/src/output_json.cpp:ChromeTraceLogger`.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, cast

import msgspec

GZIP_MAGIC: Final = b"\x1f\x8b"
EVENTS: Final = "traceEvents"

_LONGEST_VALUE: Final = 8 << 20
"""Characters of one event or other member; Kineto's own messages (`INFO`) take some 100,000."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_BLOCK: Final = 1 << 20
_BETWEEN: Final = re.compile(r"[ \t\r\n]*,[ \t\r\n]*\{")
"""The end of one event and the beginning of the next."""
_MOST_CUTS: Final = 4


class TraceError(ValueError):
    """The text is not, or no longer, a JSON object with events."""


class Event(msgspec.Struct, gc=False):
    """The members of an event that are read, unchecked; one that is missing has its default."""

    ph: object = None
    cat: object = None
    name: object = None
    ts: object = None
    dur: object = 0
    pid: object = None
    tid: object = None
    args: msgspec.Raw = msgspec.Raw()
    """JSON: of most events nobody asks for them."""

    def arguments(self) -> Mapping[str, object]:
        """The members of `args`; empty where it is no object."""
        try:
            found: object = _DECODE(self.args)
        except (ValueError, RecursionError):
            found = _read_leniently(self.args)
        return cast(Mapping[str, object], found) if isinstance(found, dict) else {}


def _read_leniently(text: msgspec.Raw) -> object:
    """The value by Python's own reader, which takes NaN; None if it is not JSON to it either."""
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError):
        return None


_DECODE: Final = msgspec.json.Decoder().decode
_DECODE_EVENTS: Final = msgspec.json.Decoder(list[Event]).decode


class JsonStream:
    """The events of one trace, and its other members as far as they were read."""

    def __init__(self, blocks: Iterable[bytes], keep: Collection[str]) -> None:
        """`keep`: the names of the members that are kept; there may be any number of others."""
        self._keep = keep
        self._texts = _texts(iter(blocks))
        self._text = ""
        self._at = 0
        self._one_by_one_to = 0
        """Up to here the text is not read by many events at once: it has something that only `json` reads."""
        self._decode = json.JSONDecoder().raw_decode
        self.members: dict[str, object] = {}
        """Those that are kept, by name."""
        self.is_whole = False
        """Whether the end of the object was read."""

    def events(self) -> Iterator[Event]:
        """The events in the order of the file; what stands between them and is no object is left out.

        Raises:
            TraceError: the text breaks off or is no JSON; events before that place were given.
        """
        self._expect("{")
        while not self._is_next("}"):
            name = self._value()
            self._expect(":")
            if not isinstance(name, str):
                raise TraceError("a member has no name")
            if name == EVENTS:
                yield from self._items()
            elif name in self._keep:
                self.members[name] = self._value()
            else:
                self._value()
            self._is_next(",")
        self.is_whole = True

    def _items(self) -> Iterator[Event]:
        self._expect("[")
        while not self._is_next("]"):
            if (events := self._many()) is not None:
                yield from events
            elif isinstance(value := self._value(), dict):
                yield _event(cast(Mapping[str, object], value))
            self._is_next(",")

    def _many(self) -> list[Event] | None:
        """The events from here to the last end of one in the text, all at once; None if they have to be read singly.

        What is between two brackets is whole events if it is JSON: a cut within an event, or a text, leaves one open.
        """
        end = len(self._text)
        if self._at < self._one_by_one_to:
            return None
        for _ in range(_MOST_CUTS):
            end = self._text.rfind("}", self._at, end)
            if end < 0:
                break
            if _BETWEEN.match(self._text, end + 1) is None:
                continue
            try:
                events = _DECODE_EVENTS(f"[{self._text[self._at : end + 1]}]")
            except (ValueError, RecursionError):
                continue
            self._at = end + 1
            return events
        self._one_by_one_to = len(self._text)
        return None

    def _is_next(self, character: str) -> bool:
        """Steps over that character, if it is the next."""
        self._skip_space()
        if self._text[self._at] != character:
            return False
        self._at += 1
        return True

    def _expect(self, character: str) -> None:
        if not self._is_next(character):
            raise TraceError(f"{character} was expected")

    def _skip_space(self) -> None:
        """Moves to the next character that means something; raises TraceError if there is none."""
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found is not None else self._at
            if self._at < len(self._text):
                return
            if not self._read_on():
                raise TraceError("the text breaks off")

    def _value(self) -> object:
        self._skip_space()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                value, end, fault = None, len(self._text), str(error)
            else:
                fault = ""
            if not fault and end < len(self._text):  # a number at the very end may go on
                self._at = end
                return value
            if len(self._text) - self._at > _LONGEST_VALUE or not self._read_on():
                raise TraceError(fault or "the text breaks off")

    def _read_on(self) -> bool:
        """Reads as much again as is left of the text, a block at least."""
        left = self._text[self._at :]
        parts, wanted = [left], max(1, len(left))
        for text in self._texts:
            parts.append(text)
            wanted -= len(text)
            if wanted <= 0:
                break
        self._text, self._at, self._one_by_one_to = "".join(parts), 0, 0
        return len(self._text) > len(left)


def _event(members: Mapping[str, object]) -> Event:
    known = {name: members[name] for name in Event.__struct_fields__ if name in members}
    if "args" in known:
        known["args"] = msgspec.Raw(_packed(known["args"]))
    return Event(**known)  # type: ignore[arg-type]


def _packed(value: object) -> bytes:
    """A value in JSON; nothing if it nests nearly as deep as can be read."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b""


def _texts(blocks: Iterator[bytes]) -> Iterator[str]:
    """The blocks unpacked and decoded, none of them empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    first = next(blocks, b"")
    chain = _unpacked(first, blocks) if first.startswith(GZIP_MAGIC) else _with_first(first, blocks)
    for block in chain:
        if text := decoder.decode(block):
            yield text


def _with_first(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from blocks


def _unpacked(first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Raises TraceError if the packed data are damaged; memory is bounded however well they are packed."""
    unpack = zlib.decompressobj(wbits=31)
    for block in _with_first(first, blocks):
        packed = block
        while packed:
            try:
                yield unpack.decompress(packed, _BLOCK)
            except zlib.error as error:
                raise TraceError(str(error)) from error
            packed = unpack.unconsumed_tail


def text_of(value: object, most: int) -> str:
    """A text that can be sent, so long at most; "" if it is none. Halves of characters (`\\ud800`) become "?"."""
    return value[:most].encode(errors="replace").decode() if isinstance(value, str) else ""


def number_of(value: object, most: int = 2**63 - 1) -> int | None:
    """A number from 0 to `most`; None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most else None


def first_text(data: bytes, most: int) -> bytes:
    """The beginning of a trace that may be packed, for looking at it; empty if it is damaged."""
    if not data.startswith(GZIP_MAGIC):
        return data[:most]
    try:
        return zlib.decompressobj(wbits=31).decompress(data[: 1 << 16], most)
    except zlib.error:
        return b""
