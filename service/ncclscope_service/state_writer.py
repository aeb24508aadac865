"""Objects to the nodes of a snapshot (`state.py`)."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import GenericAlias
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.state_classes import attributes_of, fingerprint_of, name_of
from ncclscope_service.state_graph import BUILTINS, Compactable, Tag
from ncclscope_wire.errors import StateError

_Write = Callable[[Any, str], list[object]]

_LARGE_BYTES: Final = 4096
"""Arrays of so much are kept beside the graph, as they are in memory."""


class Writer:
    """Makes the nodes of one snapshot. What has an identity is written once, and referred to after that."""

    def __init__(self, allowed: Mapping[str, type], outside: Sequence[object]) -> None:
        self.classes: list[tuple[str, str, list[str]]] = []
        """Name, fingerprint and attributes of each class, in order of appearance."""
        self.arrays: list[memoryview] = []
        """The bytes of each large array, in order of appearance; not copied."""
        self._allowed = allowed
        self._class_numbers: dict[type, int] = {}
        self._outside = {id(each): index for index, each in enumerate(outside)}
        self._known: dict[int, int] = {}
        self._alive: list[object] = []
        """Everything in `_known`: what is let go might give its id to another."""
        self._values: tuple[tuple[type, _Write], ...] = (
            (Enum, self._enum),
            (int, self._large_int),
            (tuple, self._tuple),
            (frozenset, self._frozenset),
            (np.generic, self._scalar),
            (np.dtype, self._dtype),
            (type, self._class),
            (GenericAlias, self._class),
        )
        self._identities: tuple[tuple[type, _Write], ...] = (
            (list, self._list),
            (set, self._set),
            (deque, self._deque),
            (Counter, self._counter),
            (defaultdict, self._defaultdict),
            (dict, self._dict),
            (np.ndarray, self._array),
            (object, self._object),
        )

    def node(self, value: object, way: str) -> object:
        """The node of a value. `way`: the way to it, for errors."""
        if value is None or type(value) in (bool, float, str, bytes):
            return value
        if type(value) is int and -(2**63) <= value < 2**64:
            return value
        for kind, write in self._values:
            if isinstance(value, kind):
                return write(value, way)
        return [Tag.FUNCTION] if callable(value) else self._once(value, way)

    def _once(self, value: object, way: str) -> list[object]:
        """The node of what has an identity: the first time itself, then a reference."""
        if id(value) in self._outside:
            return [Tag.OUTSIDE, self._outside[id(value)]]
        if id(value) in self._known:
            return [Tag.KNOWN, self._known[id(value)]]
        self._known[id(value)] = len(self._known)
        self._alive.append(value)
        return next(write for kind, write in self._identities if isinstance(value, kind))(value, way)

    def _enum(self, value: Enum, way: str) -> list[object]:
        return [Tag.ENUM, self._class_number(value, (), way), self.node(value.value, way)]

    def _large_int(self, value: int, way: str) -> list[object]:
        del way
        return [Tag.LARGE_INT, str(value)]

    def _tuple(self, value: tuple[object, ...], way: str) -> list[object]:
        if hasattr(value, "_fields"):
            return [Tag.NAMED_TUPLE, self._class_number(value, (), way), self._nodes(value, way)]
        return [Tag.TUPLE, self._nodes(value, way)]

    def _frozenset(self, value: frozenset[object], way: str) -> list[object]:
        return [Tag.FROZENSET, self._nodes(_in_order(value), way)]

    def _scalar(self, value: np.generic, way: str) -> list[object]:
        return [Tag.SCALAR, _description(value.dtype, way), value.tobytes()]

    def _dtype(self, value: np.dtype[np.generic], way: str) -> list[object]:
        return [Tag.DTYPE, _description(value, way)]

    def _class(self, kind: type | GenericAlias, way: str) -> list[object]:
        name = name_of(cast(type, kind.__origin__) if isinstance(kind, GenericAlias) else kind)
        if name not in BUILTINS and name not in self._allowed:
            raise StateError(f"{way} is the class {name}, which a snapshot cannot keep")
        return [Tag.CLASS, name]

    def _list(self, value: list[object], way: str) -> list[object]:
        return [Tag.LIST, self._nodes(value, way)]

    def _set(self, value: set[object], way: str) -> list[object]:
        return [Tag.SET, self._nodes(_in_order(value), way)]

    def _deque(self, value: deque[object], way: str) -> list[object]:
        return [Tag.DEQUE, self._nodes(value, way), value.maxlen]

    def _counter(self, value: Counter[object], way: str) -> list[object]:
        return [Tag.COUNTER, self._nodes(value, way), self._nodes(value.values(), way)]

    def _defaultdict(self, value: defaultdict[object, object], way: str) -> list[object]:
        keys, values = self._nodes(value, way), self._nodes(value.values(), way)
        return [Tag.DEFAULTDICT, keys, values, self.node(value.default_factory, way)]

    def _dict(self, value: dict[object, object], way: str) -> list[object]:
        return [Tag.DICT, self._nodes(value, way), self._nodes(value.values(), way)]

    def _array(self, value: NDArray[np.generic], way: str) -> list[object]:
        packed = value.dtype
        if packed.names is not None:
            packed = np.dtype([(name, kind) for name, kind in _columns(packed)])
        description, shape = _description(packed, way), list(value.shape)
        whole = np.ascontiguousarray(value if packed == value.dtype else value.astype(packed))
        if whole.nbytes < _LARGE_BYTES:
            return [Tag.ARRAY, description, shape, whole.tobytes()]
        self.arrays.append(whole.reshape(-1).view(np.uint8).data)
        return [Tag.ARRAY, description, shape, len(self.arrays) - 1]

    def _object(self, value: object, way: str) -> list[object]:
        kept = cast(Compactable, value).compacted() if _is_compactable(type(value)) else value
        self._alive.append(kept)
        names = attributes_of(kept)
        number = self._class_number(value, names, way)
        return [Tag.OBJECT, number, [self.node(getattr(kept, name), f"{way}.{name}") for name in names]]

    def _class_number(self, value: object, attributes: tuple[str, ...], way: str) -> int:
        kind, names = type(value), list(attributes)
        if kind not in self._class_numbers:
            if self._allowed.get(name_of(kind)) is not kind:
                raise StateError(f"{way} is a {name_of(kind)}, which a snapshot cannot keep")
            self._class_numbers[kind] = len(self.classes)
            self.classes.append((name_of(kind), fingerprint_of(kind), names))
        elif self.classes[self._class_numbers[kind]][2] != names:
            raise StateError(f"{way} has other attributes than another {kind.__name__}")
        return self._class_numbers[kind]

    def _nodes(self, values: Iterable[object], way: str) -> list[object]:
        return [self.node(value, f"{way}[]") for value in values]


def _is_compactable(kind: type) -> bool:
    return hasattr(kind, "compacted")


def _in_order(members: Iterable[object]) -> list[object]:
    """Members by value, where they have an order, so that equal states give equal bytes."""
    try:
        return sorted(cast(Iterable[Any], members))
    except TypeError:
        return list(members)


def _columns(dtype: np.dtype[np.generic]) -> list[tuple[str, np.dtype[np.generic]]]:
    """Name and dtype of each column, in order."""
    return [(name, cast("np.dtype[np.void]", dtype)[name]) for name in dtype.names or ()]


def _description(dtype: np.dtype[np.generic], way: str) -> object:
    """A dtype as text, or as names and texts of its columns."""
    if dtype.hasobject or dtype.subdtype is not None:
        raise StateError(f"{way} holds {dtype}, which a snapshot cannot keep")
    if dtype.names is None:
        return dtype.str
    return [[name, _description(column, way)] for name, column in _columns(dtype)]
