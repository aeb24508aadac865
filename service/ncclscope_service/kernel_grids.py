"""What a kernel's grid says of the launch it may be: one block for each channel.

TUNING lines tell the channels of a collective (communicator rank 0, from 2.24 on), and a lone collective's kernel has
just so many. Elsewhere what grids each kind of launch had is learnt from pairs: NCCL gives equal calls equal channels.

*Source:* NCCL `src/enqueue.cc` (scheduleCollTasksToPlan: channel{Lo..Hi}; ncclLaunchKernel: gridDim is the popcount of
the plan's channel mask).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.pair_hmm import Floats
from ncclscope_service.recurring import Recurring
from ncclscope_wire.batch import Columns

GRIDS_LIMIT: Final = 64
"""Grids are told apart up to so many blocks; larger ones are one more."""

_UNSEEN: Final = 4.0
"""Pairs that the grids of all kernels weigh in those of each kind."""

_ASTRAY: Final = 0.02
"""Chance that a kernel has another grid than its TUNING line says: several lines of a group may be mixed up."""

_MEMORY: Final = 4000.0
_STRONGEST: Final = 50.0


@dataclass(slots=True)
class KernelGrids:
    """Grids of the kernels of each kind of launch of one thread."""

    _kinds: Recurring = field(default_factory=Recurring)
    _counts: Floats = field(default_factory=lambda: np.zeros((0, GRIDS_LIMIT + 1)))

    def odds(self, launches: Columns, kernels: Columns) -> Floats:
        """(n, m): how much likelier each kernel's grid is for each launch than for any kernel."""
        grids = np.minimum(kernels["grid_x"], GRIDS_LIMIT)
        often = np.bincount(grids, minlength=GRIDS_LIMIT + 1) / max(len(grids), 1)
        kinds = self._number(launches)
        counts = self._counts[kinds]
        shares = (counts + _UNSEEN * often) / (counts.sum(axis=1, keepdims=True) + _UNSEEN)
        told = np.flatnonzero(launches["channels"] > 0)
        shares[told] = _ASTRAY * often
        shares[told, np.minimum(launches["channels"][told], GRIDS_LIMIT)] += 1 - _ASTRAY
        odds: Floats = np.clip((shares / np.where(often > 0, often, 1.0))[:, grids], 1 / _STRONGEST, _STRONGEST)
        odds[:, grids == 0] = 1.0
        return odds

    def learn(self, launches: Columns, kernels: Columns, pairs: Floats) -> None:
        """Takes in pairs by their probability."""
        table = np.zeros((len(kernels), GRIDS_LIMIT + 1))
        table[np.arange(len(kernels)), np.minimum(kernels["grid_x"], GRIDS_LIMIT)] = 1.0
        kinds = self._number(launches)
        np.add.at(self._counts, kinds, pairs @ table)
        self._counts *= np.minimum(1.0, _MEMORY / np.maximum(self._counts.sum(axis=1, keepdims=True), 1.0))

    def _number(self, launches: Columns) -> NDArray[np.int32]:
        kinds = self._kinds.number(launches)
        missing = len(self._kinds) - len(self._counts)
        if missing > 0:
            self._counts = np.concatenate([self._counts, np.zeros((missing, GRIDS_LIMIT + 1))])
        return kinds
