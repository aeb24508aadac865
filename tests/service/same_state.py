"""Whether two objects have the same state, as far down as it goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from ncclscope_service.columns.table import Table


def assert_same(one: object, other: object) -> None:
    """Raises AssertionError with the way to what differs; functions and the order within sets do not count."""
    seen = set[tuple[int, int]]()
    waiting: list[tuple[str, Any, Any]] = [(type(one).__name__, one, other)]
    while waiting:
        way, mine, theirs = waiting.pop()
        if (id(mine), id(theirs)) in seen or mine is theirs:
            continue
        seen.add((id(mine), id(theirs)))
        assert type(mine) is type(theirs), way
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, way
            assert mine.tobytes() == theirs.tobytes(), way
        elif isinstance(mine, Table):
            assert (mine.first, mine.next_id) == (theirs.first, theirs.next_id), way
            waiting.append((f"{way}.rows", mine.rows.copy(), theirs.rows.copy()))
        elif (parts := _parts(mine)) is not None:
            mine_and_theirs = list(parts), list(cast("Iterable[tuple[str, Any]]", _parts(theirs)))
            assert [name for name, _ in mine_and_theirs[0]] == [name for name, _ in mine_and_theirs[1]], way
            for (name, each), (_, his) in zip(*mine_and_theirs, strict=True):
                waiting.append((f"{way}.{name}", each, his))
        elif not callable(mine):
            assert repr(mine) == repr(theirs) if isinstance(mine, float) else mine == theirs, way


def _parts(value: Any) -> Iterable[tuple[str, Any]] | None:
    """What a value consists of, by name; None of what is one thing."""
    if isinstance(value, Mapping):
        return [*((f"key {at}", key) for at, key in enumerate(value)), *((f"[{key!r}]", value[key]) for key in value)]
    if isinstance(value, list | tuple | deque):
        return [(f"[{at}]", each) for at, each in enumerate(cast("Iterable[Any]", value))]
    if isinstance(value, partial) or type(value).__module__.partition("_")[0] != "ncclscope":
        return None
    if is_dataclass(value):
        return [(each.name, getattr(value, each.name)) for each in fields(value)]
    return vars(value).items() if hasattr(value, "__dict__") and not isinstance(value, type) else None
