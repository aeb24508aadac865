"""Every value of what others write in JSON, one at a time, is something else: a reader takes it or leaves it out.

Mutated bytes seldom stay JSON, and so seldom reach what looks at values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from fuzz.targets import TARGETS

_STRANGE: Final[tuple[object, ...]] = (
    *(None, True, -1, 0, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 10**30, 1.5, 1e300),
    *("", "x" * 300, "a\x00b", "\ud800", "é" * 200, "9" * 18, "-1", [], [1], {}, {"a": 1}),
)

Path = tuple[str | int, ...]


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where the values are in this one, itself among them."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from paths(part, (*path, key))


def with_other(value: Any, path: Path, other: object) -> Any:
    """The value with another one in that place."""
    if not path:
        return other
    changed = value.copy()
    changed[path[0]] = with_other(value[path[0]], path[1:], other)
    return changed


def documents(name: str) -> list[list[Any]]:
    """The seeds of a target that are JSON, each as its lines."""
    found = []
    for seed in TARGETS[name].seeds():
        try:
            text = seed.decode()
            lines = [text] if name != "inspector" else text.splitlines()
            found.append([json.loads(line) for line in lines])
        except ValueError:
            continue
    return found


@pytest.mark.parametrize("name", [pytest.param("trace", marks=pytest.mark.slow), "inspector", "ras", "dump"])
def test_any_value_in_any_place_is_taken_or_left_out(name: str) -> None:
    tried = 0
    for lines in documents(name):
        for at, line in enumerate(lines):
            for path in paths(line):
                for other in _STRANGE:
                    changed = [*lines[:at], with_other(line, path, other), *lines[at + 1 :]]
                    TARGETS[name].check("\n".join(map(json.dumps, changed)).encode() + b"\n" * (name == "inspector"))
                    tried += 1
    assert tried > 1000
