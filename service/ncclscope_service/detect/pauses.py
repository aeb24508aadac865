"""How long a pause in the log is ordinary: between the operations of a channel, and between the steps of a rank.

Evaluation and checkpoints come between steps. A step's end lies between the last of the operations that mark it
(gradients, norms) and the first of the next step's; the last mark itself and the longest usual gap are taken for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.detect.settings import HangSettings
from ncclscope_service.job.iteration_numbering import Periods
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_GAPS_KEPT: Final = 2048
_HOUR_NS: Final = 3_600_000_000_000
_FIRST_GAPS: Final = 16

_GAP_ROW: Final = np.dtype(
    [
        ("at_ns", "<i8"),  # when it ended
        ("gap_ns", "<i8"),  # between two passes that saw new operations
        ("operations", "<i4"),  # that came in it
    ]
)


@dataclass(slots=True)
class ChannelSilence:
    """Gaps between the operations of one channel."""

    ranks: int = 0
    """Ranks that have enqueued anything here."""
    begin: int = 0
    """Row of the board at which the counts of its ranks begin."""
    last_ns: int = 0
    front: int = 0
    is_resting: bool = False
    """Whether the ranks furthest behind had just ended a step in the last pass."""
    unheard_ns: int = 0
    """When an agent of its hosts was out of reach last: what nobody could send is no gap of the job."""
    longest_rest_ns: int = 0
    _gaps: Columns = field(default_factory=lambda: np.empty(0, _GAP_ROW))
    """The last ones, each in the place of the oldest: thousands of channels keep them."""
    _seen: int = 0
    _recent: tuple[int, int] | None = None
    """Number of gaps in the last hour, and the longest; None if not computed since the last gap."""
    _usual_ns: float | None = None
    """99th percentile of them for one operation; None likewise."""

    def observe(self, newest_ns: int, front: int) -> None:
        """Takes the time of the newest operation of any rank, and how far the first rank has come."""
        if newest_ns <= self.last_ns:
            return
        if self.unheard_ns > self.last_ns:
            pass
        elif self.last_ns and self.is_resting:
            self.longest_rest_ns = max(self.longest_rest_ns, newest_ns - self.last_ns)
        elif self.last_ns:
            self._remember(newest_ns, max(1, front - self.front))
        self.last_ns, self.front = newest_ns, max(front, self.front)
        self._recent = self._usual_ns = None

    def silence_ns(self, now_ns: int) -> int:
        """How long nothing came although it could."""
        return now_ns - max(self.last_ns, self.unheard_ns)

    def _remember(self, newest_ns: int, operations: int) -> None:
        if self._seen == len(self._gaps) < _GAPS_KEPT:
            grown = np.zeros(max(_FIRST_GAPS, 2 * self._seen), _GAP_ROW)  # zeros: equal histories must give equal state
            grown[: self._seen] = self._gaps
            self._gaps = grown
        self._gaps[self._seen % _GAPS_KEPT] = newest_ns, newest_ns - self.last_ns, min(operations, 2**31 - 1)
        self._seen += 1

    def patience_ns(self, settings: HangSettings, *, others_are_stuck: bool = False) -> int:
        """How long a silence is ordinary; if others are stuck already, the longest gap known decides alone."""
        if self._recent is None:
            gaps = self._last_hour()["gap_ns"]
            self._recent = len(gaps), int(gaps.max(initial=0))
        amount, longest_gap = self._recent
        longest, least = settings.longest_gaps * longest_gap, settings.least_silence_seconds * SECOND_NS
        if self.is_resting:
            longest_rest = settings.longest_gaps * self.longest_rest_ns
            return round(max(settings.rest_seconds * SECOND_NS, longest_rest, longest))
        if not amount:
            return round(4 * least)
        if others_are_stuck:
            return round(max(least, longest))
        # many operations pass between two passes: their mean gap is the usual one, that of the pass an upper bound
        if self._usual_ns is None:
            recent = self._last_hour()
            self._usual_ns = float(np.percentile(recent["gap_ns"] / recent["operations"], 99))
        return round(max(least, settings.usual_gaps * self._usual_ns, longest))

    def _last_hour(self) -> Columns:
        known = self._gaps[: self._seen]
        return known[known["at_ns"] > self.last_ns - _HOUR_NS]


_OFFSETS: Final = 512
"""Operations after the last mark that are distinguished."""
_NO_OFFSET: Final = -1
_LEAST_STEPS: Final = 3
"""Steps after which the usual pause of a rank is known."""
_CLEARLY: Final = 1.2
"""How many times the second longest pause the longest one must be."""
_FADES: Final = 0.999
"""Weight of a batch relative to the one after it."""
_LONGEST_GAP_NS: Final = 5_000_000_000
"""Longest pause that counts: one checkpoint must not make its place the usual one for ever."""


class StepPauses:
    """Operations that each rank enqueues after the last mark of a step, and the pause after each."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """Row of each rank, by its number."""
        self._offset: NDArray[np.int64] = np.empty(0, np.int64)
        """Operations since the last mark, if that was the step's last one; else _NO_OFFSET."""
        self._steps: NDArray[np.int64] = np.empty(0, np.int64)
        self._last_ns: NDArray[np.int64] = np.empty(0, np.int64)
        self._gaps: NDArray[np.float64] = np.empty((0, _OFFSETS))
        self._seen: NDArray[np.float64] = np.empty((0, _OFFSETS))

    def resting_lanes(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Each rank by its number; whether enough steps of it were seen; and whether its newest operation is one after
        which a step may be over.

        That is the last mark itself, or the one after which the rank usually pauses longest between two steps (if a
        pipeline fills, that pause is longer than the one at the step's end), and clearly so: experts that compute for
        times of their own make any of some equal pauses the longest.
        """
        amount = len(self._places)
        offset, is_known = self._offset[:amount], self._steps[:amount] >= _LEAST_STEPS
        is_resting = is_known & (offset == 0)
        behind = np.flatnonzero(is_known & (offset > 0))
        seen = self._seen[behind]
        usual = np.where(seen > 0, self._gaps[behind] / np.maximum(seen, 1e-9), 0.0)
        longest = np.partition(usual, -2, axis=1)[:, -2:]
        is_resting[behind] = (offset[behind] == usual.argmax(axis=1)) & (longest[:, 1] >= _CLEARLY * longest[:, 0])
        return np.fromiter(self._places, np.int64, amount), is_known, is_resting

    def ingest_operations(
        self, lanes: NDArray[np.int64], phases: NDArray[np.int64], marks: NDArray[np.int64], times_ns: NDArray[np.int64]
    ) -> None:
        """Takes operations, rank by rank and of each in order: the number of the rank, the place of each among the
        `marks` of its step, -1 if it is none, and when it was enqueued.
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
        is_after_last = np.where(before, known != _NO_OFFSET, phases[newest] == marks - 1)
        offsets = np.where(before, places - begin + 1 + np.maximum(known, 0), places - newest)
        self._learn(rows, begins, np.repeat(rows, sizes), offsets, is_after_last, times_ns)
        self._steps[rows] += np.add.reduceat(phases == marks - 1, begins, dtype=np.int64)
        self._offset[rows] = np.where(is_after_last[lasts], offsets[lasts], _NO_OFFSET)
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
            self._offset[rows] != _NO_OFFSET,
            self._last_ns[rows],
        )
        usable &= (own < _OFFSETS) & (before != NO_TIME_NS) & (times_ns != NO_TIME_NS)
        row, own = row[usable], own[usable]
        touched = np.unique(row)
        self._gaps[touched] *= _FADES
        self._seen[touched] *= _FADES
        np.add.at(self._gaps, (row, own), np.minimum((times_ns - before)[usable], _LONGEST_GAP_NS))
        np.add.at(self._seen, (row, own), 1.0)

    def _rows_of(self, lanes: NDArray[np.int64]) -> NDArray[np.intp]:
        rows = np.asarray([self._places.setdefault(lane, len(self._places)) for lane in lanes.tolist()], np.intp)
        more = len(self._places) - len(self._offset)
        if more > 0:
            more = max(more, len(self._offset))
            self._offset = np.concatenate([self._offset, np.full(more, _NO_OFFSET)])
            self._steps = np.concatenate([self._steps, np.zeros(more, np.int64)])
            self._last_ns = np.concatenate([self._last_ns, np.full(more, NO_TIME_NS)])
            self._gaps = np.concatenate([self._gaps, np.zeros((more, _OFFSETS))])
            self._seen = np.concatenate([self._seen, np.zeros((more, _OFFSETS))])
        return rows


class RestingRanks:
    """Which ranks of a job stand between two steps, by the operations of all processes of a store."""

    def __init__(self, store: Store, periods: Periods | None) -> None:
        """`periods` says where steps end; without it no rank is taken for resting."""
        self._store = store
        self._periods = periods
        self._pauses = StepPauses()
        self._process_of_lane: dict[int, int] = {}

    def ingest_operations(self, operations: Columns, times: NDArray[np.int64]) -> None:
        """Takes new operations (rows.PLACED) and when each was enqueued."""
        if self._periods is None:
            return
        steps = self._periods.steps(operations["template"])
        self._pauses.ingest_operations(steps.lanes, steps.phases, steps.marks, times[steps.operations])
        begins = np.flatnonzero(np.diff(steps.lanes, prepend=NO_NUMBER))
        processes = operations["process"][steps.operations[begins]]
        self._process_of_lane.update(zip(steps.lanes[begins].tolist(), processes.tolist(), strict=True))

    def of_processes(self, processes: set[int]) -> tuple[frozenset[int], bool]:
        """Global ranks that stand between two steps, and whether that is known of all of these processes."""
        lanes, is_known, is_resting = self._pauses.resting_lanes()
        of_lane = [self._process_of_lane[lane] for lane in lanes.tolist()]
        unknown = {process for process, known in zip(of_lane, is_known.tolist(), strict=True) if not known}
        moving = {process for process, rests in zip(of_lane, is_resting.tolist(), strict=True) if not rests}
        resting = (processes & set(of_lane)) - moving
        known = processes <= set(of_lane) - unknown
        ranks = {
            member.global_rank
            for member in self._store.members
            if member.process in resting and member.global_rank is not None
        }
        return frozenset(ranks), known and bool(processes)
