"""A machine's whole state to bytes and back, so that it goes on after a restart as if nothing had happened.

A machine is an object of one of our classes; its state is what its attributes hold, as far down as they go: other
such objects (each once, however often it is referred to), containers, numbers, strings, enumerations and numpy arrays.
Functions are not kept: where one is an attribute, the machine that is restored into brings its own.

The bytes are msgpack: a format version, the machine's class, a digest, a graph in which every class is named with a
fingerprint of its fields, and behind it the large arrays. A snapshot of other classes, a damaged or a cut one is
refused, and no class is built but those of `state_classes`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from ncclscope_service.state_classes import classes_of, name_of
from ncclscope_service.state_reader import Reader
from ncclscope_service.state_writer import Writer
from ncclscope_wire.errors import OtherVersionError, StateError

_Machine = TypeVar("_Machine")
_Classes = list[tuple[str, str, list[str]]]
Part: TypeAlias = bytes | memoryview

_MAGIC: Final = "ncclscope state"
_FORMAT: Final = 2
_LENGTH_BYTES: Final = 8
"""Of the header, before it."""


def parts_of(machine: object, *, outside: Sequence[object] = ()) -> list[Part]:
    """The state of a machine as bytes, in pieces that follow each other; of what it holds of `outside` (a store, say)
    only the position.

    Large arrays are not copied: the pieces are right until the machine goes on.

    Raises StateError where the machine holds what cannot be kept, with the way to it.
    """
    kind = type(machine)
    writer = Writer(classes_of(kind.__module__), outside)
    root = writer.node(machine, kind.__name__)
    body = msgspec.msgpack.encode((writer.classes, root))
    arrays = writer.arrays
    digest = _digest([body, *arrays])
    sizes = [len(body), *(len(array) for array in arrays)]
    header = msgspec.msgpack.encode((_MAGIC, _FORMAT, name_of(kind), digest, sizes))
    return [len(header).to_bytes(_LENGTH_BYTES, "big"), header, body, *arrays]


def snapshot(machine: object, *, outside: Sequence[object] = ()) -> bytes:
    """The same in one piece. Equal states give equal bytes."""
    return b"".join(parts_of(machine, outside=outside))


def restore(data: Part, into: _Machine, *, outside: Sequence[object] = ()) -> _Machine:
    """Gives a machine, newly made as the one that the snapshot is of, that machine's state; `outside` as then.

    Raises StateError where the snapshot is damaged, of another class or of another version of the classes in it; what
    was restored into is then half of each, and must be thrown away.
    """
    kind = type(into)
    classes, root, arrays = _opened(memoryview(data), name_of(kind))
    try:
        restored = Reader(classes_of(kind.__module__), classes, outside, arrays).value(root, into)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise StateError(f"the snapshot holds what no {kind.__name__} does: {error}") from error
    if restored is not into:
        raise StateError(f"the snapshot is not of a {kind.__name__}")
    return into


def _opened(data: memoryview, name: str) -> tuple[_Classes, Any, list[memoryview]]:
    """The classes, the root and the large arrays of a snapshot of that class of machine."""
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    try:
        header = msgspec.msgpack.decode(data[_LENGTH_BYTES:begin], type=tuple[str, int, str, bytes, list[int]])
    except (msgspec.DecodeError, ValueError) as error:
        raise StateError(f"this is no snapshot, or not a whole one: {error}") from error
    magic, version, kind, digest, sizes = header
    if magic != _MAGIC:
        raise StateError("this is no snapshot")
    if version != _FORMAT:
        raise OtherVersionError(f"the snapshot has format {version}, this program reads {_FORMAT}")
    if kind != name:
        raise StateError(f"the snapshot is of {kind}, not of {name}")
    if not sizes or min(sizes) < 0 or begin + sum(sizes) != len(data):
        raise StateError("the snapshot is damaged: it has another length than it says")
    if digest != _digest([data[begin:]]):
        raise StateError("the snapshot is damaged: its digest does not agree")
    parts: list[memoryview] = []
    for size in sizes:
        parts.append(data[begin : begin + size])
        begin += size
    try:
        classes, root = msgspec.msgpack.decode(parts[0], type=tuple[_Classes, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StateError(f"the snapshot is damaged: {error}") from error
    return classes, root, parts[1:]


def _digest(parts: Iterable[Part]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()
