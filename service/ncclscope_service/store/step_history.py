"""How long the steps of a job took since it began, in a bounded number of buckets of equally many steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns

MAX_BUCKETS: Final = 512

BUCKET: Final = np.dtype(
    [
        ("iteration", "<i8"),  # the first of its steps
        ("started_ns", "<i8"),
        ("steps", "<i8"),
        ("duration_ns", "<i8"),  # of all its steps together
        ("longest_ns", "<i8"),
    ]
)
"""Some steps of a job in a row. The last bucket may hold fewer than the others."""


@dataclass(slots=True, eq=False)
class StepHistory:
    """The steps of one job. Where there would be too many buckets, two neighbours become one: 20 KiB for any job."""

    steps_per_bucket: int = 1
    _buckets: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, BUCKET))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StepHistory)
            and self.steps_per_bucket == other.steps_per_bucket
            and np.array_equal(self._buckets, other._buckets)
        )

    __hash__ = None  # type: ignore[assignment]  # it grows

    def add(self, steps: Columns) -> None:
        """Takes steps (`step_times.STEP`) in order; those without a duration are left out."""
        steps = steps[steps["duration_ns"] > 0]
        rows = np.zeros(len(steps), BUCKET)
        rows["iteration"], rows["started_ns"], rows["steps"] = steps["iteration"], steps["started_ns"], 1
        rows["duration_ns"] = rows["longest_ns"] = steps["duration_ns"]
        last = self._buckets[-1:]
        is_open = len(last) == 1 and last["steps"][0] < self.steps_per_bucket
        whole = self._buckets[:-1] if is_open else self._buckets
        self._buckets = np.concatenate([whole, self._joined(np.concatenate([last, rows]) if is_open else rows)])
        while len(self._buckets) > MAX_BUCKETS:
            self.steps_per_bucket *= 2
            self._buckets = self._joined(self._buckets)

    def rows(self) -> Columns:
        """BUCKET rows in order of time."""
        return self._buckets.copy()

    def _joined(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Rows in order, as buckets of `steps_per_bucket`: each begins where those before it are full."""
        if not len(rows):
            return rows
        before = np.cumsum(rows["steps"]) - rows["steps"]
        begins = np.flatnonzero(np.diff(before // self.steps_per_bucket, prepend=-1))
        joined = rows[begins]
        joined["steps"] = np.add.reduceat(rows["steps"], begins)
        joined["duration_ns"] = np.add.reduceat(rows["duration_ns"], begins)
        joined["longest_ns"] = np.maximum.reduceat(rows["longest_ns"], begins)
        return joined


StepHistories = defaultdict[str, StepHistory]
"""By job."""
