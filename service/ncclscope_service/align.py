"""Which kernel ran each logged operation of one process.

Operations become expected launches (`translate`), each thread's launches are paired with the kernels it
launched, by time where lines carry stamps (`timed`), else by order (`ordered`), and every operation gets a match
and a confidence. Incremental: rows may come in any portions, and what is given out never changes. The order of the
kernels is that of their correlation ids, not of their starts. docs/alignment.md says what is decided how.

Kernels replayed by CUDA graphs have no log line of their own; `graphs` pairs them with what was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.align_rows import ALIGN_OPERATION, MATCH, PLAN, launch_times
from ncclscope_service.coverage import Coverage
from ncclscope_service.first_look import FirstLook, Seen
from ncclscope_service.held_kernels import HeldKernels
from ncclscope_service.kernel_queue import FAR_FUTURE_NS, KernelQueue
from ncclscope_service.launch_rules import rules_of
from ncclscope_service.pending import Outcome
from ncclscope_service.rows import Match
from ncclscope_service.threads import Threads
from ncclscope_service.track import Track
from ncclscope_service.translate import Translator
from ncclscope_service.unmatched import Undecided
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

PENDING_LIMIT: Final = 1_000_000
"""Launches of one thread that wait for their kernels; beyond, the oldest are given up (a job without captures)."""

_UNSURE_NS: Final = 1_000_000
"""Two threads' launches may be numbered in another order than they are timed, by this much."""


@dataclass(frozen=True, slots=True)
class AlignerStatistics:
    """What the aligner of one process has seen and left open."""

    pending_launches: int
    pending_kernels: int
    undecided: int
    """Operations without a kernel for which it is not known yet whether a capture was running."""
    late_kernels: int
    replayed_kernels: int
    given_up: int
    is_timed: bool | None


@dataclass(slots=True)
class ProcessAligner:
    """Aligns one process. `version` is NCCL's, None where it is not known."""

    version: str | None
    _translator: Translator = field(init=False)
    _threads: Threads = field(default_factory=Threads)
    _queue: KernelQueue = field(default_factory=KernelQueue)
    _held: HeldKernels = field(init=False)
    _first: FirstLook = field(default_factory=FirstLook)
    _coverage: Coverage = field(default_factory=Coverage)
    _undecided: Undecided = field(default_factory=Undecided)
    _out: list[Columns] = field(default_factory=list[Columns])
    _plans: list[Columns] = field(default_factory=list[Columns])
    newest_operation: int = NO_NUMBER
    """Id of the last operation that was fed."""
    _is_timed: bool | None = None
    """None until it is chosen how to pair."""
    _replayed: int = 0
    _given_up: int = 0

    def __post_init__(self) -> None:
        self._translator = Translator(rules_of(self.version))
        self._held = HeldKernels(self._threads)

    def statistics(self) -> AlignerStatistics:
        """Counts of what is pending and of what was left out."""
        return AlignerStatistics(
            pending_launches=sum(len(track.launches) for track in self._threads),
            pending_kernels=sum(len(track.kernels) for track in self._threads) + len(self._queue) + len(self._held),
            undecided=len(self._undecided),
            late_kernels=sum(track.late_kernels for track in self._threads),
            replayed_kernels=self._replayed,
            given_up=self._given_up,
            is_timed=self._is_timed,
        )

    def feed_operations(self, rows: Columns) -> None:
        """Takes further operations (ALIGN_OPERATION) in log order."""
        if len(rows) == 0:
            return
        if self.newest_operation == NO_NUMBER:
            self._threads.knows_groups = int(rows["group"][0]) != NO_NUMBER
        self.newest_operation = int(rows["id"][-1])
        silent = self._translator.feed(rows)
        self._emit(silent, NO_NUMBER, NO_NUMBER, Match.NO_KERNEL, 1.0)
        self._first.feed_operations(rows)

    def feed_kernels(self, rows: Columns) -> None:
        """Takes further kernels (ALIGN_KERNEL) in any order; replays of CUDA graphs are counted and left alone."""
        replayed = rows["graph_node_id"] != NO_NUMBER
        if replayed.any():
            self._replayed += int(np.count_nonzero(replayed))
            rows = whole_rows.kept(rows, ~replayed)
        if len(rows):
            self._queue.feed(rows)

    def withdraw(self, operations: NDArray[np.int64]) -> None:
        """Takes out operations that were captured into a CUDA graph: none of the kernels to come is theirs.

        What was decided of them stays. From now on opCount is not believed, which graphs make stand still or jump.
        """
        self._translator.withdraw(operations)
        for track in self._threads:
            track.withdraw(operations)

    def feed_coverage(self, begin_ns: int, end_ns: int) -> None:
        """Says that this process was recorded between two times of the host clock, all of it fed by now."""
        self._coverage.add(begin_ns, end_ns)

    def give_up(self, before: int) -> None:
        """Operations with an id below `before` wait no longer: no capture came for too long after them.

        Nor for lines that would have told what is launched with them.
        """
        self._coverage.forget_old()
        self._place_launches(final=False, before=before)
        for track in self._threads:
            amount = int(np.searchsorted(track.launches["first_op"], before))
            if amount:
                self._given_up += amount
                self._settle(track.give_up(amount))
        self._emit_undecided(final=False, before=before)

    def advance(self, *, final: bool) -> Columns:
        """What was decided since the last call (MATCH rows, in no particular order); everything with `final`."""
        self._step(final=False)
        if final:
            self._step(final=True)
        decided = whole_rows.joined([np.empty(0, dtype=MATCH), *self._out])
        self._out = []
        return decided

    def take_plans(self) -> Columns:
        """Further kernels (PLAN rows) of the launches that `advance` has given out since the last call."""
        taken = whole_rows.joined([np.empty(0, dtype=PLAN), *self._plans])
        self._plans = []
        return taken

    def _step(self, *, final: bool) -> None:
        self._place_launches(final=final)
        until_ns = self._queue.known_until(final=final)
        if not self._place_kernels(until_ns, final=final):
            return
        until_ns = min(until_ns, self._held.since_ns - _UNSURE_NS)
        if self._is_timed:
            for track in self._threads:
                self._settle(self._pair_by_time(track, until_ns, final=final))
        else:
            self._pair_stretches(final=final)
        for track in self._threads:
            self._limit(track)
        self._emit_undecided(final=final)

    def _place_launches(self, *, final: bool, before: int = 0) -> None:
        rows, ids = self._translator.launches(final=final, before=before)
        self._threads.lanes.grow(self._translator.lane_devices)
        if len(rows):
            self._threads.add_launches(rows, ids)

    def _place_kernels(self, until_ns: int, *, final: bool) -> bool:
        """Hands kernels to their threads once how to pair is chosen; False before."""
        rows = self._queue.take(until_ns)
        if self._is_timed is None:
            self._first.feed_kernels(rows)
            if not self._choose(final=final):
                return False
            rows = self._first.close()
            if self._coverage.begins_idle(launch_times(rows)):
                self._threads.begin_with_log()
        if self._is_timed:
            rows = self._held.placed_by_time(rows, told_until_ns=self._told_until(final=final), final=final)
        else:
            rows = self._held.placed_by_order(rows, final=final)
        if len(rows):
            self._threads.add_kernels(rows)
        return True

    def _told_until(self, *, final: bool) -> int:
        """The stamp before which all lines are launches by now."""
        pending = None if final else self._translator.first_pending()
        return min(self._first.stamped_until_ns, pending[1]) if pending else self._first.stamped_until_ns

    def _choose(self, *, final: bool) -> bool:
        """Chooses between time and order, and between threads and the whole process; False if it is too early."""
        seen = self._first.seen(final=final)
        if seen is None:
            return False
        are_told = self._are_threads_told(seen)
        if are_told is None:
            return False
        self._is_timed = seen.is_timed
        if len(seen.kernels) and not are_told:
            self._threads.merge(log=seen.is_threaded)
        return True

    def _are_threads_told(self, seen: Seen) -> bool | None:
        """Whether each thread can be paired on its own; None if it is too early to say."""
        if not seen.is_threaded or seen.is_timed:
            return seen.is_threaded
        return self._threads.start_clean(seen.kernels, collapse=self._collapses, enough=seen.is_enough)

    @property
    def _may_coalesce(self) -> bool:
        """Whether operations may have been fused without the log telling."""
        return not self._translator.tells_groups and not self._threads.knows_groups

    @property
    def _collapses(self) -> bool:
        """Whether runs of Send and Receive are told from other kernels, and divided as a whole."""
        return self._may_coalesce and not self._translator.rules.shows_send_recv

    # by time

    def _pair_by_time(self, track: Track, until_ns: int, *, final: bool) -> Outcome:
        pending = None if final else self._translator.first_pending()
        until = FAR_FUTURE_NS if final else min(until_ns, self._first.stamped_until_ns - 1)
        return track.pair_by_time(until_ns=min(until, pending[1] - 1) if pending else until, final=final)

    # by order

    def _pair_stretches(self, *, final: bool) -> None:
        """By order, one recorded stretch after the other; no thread is a stretch ahead of another."""
        for track in self._threads:
            track.in_doubt = None
        while True:
            stretches = [(track, track.stretch(self._coverage)) for track in self._threads]
            earliest = min((own for _, own in stretches if own is not None), default=None)
            first = [track for track, own in stretches if own == earliest]
            sure = [track for track in first if track.in_doubt is None]
            moved = [self._move(track, self._pair_by_order(track, final=final)) for track in sure]
            if not any(moved) and not self._place_doubtful(first, final=final):
                break
        if final:
            # Nothing tells where the recording goes on: the rest has no kernel.
            for track in self._threads:
                self._settle(self._pair_by_order(track, final=True))
                self._settle(track.give_up(len(track.launches)))
                self._settle(track.finish())

    def _pair_by_order(self, track: Track, *, final: bool) -> Outcome:
        # One thread's launches come in order, but on merged threads one that is still open may come before others.
        pending = None if final or self._threads.are_told else self._translator.first_pending()
        signatures = self._translator.signatures
        return track.pair_by_order(
            before_op=pending[0] if pending else FAR_FUTURE_NS,
            collapse=self._collapses,
            may_coalesce=self._may_coalesce,
            kinds=signatures.rows if len(signatures) else np.empty(0, dtype=ALIGN_OPERATION),
            coverage=self._coverage,
            may_ask=len(self._threads) > 1,
            final=final,
        )

    def _move(self, track: Track, outcome: Outcome) -> bool:
        """Settles what was decided; whether there is anything, or more can be."""
        self._settle(outcome)
        moved, track.has_moved = track.has_moved, False
        return moved or track.is_at_border

    def _place_doubtful(self, tracks: Sequence[Track], *, final: bool) -> bool:
        """Places the surest of the threads in doubt behind a hole by the others; False if none is, or they lag."""
        in_doubt = [track for track in tracks if track.in_doubt is not None]
        if not in_doubt:
            return False
        others = [track for track in self._threads if track.in_doubt is None]
        until = max(int(track.in_doubt.ids[-1]) for track in in_doubt if track.in_doubt is not None)
        if not all(other.has_passed(until) for other in others):
            return False
        track = min(in_doubt, key=lambda each: each.doubt)
        told = [other for other in others if len(other.landmarks.ids)]
        return self._move(track, track.resume_between(told, final=final))

    # what is decided

    def _settle(self, outcome: Outcome) -> None:
        """Gives out what was matched, and keeps the rest until it is known whether it was captured."""
        launches = outcome.launches
        if len(launches) == 0:
            return
        if len(outcome.plans):
            self._plans.append(outcome.plans)
        matched = outcome.kernel != NO_NUMBER
        first_ops = _first_of_kernel(launches["first_op"], outcome.kernel)
        sizes = launches["end"] - launches["begin"]
        kernel_ids = np.full(len(launches), NO_NUMBER, dtype=np.int64)
        kernel_ids[matched] = outcome.kernels["id"][outcome.kernel[matched]]
        of_launch = np.repeat(matched, sizes)
        self._emit(
            outcome.ids[of_launch],
            np.repeat(kernel_ids, sizes)[of_launch],
            np.repeat(first_ops, sizes)[of_launch],
            Match.MATCHED,
            np.repeat(outcome.confidence, sizes)[of_launch],
        )
        times = np.full(len(launches), NO_TIME_NS, dtype=np.int64)
        times[matched] = outcome.kernels["time_ns"][outcome.kernel[matched]]
        self._undecided.add(self._threads.number_of(launches), outcome, times, sizes)

    def _limit(self, track: Track) -> None:
        if len(track.launches) <= PENDING_LIMIT:
            return
        amount = PENDING_LIMIT // 2
        self._given_up += amount
        self._settle(track.give_up(amount))

    def _emit_undecided(self, *, final: bool, before: int = 0) -> None:
        ids, launches, matches, confidence = self._undecided.decide(self._coverage, final=final, before=before)
        self._emit(ids, NO_NUMBER, launches, matches, confidence)

    def _emit(
        self,
        operations: NDArray[np.int64],
        kernels: NDArray[np.int64] | int,
        launches: NDArray[np.int64] | int,
        match: NDArray[np.uint8] | Match,
        confidence: NDArray[np.float32] | float,
    ) -> None:
        if len(operations) == 0:
            return
        rows = np.empty(len(operations), dtype=MATCH)
        rows["operation"], rows["kernel"], rows["launch"] = operations, kernels, launches
        rows["match"], rows["confidence"] = match, confidence
        self._out.append(rows)


def _first_of_kernel(first_ops: NDArray[np.int64], kernel: NDArray[np.int64]) -> NDArray[np.int64]:
    """The launch id: the first operation of all launches that share a kernel, else the launch's own."""
    launch = first_ops.copy()
    matched = np.flatnonzero(kernel != NO_NUMBER)
    _, first, inverse = np.unique(kernel[matched], return_index=True, return_inverse=True)
    launch[matched] = first_ops[matched[first]][inverse]
    return launch
