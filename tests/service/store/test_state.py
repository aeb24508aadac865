"""A machine that is restored from its snapshot is the machine that it was; what is no snapshot of it is refused."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import pickle
import sys
from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import partial
from types import ModuleType
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_service.columns.table import Table
from ncclscope_service.store import state
from ncclscope_service.store.state import parts_of, restore, snapshot
from ncclscope_wire.errors import OtherVersionError, StateError

_ROW: Final = np.dtype([("number", "<i8"), ("small", "<u1"), ("rate", "<f4")])


class _Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class _Place(NamedTuple):
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class _Key:
    name: str
    number: int


@dataclass(slots=True)
class _Inner:
    value: object = None
    by_call: dict[int, set[int]] = field(default_factory=lambda: defaultdict[int, set[int]](set))


class _Machine:
    """Holds a value, and something twice."""

    def __init__(self, value: object = None) -> None:
        self.value = value
        self.inner = _Inner()
        self.again = self.inner

    def double(self, number: int) -> int:
        """A method that may be held."""
        return 2 * number


def _sum(one: int, other: int) -> int:
    return one + other


@pytest.fixture(autouse=True)
def own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These classes count as ours."""
    monkeypatch.setattr(state, "_OURS", ("ncclscope_", __name__))
    state.known_to.cache_clear()


def _restored(machine: _Machine) -> _Machine:
    return restore(snapshot(machine), _Machine)


_PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(_Colour)
    | st.builds(_Place, st.integers(), st.integers())
    | st.builds(_Key, st.text(max_size=3), st.integers(0, 9))
)
_VALUES = st.recursive(
    _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_PLAIN, inner, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=4))
        | st.frozensets(_PLAIN, max_size=3)
        | st.sets(_PLAIN, max_size=3)
    ),
    max_leaves=12,
)


@given(_VALUES)
def test_values_come_back_as_they_were(value: object) -> None:
    restored = _restored(_Machine(value)).value
    assert restored == value
    assert type(restored) is type(value)


def test_functions_and_methods_that_have_a_name_come_back() -> None:
    machine = _Machine()
    machine.value = [machine.double, partial(_sum, 3), _sum, defaultdict(list[int])]
    restored = _restored(machine)
    assert isinstance(restored.value, list)
    double, three_more, total, lists = restored.value
    assert (double(4), three_more(4), total(1, 2), lists["new"]) == (8, 7, 3, [])
    assert double.__self__ is restored


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint64).reshape(2, 3),
        np.zeros((0, 4), np.int32),
        np.array([np.nan, np.inf]),
        np.array([(1, 2, 0.5), (2**62, 255, -1)], _ROW),
        np.array([(1, 2, 0.5), (3, 4, 5)], _ROW)[["number", "rate"]],
        np.array([True, False]),
        np.int64(7),
        np.float32(0.1),
    ],
)
def test_arrays_and_numbers_of_numpy_keep_type_and_shape(array: np.ndarray[tuple[int, ...], np.dtype[np.void]]) -> None:
    restored = _restored(_Machine(array)).value
    assert isinstance(restored, np.ndarray | np.generic)
    assert restored.dtype.names == array.dtype.names
    assert restored.shape == array.shape
    np.testing.assert_array_equal(restored, array)
    if isinstance(restored, np.ndarray):
        assert restored.flags.writeable


def test_room_to_grow_is_not_kept() -> None:
    table = Table(_ROW)
    table.append(np.zeros(3000, _ROW))
    table.drop_before(2990)
    data = snapshot(_Machine(table))
    assert len(data) < 3000
    restored = restore(data, _Machine).value
    assert isinstance(restored, Table)
    assert (restored.first, restored.next_id) == (2990, 3000)


def test_large_arrays_are_not_copied() -> None:
    large = np.arange(10_000)
    *_, part = parts_of(_Machine(large))
    large[0] = 7
    assert np.frombuffer(part, large.dtype)[0] == 7


@pytest.mark.parametrize("value", [io.BytesIO(), lambda: 1, print, os.remove])
def test_what_cannot_be_kept_is_named_with_what_holds_it(value: object) -> None:
    machine = _Machine()
    machine.inner.value = [value]
    with pytest.raises(StateError, match=r"a .+ cannot be kept \(written after or within a _Inner\)"):
        snapshot(machine)


@pytest.mark.parametrize("text", ["", "i4", "|O", "(9", "2:i", "i4,i4", "(999999,999999)<i8", "<i8" * 9, "<M8[((]"])
def test_a_type_of_numbers_that_no_state_has_is_refused(text: str) -> None:
    for description in (text, (("column", text),)):
        with pytest.raises(StateError, match="where a type of numbers should be"):
            restore(_hostile(_Call(state._dtype, (), description)), _Machine)  # pyright: ignore[reportPrivateUsage]


@dataclass
class _Call:
    """What a pickle calls."""

    function: object
    arguments: tuple[object, ...]

    def __init__(self, function: object, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def _hostile(value: object) -> bytes:
    """Any pickle, as a state whose digest agrees."""
    return _with_body(pickle.dumps(value, 5))


def _with_body(body: bytes) -> bytes:
    digest = hashlib.blake2b(body, digest_size=16).digest()
    header = msgspec.msgpack.encode(("ncclscope state", 4, f"{__name__}:_Machine", digest, [len(body)]))
    return len(header).to_bytes(8, "big") + header + body


@pytest.mark.parametrize(
    "call",
    [
        _Call(os.remove, "state"),
        _Call(eval, "1"),
        _Call(getattr, _Machine, "double"),
        _Call(__import__, "os"),
        _Call(snapshot, 1),
        _Call(partial, os.remove, "state"),
        _Call(np.frombuffer, b"x"),
    ],
    ids=lambda call: getattr(call.function, "__name__", ""),
)
def test_a_pickle_calls_nothing_but_what_a_state_needs(call: _Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_OURS", (__name__,))
    state.known_to.cache_clear()
    with pytest.raises(OtherVersionError, match="which this program does not know"):
        restore(_hostile(call), _Machine)


class _Renamed:
    """Builds of one program: a class, an attribute and a column are called otherwise in the later ones."""

    @staticmethod
    def before() -> dict[str, object]:
        """The names of the first build."""

        @dataclass(frozen=True, slots=True)
        class Heard:
            index: int

        class Ears:
            def __init__(self) -> None:
                self.told: object = [Heard(1), Heard(2)]
                self.rows = np.zeros(3, _HEARD)
                self.rows["told_ns"] = [4, 5, 6]

        return {"Heard": Heard, "Ears": Ears, "_HEARD": _HEARD}

    @staticmethod
    def after(*, has_default: bool = True) -> dict[str, object]:
        """Those of the second one, which also knows one thing more of each."""

        @dataclass(frozen=True, slots=True)
        class Observed:
            number: int
            source: str = "none"

        class Receiver:
            limit = 8

            def __init__(self) -> None:
                self.observed: object = None
                self.rows: object = None
                self.limit = 9

        if not has_default:
            del Receiver.limit
        return {"Observed": Observed, "Receiver": Receiver, "_OBSERVED": _OBSERVED}


_HEARD: Final = np.dtype([("told_ns", "<i8")])
_OBSERVED: Final = np.dtype([("observed_ns", "<i8")])
_BEFORE, _TODAY = "earlier_build", "later_build"
_NEW_NAMES = {
    _BEFORE: _TODAY,
    f"{_TODAY}:Ears": f"{_TODAY}:Receiver",
    f"{_TODAY}:Receiver.told": "observed",
    f"{_TODAY}:Heard": f"{_TODAY}:Observed",
    f"{_TODAY}:Observed.index": "number",
    f"{_TODAY}:_HEARD": f"{_TODAY}:_OBSERVED",
    f"{_TODAY}:_OBSERVED.told_ns": "observed_ns",
}


def _build(monkeypatch: pytest.MonkeyPatch, name: str, contents: dict[str, object]) -> ModuleType:
    """A module with these contents, in the place of those of other builds."""
    module = ModuleType(name)
    for known, value in contents.items():
        setattr(module, known, value)
        if isinstance(value, type):
            value.__module__, value.__qualname__ = name, known
    module.__annotations__ = dict.fromkeys(contents, Final)
    for other in (_BEFORE, _TODAY):
        monkeypatch.delitem(sys.modules, other, raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(state, "_OURS", ("ncclscope_", "earlier_", "later_"))
    state.known_to.cache_clear()
    state.declared_by.cache_clear()
    return module


def test_a_state_survives_new_names_of_modules_classes_attributes_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _build(monkeypatch, _BEFORE, _Renamed.before())
    data = snapshot(before.Ears())
    today = _build(monkeypatch, _TODAY, _Renamed.after())
    with pytest.raises(StateError, match="is of earlier_build:Ears, not of later_build:Receiver"):
        restore(data, today.Receiver)
    monkeypatch.setattr(state, "RENAMED", _NEW_NAMES)
    restored = restore(data, today.Receiver)
    assert restored.observed == [today.Observed(1), today.Observed(2)]
    assert restored.observed[0].source == "none"
    assert restored.rows["observed_ns"].tolist() == [4, 5, 6]
    assert restored.limit == 8


@pytest.mark.parametrize(
    ("forgotten", "why"),
    [
        (f"{_TODAY}:Receiver.told", "Receiver has no told any more"),
        (f"{_TODAY}:Observed.index", "Observed has no index any more"),
        (f"{_TODAY}:Heard", "holds a earlier_build:Heard, which this program does not know"),
        (f"{_TODAY}:_OBSERVED.told_ns", "the columns of later_build:_OBSERVED have changed"),
        ("", "Receiver has a new limit, without a default"),
    ],
)
def test_a_new_name_that_nobody_maps_refuses_the_state(
    forgotten: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = snapshot(_build(monkeypatch, _BEFORE, _Renamed.before()).Ears())
    today = _build(monkeypatch, _TODAY, _Renamed.after(has_default=bool(forgotten)))
    monkeypatch.setattr(state, "RENAMED", {was: now for was, now in _NEW_NAMES.items() if was != forgotten})
    with pytest.raises(OtherVersionError, match=why):
        restore(data, today.Receiver)


def test_a_class_that_is_not_ours_is_never_built() -> None:
    class Foreign(Enum):
        ONE = 1

    with pytest.raises(StateError, match="cannot be kept"):
        snapshot(_Machine(Foreign.ONE))


def test_a_snapshot_of_another_machine_is_refused() -> None:
    with pytest.raises(StateError, match=r"is of .*_Machine, not of .*_Inner"):
        restore(snapshot(_Machine()), _Inner)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damage_is_told(place: int, change: int) -> None:
    data = bytearray(snapshot(_Machine({"a": [1, 2, 3]})))
    data[place % len(data)] ^= change
    with pytest.raises(StateError):
        restore(bytes(data), _Machine)


def test_the_garbage_collector_is_left_no_buffers_of_a_state() -> None:
    """It clears views of memory that others still read, and the process ends in a segmentation fault."""
    machine = _Machine(np.arange(10_000))
    gc.collect()
    gc.disable()
    try:
        pieces = parts_of(machine)
        assert len(pieces) > 3
        del pieces
        left = [each for each in gc.get_objects() if isinstance(each, pickle.Pickler)]
    finally:
        gc.enable()
    assert not left
