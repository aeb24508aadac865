"""Where in its step a rank may stand still for long and nothing is wrong: before the next one begins.

Evaluation and checkpoints come between steps. A step's end lies between the last of what marks it (gradients, norms)
and the first of the next step's; there the last mark itself and the longest usual gap are taken for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import NO_TIME_NS

_OFFSETS: Final = 512
"""Operations after the last mark that are told apart."""
_LEAST_STEPS: Final = 3
_FADES: Final = 0.999
"""A batch weighs so much less than the one after it."""
_LONGEST_NS: Final = 5_000_000_000
"""One checkpoint must not make its place the usual one for ever."""


@dataclass(slots=True)
class Rest:
    """One rank: what it enqueues after the last mark of a step, and how long it takes over it."""

    offset: int | None = None
    """Operations since the last mark, where that was the step's last one."""
    steps: int = 0
    _last_ns: int = NO_TIME_NS
    _gaps: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_OFFSETS))
    _seen: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_OFFSETS))

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen."""
        return self.steps >= _LEAST_STEPS

    @property
    def is_resting(self) -> bool:
        """Whether the newest operation is one after which a step may be over.

        That is the last mark itself, or the one after which the rank usually pauses longest between two steps (where a
        pipeline fills, that pause is longer than the one at the step's end).
        """
        if not self.is_known or self.offset is None:
            return False
        if self.offset == 0:
            return True
        usual = np.where(self._seen > 0, self._gaps / np.maximum(self._seen, 1e-9), 0.0)
        return self.offset == int(usual.argmax())

    def feed(self, phases: NDArray[np.int64], marks: int, times_ns: NDArray[np.int64]) -> None:
        """Takes operations in order: the place of each among the `marks` of its step, -1 where it is none."""
        if not len(phases):
            return
        places = np.arange(len(phases))
        newest = np.maximum.accumulate(np.where(phases >= 0, places, -1))
        before = newest < 0
        is_after_last = np.where(before, self.offset is not None, phases[newest] == marks - 1)
        offsets = np.where(before, places + 1 + (self.offset or 0), places - newest)
        self._learn(offsets, is_after_last, times_ns)
        self.steps += int(np.count_nonzero(phases == marks - 1))
        self.offset = int(offsets[-1]) if is_after_last[-1] else None
        self._last_ns = int(times_ns[-1])

    def _learn(self, offsets: NDArray[np.int64], is_after_last: NDArray[np.bool_], times_ns: NDArray[np.int64]) -> None:
        """The gap behind each operation, under the offset of that operation."""
        own = np.concatenate([[_OFFSETS if self.offset is None else self.offset], offsets[:-1]])
        usable = np.concatenate([[self.offset is not None], is_after_last[:-1]]) & (own < _OFFSETS)
        times = np.concatenate([[self._last_ns], times_ns])
        usable &= (times[:-1] != NO_TIME_NS) & (times[1:] != NO_TIME_NS)
        at = own[usable]
        if len(at):
            self._gaps *= _FADES
            self._seen *= _FADES
            np.add.at(self._gaps, at, np.minimum(np.diff(times)[usable], _LONGEST_NS))
            np.add.at(self._seen, at, 1.0)
