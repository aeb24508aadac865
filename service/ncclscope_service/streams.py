"""Which CUDA stream a logged stream pointer is: pairs lanes of the log with lanes of the kernels.

A lane of the log is (stream pointer, communicator of this process), a lane of the kernels (device, stream id).
Several of the first may share one of the second; never the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.needleman_wunsch import FORBIDDEN, align
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

UNBOUND: Final = NO_NUMBER

FREE: Final = -2
"""Looked for and not found: launches of such a lane may be on any stream of their device."""

VOTES: Final = 5
"""So many launches of a lane say where it runs; the majority holds while fewer than half of their kernels are lost."""

PATIENCE_NS: Final = 2_000_000_000
"""A lane that launches less than `VOTES` times within this is paired by what there is."""

_ROUNDS: Final = 4


@dataclass(slots=True)
class LanePairs:
    """The kernel lane of each lane of the log; UNBOUND while it is not known."""

    kernel_lanes: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def grow(self, lanes: int) -> None:
        """Makes room for lanes that appeared."""
        missing = lanes - len(self.kernel_lanes)
        if missing > 0:
            self.kernel_lanes = np.append(self.kernel_lanes, np.full(missing, UNBOUND, dtype=np.int32))

    def is_bound(self, lane: int) -> bool:
        """Whether the kernel lane of this lane is known."""
        return int(self.kernel_lanes[lane]) != UNBOUND

    def bind(self, lane: int, kernel_lane: int) -> None:
        """Pairs a lane for good."""
        self.kernel_lanes[lane] = kernel_lane


def majority(votes: NDArray[np.int32]) -> int:
    """The most frequent value; the earlier one among equals."""
    values, first, counts = np.unique(votes, return_index=True, return_counts=True)
    best = np.flatnonzero(counts == counts.max())
    return int(values[best[first[best].argmin()]])


def votes_by_time(launches: Columns, kernels: Columns, agrees: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The lane of the kernel that each launch was followed by, on a thread where nothing else could have led to it.

    `launches` and `kernels` (time_ns ascending, lane) of one thread; `agrees[i]`: launch i fits the kernel next
    after it. UNBOUND where another operation was logged in between, or the kernel does not fit.
    """
    following = np.searchsorted(kernels["time_ns"], launches["time_ns"], side="left")
    exists = following < len(kernels)
    votes = np.full(len(launches), UNBOUND, dtype=np.int32)
    if not exists.any():
        return votes
    is_last = np.append(following[1:] != following[:-1], True)
    usable = exists & is_last & agrees
    votes[usable] = kernels["lane"][following[usable]]
    return votes


def votes_by_order(
    lanes: NDArray[np.int32], kernel_lanes: NDArray[np.int32], agrees: NDArray[np.bool_]
) -> dict[int, int]:
    """Lane pairs that make two sequences agree best: aligned, counted, and aligned again by what was counted.

    `agrees[i, j]`: launch i may be kernel j by class, type, device and the lanes known so far.
    Costs four alignments of the window.
    """
    if len(lanes) == 0 or len(kernel_lanes) == 0:
        return {}
    counts = np.zeros((int(lanes.max()) + 1, int(kernel_lanes.max()) + 1))
    chance = np.outer(
        np.bincount(lanes, minlength=counts.shape[0]),
        np.bincount(kernel_lanes, minlength=counts.shape[1]) / len(kernel_lanes),
    )
    gaps = (np.full(len(lanes), -1.5, dtype=np.float32), np.full(len(kernel_lanes), -1.5, dtype=np.float32))
    rarity = -np.log(np.maximum(agrees.mean(axis=1), 1e-3))
    # To begin with, lanes that are used as often belong together.
    often = np.bincount(lanes, minlength=counts.shape[0]) / len(lanes)
    kernels_often = np.bincount(kernel_lanes, minlength=counts.shape[1]) / len(kernel_lanes)
    affinity = -np.abs(np.log((often[:, None] + 0.02) / (kernels_often[None, :] + 0.02)))
    for turn in range(_ROUNDS):
        affinity = np.log((counts + 0.5) / (chance + 0.5)) if turn else affinity
        worth = 2 + rarity[:, None] + affinity[lanes[:, None], kernel_lanes[None, :]]
        scores = np.where(agrees, worth, FORBIDDEN).astype(np.float32)
        rows, columns = align(scores, *gaps, is_open_ended=True)
        counts[:] = 0
        np.add.at(counts, (lanes[rows], kernel_lanes[columns]), 1)
    best = counts.argmax(axis=1)
    return {
        lane: int(best[lane])
        for lane in range(counts.shape[0])
        if counts[lane].sum() > 0 and counts[lane, best[lane]] >= 0.5 * counts[lane].sum()
    }
