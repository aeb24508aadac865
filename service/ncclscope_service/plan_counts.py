"""How many kernels a group takes, by what the log tells: the step of opCount, or the roots of its Broadcasts.

Where a communicator counts every kernel, the line behind a group shows how many the group took. So it does where lines
were lost: the group's number is what its like was seen to take most often, the smaller one where two are as often.

*Source:* NCCL `src/proxy.cc:ncclProxyStart` (called once per kernel plan), `src/enqueue.cc:ncclLaunchPrepare` and
`src/scheduler/allgatherv_sched.cc` (2.29 on: a plan of Broadcasts takes one of each root, behind other collectives).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import NO_NUMBER


@dataclass(slots=True)
class PlanCounts:
    """What groups of one process took so far, by what they are. Causal: of each kind in the order of the log."""

    _seen: dict[int, Counter[int]] = field(default_factory=dict[int, Counter[int]])

    def feed(self, keys: NDArray[np.int64], sizes: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each group how many kernels it takes.

        `keys`: what it is; `sizes`: so many it can take at most; `steps`: of opCount behind it, NO_NUMBER where that is
        not known.
        """
        plans = np.ones(len(keys), dtype=np.int64)
        known = np.fromiter(self._seen, np.int64, len(self._seen))
        several = np.isin(keys, np.concatenate([known, keys[(steps > 1) & (steps <= sizes)]]))
        for at in np.flatnonzero(several).tolist():
            step = int(steps[at])
            is_told = 1 <= step <= int(sizes[at])
            if int(keys[at]) not in self._seen and not (is_told and step > 1):
                continue
            seen = self._seen.setdefault(int(keys[at]), Counter())
            if is_told:
                seen[step] += 1
            plans[at] = min((-times, amount) for amount, times in seen.items())[1]
        return plans


def plans_of_roots(roots: list[int], *, others: bool) -> int:
    """Kernels of a group whose Broadcasts have these roots, of two or more; `others`: it has other collectives too."""
    return max(Counter(roots).values()) + others


def steps_of(
    counts: NDArray[np.uint64], next_counts: NDArray[np.uint64], is_told: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Steps from an opCount to the next of the same communicator; NO_NUMBER where it did not move, or is not told."""
    steps = next_counts.astype(np.int64) - counts.astype(np.int64)
    return np.where(is_told & (steps >= 1), steps, NO_NUMBER)
