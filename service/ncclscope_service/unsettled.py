"""What batches brought and a stage has not worked on yet.

A thousand small batches a second, of a hundred logs, cost by batch more than by operation: each stage has something to
find for it; and where thousands of ranks start, each first batch would find more. They are put together in the order
in which they came, and worked on in one go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_wire.batch import Columns


@dataclass(slots=True)
class Unsettled:
    """Operations (all rows.LOGGED, or all rows.PLACED) and TUNING lines (store.TUNING), in the order they came in."""

    rows: int = 0
    _logged: list[Columns] = field(default_factory=list[Columns])
    _tunings: list[Columns] = field(default_factory=list[Columns])

    def append(self, operations: Columns, tunings: Columns) -> None:
        """Takes what one batch brought."""
        if len(operations) or len(tunings):
            self._logged.append(operations)
            self._tunings.append(tunings)
            self.rows += len(operations) + len(tunings)

    def column(self, name: str) -> NDArray[np.int32]:
        """A column of these operations."""
        return np.concatenate([np.empty(0, np.int32), *(rows[name] for rows in self._logged)])

    def take(self) -> tuple[Columns, Columns]:
        """All of it, which is forgotten here; there must be something."""
        operations, tunings = whole_rows.joined(self._logged), whole_rows.joined(self._tunings)
        self._logged, self._tunings, self.rows = [], [], 0
        return operations, tunings
