"""What came since the aligners last worked, and which of it they are given now.

An operation can be aligned when a capture of its process tells of its kernels, which comes seconds to minutes after
the log. Until then it waits here: an aligner that is given a few operations twice a second does the work of a hundred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_service.store import Ids, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CaptureSeen

_WAITS_NS: Final = 30_000_000_000
"""An operation of which nothing was captured by then is given to the aligners all the same."""


@dataclass(slots=True)
class Arrivals:
    """Fed batch by batch; `take` empties it but for operations that wait."""

    kernels: list[Ids] = field(default_factory=list[Ids])
    calls: list[Columns] = field(default_factory=list[Columns])
    captures: list[tuple[CaptureSeen, dict[int, int]]] = field(default_factory=list[tuple[CaptureSeen, dict[int, int]]])
    """With the processes by pid."""
    _new: list[Ids] = field(default_factory=list[Ids])
    _waiting: deque[tuple[int, Ids]] = field(default_factory=deque[tuple[int, Ids]])
    """(when they came, operations), oldest first."""

    def append_operations(self, operations: Ids) -> None:
        """Operations that were numbered, in the order in which they came."""
        self._new.append(operations)

    def take_new(self, now_ns: int) -> list[Ids]:
        """Operations since this was last asked; from now on they wait."""
        new, self._new = [operations for operations in self._new if len(operations)], []
        self._waiting.extend((now_ns, operations) for operations in new)
        return new

    def take_operations(self, known: Store, now_ns: int, *, ended: Iterable[int], before: int) -> Ids:
        """Those of processes that something was captured of, or that `ended`; those that have waited for long, and
        those with an id below `before`.
        """
        taken: list[Ids] = []
        while self._waiting and (now_ns - self._waiting[0][0] >= _WAITS_NS or self._waiting[0][1][0] < before):
            taken.append(self._waiting.popleft()[1])
        if not self._waiting:
            return _joined(taken)
        wanted = np.zeros(len(known.processes), np.bool_)
        wanted[list(ended)] = True
        for _, processes in self.captures:
            wanted[list(processes.values())] = True
        for kernels in self.kernels:
            wanted[known.kernels.take(kernels, "process")["process"]] = True
        return _joined([*taken, *self._of(known, wanted)] if wanted.any() else taken)

    def _of(self, known: Store, wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[Ids]:
        """Takes the operations of these processes out of those that wait."""
        taken: list[Ids] = []
        left: deque[tuple[int, Ids]] = deque()
        for at_ns, operations in self._waiting:
            is_wanted = wanted[known.operations.take(operations, "process")["process"]]
            taken.append(operations[is_wanted])
            if not is_wanted.all():
                left.append((at_ns, operations[~is_wanted]))
        self._waiting = left
        return taken

    def take_captured(self) -> tuple[list[Ids], list[Columns], list[tuple[CaptureSeen, dict[int, int]]]]:
        """Kernels, calls and captures, which are forgotten here."""
        taken = self.kernels, self.calls, self.captures
        self.kernels, self.calls, self.captures = [], [], []
        return taken


def _joined(operations: list[Ids]) -> Ids:
    return np.concatenate([np.empty(0, np.int64), *operations])
