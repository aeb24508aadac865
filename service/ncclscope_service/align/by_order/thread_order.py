"""Launches of one thread paired with its kernels by their order alone.

The units are items: one launch, or, if it is not known what was fused, a run of Sends and Receives. `sequence`
pairs items; here they are made, and what was paired is spread over the launches in them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.known_runs import (
    KERNELS_SEEN,
    LAUNCHES_SEEN,
    Divider,
    Kind,
    are_p2p,
    divided,
    is_regular,
    items_of,
)
from ncclscope_service.align.by_order.sequence import CERTAIN, Decided, Pairing, PairingInput, PairingState
from ncclscope_service.align.by_time import GroupVotes
from ncclscope_service.align.lanes import FREE, LANE_WINDOW, UNBOUND, LaneConflicts, Lanes
from ncclscope_service.align.thread_backlog import Choice
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

UNANCHORED: Final = 0.5
"""Confidence of pairs that may be off by whole periods."""

_ENOUGH_LAUNCHES: Final = 32
_ENOUGH_ALONE: Final = 48
_FEW_LOST: Final = 0.005
"""If fewer kernels are missing, two equal calls with one kernel were rather one group."""


@dataclass(frozen=True, slots=True)
class PairingMode:
    """How the launches of a process are paired by order: what its log does not say about groups."""

    signatures: Columns
    """Signatures of its operations (ALIGN_OPERATION), by which runs of Send and Receive are divided."""
    collapses: bool
    """Runs of Send and Receive are items."""
    may_coalesce: bool
    """Collectives may have been launched together without the log saying so."""
    has_other_threads: bool
    """A thread whose place behind a hole is not sure may be placed by the others."""


@dataclass(slots=True)
class OrderPairing:
    """Pairs the launches of one thread with its kernels by order."""

    lanes: Lanes
    trust: float = 1.0
    """How sure it is that pairs are not off by whole periods, after the last hole."""
    _used: int = 0
    """Launches decided so far, by order."""
    _lost: int = 0
    """Launches for which no kernel was found at first."""
    _votes: GroupVotes = field(default_factory=GroupVotes)
    _state: PairingState = field(default_factory=PairingState)
    _divider: Divider = field(default_factory=Divider)
    _lane_conflicts: LaneConflicts = field(default_factory=LaneConflicts)
    _fused: int = 0
    _alone: int = 0
    """Sends and Receives of no known group that share their kernel with the one before, and that do not."""
    _coalesces: bool | None = None
    """Whether equal collectives that follow each other are launched together; None until that is seen."""

    def pair(
        self,
        launches: Columns,
        kernels: Columns,
        mode: PairingMode,
        *,
        is_closed: bool,
        final: bool,
    ) -> Choice:
        """Decides what is certain by now of these launches (LAUNCH) and kernels (THREAD_KERNEL).

        With `is_closed` the kernels are all there are before a hole, though there are more launches.
        """
        if self._coalesces is None:
            self._coalesces = mode.may_coalesce and self._is_coalesced(launches, kernels, mode, final=final)
            if self._coalesces is None:
                return Choice.without_kernels(0)
        items, runs = self.items(launches, kernels, mode, final=final)
        decided = self._paired(launches, kernels, (items, runs), is_closed=is_closed, final=final)
        kernel, confidence = self._spread(launches, decided, mode.signatures)
        used = decided.launches_used
        is_hole = np.zeros(used, dtype=bool)
        for begin, end in decided.holes:
            is_hole[begin:end] = True
        self._doubt(confidence, decided.holes[0][0] if decided.holes else used)
        self._doubt_unbound_lanes(launches[:used], kernels, kernel, confidence)
        if mode.may_coalesce:
            self._coalesce(launches[:used], kernel, confidence, is_divided=self._collapses(mode))
        self._note_fused(launches["is_open"][:used], kernel)
        self._used += used
        return Choice(kernel, confidence, is_hole, decided.kernels_used)

    def items(
        self, launches: Columns, kernels: Columns, mode: PairingMode, *, final: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`items_of` as this thread launches."""
        return items_of(
            launches, kernels, collapse=self._collapses(mode), coalesce=self._coalesces is True, final=final
        )

    def _collapses(self, mode: PairingMode) -> bool:
        """Whether runs of Send and Receive are items: not once it is seen that each of them has a kernel of its own."""
        return mode.collapses and (self._fused > 0 or self._alone < _ENOUGH_ALONE)

    def _note_fused(self, is_open: NDArray[np.bool_], kernel: NDArray[np.int64]) -> None:
        """Counts Sends and Receives of no known group by whether they share their kernel with the one before."""
        own = kernel[is_open & (kernel != NO_NUMBER)]
        fused = int(np.count_nonzero(np.diff(own) == 0))
        self._fused += fused
        self._alone += len(own) - fused

    def _is_coalesced(self, launches: Columns, kernels: Columns, mode: PairingMode, *, final: bool) -> bool | None:
        """Whether the first kernels are runs of collectives launched together; None if more data must come first."""
        if not final and min(len(launches), len(kernels)) < KERNELS_SEEN:
            return None
        is_over = final and len(launches) <= LAUNCHES_SEEN and len(kernels) <= KERNELS_SEEN
        launches, kernels = launches[:LAUNCHES_SEEN], kernels[:KERNELS_SEEN]
        left, right = self.lanes.launch_symbols.number(launches), self.lanes.kernel_symbols.number(kernels)
        compatible = self.lanes.compatible()
        shorter = min(len(left), len(right))
        if compatible[left[:shorter], right[:shorter]].all():
            return False
        items, runs = items_of(launches, kernels, collapse=mode.collapses, coalesce=True, final=is_over)
        if not final and len(items) < len(runs) and len(launches) < LAUNCHES_SEEN:
            return None
        # The last run may have been cut.
        amount = min(len(items), len(runs)) - 2
        if amount <= 0:
            return False
        first, to = items[:amount], runs[:amount]
        if not compatible[left[first], right[to]].all():
            return False
        are_collectives = ~are_p2p(launches[first])
        return is_regular(items[: amount + 1], runs[: amount + 1], left[first], are_collectives)

    def begin_with_log(self) -> None:
        """The first launch pairs with the first kernel, but for losses."""
        self._state.has_begun = True

    def doubt_beginning(self) -> None:
        """The first kernel may be that of a later launch, unless it is known to be the first's."""
        if not self._state.has_begun:
            self.trust = min(self.trust, UNANCHORED)

    def skip(self, amount: int) -> None:
        """Passes over this number of launches, which were given up without a kernel."""
        self._used += amount

    def _paired(
        self,
        rows: Columns,
        kernels: Columns,
        ends: tuple[NDArray[np.int64], NDArray[np.int64]],
        *,
        is_closed: bool,
        final: bool,
    ) -> Decided:
        items, runs = ends
        rows, kernels = rows[: int(items[-1])], kernels[: int(runs[-1])]
        joinable = np.zeros(len(rows), dtype=bool)
        joinable[1:] = rows["is_open"][1:] & rows["is_open"][:-1] & (rows["lane"][1:] == rows["lane"][:-1])
        left, right = self.lanes.launch_symbols.number(rows), self.lanes.kernel_symbols.number(kernels)
        lanes = self.lanes.kernel_lanes
        pairing = Pairing(PairingInput(rows, kernels, left, right, items, runs, joinable, lanes), self._state)
        while True:
            used = pairing.launches_used
            unbound = self.lanes.kernel_lanes[rows["lane"][used:]] == UNBOUND
            limit = used + int(unbound.argmax()) if unbound.any() else None
            if limit == used:
                waiting, free = pairing.waiting(LANE_WINDOW)
                if self.lanes.bind_by_order(rows[waiting], kernels[free], final=final):
                    continue
                break
            pairing.run(self.lanes.compatible(), final=final, is_closed=is_closed, limit=limit)
            if limit is None or pairing.launches_used == used:
                break
        decided = pairing.decided
        if is_closed:
            decided.kernels_used = len(kernels)
        elif final:
            decided.launches_used, decided.kernels_used = len(rows), len(kernels)
        return decided

    def _spread(
        self, rows: Columns, decided: Decided, signatures: Columns
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """From pairs to launches: those of a run are divided among its kernels."""
        kernel = np.full(decided.launches_used, NO_NUMBER, dtype=np.int64)
        confidence = np.full(decided.launches_used, 0.9, dtype=np.float32)
        for found in decided.pairs:
            single = (found.launch_counts == 1) & (found.kernel_counts == 1)
            kernel[found.launches[single]] = found.kernels[single]
            confidence[found.launches[single]] = found.confidence[single]
            for index in np.flatnonzero(~single).tolist():
                begin, first = int(found.launches[index]), int(found.kernels[index])
                run, amount = rows[begin : begin + int(found.launch_counts[index])], int(found.kernel_counts[index])
                if are_p2p(run[:1]).any():
                    groups, how_sure = self._divider.divide(_kinds_of(run, signatures), amount)
                else:
                    groups, how_sure = divided(tuple(run["signature"].tolist()), amount)
                kernel[begin : begin + len(groups)] = first + groups
                confidence[begin : begin + len(groups)] = how_sure * found.confidence[index] / CERTAIN
        return kernel, confidence

    def _doubt(self, confidence: NDArray[np.float32], hole: int) -> None:
        """Lowers the confidence if order may be off by whole periods: a program that repeats fits anywhere."""
        confidence[:hole] *= self.trust * (UNANCHORED + (1 - UNANCHORED) * self._state.starts)
        if hole < len(confidence):
            self.trust = min(self.trust, UNANCHORED)
            confidence[hole:] *= self.trust * (UNANCHORED + (1 - UNANCHORED) * self._state.starts)

    def _doubt_unbound_lanes(
        self, rows: Columns, kernels: Columns, kernel: NDArray[np.int64], confidence: NDArray[np.float32]
    ) -> None:
        """Lowers the confidence on lanes whose stream was not found, and whose kernels are on several."""
        free = np.flatnonzero((self.lanes.kernel_lanes[rows["lane"]] == FREE) & (kernel != NO_NUMBER))
        if len(free):
            confidence[free] *= self._lane_conflicts.shares(rows["lane"][free], kernels["lane"][kernel[free]])

    def _coalesce(
        self, rows: Columns, kernel: NDArray[np.int64], confidence: NDArray[np.float32], *, is_divided: bool
    ) -> None:
        """Gives collectives whose neighbour has a kernel, time and again, while they have none, that same kernel.

        Equal collectives of one group are one launch, which the log does not show if opCount does not count.
        So are a Send and a Receive, if their runs were not divided.
        """
        before, after = np.arange(len(rows) - 1), np.arange(1, len(rows))
        matched = kernel != NO_NUMBER
        lost = self._lost + np.cumsum(~matched)
        self._lost += int(np.count_nonzero(~matched))
        same = (rows["lane"][before] == rows["lane"][after]) & (rows["classes"][before] == rows["classes"][after])
        same &= matched[before] & (rows["plan"][before] == 0) & (rows["plan"][after] == 0)
        if is_divided:
            same &= ~rows["is_open"][before]
        before, after = before[same], after[same]
        if len(before) == 0:
            return
        keys = rows["signature"][before].astype(np.int64) << 32 | rows["signature"][after]
        together = ~matched[after]
        # Frameworks coalesce different tensors; a run of one and the same call is rather one that lost a kernel.
        seen, missing = self._used + before, lost[before]
        is_clean = (seen >= _ENOUGH_LAUNCHES) & (missing < _FEW_LOST * seen)
        prior = np.where(rows["signature"][before] != rows["signature"][after], 0.6, np.where(is_clean, 0.4, 0.1))
        share = self._votes.share(keys, together, prior)
        joined = together & (share > 0.5)
        kernel[after[joined]] = kernel[before[joined]]
        confidence[after[joined]] = share[joined]
        confidence[before[joined]] = np.maximum(confidence[before[joined]], share[joined])


def _kinds_of(rows: Columns, signatures: Columns) -> tuple[Kind, ...]:
    return tuple(
        (int(signatures["op"][number]), int(signatures["root"][number]), bool(is_open))
        for number, is_open in zip(rows["signature"].tolist(), rows["is_open"].tolist(), strict=True)
    )
