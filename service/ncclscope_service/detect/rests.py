"""Where in its step a rank may stand still for long and nothing is wrong: before the next one begins.

Evaluation and checkpoints come between steps. A step's end lies between the last of what marks it (gradients, norms)
and the first of the next step's; there the last mark itself and the longest usual gap are taken for it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.terms import NO_TIME_NS

_OFFSETS: Final = 512
"""Operations after the last mark that are told apart."""
_NONE: Final = -1
_LEAST_STEPS: Final = 3
_FADES: Final = 0.999
"""A batch weighs so much less than the one after it."""
_LONGEST_NS: Final = 5_000_000_000
"""One checkpoint must not make its place the usual one for ever."""


class Rests:
    """What each rank enqueues after the last mark of a step, and how long it takes over it."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """Of each rank, by its number."""
        self._offset: NDArray[np.int64] = np.empty(0, np.int64)
        """Operations since the last mark, where that was the step's last one; else _NONE."""
        self._steps: NDArray[np.int64] = np.empty(0, np.int64)
        self._last_ns: NDArray[np.int64] = np.empty(0, np.int64)
        self._gaps: NDArray[np.float64] = np.empty((0, _OFFSETS))
        self._seen: NDArray[np.float64] = np.empty((0, _OFFSETS))

    def lanes(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Each rank by its number; whether enough steps of it were seen; and whether its newest operation is one after
        which a step may be over.

        That is the last mark itself, or the one after which the rank usually pauses longest between two steps (where a
        pipeline fills, that pause is longer than the one at the step's end).
        """
        amount = len(self._places)
        offset, is_known = self._offset[:amount], self._steps[:amount] >= _LEAST_STEPS
        is_resting = is_known & (offset == 0)
        behind = np.flatnonzero(is_known & (offset > 0))
        seen = self._seen[behind]
        usual = np.where(seen > 0, self._gaps[behind] / np.maximum(seen, 1e-9), 0.0)
        is_resting[behind] = offset[behind] == usual.argmax(axis=1)
        return np.fromiter(self._places, np.int64, amount), is_known, is_resting

    def feed(
        self,
        lanes: NDArray[np.int64],
        phases: NDArray[np.int64],
        marks: NDArray[np.int64],
        times_ns: NDArray[np.int64],
    ) -> None:
        """Takes operations, rank by rank and of each in order: the number of the rank, the place of each among the
        `marks` of its step, -1 where it is none, and when it was enqueued.
        """
        if not len(lanes):
            return
        begins = np.concatenate([[0], np.flatnonzero(np.diff(lanes)) + 1])
        lasts = np.append(begins[1:], len(lanes)) - 1
        rows = self._rows_of(lanes[begins])
        sizes = lasts + 1 - begins
        begin, known = np.repeat(begins, sizes), np.repeat(self._offset[rows], sizes)
        places = np.arange(len(lanes))
        newest = np.maximum.accumulate(np.where(phases >= 0, places, -1))
        before = newest < begin
        is_after_last = np.where(before, known != _NONE, phases[newest] == marks - 1)
        offsets = np.where(before, places - begin + 1 + np.maximum(known, 0), places - newest)
        self._learn(rows, begins, np.repeat(rows, sizes), offsets, is_after_last, times_ns)
        self._steps[rows] += np.add.reduceat(phases == marks - 1, begins, dtype=np.int64)
        self._offset[rows] = np.where(is_after_last[lasts], offsets[lasts], _NONE)
        self._last_ns[rows] = times_ns[lasts]

    def _learn(
        self,
        rows: NDArray[np.intp],
        begins: NDArray[np.intp],
        row: NDArray[np.intp],
        offsets: NDArray[np.int64],
        is_after_last: NDArray[np.bool_],
        times_ns: NDArray[np.int64],
    ) -> None:
        """The gap behind each operation, under the offset of that operation."""
        own, usable, before = np.roll(offsets, 1), np.roll(is_after_last, 1), np.roll(times_ns, 1)
        own[begins], usable[begins], before[begins] = (
            self._offset[rows],
            self._offset[rows] != _NONE,
            self._last_ns[rows],
        )
        usable &= (own < _OFFSETS) & (before != NO_TIME_NS) & (times_ns != NO_TIME_NS)
        row, own = row[usable], own[usable]
        touched = np.unique(row)
        self._gaps[touched] *= _FADES
        self._seen[touched] *= _FADES
        np.add.at(self._gaps, (row, own), np.minimum((times_ns - before)[usable], _LONGEST_NS))
        np.add.at(self._seen, (row, own), 1.0)

    def _rows_of(self, lanes: NDArray[np.int64]) -> NDArray[np.intp]:
        rows = np.asarray([self._places.setdefault(lane, len(self._places)) for lane in lanes.tolist()], np.intp)
        more = len(self._places) - len(self._offset)
        if more > 0:
            more = max(more, len(self._offset))
            self._offset = np.concatenate([self._offset, np.full(more, _NONE)])
            self._steps = np.concatenate([self._steps, np.zeros(more, np.int64)])
            self._last_ns = np.concatenate([self._last_ns, np.full(more, NO_TIME_NS)])
            self._gaps = np.concatenate([self._gaps, np.zeros((more, _OFFSETS))])
            self._seen = np.concatenate([self._seen, np.zeros((more, _OFFSETS))])
        return rows
