"""A machine's whole state to bytes and back, so that it goes on after a restart as if nothing had happened.

A machine is an object of one of our classes; its state is what its attributes hold, as far down as they go: other
such objects (each once, however often it is referred to), containers, numbers, strings, enumerations and numpy arrays.
Functions are not kept: where one is an attribute, the machine that is restored into brings its own.

The bytes are msgpack: a format version, the machine's class, a digest, and a graph in which every class is named with
a fingerprint of its fields. A snapshot of other classes, a damaged or a cut one is refused, and no class is built but
those of `state_classes`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from ncclscope_service.state_classes import classes_of, name_of
from ncclscope_service.state_reader import Reader
from ncclscope_service.state_writer import Writer
from ncclscope_wire.errors import StateError

_Machine = TypeVar("_Machine")
_Classes = list[tuple[str, str, list[str]]]

_MAGIC: Final = "ncclscope state"
_FORMAT: Final = 1


def snapshot(machine: object, *, outside: Sequence[object] = ()) -> bytes:
    """The state of a machine; what it holds of `outside` (a store, say) is only referred to, by position.

    Equal states give equal bytes. Raises StateError where the machine holds what cannot be kept, with the way to it.
    """
    kind = type(machine)
    writer = Writer(classes_of(kind.__module__), outside)
    root = writer.node(machine, kind.__name__)
    body = msgspec.msgpack.encode((writer.classes, root))
    return msgspec.msgpack.encode((_MAGIC, _FORMAT, name_of(kind), _digest(body), body))


def restore(data: bytes, into: _Machine, *, outside: Sequence[object] = ()) -> _Machine:
    """Gives a machine, newly made as the one that the snapshot is of, that machine's state; `outside` as then.

    Raises StateError where the snapshot is damaged, of another class or of another version of the classes in it; what
    was restored into is then half of each, and must be thrown away.
    """
    kind = type(into)
    classes, root = _opened(data, name_of(kind))
    try:
        restored = Reader(classes_of(kind.__module__), classes, outside).value(root, into)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise StateError(f"the snapshot holds what no {kind.__name__} does: {error}") from error
    if restored is not into:
        raise StateError(f"the snapshot is not of a {kind.__name__}")
    return into


def _opened(data: bytes, name: str) -> tuple[_Classes, Any]:
    """The classes and the root of a snapshot of that class of machine."""
    try:
        magic, version, kind, digest, body = msgspec.msgpack.decode(data, type=tuple[str, int, str, bytes, bytes])
    except (msgspec.DecodeError, ValueError) as error:
        raise StateError(f"this is no snapshot, or not a whole one: {error}") from error
    if magic != _MAGIC:
        raise StateError("this is no snapshot")
    if version != _FORMAT:
        raise StateError(f"the snapshot has format {version}, this program reads {_FORMAT}")
    if kind != name:
        raise StateError(f"the snapshot is of {kind}, not of {name}")
    if digest != _digest(body):
        raise StateError("the snapshot is damaged: its digest does not agree")
    try:
        return msgspec.msgpack.decode(body, type=tuple[_Classes, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise StateError(f"the snapshot is damaged: {error}") from error


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
