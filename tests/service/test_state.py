"""A machine that is restored from its snapshot is the machine that it was; what is no snapshot of it is refused."""

from __future__ import annotations

import io
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_service import state_classes
from ncclscope_service.state import restore, snapshot
from ncclscope_service.state_graph import Tag
from ncclscope_service.state_reader import Reader
from ncclscope_service.store import Table
from ncclscope_wire.errors import StateError

_ROW = np.dtype([("number", "<i8"), ("small", "<u1"), ("rate", "<f4")])


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
    by_call: dict[int, set[int]] = field(default_factory=lambda: defaultdict[int, set[int]](lambda: {1}))


class _Machine:
    """Holds a value, a function of its own, and something twice."""

    def __init__(self, value: object = None, function: Callable[[], str] = lambda: "own") -> None:
        self.value = value
        self.function = function
        self.inner = _Inner()
        self.again = self.inner


@pytest.fixture(autouse=True)
def own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These classes count as ours."""
    monkeypatch.setattr(state_classes, "_OURS", ("ncclscope_", __name__))
    state_classes.classes_of.cache_clear()


def _restored(machine: _Machine) -> _Machine:
    return restore(snapshot(machine), _Machine())


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


def test_a_deque_keeps_its_bound() -> None:
    restored = _restored(_Machine(deque([1, 2], maxlen=2))).value
    assert isinstance(restored, deque)
    assert restored.maxlen == 2


def test_counts_come_back_and_a_default_dictionary_goes_on_making_values() -> None:
    made = defaultdict[str, Counter[str]](Counter)
    made["a"]["b"] += 2
    restored = _restored(_Machine(made)).value
    assert restored == made
    assert isinstance(restored, defaultdict)
    assert restored["new"] == Counter()


def test_a_factory_that_is_a_function_is_that_of_a_new_machine() -> None:
    machine = _Machine()
    machine.inner.by_call[7].add(5)
    assert _restored(machine).inner.by_call == {7: {1, 5}}
    assert _restored(machine).inner.by_call[8] == {1}


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


def test_what_is_referred_to_twice_comes_back_once() -> None:
    items: list[object] = [1]
    items.append(items)
    machine = _restored(_Machine({"a": items, "b": items}))
    assert machine.inner is machine.again
    value = machine.value
    assert isinstance(value, dict)
    assert value["a"] is value["b"] is value["a"][1]


def test_functions_are_those_of_the_machine_that_is_restored_into() -> None:
    machine = _Machine(function=lambda: "old")
    assert restore(snapshot(machine), _Machine(function=lambda: "new")).function() == "new"


def test_what_lies_outside_is_referred_to_and_not_kept() -> None:
    store, other = ["large"], ["another"]
    data = snapshot(_Machine(store), outside=[store])
    assert b"large" not in data
    assert restore(data, _Machine(), outside=[other]).value is other


def test_equal_states_give_equal_bytes() -> None:
    machine = _Machine({"set": {3, 1, 2}, "names": {"b", "a"}})
    assert snapshot(_restored(machine)) == snapshot(machine)


def test_room_to_grow_is_not_kept() -> None:
    table = Table(_ROW)
    table.append(np.zeros(3000, _ROW))
    table.drop_before(2990)
    data = snapshot(_Machine(table))
    assert len(data) < 3000
    restored = restore(data, _Machine(Table(_ROW))).value
    assert isinstance(restored, Table)
    assert (restored.first, restored.next_id) == (2990, 3000)


def test_a_table_whose_columns_have_changed_is_refused() -> None:
    data = snapshot(_Machine(Table(_ROW)))
    with pytest.raises(StateError, match="columns of a table have changed"):
        restore(data, _Machine(Table(np.dtype([("number", "<i4")]))))


def test_a_class_that_has_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data, new = snapshot(_Machine()), _Machine()
    changed = make_dataclass("_Inner", [("value", "int"), ("by_call", "object")], slots=True)
    changed.__module__ = __name__
    monkeypatch.setitem(globals(), "_Inner", changed)
    state_classes.classes_of.cache_clear()
    with pytest.raises(StateError, match="_Inner has changed since"):
        restore(data, new)


def test_what_cannot_be_kept_is_named_with_the_way_to_it() -> None:
    machine = _Machine()
    machine.inner.value = [io.BytesIO()]
    with pytest.raises(StateError, match=r"_Machine\.inner\.value\[\] is a _io:BytesIO"):
        snapshot(machine)


@pytest.mark.parametrize("text", ["", "i4", "|O", "(9", "2:i", "i4,i4", "(999999,999999)<i8", "<i8" * 9, "<M8[((]"])
def test_a_type_of_numbers_that_no_snapshot_writes_is_refused(text: str) -> None:
    for node in ([Tag.DTYPE, text], [Tag.DTYPE, [["column", text]]], [Tag.ARRAY, text, [0], b""]):
        with pytest.raises(StateError, match="where a type of numbers should be"):
            Reader({}, [], [], []).value(node, None)


def test_a_class_that_is_not_ours_is_never_built() -> None:
    class Foreign(Enum):
        ONE = 1

    with pytest.raises(StateError, match="cannot keep"):
        snapshot(_Machine(Foreign.ONE))


def test_a_snapshot_of_another_machine_is_refused() -> None:
    with pytest.raises(StateError, match=r"is of .*_Machine, not of .*_Inner"):
        restore(snapshot(_Machine()), _Inner())


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damage_is_told(place: int, change: int) -> None:
    data = bytearray(snapshot(_Machine({"a": [1, 2, 3]})))
    data[place % len(data)] ^= change
    with pytest.raises(StateError):
        restore(bytes(data), _Machine())


@given(st.integers(0, 10_000))
def test_a_cut_snapshot_is_told(length: int) -> None:
    data = snapshot(_Machine({"a": [1, 2, 3]}))
    with pytest.raises(StateError):
        restore(data[: length % len(data)], _Machine())


@given(st.binary(max_size=60))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(StateError):
        restore(data, _Machine())
