"""The whole state of a service as bytes and back: standard pickle, restricted to our own classes.

The state of an object is what its attributes hold, as far down as they go: other objects of our classes, containers,
numbers, strings, enumerations, numpy arrays, and functions that have a name. The bytes are a header (format version,
class, digest, sizes), a pickle of protocol 5, and behind it the large arrays as they are in memory.

An upgrade keeps the state. Objects are written by the names of their classes, attributes and columns; `RENAMED` maps
names of earlier builds to those of today, and an attribute that a class has gained since takes its default. Any other
difference refuses the state as that of another version, and the service applies its journal instead
(`keep/persistence.py`). `tests/service/store/state_names.txt` lists all names, so that a test fails for whoever renames
one without a word here. The alternative, a table format with a schema by hand, would need one for each of the two
hundred classes of aligners, clocks and detectors whose attributes are state too.

Reading runs no foreign code: a pickle can name only the builders of this module, a few containers, and classes and
functions of the modules that the state's class refers to, all of which decide and do not act.
"""

from __future__ import annotations

import dis
import hashlib
import io
import pickle
import re
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from types import FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.errors import OtherVersionError, StateError

Part: TypeAlias = bytes | memoryview
_Restored = TypeVar("_Restored")
_Dtype: TypeAlias = "np.dtype[Any]"

RENAMED: Final[dict[str, str]] = {
    "ncclscope_service.columns.table:Table._used": "_written",  # in a state both were the same
    "ncclscope_service.detect.bandwidth:BandwidthDrop._unlocated_since": "_slow_since",
    "ncclscope_service.intake.name_limits": "ncclscope_service.intake.limits",
    "ncclscope_service.intake.content_limits": "ncclscope_service.intake.limits",
    "ncclscope_service.rollup.window:BucketSums": "ncclscope_service.columns.buckets:BucketSums",
    "ncclscope_service.rollup.window:BucketSpans": "ncclscope_service.columns.buckets:BucketSpans",
}
"""Names in states of earlier builds, and what they are called today:

"package.module": "package.other"                               a module that moved
"package.module:Class": "package.module:Other"                  a class, a function or a row type
"package.module:Class.attribute": "other"                       an attribute or a method, or a column of a row type, by
                                                                today's name of its class
"""

_MAGIC: Final = "ncclscope state"
_FORMAT: Final = 4
"""To be raised if what an attribute means changes and its name does not."""
_LENGTH_BYTES: Final = 8
"""Size of the number before the header that says how long it is."""
_LARGE_BYTES: Final = 4096
"""Arrays of that size lie behind the pickle."""
_OURS: Final = "ncclscope_"
_PLAIN_DTYPE: Final = re.compile(r"[<>|=][biufcSUVmM][0-9]{1,9}(?:\[[0-9A-Za-z]{1,8}\])?", re.ASCII)
"""Type of a column as numpy writes it. From any other text it may make a huge shape."""
_CONTAINERS: Final[dict[tuple[str, str], Any]] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (bool, int, float, str, bytes, list, dict, set, tuple, deque, Counter, defaultdict, partial)
}


def parts_of(value: object) -> list[Part]:
    """The state of an object as bytes, in pieces that follow each other.

    Large arrays are not copied: the pieces are right until the object changes.

    Raises StateError if it holds what cannot be kept.
    """
    kind, body, arrays = type(value), io.BytesIO(), list[memoryview]()
    try:
        _Pickler(body, known_to(kind.__module__), arrays).dump(value)
    except pickle.PicklingError as error:
        raise StateError(f"the state of a {kind.__name__} cannot be kept: {error}") from error
    pieces: list[Part] = [body.getbuffer(), *arrays]
    header = msgspec.msgpack.encode((_MAGIC, _FORMAT, name_of(kind), _digest(pieces), [len(each) for each in pieces]))
    return [len(header).to_bytes(_LENGTH_BYTES, "big"), header, *pieces]


def snapshot(value: object) -> bytes:
    """The state of an object as bytes, in one piece."""
    return b"".join(parts_of(value))


def restore(data: Part, kind: type[_Restored]) -> _Restored:
    """The object of this class that the state is of.

    Raises StateError if the state is damaged or of another class, OtherVersionError if an incompatible build wrote it.
    """
    body, arrays = _opened(memoryview(data), kind)
    try:
        restored: object = _Unpickler(body, known_to(kind.__module__), arrays).load()
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise StateError(f"the state holds what no {kind.__name__} does: {error}") from error
    except (OverflowError, RecursionError, MemoryError) as error:
        raise StateError(f"the state cannot be read: {type(error).__name__} {error}") from error
    if type(restored) is not kind:
        raise StateError(f"the state is not of a {kind.__name__}")
    return restored


def name_of(kind: type | FunctionType) -> str:
    """How a state names a class or a function."""
    return f"{kind.__module__}:{kind.__qualname__}"


@lru_cache(maxsize=4096)
def declared_by(kind: type) -> tuple[str, ...]:
    """The attributes that every object of a class has: fields, or what `__init__` sets."""
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    if issubclass(kind, tuple):
        return cast("tuple[str, ...]", getattr(kind, "_fields", ()))
    inits = [vars(each)["__init__"] for each in kind.__mro__ if isinstance(vars(each).get("__init__"), FunctionType)]
    steps = [step for init in inits for step in dis.get_instructions(init)]
    return tuple(sorted({str(step.argval) for step in steps if step.opname == "STORE_ATTR"}))


def _opened(data: memoryview, kind: type) -> tuple[memoryview, list[memoryview]]:
    """The pickle and the large arrays of a state of that class."""
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    try:
        header = msgspec.msgpack.decode(data[_LENGTH_BYTES:begin], type=tuple[str, int, str, bytes, list[int]])
    except (msgspec.DecodeError, ValueError) as error:
        raise StateError(f"this is no state, or not a whole one: {error}") from error
    magic, version, name, digest, sizes = header
    if magic != _MAGIC:
        raise StateError("this is no state")
    if version != _FORMAT:
        raise OtherVersionError(f"the state has format {version}, this program reads {_FORMAT}")
    if _today(name) != name_of(kind):
        raise StateError(f"the state is of {name}, not of {name_of(kind)}")
    if not sizes or min(sizes) < 0 or begin + sum(sizes) != len(data):
        raise StateError("the state is damaged: it has another length than it says")
    if digest != _digest([data[begin:]]):
        raise StateError("the state is damaged: its digest does not agree")
    parts: list[memoryview] = []
    for size in sizes:
        parts.append(data[begin : begin + size])
        begin += size
    return parts[0], parts[1:]


def _digest(parts: Iterable[Part]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


# Names


@lru_cache(maxsize=64)
def known_to(module: str) -> Mapping[str, Any]:
    """Our classes, functions and row types that a state of a class of this module may name: those of all modules that
    it refers to, directly or through others.
    """
    found: dict[str, Any] = {}
    seen, waiting = set[str](), [module]
    while waiting:
        home = waiting.pop()
        if home in seen or not home.startswith(_OURS) or home not in sys.modules:
            continue
        seen.add(home)
        for name, value in vars(sys.modules[home]).items():
            if isinstance(value, np.dtype):
                if name in vars(sys.modules[home]).get("__annotations__", {}):  # defined there, not imported
                    found[f"{home}:{name}"] = value
                continue
            origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(origin, str):
                waiting.append(origin)
            if isinstance(value, type | FunctionType) and origin == home:
                found[name_of(value)] = value
    return found


def _today(name: str) -> str:
    """Today's name of a class, a function or a row type."""
    module, _, own = RENAMED.get(name, name).partition(":")
    name = f"{RENAMED.get(module, module)}:{own}"
    return RENAMED.get(name, name)


# Writing


class _Compactable(Protocol):
    """An object with spare memory, which its state does not hold."""

    def compacted(self) -> object:
        """An equal object without spare memory."""
        ...


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, known: Mapping[str, Any], arrays: list[memoryview]) -> None:
        super().__init__(file, 5, buffer_callback=lambda buffer: arrays.append(buffer.raw()))
        self._known = known
        self._shapes: dict[tuple[type, tuple[str, ...]], _Shape] = {}
        self._row_types = defaultdict[_Dtype, list[str]](list)
        for name, value in known.items():
            if isinstance(value, np.dtype):
                self._row_types[value].append(name)
        self._last = ""
        """The class of the object that was written last, for errors."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401  (as pickle has it)
        """How pickle takes apart what is not of one of its own types."""
        return next(parts(self, value) for kind, parts in _PARTS_OF if isinstance(value, kind))

    def named(self, value: type | FunctionType) -> object:
        """A class or a function is written by its name."""
        is_builder = value.__module__ == __name__ and value.__name__ in _BUILDERS
        is_ours = self._known.get(name_of(value)) is value
        if not is_ours and not is_builder and (value.__module__, value.__qualname__) not in _CONTAINERS:
            raise StateError(f"a {name_of(value)} cannot be kept (written after or within a {self._last})")
        return NotImplemented

    def dtype_parts(self, value: _Dtype) -> object:
        return _dtype, (tuple(self._row_types.get(value, ())), self._description(value))

    def object_parts(self, value: object) -> object:
        kind: type = type(value)
        self.named(kind)
        self._last = kind.__name__
        if isinstance(value, tuple):
            return _tuple, (self._shape(kind, declared_by(kind)), tuple(value))
        written = cast("_Compactable", value).compacted() if hasattr(kind, "compacted") else value
        names = declared_by(kind) if is_dataclass(kind) else tuple(vars(written))
        shape = self._shape(kind, names)
        return _object, (shape,), (shape, tuple([getattr(written, name) for name in names])), None, None, _fill

    def _shape(self, kind: type, names: tuple[str, ...]) -> _Shape:
        shape = self._shapes.get((kind, names))
        if shape is None:
            shape = self._shapes[kind, names] = _Shape(kind, names, {})
        return shape

    def _description(self, dtype: _Dtype) -> object:
        """A dtype as text, or as names and texts of its columns."""
        if dtype.hasobject or dtype.subdtype is not None:
            raise StateError(f"an array of {dtype} cannot be kept (written after or within a {self._last})")
        if dtype.names is None:
            return dtype.str
        return tuple((name, self._description(dtype[name])) for name in dtype.names)


@dataclass(slots=True)
class _Shape:
    """A class, and the attributes that a state has of each of its objects."""

    kind: type
    names: tuple[str, ...]
    defaults: dict[str, Callable[[], object]]
    """Of attributes that objects had not when the state was written."""


def _member_parts(value: Enum) -> tuple[object, ...]:
    return type(value), (value.value,)


def _array_parts(value: NDArray[Any]) -> tuple[object, ...]:
    packed = value.dtype
    if packed.names is not None:  # of selected columns, numpy keeps the room of the others
        packed = np.dtype([(name, packed[name]) for name in packed.names])
    whole = np.ascontiguousarray(value if packed == value.dtype else value.astype(packed))
    if whole.nbytes < _LARGE_BYTES:
        return _array, (whole.dtype, value.shape, whole.tobytes())
    return _array, (whole.dtype, value.shape, pickle.PickleBuffer(whole.reshape(-1).view(np.uint8).data))


def _as_pickle_does(pickler: _Pickler, value: object) -> object:
    del pickler, value
    return NotImplemented


_PARTS_OF: Final[tuple[tuple[type, Callable[[_Pickler, Any], object]], ...]] = (
    (_Shape, lambda _, value: (_shape, (value.kind, value.names, declared_by(value.kind)))),
    (np.ndarray, lambda _, value: _array_parts(value)),
    (np.dtype, _Pickler.dtype_parts),
    (np.generic, lambda _, value: (_scalar, (value.dtype, value.tobytes()))),
    (Enum, lambda _, value: _member_parts(value)),
    (GenericAlias, lambda _, value: (_same, (value.__origin__,))),
    (MethodType, lambda _, value: (_method, (value.__self__, value.__name__))),
    *((kind, _Pickler.named) for kind in (type, FunctionType)),
    *((kind, _as_pickle_does) for kind in (dict, list, set, frozenset, deque, partial)),
    (object, _Pickler.object_parts),
)
"""Not of the pickler: it would refer to itself, and leave the views of arrays to the garbage collector, which frees
memory in any order (the process ended in a segmentation fault)."""


# Reading: the builders


class _Unpickler(pickle.Unpickler):
    def __init__(self, body: memoryview, known: Mapping[str, Any], arrays: list[memoryview]) -> None:
        super().__init__(io.BytesIO(body), buffers=arrays)
        self._known = known

    def find_class(self, module: str, name: str) -> object:
        """The builder, container, class or function of a name; nothing else."""
        if module == __name__ and name in _BUILDERS:
            return _BUILDERS[name]
        if (module, name) in _CONTAINERS:
            return _CONTAINERS[module, name]
        found = self._known.get(_today(f"{module}:{name}"))
        if found is None or isinstance(found, np.dtype):
            raise OtherVersionError(f"the state holds a {module}:{name}, which this program does not know")
        return found


def _shape(kind: type, names: tuple[str, ...], declared: tuple[str, ...]) -> _Shape:
    """The class as it is today, with the attributes that are called otherwise and those that are new."""

    def today(name: str) -> str:
        return RENAMED.get(f"{name_of(kind)}.{name}", name)

    had, has = {today(name) for name in declared}, set(declared_by(kind))
    if gone := sorted(had - has):
        raise OtherVersionError(f"{name_of(kind)} has no {gone[0]} any more")
    defaults = {name: _default(kind, name) for name in sorted(has - had)}
    return _Shape(kind, tuple(today(name) for name in names), defaults)


def _default(kind: type, name: str) -> Callable[[], object]:
    if is_dataclass(kind):
        (field,) = (each for each in fields(kind) if each.name == name)
        if field.default_factory is not MISSING:
            return field.default_factory
        if field.default is not MISSING:
            return partial(_same, field.default)
    elif issubclass(kind, tuple):
        defaults: dict[str, object] = getattr(kind, "_field_defaults", {})
        if name in defaults:
            return partial(_same, defaults[name])
    elif hasattr(kind, name):
        return partial(_same, getattr(kind, name))
    raise OtherVersionError(f"{name_of(kind)} has a new {name}, without a default")


def _object(shape: _Shape) -> object:
    return object.__new__(shape.kind)


def _fill(made: object, state: tuple[_Shape, tuple[object, ...]]) -> None:
    shape, values = state
    if type(made) is not shape.kind:
        raise StateError("the state gives an object the attributes of another class")
    for name, value in zip(shape.names, values, strict=True):
        object.__setattr__(made, name, value)
    for name, make in shape.defaults.items():
        object.__setattr__(made, name, make())


def _tuple(shape: _Shape, values: tuple[object, ...]) -> object:
    new = {name: make() for name, make in shape.defaults.items()}
    made: object = shape.kind(**dict(zip(shape.names, values, strict=True)), **new)
    return made


def _array(dtype: _Dtype, shape: tuple[int, ...], data: bytes | memoryview) -> NDArray[Any]:
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _scalar(dtype: _Dtype, data: bytes) -> object:
    value: object = np.frombuffer(data, dtype)[0]
    return value


def _dtype(row_types: tuple[str, ...], description: object) -> _Dtype:
    """The dtype of a description; refused if a row type that had these columns has others today."""
    dtype = _described(description)
    for name in map(_today, row_types):
        if dtype.names is not None:
            dtype = np.dtype([(RENAMED.get(f"{name}.{column}", column), dtype[column]) for column in dtype.names])
        home, _, own = name.partition(":")
        if home not in sys.modules or vars(sys.modules[home]).get(own) != dtype:
            raise OtherVersionError(f"the columns of {name} have changed")
    return dtype


def _described(description: object) -> _Dtype:
    if isinstance(description, str):
        if not _PLAIN_DTYPE.fullmatch(description):
            raise StateError(f"the state has {description!r} where a type of numbers should be")
        return np.dtype(description)
    columns = cast("tuple[tuple[str, object], ...]", description)
    return np.dtype([(name, _described(column)) for name, column in columns])


def _method(owner: object, name: str) -> object:
    name = RENAMED.get(f"{name_of(type(owner))}.{name}", name)
    if not isinstance(vars(type(owner)).get(name), FunctionType):
        raise OtherVersionError(f"{name_of(type(owner))} has no method {name}")
    method: object = getattr(owner, name)
    return method


def _same(value: _Restored) -> _Restored:
    return value


_BUILDERS: Final[dict[str, Callable[..., Any]]] = {
    each.__name__: each for each in (_shape, _object, _fill, _tuple, _array, _scalar, _dtype, _method, _same)
}
