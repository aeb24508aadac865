"""How far pairs of lanes that are tied to no stream contradict each other: a stream of the log is one stream.

Where the stream of a lane was not found, its launches may be any kernel of their kind, and two sequences of one kind
agree wherever they are laid side by side. If they do not belong together, the kernels of one lane are on several
streams.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_PAIR = 1 << 32


@dataclass(slots=True)
class LaneDoubts:
    """What was paired so far, of one thread. Causal: a pair is judged by those before it, however the data were cut."""

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
