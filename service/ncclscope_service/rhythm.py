"""How long a training step is, from the rhythm of the log, where no NVTX marks tell.

Something comes once per step in most programs: the loss of all ranks, one bucket of gradients, the embeddings. Its
lines are as far apart as steps are long, from the first to the last. What comes several times per step is not: its
gaps are short and then long.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_LEAST_LINES: Final = 8
"""Of one kind of operation, before it may tell a step."""
_STEADY: Final = 1.5
"""Quartiles of the gaps may differ by this factor: steps vary, and some lines are lost."""
_COVERAGE: Final = (0.75, 1.25)
"""Its usual gap times the number of gaps, over the time from its first to its last line."""
_LONGEST_STEP_NS: Final = 60_000_000_000


def step_ns(kinds: NDArray[np.integer], times_ns: NDArray[np.int64]) -> int | None:
    """The longest regular gap of any kind of operation of one process; None where nothing is regular.

    `kinds`: what is the same operation with the same arguments; `times_ns`: when each line was written, in any order.
    """
    if not len(kinds):
        return None
    order = np.lexsort((times_ns, kinds))
    cuts = np.flatnonzero(np.diff(kinds[order])) + 1
    found = (_regular_gap(part) for part in np.split(times_ns[order], cuts) if len(part) >= _LEAST_LINES)
    return max((gap for gap in found if gap is not None), default=None)


def _regular_gap(times_ns: NDArray[np.int64]) -> int | None:
    gaps = np.diff(times_ns)
    quarter, gap, three_quarters = np.quantile(gaps, (0.25, 0.5, 0.75))
    span = int(times_ns[-1] - times_ns[0])
    if not 0 < gap <= _LONGEST_STEP_NS or three_quarters > _STEADY * quarter:
        return None
    return int(gap) if _COVERAGE[0] <= gap * len(gaps) / span <= _COVERAGE[1] else None
