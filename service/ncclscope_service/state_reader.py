"""The nodes of a snapshot to objects (`state.py`)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.state_classes import fingerprint_of, is_frozen, name_of
from ncclscope_service.state_graph import BUILTINS, Tag
from ncclscope_wire.errors import OtherVersionError, StateError

_Value = TypeVar("_Value")
_Rest = list[Any]
"""What follows the tag of a node: a foreign format, of which nothing is known before it is looked at."""

_PLAIN_DTYPE: Final = re.compile(r"[<>|=][biufcSUVmM][0-9]{1,9}(?:\[[0-9A-Za-z]{1,8}\])?", re.ASCII)
"""What numpy writes of the type of a column. Of any other text it may make a program's syntax tree, or a huge shape."""

_READ_LIKE_NEW: Final = (Tag.ARRAY, Tag.DEFAULTDICT, Tag.FUNCTION)


class Reader:
    """Reads the nodes of one snapshot.

    `like` is, throughout, what a new machine has in the place of what is read; None where that is not known. An
    object there takes the state that is read; functions come from there, and the columns of tables must be as there.
    """

    def __init__(
        self,
        allowed: Mapping[str, type],
        classes: Sequence[tuple[str, str, list[str]]],
        outside: Sequence[object],
        arrays: Sequence[memoryview],
    ) -> None:
        self._allowed = allowed
        self._outside = outside
        self._arrays = arrays
        self._known: list[object] = []
        self._classes = [self._checked(name, fingerprint) for name, fingerprint, _ in classes]
        self._attributes = [attributes for _, _, attributes in classes]
        self._read: dict[int, Callable[[_Rest, object], object]] = {
            Tag.KNOWN: lambda rest, like: self._known[rest[0]],
            Tag.OUTSIDE: lambda rest, like: self._outside[rest[0]],
            Tag.TUPLE: lambda rest, like: tuple(self._values(rest[0])),
            Tag.FROZENSET: lambda rest, like: frozenset(self._values(rest[0])),
            Tag.SCALAR: lambda rest, like: np.frombuffer(rest[1], _dtype(rest[0]))[0],
            Tag.DTYPE: lambda rest, like: _with_same_columns(_dtype(rest[0]), like),
            Tag.LARGE_INT: lambda rest, like: int(rest[0]),
            Tag.CLASS: lambda rest, like: self._named(rest[0]),
            Tag.NAMED_TUPLE: lambda rest, like: self._made(rest[0], tuple, self._values(rest[1])),
            Tag.ENUM: lambda rest, like: self._made(rest[0], Enum, [self.value(rest[1], None)]),
            Tag.FUNCTION: _own_function,
            Tag.LIST: self._list,
            Tag.SET: self._set,
            Tag.DEQUE: self._deque,
            Tag.DICT: self._dict,
            Tag.COUNTER: self._counter,
            Tag.DEFAULTDICT: self._defaultdict,
            Tag.ARRAY: self._array,
            Tag.OBJECT: self._object,
        }

    def value(self, node: object, like: object) -> object:
        """The value of a node."""
        if not isinstance(node, list):
            return node
        known: list[Any] = node
        return self._read[known[0]](known[1:], like)

    # What has an identity is known before what it holds is read, since that may refer to it.

    def _list(self, rest: _Rest, like: object) -> object:
        del like
        items = self._now_known(list[object]())
        items.extend(self._values(rest[0]))
        return items

    def _set(self, rest: _Rest, like: object) -> object:
        del like
        members = self._now_known(set[object]())
        members.update(self._values(rest[0]))
        return members

    def _deque(self, rest: _Rest, like: object) -> object:
        del like
        items = self._now_known(deque[object](maxlen=rest[1]))
        items.extend(self._values(rest[0]))
        return items

    def _dict(self, rest: _Rest, like: object) -> object:
        del like
        entries = self._now_known(dict[object, object]())
        entries.update(self._entries(rest))
        return entries

    def _counter(self, rest: _Rest, like: object) -> object:
        del like
        counts = self._now_known(Counter[object]())
        counts.update(self._entries(rest))  # of a mapping, the counts are added to none
        return counts

    def _defaultdict(self, rest: _Rest, like: object) -> object:
        entries = self._now_known(defaultdict[object, object]())
        entries.update(self._entries(rest))
        factory: Any = self.value(rest[2], like.default_factory if isinstance(like, defaultdict) else None)
        entries.default_factory = factory
        return entries

    def _array(self, rest: _Rest, like: object) -> object:
        dtype = _dtype(rest[0])
        if isinstance(like, np.ndarray):
            _with_same_columns(dtype, like.dtype)
        data = self._arrays[rest[2]] if isinstance(rest[2], int) else rest[2]
        array: NDArray[np.generic] = np.frombuffer(data, dtype).reshape(rest[1]).copy()
        return self._now_known(array)

    def _object(self, rest: _Rest, like: object) -> object:
        kind = self._classes[rest[0]]
        is_alike = type(like) is kind
        # Frozen records are made anew: a new machine's may be a constant of the program.
        made = self._now_known(like if is_alike and not is_frozen(kind) else object.__new__(kind))
        for name, node in zip(self._attributes[rest[0]], rest[1], strict=True):
            model = getattr(like, name, None) if is_alike else _default(kind, name, node)
            object.__setattr__(made, name, self.value(node, model))
        return made

    def _now_known(self, value: _Value) -> _Value:
        self._known.append(value)
        return value

    def _values(self, nodes: Sequence[Any]) -> list[object]:
        return [self.value(node, None) for node in nodes]

    def _entries(self, rest: _Rest) -> dict[Any, Any]:
        keys, values = self._values(rest[0]), self._values(rest[1])
        return dict(zip(keys, values, strict=True))

    def _made(self, number: int, base: type, values: Sequence[object]) -> object:
        kind = self._classes[number]
        if not issubclass(kind, base):
            raise StateError(f"the snapshot makes of {name_of(kind)} what it is not")
        made: object = kind(*values)
        return made

    def _named(self, name: str) -> type:
        kind = BUILTINS.get(name) or self._allowed.get(name)
        if kind is None:
            raise OtherVersionError(f"the snapshot holds a {name}, which this program does not know")
        return kind

    def _checked(self, name: str, fingerprint: str) -> type:
        kind = self._named(name)
        if fingerprint != fingerprint_of(kind):
            raise OtherVersionError(f"the snapshot is of another version: {name} has changed since")
        return kind


def _dtype(description: str | list[Any]) -> np.dtype[Any]:
    if isinstance(description, str):
        if not _PLAIN_DTYPE.fullmatch(description):
            raise StateError(f"the snapshot has {description!r} where a type of numbers should be")
        return np.dtype(description)
    return np.dtype([(name, _dtype(column)) for name, column in description])


def _with_same_columns(dtype: np.dtype[Any], like: object) -> np.dtype[Any]:
    if isinstance(like, np.dtype) and like.names is not None and dtype != like:
        raise OtherVersionError("the snapshot is of another version: the columns of a table have changed since")
    return dtype


def _own_function(rest: _Rest, like: object) -> object:
    del rest
    if not callable(like):
        raise StateError("the snapshot lacks a function that a new machine does not have either")
    return like


def _default(kind: type, name: str, node: object) -> object:
    """What a new object of a class has in an attribute, where that is needed to read its node."""
    if not isinstance(node, list) or not is_dataclass(kind) or node[0] not in _READ_LIKE_NEW:
        return None
    for each in fields(kind):
        if each.name == name and each.default_factory is not MISSING:
            made: object = each.default_factory()
            return made
    return None
