"""Operations that were decided lately, whose iteration marks that come later may still tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ncclscope_service.by_process import ByProcess
from ncclscope_service.store import Ids, Store


@dataclass(slots=True)
class _Part:
    """What was decided together."""

    at_ns: int
    operations: Ids
    rows: ByProcess | None = None
    """The same, from when it was first asked for: where there are no marks, nobody asks."""


@dataclass(slots=True)
class Numbered:
    """Kept for as long as marks may come."""

    _parts: deque[_Part] = field(default_factory=deque[_Part])
    """Oldest first."""

    def add(self, operations: Ids, now_ns: int) -> None:
        """Takes what was decided, before anything of it leaves the store."""
        if len(operations):
            self._parts.append(_Part(now_ns, operations))

    def forget_before(self, at_ns: int) -> None:
        """Lets go of what was decided before that time."""
        while self._parts and self._parts[0].at_ns < at_ns:
            self._parts.popleft()

    def of(self, processes: Iterable[int], known: Store) -> Ids:
        """Those of these processes that are still in the store."""
        asked = np.asarray(sorted(processes), np.int64)
        found = [np.empty(0, np.int64)]
        for part in self._parts:
            rows = part.rows
            if rows is None:
                here = part.operations[part.operations >= known.operations.first]
                rows = part.rows = ByProcess.of(here, known.operations.take(here, "process")["process"])
                part.operations = rows.operations
            found += [rows.at(place) for place in rows.places(asked).tolist()]
        operations: Ids = np.concatenate(found)
        return operations[operations >= known.operations.first]
