"""Lanes of the log beside lanes of the kernels: which logged stream pointer is which CUDA stream.

A lane of the log is (stream pointer, communicator of this process), a lane of the kernels (device, stream id).
Several of the first may share one of the second; never the other way round. `Lanes` holds for all threads of a process
which launch may be which kernel.

If the stream of a lane was not found, its launches may be any kernel of their kind, and two sequences of one kind agree
wherever they are laid side by side. If they do not belong together, the kernels of one lane are on several streams:
that is how far such pairs are doubted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.pair_hmm import Ends, Weights, log_likelihood
from ncclscope_service.align.by_order.resync import FIRST_STRAIGHT
from ncclscope_service.columns.group_by import CombinationIndex
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

UNBOUND: Final = NO_NUMBER

FREE: Final = -2
"""The stream was not found: launches of such a lane may be on any stream of their device."""

VOTES: Final = 5
"""Launches of a lane that vote on its stream; the majority is right while fewer than half of their kernels are lost."""

_SOON_NS: Final = 1_000_000_000
"""A kernel that is launched later than this after a line shows that those between were not recorded."""

PATIENCE_NS: Final = 2_000_000_000
"""A lane that launches less than `VOTES` times within this is paired by what there is."""

_ROUNDS: Final = 2

_LOST: Final = 0.15
"""Assumed share of lost kernels and of lost lines while streams are being identified."""


_RESERVE: Final = 4.0
"""A lane that is tied to one stream may be so much less likely (logarithm) than one that is on any."""

LANE_WINDOW: Final = 512
"""Launches and kernels that are aligned to see which stream is which."""

_LANE_SAMPLE: Final = 256
"""Launches and kernels that are tried with each candidate."""

_PAIR = 1 << 32


def majority(votes: NDArray[np.int32]) -> int:
    """The most frequent value; the earlier one among equals."""
    values, first, counts = np.unique(votes, return_index=True, return_counts=True)
    best = np.flatnonzero(counts == counts.max())
    return int(values[best[first[best].argmin()]])


def votes_by_time(launches: Columns, kernels: Columns, agrees: NDArray[np.bool_]) -> NDArray[np.int32]:
    """The lane of the kernel that each launch was followed by, if nothing else on the thread could have led to it.

    `launches` and `kernels` (time_ns ascending, lane) of one thread; `agrees[i]`: launch i fits the kernel next
    after it. UNBOUND if another operation was logged in between, or the kernel does not fit or comes a second later.
    """
    following = np.searchsorted(kernels["time_ns"], launches["time_ns"], side="left")
    exists = following < len(kernels)
    votes = np.full(len(launches), UNBOUND, dtype=np.int32)
    if not exists.any():
        return votes
    is_last = np.append(following[1:] != following[:-1], True)
    nearest = np.minimum(following, len(kernels) - 1)
    usable = exists & is_last & agrees & (kernels["time_ns"][nearest] - launches["time_ns"] < _SOON_NS)
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


@dataclass(slots=True)
class Lanes:
    """Lanes of a process and their pairing, shared by its threads."""

    kernel_lanes: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """The kernel lane of each lane of the log; UNBOUND while it is not known."""
    devices: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Device of each lane of the log."""
    launch_symbols: CombinationIndex = field(
        default_factory=lambda: CombinationIndex(("tid", "lane", "classes", "data_type"))
    )
    kernel_symbols: CombinationIndex = field(
        default_factory=lambda: CombinationIndex(("tid", "lane", "device", "kernel_class", "data_type"))
    )

    def grow(self, devices: NDArray[np.int32]) -> None:
        """Takes in lanes of the log that appeared."""
        self.devices = devices
        missing = len(devices) - len(self.kernel_lanes)
        if missing > 0:
            self.kernel_lanes = np.append(self.kernel_lanes, np.full(missing, UNBOUND, dtype=np.int32))

    def bind(self, lane: int, kernel_lane: int) -> None:
        """Pairs a lane for good."""
        self.kernel_lanes[lane] = kernel_lane

    def compatible(self) -> NDArray[np.bool_]:
        """Which launch symbol may be which kernel symbol, by thread, lane, device, class and type."""
        if len(self.launch_symbols) == 0 or len(self.kernel_symbols) == 0:
            return np.zeros((len(self.launch_symbols), len(self.kernel_symbols)), dtype=bool)
        launches, kernels = self.launch_symbols.rows, self.kernel_symbols.rows
        lanes = self.kernel_lanes[launches["lane"]]
        # The log's [dev] is the current device of the calling thread: a hint only where there are several.
        several = len(np.unique(self.devices)) > 1 and len(np.unique(kernels["device"])) > 1
        devices = self.devices[launches["lane"]] if several else np.full(len(launches), NO_NUMBER)
        at_home = devices[:, None] == kernels["device"][None, :]
        at_home |= (devices == NO_NUMBER)[:, None]
        fits = np.where((lanes < 0)[:, None], at_home, lanes[:, None] == kernels["lane"][None, :])
        compatible: NDArray[np.bool_] = fits & self._same_kind(launches, kernels) & _same_thread(launches, kernels)
        return compatible

    def fits(self, launches: Columns, kernels: Columns) -> NDArray[np.bool_]:
        """fits[i, j]: launch i may be kernel j, by lane, device, class and type."""
        left, right = self.launch_symbols.number(launches), self.kernel_symbols.number(kernels)
        table: NDArray[np.bool_] = self.compatible()[left][:, right]
        return table

    @staticmethod
    def _same_kind(launches: Columns, kernels: Columns) -> NDArray[np.bool_]:
        bits = launches["classes"][:, None] >> kernels["kernel_class"][None, :].astype(np.uint32)
        types = launches["data_type"][:, None] == kernels["data_type"][None, :]
        types |= (kernels["data_type"] == NO_NUMBER)[None, :] | (launches["data_type"] == NO_NUMBER)[:, None]
        kinds: NDArray[np.bool_] = (bits & 1 == 1) & types
        return kinds

    def bind_by_order(self, launches: Columns, kernels: Columns, *, final: bool) -> bool:
        """Pairs the lane of the first launch, and others beside it; False if more data must come first."""
        left = self.launch_symbols.number(launches[:LANE_WINDOW])
        right = self.kernel_symbols.number(kernels[:LANE_WINDOW])
        shorter = min(len(left), len(right))
        table = self.compatible()
        agreeing = table[left[:shorter], right[:shorter]]
        straight = int((~agreeing).argmax()) if not agreeing.all() else shorter
        lane = int(launches["lane"][0])
        if straight >= FIRST_STRAIGHT or (final and straight == shorter and shorter):
            of_lane = launches["lane"][: min(straight, FIRST_STRAIGHT)] == lane
            seen = kernels["lane"][: len(of_lane)][of_lane]
            if np.all(seen == seen[0]):
                self.bind(lane, int(seen[0]))
                return True
        if not final and (len(left) < LANE_WINDOW or len(right) < LANE_WINDOW):
            return False
        left, right = left[:_LANE_SAMPLE], right[:_LANE_SAMPLE]
        found = lanes_by_order(launches["lane"][: len(left)], kernels["lane"][: len(right)], table[left][:, right])
        for one, kernel_lane in found.items():
            if int(self.kernel_lanes[one]) == UNBOUND:
                self.bind(one, kernel_lane)
        if int(self.kernel_lanes[lane]) == UNBOUND:
            self.bind(lane, FREE)
        return True


def _same_thread(launches: Columns, kernels: Columns) -> NDArray[np.bool_]:
    """A thread that logs launches what it logged."""
    logs = np.isin(kernels["tid"], launches["tid"])
    same: NDArray[np.bool_] = (launches["tid"][:, None] == kernels["tid"][None, :]) | ~logs[None, :]
    return same


@dataclass(slots=True)
class LaneConflicts:
    """Pairs of one thread so far. Causal: a pair is judged by those before it, however the data were cut."""

    _of_lane: dict[int, int] = field(default_factory=dict[int, int])
    _on_stream: dict[int, int] = field(default_factory=dict[int, int])
    """By lane of the log and lane of the kernels."""

    def shares(self, lanes: NDArray[np.int32], kernel_lanes: NDArray[np.int32]) -> NDArray[np.float64]:
        """For each pair the share of its lane's pairs, up to it and one more, that are on the stream of its kernel."""
        pairs = lanes.astype(np.int64) * _PAIR + kernel_lanes
        return _counted(self._on_stream, pairs) / (_counted(self._of_lane, lanes.astype(np.int64)) + 1.0)


def _counted(counts: dict[int, int], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each key was seen, up to and with each; the counts go on."""
    found, inverse, amounts = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    begins = np.cumsum(amounts) - amounts
    seen = np.empty(len(keys), dtype=np.int64)
    seen[order] = np.arange(len(keys)) - np.repeat(begins, amounts) + 1
    before = np.array([counts.get(key, 0) for key in found.tolist()], dtype=np.int64)
    for key, amount in zip(found.tolist(), amounts.tolist(), strict=True):
        counts[key] = counts.get(key, 0) + amount
    return seen + before[inverse] if len(keys) else seen
