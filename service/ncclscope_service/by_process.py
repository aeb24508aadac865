"""Operations in the order of their processes: those of a few are found without a look at all others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.distinct import grouped
from ncclscope_service.store import Ids


@dataclass(slots=True)
class ByProcess:
    """Operations that came together."""

    operations: Ids
    """By process, those of each in the order in which they came."""
    processes: NDArray[np.int64]
    """Ascending, each once."""
    ends: NDArray[np.int64]
    """Where the operations of each end."""

    @classmethod
    def of(cls, operations: Ids, processes: NDArray[np.integer]) -> ByProcess:
        """`processes`: that of each operation."""
        found = grouped(processes)
        return cls(operations[found.order], found.values.astype(np.int64), found.ends)

    def places(self, processes: NDArray[np.int64]) -> NDArray[np.intp]:
        """Which of `self.processes` are among these, which are ascending and each there once."""
        if not len(self.processes) or not len(processes):
            return np.empty(0, np.intp)
        places = np.minimum(np.searchsorted(self.processes, processes), len(self.processes) - 1)
        found: NDArray[np.intp] = places[self.processes[places] == processes]
        return found

    def at(self, place: int) -> Ids:
        """The operations of one of the processes: a view."""
        operations: Ids = self.operations[self.ends[place - 1] if place else 0 : self.ends[place]]
        return operations

    def only(self, places: NDArray[np.intp]) -> ByProcess:
        """Those of some processes, by ascending places: a copy."""
        sizes = np.diff(self.ends, prepend=0)
        is_kept = np.zeros(len(sizes), np.bool_)
        is_kept[places] = True
        return ByProcess(self.operations[np.repeat(is_kept, sizes)], self.processes[places], np.cumsum(sizes[places]))
