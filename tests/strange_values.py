"""Values of JSON in which one place holds something else, for readers of what others wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

STRANGE: Final[tuple[object, ...]] = (
    *(None, True, -1, 0, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 10**30, 1.5, 1e300),
    *("", "x" * 300, "a\x00b", "\ud800", "é" * 200, "9" * 18, "-1", [], [1], {}, {"a": 1}),
)


def with_strange_values(value: Any) -> Iterator[Any]:
    """The value with each of these in each of its places, one at a time."""
    for path in _paths(value):
        for other in STRANGE:
            yield _with_other(value, path, other)


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _paths(part, (*path, key))


def _with_other(value: Any, path: tuple[str | int, ...], other: object) -> Any:
    if not path:
        return other
    changed = value.copy()
    changed[path[0]] = _with_other(value[path[0]], path[1:], other)
    return changed
