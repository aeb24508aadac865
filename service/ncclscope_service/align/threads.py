"""Threads of a process: expected launches beside the kernels each launched, paired by time or by order.

Threads that cannot be distinguished are treated as one.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.after_gap import (
    ENOUGH_BEFORE,
    ENOUGH_BEHIND,
    Anchors,
    BehindGap,
    Doubt,
    GapHistory,
    GapPlace,
    between,
)
from ncclscope_service.align.by_order.known_runs import items_of
from ncclscope_service.align.by_order.thread_order import OrderPairing, PairingMode
from ncclscope_service.align.by_time import TIMED_KERNEL, TIMED_LAUNCH, TimePairing
from ncclscope_service.align.coverage import Coverage
from ncclscope_service.align.lanes import LANE_WINDOW, PATIENCE_NS, UNBOUND, VOTES, Lanes, majority, votes_by_time
from ncclscope_service.align.lost_calls import LostCalls
from ncclscope_service.align.records import launch_times
from ncclscope_service.align.thread_backlog import (
    THREAD_KERNEL,
    Choice,
    Outcome,
    PlanGatherer,
    ThreadBacklog,
    plans_of,
    spread,
)
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import CombinationIndex, group_by
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_AHEAD: Final = 2 * 65536
"""How far launches ahead of their kernels are looked at, in items beyond four per kernel."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one step of pairing a thread by order."""

    outcome: Outcome
    may_go_on: bool = False
    """Something was decided, or the next pending kernel is behind a hole in what was recorded and can be placed now."""
    doubt: Doubt | None = None
    """The next kernels are behind a hole, and wait until other threads bound where they go on."""


@dataclass(slots=True)
class ThreadAligner:
    """Pending launches and kernels of one thread."""

    lanes: Lanes
    knows_groups: bool = False
    """Groups are known from the log."""
    backlog: ThreadBacklog = field(default_factory=ThreadBacklog)
    """Launches and kernels that are not decided yet."""
    _gaps: GapHistory = field(default_factory=GapHistory)
    _lost: LostCalls = field(default_factory=lambda: LostCalls(("signature", "text", "plan")))
    _plans: PlanGatherer = field(default_factory=PlanGatherer)
    _used: int = 0
    """Launches decided so far."""
    _timed: TimePairing = field(init=False)
    _ordered: OrderPairing = field(init=False)

    def __post_init__(self) -> None:
        self._timed = TimePairing(knows_groups=self.knows_groups)
        self._ordered = OrderPairing(self.lanes)

    @property
    def by_time(self) -> TimePairing:
        """Pairs by time."""
        return self._timed

    def begin_with_log(self) -> None:
        """The first kernel recorded is the first that was launched."""
        self._ordered.begin_with_log()

    def begin_within_log(self) -> None:
        """Launches before the first kernel were not recorded: where a program repeats, its place is a guess."""
        self._ordered.doubt_beginning()

    def give_up(self, amount: int) -> Outcome:
        """Takes the oldest launches out without a kernel."""
        self._ordered.skip(amount)
        if amount > self.backlog.filled:
            self._lost.skip()
        outcome = self._drain(Choice.without_kernels(amount))
        return self._plans.gather(outcome) if self.backlog.is_spread else outcome

    def finish(self) -> Outcome:
        """The last launch, which was held because more of its kernels might have come."""
        return self._plans.gather(self._nothing().outcome, final=True)

    def _nothing(self) -> Step:
        return Step(self._drain(Choice.without_kernels(0)))

    def _drain(self, choice: Choice) -> Outcome:
        outcome = self.backlog.drain_decided(choice)
        self._gaps.remember(outcome.kernels, choice.kernel, outcome.launches["first_op"], self._used)
        self._used += len(choice.kernel)
        return outcome

    # by time

    def pair_by_time(self, *, until_ns: int, final: bool) -> Outcome:
        """Decides what is over before `until_ns`; all of it with `final`."""
        launches = self._timed_launches()
        kernels = self._timed_kernels()
        blocked_at = self._bind_by_time(launches, kernels, until_ns=until_ns, final=final)
        launches["lane"] = self.lanes.kernel_lanes[self.backlog.launches["lane"]]
        if blocked_at is not None:
            before = row_ops.filter_rows(launches, launches["time_ns"] < blocked_at)
            launched = row_ops.filter_rows(kernels, kernels["time_ns"] < blocked_at)
            until_ns = min(until_ns, blocked_at - 1)
            pairs = self._timed.pair_bursts(before, launched, until_ns=until_ns, final=False)
        else:
            pairs = self._timed.pair_bursts(launches, kernels, until_ns=until_ns, final=final)
        no_hole = np.zeros(pairs.launches_used, dtype=bool)
        ids = self.backlog.kernels["id"]
        plans = plans_of(ids[pairs.further], ids[pairs.first_of_further])
        outcome = self._drain(Choice(pairs.kernels, pairs.confidence, no_hole, pairs.kernels_used))
        return replace(outcome, plans=plans)

    def launched_together(self, since_ns: int, until_ns: int, kernels: Columns) -> tuple[Columns, NDArray[np.bool_]]:
        """Pending launches logged between two times, and which are launched with the next one of their lane.

        `kernels`: those of this thread whose launch time is known.
        """
        rows = self._timed_launches()
        rows["lane"] = self.lanes.kernel_lanes[rows["lane"]]
        near = (rows["time_ns"] > since_ns) & (rows["time_ns"] < until_ns)
        return self.backlog.launches[near], self._timed.joins_next(rows[near], kernels)

    def _timed_launches(self) -> Columns:
        rows = np.empty(len(self.backlog.launches), dtype=TIMED_LAUNCH)
        rows["position"] = np.arange(len(rows))
        rows["time_ns"] = np.maximum.accumulate(self.backlog.launches["logged_at_ns"]) if len(rows) else 0
        for name in ("lane", "signature", "classes", "data_type", "is_open", "may_split"):
            rows[name] = self.backlog.launches[name]
        return rows

    def _timed_kernels(self) -> Columns:
        rows = np.empty(len(self.backlog.kernels), dtype=TIMED_KERNEL)
        rows["position"] = np.arange(len(rows))
        rows["time_ns"] = np.maximum.accumulate(self.backlog.kernels["time_ns"]) if len(rows) else 0
        for name in ("lane", "kernel_class", "data_type"):
            rows[name] = self.backlog.kernels[name]
        return rows

    def _bind_by_time(self, launches: Columns, kernels: Columns, *, until_ns: int, final: bool) -> int | None:
        """Pairs lanes that appeared; gives the time from which on nothing can be decided because one is open."""
        unbound = self.lanes.kernel_lanes[launches["lane"]] == UNBOUND
        if not unbound.any():
            return None
        votes = self._votes(launches, kernels)
        blocked_at: int | None = None
        for lane in np.unique(launches["lane"][unbound]).tolist():
            of_lane = launches["lane"] == lane
            voting = of_lane & (votes != UNBOUND)
            begin = int(launches["time_ns"][of_lane][0])
            if until_ns > begin + PATIENCE_NS and voting.any():
                # What was called long before the first vote was not recorded: a capture began within the log.
                begin = max(begin, int(launches["time_ns"][voting][0]))
            chosen = votes[voting & (launches["time_ns"] <= begin + PATIENCE_NS)][:VOTES]
            is_over = final or until_ns > begin + PATIENCE_NS
            if len(chosen) == VOTES or (is_over and len(chosen)):
                self.lanes.bind(lane, majority(chosen))
            elif not is_over:
                blocked_at = begin if blocked_at is None else min(begin, blocked_at)
        return blocked_at

    def _votes(self, launches: Columns, kernels: Columns) -> NDArray[np.int32]:
        if len(kernels) == 0:
            return np.full(len(launches), UNBOUND, dtype=np.int32)
        next_one = np.minimum(np.searchsorted(kernels["time_ns"], launches["time_ns"], side="left"), len(kernels) - 1)
        left, right = self._symbols(self.backlog.launches, self.backlog.kernels)
        return votes_by_time(launches, kernels, self.lanes.compatible()[left, right[next_one]])

    # by order

    def pair_by_order(self, mode: PairingMode, coverage: Coverage, *, before_op: int, final: bool) -> Step:
        """Decides what order alone settles, among launches that begin before an operation.

        Kernels up to a hole in what was recorded are decided on their own; the next step goes on behind it.
        """
        self.backlog.spread()
        self._fill(before_op, final=final)
        rows = self.backlog.launches[: self.backlog.filled]
        rows = rows if final else rows[: 4 * len(self.backlog.kernels) + _AHEAD]
        amount, is_border = self._gaps.next_border(self.backlog.kernels, coverage, final=final)
        if is_border and amount == 0 and len(rows):
            return self._resume(rows, mode, coverage, final=final)
        if amount == 0 and not final:
            return self._nothing()
        kernels = self.backlog.kernels[:amount]
        if is_border and not final and len(rows) < amount + LANE_WINDOW:
            return self._nothing()
        self.lanes.kernel_symbols.number(self.backlog.kernels)
        if is_border and self._used == 0 and amount < ENOUGH_BEFORE:
            self._ordered.doubt_beginning()  # few kernels fit many places of a log that goes on behind them
        choice = self._ordered.pair(rows, kernels, mode, is_closed=is_border, final=final or is_border)
        has_moved = len(choice.kernel) + choice.kernels_used > 0
        return Step(self._plans.gather(self._drain(choice)), has_moved or (is_border and amount > 0))

    def _fill(self, before_op: int, *, final: bool) -> None:
        """Puts in launches whose lines were lost, among those that begin before an operation."""
        backlog = self.backlog
        end = int(np.searchsorted(backlog.launches["first_op"], before_op))
        if end > backlog.filled:
            backlog.fill(self._lost.fill(backlog.launches[backlog.filled : end], final=final))

    def _resume(self, rows: Columns, mode: PairingMode, coverage: Coverage, *, final: bool) -> Step:
        """Skips the launches of a hole in what was recorded; none while more must come first."""
        behind, is_over = self._gaps.next_border(self.backlog.kernels, coverage, final=True, is_behind=True)
        items, runs = self._ordered.items(rows, self.backlog.kernels[:behind], mode, final=final)
        self.lanes.kernel_symbols.number(self.backlog.kernels)
        left, right = self._symbols(rows[items[:-1]], self.backlog.kernels[runs[:-1]])
        operations, kernels = rows["first_op"][items[:-1]], self.backlog.kernels[runs[:-1]]
        given = BehindGap(items, operations, left, kernels, right, self.lanes.compatible())
        if not (final or is_over or len(kernels) >= ENOUGH_BEHIND):
            return self._nothing()
        found = self._gaps.find(given, self._used, step=self._lost.step, final=final)
        if found is None:
            return self._nothing()
        if mode.has_other_threads and not found.is_sure:
            return replace(self._nothing(), doubt=Doubt(given, found))
        return self._go_on(GapPlace(found.skipped, min(self._ordered.trust, found.trust)))

    def resume_between(self, doubt: Doubt, others: Sequence[ThreadAligner], *, final: bool) -> Step:
        """Places the kernels in doubt by what other threads launched meanwhile; nothing while more must come first."""
        bounds = between([other.anchors for other in others], doubt.given.ids)
        found = self._gaps.find_between(doubt.given, bounds, self._used, doubt.guess, final=final)
        if found is None:
            return self._nothing()
        if found is doubt.guess:
            return self._go_on(GapPlace(found.skipped, min(self._ordered.trust, found.trust)))
        return self._go_on(GapPlace(found.skipped, found.trust * min(other.trust for other in others)))

    def _go_on(self, found: GapPlace) -> Step:
        self._gaps.close_gap(self.backlog.kernels)
        self._ordered.trust = found.trust
        return Step(self.give_up(found.skipped), may_go_on=True)

    @property
    def trust(self) -> float:
        """How sure it is that pairs are not off by whole periods, after the last hole."""
        return self._ordered.trust

    @property
    def anchors(self) -> Anchors:
        """The pairs behind the last hole."""
        return self._gaps.anchors

    def stretch(self, coverage: Coverage) -> int | None:
        """Number of the recorded stretch that the next kernel is in; None without one."""
        return self._gaps.stretch_of_next(self.backlog.kernels, coverage) if len(self.backlog.kernels) else None

    def has_passed(self, correlation_id: int) -> bool:
        """Whether all kernels up to a correlation id are decided."""
        return len(self.backlog.kernels) == 0 or int(self.backlog.kernels["correlation_id"][0]) > correlation_id

    def agrees_with(self, kernels: Columns, *, collapse: bool, enough: bool) -> bool | None:
        """Whether the first pending launches may be these kernels, one by one; None if `enough` is yet to come."""
        launches = spread(self.backlog.launches)
        items, runs = items_of(launches, kernels, collapse=collapse, final=False)
        left, right = launches[items[:-1]], kernels[runs[:-1]]
        if len(left) < len(right) and not enough:
            return None
        amount = min(len(left), len(right))
        symbols, kernel_symbols = self._symbols(left[:amount], right[:amount])
        return bool(self.lanes.compatible()[symbols, kernel_symbols].all())

    def _symbols(self, launches: Columns, kernels: Columns) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Numbers of both sides in the table of `Lanes.compatible`."""
        return self.lanes.launch_symbols.number(launches), self.lanes.kernel_symbols.number(kernels)


@dataclass(slots=True)
class Threads:
    """Threads of a process, and the lanes they share."""

    lanes: Lanes = field(default_factory=Lanes)
    are_separate: bool = True
    """Kernels are launched by threads that log; else all rows are one thread's, number 0."""
    log: bool = True
    """Threads that launch are those that log, though they are treated as one."""
    is_whole: bool = False
    """The recording began before anything was launched."""
    is_within: bool = False
    """The recording began in the middle of the log."""
    knows_groups: bool = False
    """Groups are known from the log, by its first operation."""
    _threads: dict[int, ThreadAligner] = field(default_factory=dict[int, ThreadAligner])
    _kernel_lanes: CombinationIndex = field(default_factory=lambda: CombinationIndex(("device_id", "stream_id")))

    def __len__(self) -> int:
        return len(self._threads)

    def __iter__(self) -> Iterator[ThreadAligner]:
        return iter(self._threads.values())

    def items(self) -> ItemsView[int, ThreadAligner]:
        """Thread ids with their aligners."""
        return self._threads.items()

    def for_thread(self, tid: int) -> ThreadAligner:
        """The aligner of a thread, created if it is new."""
        if tid not in self._threads:
            self._threads[tid] = ThreadAligner(self.lanes, knows_groups=self.knows_groups)
            if self.is_whole:
                self._threads[tid].begin_with_log()
            if self.is_within:
                self._threads[tid].begin_within_log()
        return self._threads[tid]

    def begin_with_log(self) -> None:
        """Nothing was launched before the recording began."""
        self.is_whole = True
        for thread in self._threads.values():
            thread.begin_with_log()

    def begin_within_log(self) -> None:
        """Something was launched before the recording began."""
        self.is_within = True
        for thread in self._threads.values():
            thread.begin_within_log()

    def number_of(self, launches: Columns) -> int:
        """The thread that these launches are pending on."""
        return int(launches["tid"][0]) if self.are_separate else 0

    def add_launches(self, rows: Columns, ids: NDArray[np.int64]) -> None:
        """Adds further launches (LAUNCH) of any threads; `ids` are the operations that they point into."""
        if not self.are_separate:
            self.for_thread(0).backlog.add_launches(rows, ids)
            return
        for tid, mine in group_by(rows["tid"]):
            self.for_thread(tid).backlog.add_launches(row_ops.take(rows, mine), ids)

    def add_kernels(self, rows: Columns) -> None:
        """Ingests further kernels (ALIGN_KERNEL) of any threads."""
        known = self.columns_of(rows)
        if not self.are_separate:
            self.for_thread(0).backlog.add_kernels(known)
            return
        for tid, mine in group_by(rows["launch_tid"]):
            self.for_thread(tid).backlog.add_kernels(row_ops.take(known, mine))

    def columns_of(self, rows: Columns) -> Columns:
        """Kernels (ALIGN_KERNEL) as thread aligners need them (THREAD_KERNEL)."""
        known = np.empty(len(rows), dtype=THREAD_KERNEL)
        known["id"], known["correlation_id"] = rows["id"], rows["correlation_id"]
        known["time_ns"] = launch_times(rows)
        known["tid"] = rows["launch_tid"] if self.log and not self.are_separate else NO_NUMBER
        known["lane"] = self.kernel_lanes_of(rows)
        known["is_orphan"] = rows["launch_start_ns"] == NO_TIME_NS
        known["device"] = rows["device_id"]
        known["duration_ns"] = np.where(rows["censored"], 0, rows["end_ns"] - rows["start_ns"])
        known["grid_x"] = np.maximum(rows["grid_x"], 0)
        known["kernel_class"], known["data_type"] = rows["kernel_class"], rows["data_type"]
        return known

    def kernel_lanes_of(self, rows: Columns) -> NDArray[np.int32]:
        """The lane (device and stream) of each kernel (ALIGN_KERNEL), in order of appearance."""
        return self._kernel_lanes.number(rows)

    def start_clean(self, kernels: Columns, *, collapse: bool, enough: bool) -> bool | None:
        """Whether each thread's first kernels (ALIGN_KERNEL) are just those expected; None if it is too early to say.

        Threads are exact on their own, but if rows are missing the order between threads is worth more.
        """
        known = self.columns_of(kernels)
        answers = [
            self.for_thread(tid).agrees_with(known[kernels["launch_tid"] == tid], collapse=collapse, enough=enough)
            for tid in np.unique(kernels["launch_tid"]).tolist()
        ]
        if any(answer is None for answer in answers):
            return None
        return all(answers)

    def merge(self, *, log: bool) -> None:
        """From now on the process is one thread; `log`: the threads that launch its kernels log, too."""
        self.are_separate, self.log = False, log
        before, self._threads = self._threads, {}
        backlogs = [thread.backlog for thread in before.values() if len(thread.backlog.launches)]
        if not backlogs:
            return
        rows, ids = [each.launches for each in backlogs], np.concatenate([each.ids for each in backlogs])
        offsets = np.cumsum([0, *(len(each.ids) for each in backlogs[:-1])])
        for launches, offset in zip(rows, offsets.tolist(), strict=True):
            launches["begin"] += offset
            launches["end"] += offset
        merged = np.concatenate(rows)
        self.for_thread(0).backlog.add_launches(merged[np.argsort(merged["first_op"], kind="stable")], ids)
