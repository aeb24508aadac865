"""Reads a pickle of plain values without running anything of it.

Scope: the opcodes that PyTorch writes for numbers, text, lists, tuples and maps, and their later forms of Python's own
pickler. Whatever names a class or calls one (GLOBAL, REDUCE, BUILD, ...), or refers to anything outside, is refused.
*Source:* CPython `Lib/pickletools.py`; PyTorch `torch/csrc/jit/serialization/pickler.cpp`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from ncclscope_wire.errors import FormatError

MOST_STEPS: Final = 4_000_000
"""Of one pickle: 2,000 entries with stacks of fifty frames take a million."""
MOST_VALUES: Final = 1_000_000
"""Values that are made or remembered, of some 100 bytes each: those entries have 400,000."""
_LARGEST_KEY: Final = 2**60
"""Python hashes whole numbers by 2**61 - 1: larger ones may all have one hash, and a map of a million of these is never
done. *Source:* CPython `Python/pyhash.c`."""


class _Mark:
    """Where the members of what comes next begin."""


_MARK: Final = _Mark()


def load_plain(data: bytes) -> object:
    """The value: None, bool, int, float, str, list, tuple or dict of these. MOST_STEPS and MOST_VALUES bound it.

    Raises:
        FormatError: the pickle is cut off, damaged, or holds anything else.
    """
    try:
        return _Reader(data).value()
    except (IndexError, struct.error, ValueError, TypeError, KeyError) as error:
        raise FormatError(f"a pickle is cut off or damaged: {type(error).__name__}") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}
        self._left = MOST_VALUES

    def value(self) -> object:
        for _ in range(MOST_STEPS):
            opcode = self._data[self._at]
            self._at += 1
            if opcode == ord("."):
                (found,) = self._stack
                return found
            act = _ACTS.get(opcode)
            if act is None:
                raise FormatError(f"a pickle holds more than plain values: opcode {chr(opcode)!r}")
            act(self)
        raise FormatError(f"a pickle takes more than {MOST_STEPS} steps")

    def _number(self, form: str) -> int:
        (found,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(found)

    def _bytes(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if length < 0 or len(found) < length:
            raise IndexError
        self._at += length
        return found

    def _members(self) -> list[object]:
        """What lies above the last mark, which goes."""
        for at in range(len(self._stack) - 1, -1, -1):
            if self._stack[at] is _MARK:
                members = self._stack[at + 1 :]
                del self._stack[at:]
                return members
        raise IndexError

    def push(self, value: object) -> None:
        """Puts a new value there."""
        self._count()
        self._stack.append(value)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise FormatError(f"a pickle holds more than {MOST_VALUES} values")

    def mark(self) -> None:
        self._stack.append(_MARK)

    def skip(self, length: int) -> None:
        self._bytes(length)

    def integer(self, form: str) -> None:
        self.push(self._number(form))

    def long(self, form: str) -> None:
        length = self._number(form)
        if length > 64:
            raise IndexError
        self.push(int.from_bytes(self._bytes(length), "little", signed=True))

    def real(self) -> None:
        (found,) = struct.unpack_from(">d", self._data, self._at)
        self._at += 8
        self.push(float(found))

    def text(self, form: str) -> None:
        self.push(self._bytes(self._number(form)).decode())

    def append(self) -> None:
        value = self._stack.pop()
        self._list().append(value)

    def appends(self) -> None:
        members = self._members()
        self._list().extend(members)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._map()[_key(key)] = value

    def set_items(self) -> None:
        members = self._members()
        if len(members) % 2:
            raise IndexError
        self._map().update(zip(map(_key, members[::2]), members[1::2], strict=True))

    def tuple_of(self, length: int) -> None:
        members = self._stack[len(self._stack) - length :]
        if len(members) < length or _MARK in members:
            raise IndexError
        del self._stack[len(self._stack) - length :]
        self.push(tuple(members))

    def tuple_of_members(self) -> None:
        self.push(tuple(self._members()))

    def remember(self, form: str | None) -> None:
        self._count()
        self._memo[len(self._memo) if form is None else self._number(form)] = self._stack[-1]

    def recall(self, form: str) -> None:
        self._stack.append(self._memo[self._number(form)])

    def _list(self) -> list[object]:
        found = self._stack[-1]
        if not isinstance(found, list):
            raise TypeError
        return found

    def _map(self) -> dict[object, object]:
        found = self._stack[-1]
        if not isinstance(found, dict):
            raise TypeError
        return found


def _key(value: object) -> str | int:
    """A key: the hash of a tuple in a tuple in a tuple ends the process."""
    if not isinstance(value, str | int):
        raise TypeError
    if isinstance(value, int) and abs(value) >= _LARGEST_KEY:
        raise ValueError
    return value


_ACTS: Final[dict[int, Callable[[_Reader], None]]] = {
    0x80: lambda reader: reader.skip(1),  # PROTO
    0x95: lambda reader: reader.skip(8),  # FRAME
    ord("("): lambda reader: reader.mark(),
    ord("N"): lambda reader: reader.push(None),
    0x88: lambda reader: reader.push(True),
    0x89: lambda reader: reader.push(False),
    ord("K"): lambda reader: reader.integer("<B"),
    ord("M"): lambda reader: reader.integer("<H"),
    ord("J"): lambda reader: reader.integer("<i"),
    0x8A: lambda reader: reader.long("<B"),
    ord("G"): lambda reader: reader.real(),
    ord("X"): lambda reader: reader.text("<I"),
    0x8C: lambda reader: reader.text("<B"),
    ord("]"): lambda reader: reader.push([]),
    ord("}"): lambda reader: reader.push({}),
    ord(")"): lambda reader: reader.push(()),
    ord("a"): lambda reader: reader.append(),
    ord("e"): lambda reader: reader.appends(),
    ord("s"): lambda reader: reader.set_item(),
    ord("u"): lambda reader: reader.set_items(),
    0x85: lambda reader: reader.tuple_of(1),
    0x86: lambda reader: reader.tuple_of(2),
    0x87: lambda reader: reader.tuple_of(3),
    ord("t"): lambda reader: reader.tuple_of_members(),
    ord("q"): lambda reader: reader.remember("<B"),
    ord("r"): lambda reader: reader.remember("<I"),
    0x94: lambda reader: reader.remember(None),
    ord("h"): lambda reader: reader.recall("<B"),
    ord("j"): lambda reader: reader.recall("<I"),
}
