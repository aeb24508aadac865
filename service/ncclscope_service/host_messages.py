"""Messages of one host to another, as the clocks learn from them: the quickest are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import two_way
from ncclscope_service.host_ends import BINS

_PER_BIN: Final = 8


@dataclass(slots=True)
class HostMessages:
    """Messages, each on both hosts' own clocks."""

    sent: NDArray[np.int64]
    """Begin of the Send."""
    received: NDArray[np.int64]
    """End of the Recv."""

    def thin(self, window_ns: int) -> None:
        """Keeps, of each bin of the window, the quickest."""
        bins = self.received // max(1, window_ns // BINS)
        order = np.lexsort((self.received - self.sent, bins))
        place = np.arange(len(order)) - np.searchsorted(bins[order], bins[order], side="left")
        kept = np.sort(order[(place < _PER_BIN) & (bins[order] > bins.max() - BINS)])
        self.sent, self.received = self.sent[kept], self.received[kept]

    def keep_newest(self, span_ns: int) -> None:
        """Forgets messages older than so much before the newest."""
        kept = self.received > self.received.max() - span_ns
        self.sent, self.received = self.sent[kept], self.received[kept]


def band(forward: HostMessages, backward: HostMessages, at_ns: int, window_ns: int) -> two_way.Band | None:
    """Where the second host's clock minus the first's lies at a time of the first; None where nothing can be said.

    Where both ways contradict each other a clock was set: all but the newest messages are forgotten.
    """
    found = _band(forward, backward, at_ns)
    if found is not None and found.half_width_ns < 0:
        forward.keep_newest(window_ns // BINS)
        backward.keep_newest(window_ns // BINS)
        found = _band(forward, backward, at_ns)
    return found if found is not None and found.half_width_ns >= 0 else None


def _band(forward: HostMessages, backward: HostMessages, at_ns: int) -> two_way.Band | None:
    return two_way.band(
        (forward.sent - at_ns).astype(np.float64),
        (forward.received - forward.sent).astype(np.float64),
        (backward.received - at_ns).astype(np.float64),
        (backward.received - backward.sent).astype(np.float64),
    )
