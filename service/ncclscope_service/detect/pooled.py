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

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.judged_steps import BlamesByOp
from ncclscope_service.detect.margin import Blames

Firmness: TypeAlias = NDArray[np.float64]
"""By rank of a group: its mean lateness over the standard error of that."""
FirmnessByOp: TypeAlias = Mapping[tuple[int, int | None], Firmness]
"""By communicator and operation; None: all of them."""
_Kind: TypeAlias = tuple[str | None, int, int | None]
"""Parallelism and size of groups, and the operation, None for all of them."""

_WINSOR: Final = 3.0
_LEAST_SPREAD_NS: Final = 1_000.0
_MOST_PHI: Final = 0.3
_LEAST_LOOKS: Final = 8
_MEMORY: Final = 64
"""Looks over which it is remembered how much scatter lasts."""
_LEAST_SAMPLES: Final = 100
"""Steps by ranks, all groups together."""


@dataclass(slots=True)
class Pooled:
    """The groups of one kind: of one parallelism and size."""

    _lasting: float = 0.0
    looks: int = 0
    _newest_ns: int = 0
    """The newest step that was looked at."""

    def firmness(self, blames: Mapping[int, Blames], newest_ns: int) -> dict[int, Firmness]:
        """Of every rank, by communicator, from blames (occasion by rank); empty where too little is known.

        `newest_ns`: when the newest of these steps began. Without new ones nothing is learnt: where steps are long,
        the same ones are asked for again and again.
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
        if newest_ns > self._newest_ns:
            self._newest_ns = newest_ns
            self._remember(sum(float((each[1:] * each[:-1]).sum()) for each in offs.values()), power, _steps(offs))
        phi = self._lasting + (1 + 3 * max(self._lasting, 0.0)) / _steps(offs)
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

    def _remember(self, lasting: float, power: float, steps: float) -> None:
        """The autocorrelation over the last looks."""
        keep = 1.0 - 1.0 / min(self.looks + 1, _MEMORY)
        scale = max(power, _LEAST_SPREAD_NS**2)
        self._lasting = keep * self._lasting + (1 - keep) * lasting / scale * steps / max(steps - 1, 1.0)
        self.looks += 1


class PooledKinds:
    """The groups of all kinds of a job."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, Pooled] = {}

    def firmness(
        self, blames: Mapping[int, BlamesByOp], newest_ns: Mapping[int, int], context: Context
    ) -> FirmnessByOp:
        """Of the ranks of each communicator; `newest_ns`: when the newest step of its blames began."""
        kinds: dict[_Kind, dict[int, Blames]] = {}
        for communicator, by_op in blames.items():
            group = context.groups[communicator]
            for op, mine in by_op.items():
                if len(group.global_ranks) > 1:
                    kinds.setdefault((group.parallelism, len(group.global_ranks), op), {})[communicator] = mine
        found: dict[tuple[int, int | None], Firmness] = {}
        for kind, of_kind in kinds.items():
            newest = max(newest_ns[communicator] for communicator in of_kind)
            firm = self._kinds.setdefault(kind, Pooled()).firmness(of_kind, newest)
            found |= {(communicator, kind[2]): each for communicator, each in firm.items()}
        return found


def _steps(offs: Mapping[int, Blames]) -> float:
    """How many of them a group has, on average; what so few take from the autocorrelation is given back."""
    return float(np.mean([len(each) for each in offs.values()]))


def _contrast(blames: Blames) -> Blames:
    others: Blames = (blames.sum(axis=1, keepdims=True) - blames) / (blames.shape[1] - 1)
    return np.subtract(blames, others)
