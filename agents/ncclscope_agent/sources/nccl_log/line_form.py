"""Families of lines: a pattern with named fields, and the fact that it fills, if anybody reads it.

A field's name may say how its text is read: `name_hex` is hexadecimal, `name_list` holds numbers between
anything else, `name_is` is true if the group took part. Everything else is read by the type of the record's
field, and held against its bounds; what is out of bounds makes no record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, TypeAlias, get_type_hints

import msgspec

from ncclscope_wire.facts import Fact

Fields: TypeAlias = dict[str, object]
"""Fields of a record to be: texts and numbers by name."""

RECORD_BYTES: Final = "record_bytes"
"""Beside the fields of `Fact`: bytes of the whole record with its prefix, for lines that NCCL cuts."""
FRONT_BYTES: Final = 3
"""A family is looked up by this many bytes at the front of a message."""
_INTEGER: Final = re.compile(r"-?\d{1,20}")
_HEX: Final = "_hex"
_LIST: Final = "_list"
_IS: Final = "_is"
_FIXED_START: Final = re.compile(r"(?:[\w :/-]|\\\[)*(?![?*+{])")
_FIXED_END: Final = re.compile(r"(?:(?<!\\)[A-Za-z']|\\\)|\\\.|\\]|<\\d\{1,5}>)\)?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One form of a line."""

    name: str
    """Under which it is counted; several forms share one."""
    record: type[Fact] | None
    """None: its lines are counted, and nothing is sent of them."""
    starts: tuple[bytes, ...]
    """Beginnings of the message, three bytes at least; empty if they are not fixed."""
    pattern: str
    """Compiled when a line is first held against it: of hundreds, a log needs few."""
    fixed: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields that the form itself says."""
    finish: Callable[[Fields], Fields | None] | None = None
    """Takes the fields apart further; None if the line is not of this form after all."""
    is_closed: bool = False
    """It ends with words that cannot have been cut: it is whole in front of another record too."""
    integers: frozenset[str]
    """Fields of the record that are integers: their text may have zeros in front."""


@dataclass(frozen=True, slots=True)
class FamilyRead:
    """A message that has the form of a family."""

    family: Family
    fact: Fact | None
    """None if the family is only counted, or a field is out of its bounds."""

    @property
    def is_in_bounds(self) -> bool:
        """Whether every field has a value that NCCL can print."""
        return self.fact is not None or self.family.record is None


def forms(
    name: str,
    record: type[Fact] | None,
    *patterns: str,
    starts: tuple[str, ...] | None = None,
    fixed: Mapping[str, object] | None = None,
    finish: Callable[[Fields], Fields | None] | None = None,
) -> tuple[Family, ...]:
    """Line forms of one family that fill a record alike; `record` None if its lines are only counted.

    `starts` is needed if a pattern begins with alternatives: without it its lines are looked for among all.
    """
    integers = _integers(record)
    return tuple(
        Family(
            name=name,
            record=record,
            starts=tuple(head.encode() for head in starts) if starts is not None else _start_of(pattern),
            pattern=pattern,
            fixed=fixed or {},
            finish=finish,
            is_closed=_FIXED_END.search(pattern) is not None,
            integers=integers,
        )
        for pattern in patterns
    )


def _start_of(pattern: str) -> tuple[bytes, ...]:
    found = _FIXED_START.match(re.sub(r"\A\(\?P<\w+>(?!\(|[^()]*\|)", "", pattern))
    start = "" if found is None else found[0].replace("\\", "")
    return (start.encode(),) if len(start) >= FRONT_BYTES else ()


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII)


def _integers(record: type[Fact] | None) -> frozenset[str]:
    hints = {} if record is None else get_type_hints(record)
    return frozenset(name for name, hint in hints.items() if hint in {int, int | None})


class FamilyIndex:
    """Finds the family of a message by its first three bytes."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._anywhere: list[Family] = []
        self._by_start: dict[bytes, list[Family]] = {}
        for family in families:
            if not family.starts:
                self._anywhere.append(family)
            for start in dict.fromkeys(head[:FRONT_BYTES] for head in family.starts):
                self._by_start.setdefault(start, []).append(family)

    def read(self, message: bytes, about: Mapping[str, object]) -> FamilyRead | None:
        """The record of a message; `about` holds the fields of `Fact`. None if it has no family."""
        text = message.decode("utf-8", "replace").rstrip()
        for family in (*self._by_start.get(message[:FRONT_BYTES], ()), *self._anywhere):
            found = _compiled(family.pattern).fullmatch(text)
            if found is not None and family.record is None:
                return FamilyRead(family, None)
            fields = None if found is None else _fields(family, found, about)
            if fields is not None:
                return FamilyRead(family, _fact(family, fields))
        return None


def _fields(family: Family, found: re.Match[str], about: Mapping[str, object]) -> Fields | None:
    fields: Fields = {**about, **family.fixed}
    for name, text in found.groupdict().items():
        if name.endswith(_IS):
            fields[name.removesuffix(_IS)] = text is not None
        elif text is None:
            continue
        elif name.endswith(_HEX):
            fields[name.removesuffix(_HEX)] = 0 if text == "(nil)" else int(text, 16)
        elif name.endswith(_LIST):
            fields[name.removesuffix(_LIST)] = numbers(text)
        else:
            fields[name] = int(text) if name in family.integers and text.isdecimal() else text
    return fields if family.finish is None else family.finish(fields)


def _fact(family: Family, fields: Fields) -> Fact | None:
    if family.record is None:
        return None
    try:
        return msgspec.convert(fields, family.record, strict=False)
    except (msgspec.ValidationError, OverflowError):
        return None


def numbers(text: str) -> list[int]:
    """The integers of a text, in order."""
    return [int(number) for number in _INTEGER.findall(text)]
