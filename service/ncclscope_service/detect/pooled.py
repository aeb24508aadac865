"""Lateness of ranks against how much it scatters in all groups of a kind, taken together.

Sixteen steps of one group say little of its scatter, and a rank must stand far out of it to be told from chance. Groups
of one kind do the same work: their scatter, and how much of it lasts from step to step, is that of all of them, known
well after some steps. A rank's lateness is its blame less the mean of the others' (what all ranks share falls out).

It says nothing where scatter lasts: then few steps, of however many groups, are fewer still.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.detect.margin import Blames

Firmness: TypeAlias = NDArray[np.float64]
"""By rank of a group: its mean lateness over the standard error of that."""

_WINSOR: Final = 3.0
_LEAST_SPREAD_NS: Final = 1_000.0
_MOST_PHI: Final = 0.3
_LEAST_LOOKS: Final = 16
_MEMORY: Final = 64
"""Looks over which it is remembered how much scatter lasts."""
_LEAST_SAMPLES: Final = 100
"""Steps by ranks, all groups together."""


@dataclass(slots=True)
class Pooled:
    """The groups of one kind: of one parallelism and size."""

    _lasting: float = 0.0
    _power: float = 0.0
    looks: int = 0

    def firmness(self, blames: Mapping[int, Blames]) -> dict[int, Firmness]:
        """Of every rank, by communicator, from blames (occasion by rank); empty where too little is known.

        One call is one look, for which new steps must have come.
        """
        contrasts = {communicator: _contrast(each) for communicator, each in blames.items()}
        offs = {communicator: each - np.median(each, axis=0) for communicator, each in contrasts.items()}
        if not offs:
            return {}
        everything = np.abs(np.concatenate([each.ravel() for each in offs.values()]))
        spread = max(1.4826 * float(np.median(everything)), 1.2533 * float(everything.mean()), _LEAST_SPREAD_NS)
        offs = {communicator: np.clip(each, -_WINSOR * spread, _WINSOR * spread) for communicator, each in offs.items()}
        power = sum(float((each**2).sum()) for each in offs.values())
        samples = sum(each.shape[0] * (each.shape[1] - 1) for each in offs.values())
        phi = self._remembered(sum(float((each[1:] * each[:-1]).sum()) for each in offs.values()), power, offs)
        phi += 2.0 / np.sqrt(samples)
        if self.looks < _LEAST_LOOKS or samples < _LEAST_SAMPLES or phi >= _MOST_PHI:
            return {}
        common = power / sum(each.size for each in offs.values())
        firm: dict[int, Firmness] = {}
        for communicator, off in offs.items():
            deviation = np.maximum(np.sqrt(np.maximum(common, (off**2).mean(axis=0))), _LEAST_SPREAD_NS)
            middle = np.median(contrasts[communicator], axis=0) + off.mean(axis=0)
            wide = (1 + max(phi, 0.0)) / (1 - max(phi, 0.0))
            firm[communicator] = middle / (deviation * np.sqrt(wide / len(off)))
        return firm

    def _remembered(self, lasting: float, power: float, offs: Mapping[int, Blames]) -> float:
        """The autocorrelation over the last looks, less what the few steps of a look take from it."""
        steps = float(np.mean([len(each) for each in offs.values()]))
        keep = 1.0 - 1.0 / min(self.looks + 1, _MEMORY)
        scale = max(power, _LEAST_SPREAD_NS**2)
        self._lasting = keep * self._lasting + (1 - keep) * lasting / scale * steps / max(steps - 1, 1.0)
        self.looks += 1
        return self._lasting + (1 + 3 * max(self._lasting, 0.0)) / steps


def _contrast(blames: Blames) -> Blames:
    others: Blames = (blames.sum(axis=1, keepdims=True) - blames) / (blames.shape[1] - 1)
    return np.subtract(blames, others)
