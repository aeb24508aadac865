"""Which kernel ran each logged operation of one process.

Operations become expected launches (`expected_launches`). How to pair is chosen once, from the first kernels and the
lines before them: by time if lines carry stamps (`by_time`), else by order (`by_order`), and each thread on its own or
all as one. Each thread's launches are then paired with the kernels it launched (`threads`), and every operation gets a
match and a confidence. Incremental: rows may come in any portions, and results never change. The order of
the kernels is that of their correlation ids, not of their starts. docs/internals/alignment.md explains each decision.

Kernels replayed by CUDA graphs have no log line of their own; `process_graphs` pairs them with what was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.after_gap import Doubt
from ncclscope_service.align.by_order.thread_order import PairingMode
from ncclscope_service.align.certain import CertainPairs, Lines
from ncclscope_service.align.coverage import Coverage, UnmatchedBacklog
from ncclscope_service.align.expected_launches import Translator
from ncclscope_service.align.kernel_queue import FAR_FUTURE_NS, HeldKernels, KernelQueue
from ncclscope_service.align.records import ALIGN_KERNEL, ALIGN_OPERATION, COARSE_STAMP_NS, MATCH, PLAN, launch_times
from ncclscope_service.align.thread_backlog import Outcome
from ncclscope_service.align.threads import Step, ThreadAligner, Threads
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import first_positions, group_by
from ncclscope_service.nccl.launch_rules import Counting, rules_of
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_KERNELS: Final = 32
"""Kernels that are looked at."""

_ENOUGH_OPERATIONS: Final = 4096
"""Operations after which the choice is made although stamps and launches do not meet."""

PENDING_LIMIT: Final = 1_000_000
"""Launches of one thread that wait for their kernels; beyond, the oldest are given up (a job without captures)."""

_UNSURE_NS: Final = 1_000_000
"""Two threads' launches may be numbered in another order than they are timed, by this much."""


@dataclass(frozen=True, slots=True)
class ModeHints:
    """Hints of the first kernels and lines on how to pair."""

    kernels: Columns
    """The first kernels (ALIGN_KERNEL) in launch order, but for those whose launch call is in no export."""
    is_timed: bool
    """Lines have fine stamps that agree with the launch times."""
    is_threaded: bool
    """Each kernel was launched by a thread that logs."""
    is_enough: bool
    """More lines would not help."""


@dataclass(slots=True)
class ModeSelection:
    """First kernels and stamps of a process, until it is chosen how to pair."""

    stamped_until_ns: int = NO_TIME_NS
    """The newest stamp of any line, also later."""
    _is_over: bool = False
    _is_certain: bool = False
    """Pairs that are certain show that lines are stamped, and who launches."""
    _operations: int = 0
    _tids: set[int] = field(default_factory=set[int])
    _stamps: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _kernels: Columns = field(default_factory=lambda: np.empty(0, dtype=ALIGN_KERNEL))

    def ingest_operations(self, rows: Columns) -> None:
        """Ingests further operations (ALIGN_OPERATION)."""
        self.stamped_until_ns = max(self.stamped_until_ns, int(rows["logged_at_ns"].max()))
        if self._is_over:
            return
        self._operations += len(rows)
        self._tids.update(np.unique(rows["tid"]).tolist())
        self._stamps = np.concatenate([self._stamps, rows["logged_at_ns"]])

    def observe_certain(self, stamp_ns: int) -> None:
        """Lines up to this stamp were paired by others by time, thread by thread: nothing is to be chosen any more."""
        self.stamped_until_ns = max(self.stamped_until_ns, stamp_ns)
        self._is_certain = True

    def ingest_kernels(self, rows: Columns) -> None:
        """Ingests further kernels (ALIGN_KERNEL)."""
        self._kernels = row_ops.concat([self._kernels, rows])

    def hints(self, *, final: bool) -> ModeHints | None:
        """Hints to choose by; None if it is too early."""
        if self._is_certain:
            return ModeHints(self._kernels, is_timed=True, is_threaded=True, is_enough=True)
        if self._operations == 0 and not final:
            return None
        rows = self._kernels[np.argsort(self._kernels["correlation_id"], kind="stable")][:_KERNELS]
        if len(rows) < _KERNELS and not final:
            return None
        rows = _without_orphans(rows)
        tids = set(np.unique(rows["launch_tid"]).tolist())
        is_threaded = len(rows) > 0 and tids <= self._tids
        has_stamps = _is_stamped(self._stamps) and bool((rows["launch_start_ns"] != NO_TIME_NS).all())
        waits = not is_threaded or (has_stamps and self.stamped_until_ns < int(rows["launch_start_ns"].max()))
        is_enough = final or self._operations >= _ENOUGH_OPERATIONS
        if waits and not is_enough:
            return None
        is_timed = has_stamps and len(rows) > 0 and _meets(self._stamps, rows["launch_start_ns"])
        return ModeHints(rows, is_timed, is_threaded, is_enough)

    def close(self) -> Columns:
        """Ends the choice; returns all kernels that waited for it."""
        kernels, self._kernels = self._kernels, self._kernels[:0]
        self._is_over, self._stamps = True, self._stamps[:0]
        return kernels


def _without_orphans(rows: Columns) -> Columns:
    """The kernels before the first whose launch call is in no export; or after the last, if those come first."""
    orphans = np.flatnonzero((rows["launch_tid"] == NO_NUMBER) & (rows["launch_start_ns"] == NO_TIME_NS))
    if len(orphans) == 0 or len(orphans) == len(rows):
        return rows
    return rows[: orphans[0]] if orphans[0] >= len(rows) // 2 else rows[orphans[-1] + 1 :]


def _is_stamped(stamps: NDArray[np.int64]) -> bool:
    """Whether nearly every line has a stamp, and a fine one."""
    known = stamps[stamps != NO_TIME_NS]
    return len(known) >= 0.9 * len(stamps) and len(known) > 0 and bool(np.any(known % COARSE_STAMP_NS != 0))


def _meets(stamps: NDArray[np.int64], launched: NDArray[np.int64]) -> bool:
    """Whether most launches follow a line within a second: else the stamps are of another zone or clock."""
    known = np.sort(stamps[stamps != NO_TIME_NS])
    before = np.searchsorted(known, launched, side="right") - 1
    near = (before >= 0) & (launched - known[np.maximum(before, 0)] < 1_000_000_000)
    return bool(np.count_nonzero(near) >= 0.5 * len(launched))


@dataclass(slots=True)
class ProcessAligner:
    """Aligns one process. `version` is NCCL's, None if it is not known."""

    version: str | None
    _translator: Translator = field(init=False)
    _threads: Threads = field(default_factory=Threads)
    _queue: KernelQueue = field(default_factory=KernelQueue)
    _held: HeldKernels = field(init=False)
    _selection: ModeSelection = field(default_factory=ModeSelection)
    _coverage: Coverage = field(default_factory=Coverage)
    _unmatched: UnmatchedBacklog = field(default_factory=UnmatchedBacklog)
    _out: list[Columns] = field(default_factory=list[Columns])
    _plans: list[Columns] = field(default_factory=list[Columns])
    newest_operation: int = NO_NUMBER
    """Id of the last operation that was ingested."""
    _is_timed: bool | None = None
    """None until it is chosen how to pair."""

    def __post_init__(self) -> None:
        self._translator = Translator(rules_of(self.version))
        self._held = HeldKernels(self._threads)

    @property
    def may_be_certain(self) -> bool:
        """Whether nothing speaks against stamped lines, and kernels that are launched by the threads that log."""
        return self._is_timed is not False and self._threads.are_separate

    @property
    def begins_with_log(self) -> bool | None:
        """Whether the recording began before anything was launched; None until that is known."""
        may_be_unstamped = self._selection.stamped_until_ns == NO_TIME_NS
        return None if self._is_timed is None and may_be_unstamped else self._threads.is_whole

    @property
    def knows_beginning(self) -> bool:
        """Whether it is known which lines the first kernels are of: by stamps, or as the recording began before."""
        return self._is_timed is not False or self._threads.is_whole

    @property
    def counting(self) -> Counting:
        """When opCount moves."""
        return self._translator.rules.counting

    @property
    def known_kernel_lanes(self) -> NDArray[np.int32]:
        """The kernel lane of each lane of the log so far."""
        self._threads.lanes.grow(self._translator.lane_devices)
        return self._threads.lanes.kernel_lanes

    def kernel_lanes_of(self, rows: Columns) -> NDArray[np.int32]:
        """The lane of each kernel (ALIGN_KERNEL)."""
        return self._threads.kernel_lanes_of(rows)

    def decisions_of(self, rows: Columns) -> tuple[NDArray[np.int32], Columns]:
        """Signatures of operations (ALIGN_OPERATION), and what is decided of each (expected_launches.DECISION)."""
        return self._translator.decisions_of(rows)

    def observe_certain(
        self, lines: Lines, pairs: CertainPairs, kernels: Columns, since: int
    ) -> list[tuple[int, int, int]]:
        """Learns from lines that were paired with kernels (ALIGN_KERNEL) by others, and are not ingested here.

        `since`: id of the first of `lines`.

        Returns (member, device, stream) of all lanes among them.
        """
        self._queue.observe(row_ops.take(kernels, pairs.kernels))
        self._selection.observe_certain(int(lines.time_ns[pairs.lines].max()))
        for tid, mine in group_by(lines.tid[pairs.lines]):
            by_time = self._threads.for_thread(tid).by_time
            by_time.observe_certain(len(mine), int(np.count_nonzero(pairs.is_first[mine])))
        for tid, mine in group_by(lines.tid[pairs.before]):
            before, after = lines.signature[pairs.before[mine]], lines.signature[pairs.after[mine]]
            self._threads.for_thread(tid).by_time.observe_neighbours(before, after, pairs.together[mine])
        lanes = lines.lane[pairs.lines]
        alone = pairs.lines[pairs.is_first & (lines.group[pairs.lines] == NO_NUMBER)]
        self._translator.observe_certain(lines.lane[alone], lines.op_count[alone], since)
        first = first_positions(lanes)
        rows = row_ops.take(kernels, pairs.kernels[first])
        own, kernel_lanes = lanes[first].tolist(), self.kernel_lanes_of(rows).tolist()
        for lane, kernel_lane in zip(own, kernel_lanes, strict=True):
            self._threads.lanes.bind(lane, kernel_lane)
        members = [self._translator.member_of(lane) for lane in own]
        return list(zip(members, rows["device_id"].tolist(), rows["stream_id"].tolist(), strict=True))

    def ingest_operations(self, rows: Columns, skipped: NDArray[np.int64] | None = None) -> None:
        """Ingests further operations (ALIGN_OPERATION) in log order.

        `skipped`: how many of its thread were decided by others between each and the one before it.
        """
        if len(rows) == 0:
            return
        if self.newest_operation == NO_NUMBER:
            self._threads.knows_groups = int(rows["group"][0]) != NO_NUMBER
        self.newest_operation = int(rows["id"][-1])
        silent = self._translator.ingest_operations(rows, skipped)
        self._emit(silent, NO_NUMBER, NO_NUMBER, Match.NO_KERNEL, 1.0)
        self._selection.ingest_operations(rows)

    def ingest_kernels(self, rows: Columns) -> None:
        """Ingests further kernels (ALIGN_KERNEL) in any order; replays of CUDA graphs are ignored."""
        replayed = rows["graph_node_id"] != NO_NUMBER
        if replayed.any():
            rows = row_ops.filter_rows(rows, ~replayed)
        if len(rows):
            self._queue.ingest_kernels(rows)

    def withdraw(self, operations: NDArray[np.int64]) -> None:
        """Removes operations that were captured into a CUDA graph: none of the kernels to come is theirs.

        Earlier decisions stay. From now on opCount is not trusted: graphs make it stand still or jump.
        """
        self._translator.withdraw(operations)
        for thread in self._threads:
            thread.backlog.withdraw(operations)

    def ingest_coverage(self, begin_ns: int, end_ns: int, *, is_of_profiler: bool = False) -> None:
        """Records that this process was captured between two times of the host clock; all its rows were ingested."""
        self._coverage.add(begin_ns, end_ns, is_of_profiler=is_of_profiler)

    def give_up(self, before: int) -> None:
        """Stops waiting for kernels of operations with an id below `before`: no capture came for too long after them.

        Nor do they wait for lines that would have shown what is launched with them.
        """
        self._coverage.forget_old()
        self._place_launches(final=False, before=before)
        for thread in self._threads:
            amount = int(np.searchsorted(thread.backlog.launches["first_op"], before))
            if amount:
                self._settle(thread.give_up(amount))
        self._emit_unmatched(final=False, before=before)

    def align_ready(self, *, final: bool) -> Columns:
        """Matches since the last call (MATCH rows, in no particular order); of all operations with `final`."""
        self._step(final=False)
        if final:
            self._step(final=True)
        decided = row_ops.concat([np.empty(0, dtype=MATCH), *self._out])
        self._out = []
        return decided

    def drain_plans(self) -> Columns:
        """Further kernels (PLAN rows) of the launches matched since the last call."""
        taken = row_ops.concat([np.empty(0, dtype=PLAN), *self._plans])
        self._plans = []
        return taken

    def _step(self, *, final: bool) -> None:
        self._place_launches(final=final)
        until_ns = self._queue.known_until(final=final)
        if not self._place_kernels(until_ns, final=final):
            return
        until_ns = min(until_ns, self._held.since_ns - _UNSURE_NS)
        if self._is_timed:
            for thread in self._threads:
                self._settle(self._pair_by_time(thread, until_ns, final=final))
        else:
            self._pair_stretches(final=final)
        for thread in self._threads:
            self._limit(thread)
        self._emit_unmatched(final=final)

    def _place_launches(self, *, final: bool, before: int = 0) -> None:
        rows, ids = self._translator.drain_launches(final=final, before=before)
        self._threads.lanes.grow(self._translator.lane_devices)
        if len(rows):
            self._threads.add_launches(rows, ids)

    def _place_kernels(self, until_ns: int, *, final: bool) -> bool:
        """Adds kernels to their threads once it is chosen how to pair; False before."""
        rows = self._queue.drain_launched(until_ns)
        if self._is_timed is None:
            self._selection.ingest_kernels(rows)
            if not self._choose(final=final):
                return False
            rows = self._selection.close()
            if self._coverage.begins_idle(launch_times(rows)):
                self._threads.begin_with_log()
            elif self._coverage.is_of_profiler and not self._is_timed:
                self._threads.begin_within_log()
        if self._is_timed:
            rows = self._held.placed_by_time(rows, logged_until_ns=self._logged_until(final=final), final=final)
        else:
            rows = self._held.placed_by_order(rows, final=final)
        if len(rows):
            self._threads.add_kernels(rows)
        return True

    def _logged_until(self, *, final: bool) -> int:
        """The stamp before which all lines are launches by now."""
        pending = None if final else self._translator.first_pending()
        return min(self._selection.stamped_until_ns, pending[1]) if pending else self._selection.stamped_until_ns

    def _choose(self, *, final: bool) -> bool:
        """Chooses between time and order, and between threads and the whole process; False if it is too early."""
        seen = self._selection.hints(final=final)
        if seen is None:
            return False
        are_separate = self._are_threads_separable(seen)
        if are_separate is None:
            return False
        self._is_timed = seen.is_timed
        if len(seen.kernels) and not are_separate:
            self._threads.merge(log=seen.is_threaded)
        return True

    def _are_threads_separable(self, seen: ModeHints) -> bool | None:
        """Whether each thread can be paired on its own; None if it is too early to say."""
        if not seen.is_threaded or seen.is_timed:
            return seen.is_threaded
        if len(np.unique(seen.kernels["device_id"])) == 1:
            return False  # a thread that repeats one call shows no loss: only the calls of others beside its own do
        return self._threads.start_clean(seen.kernels, collapse=self._collapses, enough=seen.is_enough)

    @property
    def _may_coalesce(self) -> bool:
        """Whether operations may have been fused without the log saying so."""
        return not self._translator.tells_groups and not self._threads.knows_groups

    @property
    def _collapses(self) -> bool:
        """Whether runs of Send and Receive are distinguished from other kernels, and divided as a whole."""
        return self._may_coalesce and not self._translator.rules.shows_send_recv

    # by time

    def _pair_by_time(self, thread: ThreadAligner, until_ns: int, *, final: bool) -> Outcome:
        pending = None if final else self._translator.first_pending()
        until = FAR_FUTURE_NS if final else min(until_ns, self._selection.stamped_until_ns - 1)
        return thread.pair_by_time(until_ns=min(until, pending[1] - 1) if pending else until, final=final)

    # by order

    def _pair_stretches(self, *, final: bool) -> None:
        """By order, one recorded stretch after the other; no thread is a stretch ahead of another."""
        doubts: dict[int, Doubt] = {}
        while True:
            stretches = {tid: thread.stretch(self._coverage) for tid, thread in self._threads.items()}
            earliest = min((own for own in stretches.values() if own is not None), default=None)
            first = [tid for tid, own in stretches.items() if own == earliest]
            may_go_on = False
            for tid in [tid for tid in first if tid not in doubts]:
                step = self._pair_by_order(self._threads.for_thread(tid), final=final)
                self._settle(step.outcome)
                may_go_on |= step.may_go_on
                if step.doubt is not None:
                    doubts[tid] = step.doubt
            if not may_go_on and not self._place_doubtful(first, doubts, final=final):
                break
        if final:
            # Nothing tells where the recording goes on: the rest has no kernel.
            for thread in self._threads:
                self._settle(self._pair_by_order(thread, final=True).outcome)
                self._settle(thread.give_up(len(thread.backlog.launches)))
                self._settle(thread.finish())

    def _pair_by_order(self, thread: ThreadAligner, *, final: bool) -> Step:
        # One thread's launches come in order, but on merged threads one that is still open may come before others.
        pending = None if final or self._threads.are_separate else self._translator.first_pending()
        signatures = self._translator.signatures
        mode = PairingMode(
            signatures=signatures.rows if len(signatures) else np.empty(0, dtype=ALIGN_OPERATION),
            collapses=self._collapses,
            may_coalesce=self._may_coalesce,
            has_other_threads=len(self._threads) > 1,
        )
        before_op = pending[0] if pending else FAR_FUTURE_NS
        return thread.pair_by_order(mode, self._coverage, before_op=before_op, final=final)

    def _place_doubtful(self, tids: Sequence[int], doubts: dict[int, Doubt], *, final: bool) -> bool:
        """Places the surest of the threads in doubt behind a hole by the others; False if none is, or they lag."""
        in_doubt = [tid for tid in tids if tid in doubts]
        if not in_doubt:
            return False
        others = [thread for tid, thread in self._threads.items() if tid not in doubts]
        until = max(doubts[tid].ends_at for tid in in_doubt)
        if not all(other.has_passed(until) for other in others):
            return False
        tid = max(in_doubt, key=lambda each: doubts[each].guess.trust)
        anchored = [other for other in others if len(other.anchors.ids)]
        step = self._threads.for_thread(tid).resume_between(doubts[tid], anchored, final=final)
        self._settle(step.outcome)
        if step.may_go_on:
            del doubts[tid]
        return step.may_go_on

    # what is decided

    def _settle(self, outcome: Outcome) -> None:
        """Emits what was matched, and keeps the rest until it is known whether it was captured."""
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
        self._unmatched.add(self._threads.number_of(launches), outcome, times, sizes)

    def _limit(self, thread: ThreadAligner) -> None:
        if len(thread.backlog.launches) > PENDING_LIMIT:
            self._settle(thread.give_up(PENDING_LIMIT // 2))

    def _emit_unmatched(self, *, final: bool, before: int = 0) -> None:
        ids, launches, matches, confidence = self._unmatched.drain_decided(self._coverage, final=final, before=before)
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
