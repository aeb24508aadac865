"""Which CUDA stream a logged stream pointer is: pairs lanes of the log with lanes of the kernels.

A lane of the log is (stream pointer, communicator of this process), a lane of the kernels (device, stream id).
Several of the first may share one of the second; never the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.pair_hmm import Ends, Weights, log_likelihood
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

UNBOUND: Final = NO_NUMBER

FREE: Final = -2
"""Looked for and not found: launches of such a lane may be on any stream of their device."""

VOTES: Final = 5
"""So many launches of a lane say where it runs; the majority holds while fewer than half of their kernels are lost."""

PATIENCE_NS: Final = 2_000_000_000
"""A lane that launches less than `VOTES` times within this is paired by what there is."""

_ROUNDS: Final = 2

_LOST: Final = 0.15
"""Share of kernels and of lines that are taken to be lost while streams are told apart."""


_RESERVE: Final = 4.0
"""A lane that is tied to one stream may be so much less likely (logarithm) than one that is on any."""


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


def lanes_by_order(
    lanes: NDArray[np.int32], kernel_lanes: NDArray[np.int32], agrees: NDArray[np.bool_]
) -> dict[int, int]:
    """Kernel lanes of the log's lanes that make two sequences likeliest, one lane after the other, the busiest first.

    `agrees[i, j]`: launch i may be kernel j by class, type, device and the lanes known so far. A lane is left
    out if several kernel lanes are as likely for it, or none is.
    """
    found: dict[int, int] = {}
    if min(len(lanes), len(kernel_lanes)) < 2:
        return found
    values, amounts = np.unique(lanes, return_counts=True)
    options = np.unique(kernel_lanes)
    on_option = options[:, None] == kernel_lanes[None, :]
    fits = agrees.astype(np.float64)
    for _ in range(_ROUNDS):
        for lane in values[np.argsort(-amounts, kind="stable")].tolist():
            mine = lanes == lane
            fits[mine] = agrees[mine]
            tried = np.repeat(fits[:, :, None], len(options) + 1, axis=2)
            tried[mine, :, :-1] *= on_option.T
            likely = _likelihoods(tried)
            best = int(likely[:-1].argmax())
            second = np.delete(likely[:-1], best).max(initial=-np.inf)
            found.pop(lane, None)
            if likely[best] > max(second, likely[-1] - _RESERVE) + 1.0:
                found[lane] = int(options[best])
                fits[mine] *= on_option[best]
        if len(found) == len(values):
            break
    return found


def _likelihoods(fits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log likelihood of each of several answers to which launch may be which kernel."""
    launches, kernels, batch = fits.shape
    odds = fits / np.maximum(fits.mean(axis=1, keepdims=True), 1e-9)
    return log_likelihood(
        Weights(
            odds * (1 - _LOST) ** 2,
            np.full((launches, batch), _LOST * (1 - _LOST)),
            np.full((launches + 1, kernels, batch), _LOST * (1 - _LOST)),
            np.zeros((launches, batch)),
        ),
        Ends(is_open=True),
    )
