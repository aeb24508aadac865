"""Collectives launched together where nothing tells it: is a thread's program such, and which kernel ran which of them.

A framework that reduces the gradients of many layers in one group logs a line for each and launches one kernel. Where
no line tells groups, the kernels then look like those of a capture with holes. What gives such a program away is that
its runs of equal launches (one lane, kind and type) follow each other as the runs of equal kernels do, and that runs of
one length always have as many kernels: losses are not as regular.

*Source:* NCCL src/enqueue.cc (ncclPrepareTasks, scheduleCollTasksToPlan): one plan takes the collectives of a group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Ends = NDArray[np.int64]
"""Where each item begins, with the end appended."""

KERNELS_SEEN: Final = 64
"""Kernels that are looked at to see whether a program is such."""

LAUNCHES_SEEN: Final = 2048
"""Launches beside them; larger groups are not seen."""

_FEWEST: Final = 3
"""So many runs must have fewer kernels than launches."""


def is_regular(items: Ends, runs: Ends, symbols: NDArray[np.int32], are_collectives: NDArray[np.bool_]) -> bool:
    """Whether runs have fewer kernels than launches throughout, and always as many where they are as long.

    `items` and `runs` are the runs of launches and of kernels, pair by pair; `symbols` and `are_collectives` are of
    each run of launches.
    """
    launches, kernels = np.diff(items)[are_collectives], np.diff(runs)[are_collectives]
    if np.any(kernels > launches) or np.count_nonzero(kernels < launches) < _FEWEST:
        return False
    kinds = set(zip(symbols[are_collectives].tolist(), launches.tolist(), strict=True))
    whole = set(zip(symbols[are_collectives].tolist(), launches.tolist(), kernels.tolist(), strict=True))
    return len(whole) == len(kinds)


def divided(signatures: tuple[int, ...], kernels: int) -> tuple[NDArray[np.int64], float]:
    """The kernel (0 .. kernels-1, ascending) of each launch of a run of equal collectives, and how sure that is.

    `signatures` tell calls apart by size and root. With more kernels than launches the first ones are taken: lines
    were lost.
    """
    size = len(signatures)
    if size <= kernels:
        return np.arange(size, dtype=np.int64), 0.99 if size == kernels else 0.4
    if kernels == 1:
        return np.zeros(size, dtype=np.int64), 0.95
    repeats = np.array([signature == signatures[0] for signature in signatures])
    if np.count_nonzero(repeats) == kernels:
        starts = [*np.flatnonzero(repeats).tolist(), size]
        parts = {signatures[begin:end] for begin, end in pairwise(starts)}
        return np.cumsum(repeats) - 1, 0.9 if len(parts) == 1 else 0.6
    is_even = size % kernels == 0
    return np.arange(size, dtype=np.int64) * kernels // size, 0.6 if is_even else 0.1
