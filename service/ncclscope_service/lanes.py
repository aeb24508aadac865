"""Which launch may be which kernel: lanes of the log beside lanes of the kernels, for all threads of a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.first_losses import FIRST_STRAIGHT
from ncclscope_service.signatures import Signatures
from ncclscope_service.streams import FREE, LanePairs, lanes_by_order
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

LANE_WINDOW: Final = 512
"""Launches and kernels that are aligned to see which stream is which."""

_LANE_SAMPLE: Final = 256
"""Those of them that are tried with each answer."""


@dataclass(slots=True)
class Lanes:
    """What all threads of a process share: lanes and their pairing."""

    pairs: LanePairs = field(default_factory=LanePairs)
    devices: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Device of each lane of the log."""
    launch_symbols: Signatures = field(default_factory=lambda: Signatures(("tid", "lane", "classes", "data_type")))
    kernel_symbols: Signatures = field(
        default_factory=lambda: Signatures(("tid", "lane", "device", "kernel_class", "data_type"))
    )

    def grow(self, devices: NDArray[np.int32]) -> None:
        """Takes in lanes of the log that appeared."""
        self.devices = devices
        self.pairs.grow(len(devices))

    def compatible(self) -> NDArray[np.bool_]:
        """Which launch symbol may be which kernel symbol, by thread, lane, device, class and type."""
        if len(self.launch_symbols) == 0 or len(self.kernel_symbols) == 0:
            return np.zeros((len(self.launch_symbols), len(self.kernel_symbols)), dtype=bool)
        launches, kernels = self.launch_symbols.rows, self.kernel_symbols.rows
        lanes = self.pairs.kernel_lanes[launches["lane"]]
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
                self.pairs.bind(lane, int(seen[0]))
                return True
        if not final and (len(left) < LANE_WINDOW or len(right) < LANE_WINDOW):
            return False
        left, right = left[:_LANE_SAMPLE], right[:_LANE_SAMPLE]
        found = lanes_by_order(launches["lane"][: len(left)], kernels["lane"][: len(right)], table[left][:, right])
        for one, kernel_lane in found.items():
            if not self.pairs.is_bound(one):
                self.pairs.bind(one, kernel_lane)
        if not self.pairs.is_bound(lane):
            self.pairs.bind(lane, FREE)
        return True


def _same_thread(launches: Columns, kernels: Columns) -> NDArray[np.bool_]:
    """A thread that logs launches what it logged."""
    logs = np.isin(kernels["tid"], launches["tid"])
    same: NDArray[np.bool_] = (launches["tid"][:, None] == kernels["tid"][None, :]) | ~logs[None, :]
    return same
