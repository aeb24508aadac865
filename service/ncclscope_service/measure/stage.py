"""Stage that measures: joined operations in; clocks, measures and limits out; then an operation is finished.

Replays of captured operations are joined across ranks and measured here, and so are the records of NCCL Inspector
(`inspector`). The rows of replays (`Store.replays`) have the columns of operations, so what measures operations
measures them too. The first recorded replay is what the captured operation's own row tells of, so that row gets its
measures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.estimator import ClockEstimator
from ncclscope_service.clock.host_clocks import ClockPrior, Clocks, Unclocked
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.table import Ids
from ncclscope_service.intake.communicators import Communicators
from ncclscope_service.join.send_recv import ExchangeBook
from ncclscope_service.join.stage import MEETING, JoinStage, Met, ReplayJoin
from ncclscope_service.measure import limits
from ncclscope_service.measure.inspector import Inspection
from ncclscope_service.measure.limits import Limits
from ncclscope_service.measure.measured_rows import Measuring
from ncclscope_service.rollup.recent_sums import RecentSums
from ncclscope_service.rollup.series import SeriesBook
from ncclscope_service.rollup.usage import Patterns, UsageCounts
from ncclscope_service.store.retention import Retention
from ncclscope_service.store.rows import COLLECTIVE, LimitReference, has_kernel, has_launch
from ncclscope_service.store.tables import Hosts, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_SEND: Final = OPERATION_CODES["Send"]
_RECV: Final = OPERATION_CODES["Recv"]
_MEASURES: Final = (
    "start_true_ns",
    "end_true_ns",
    "clock_uncertainty_ns",
    "ranks_seen",
    "wait_ns",
    "transfer_ns",
    "algbw",
    "busbw",
    "busbw_apparent",
)
"""Columns that the captured operation takes from its first replay."""
_A_GUESS: Final = 0.5
"""Confidence up to which nothing is measured by a match."""


@dataclass(frozen=True, slots=True)
class MeasuredReplays:
    """Measured collectives of replays, and the captured operations that are finished."""

    collectives: Columns
    """rows.COLLECTIVE, one for each launch that was measured."""
    operations: Ids
    """Captured operations of which nothing more will be learnt."""


class Replaying:
    """All replays of a store."""

    def __init__(
        self,
        known: Store,
        hosts: Hosts,
        clocks: Clocks,
        series: SeriesBook,
        limits: Limits,
        *,
        settle_ns: int,
        patience_ns: int,
    ) -> None:
        self._store = known
        self._table = known.replays
        self._series = series
        self._clocks = clocks
        self._measuring = Measuring(known, hosts, limits, known.replays)
        self._unclocked = Unclocked(clocks, hosts, known.replays)
        self._join = ReplayJoin(settle_ns=settle_ns, patience_ns=patience_ns)
        self._exchanges = ExchangeBook()
        self._unfinished: list[tuple[int, Ids]] = []
        self._unidentified = np.empty(0, np.int64)

    def wait(self, patience_ns: int) -> None:
        """So long any rank is waited for, from now on."""
        self._join.patience_ns = patience_ns

    def feed(self, replays: Columns, now_ns: int) -> None:
        """Takes replays (rows.REPLAYED) that the alignment found."""
        if len(replays) == 0:
            return
        ids = self._table.append(replays)
        again = replays[~replays["is_first"]]
        if len(again):
            self._series.count_run(again)
        self._unfinished.append((now_ns, ids))
        self._unidentified = np.concatenate([self._unidentified, ids[replays["confidence"] > _A_GUESS]])

    def report(self, is_open: NDArray[np.bool_], now_ns: int, *, final: bool) -> None:
        """Tells the join of replays; `is_open`: by member, whether its communicator may still prove to be another."""
        if len(self._unidentified) == 0:
            return
        replays = self._table.take(self._unidentified)
        ready = ~is_open[replays["member"]] | final
        meetings = self._meetings(self._unidentified[ready], replays[ready], now_ns)
        self._unidentified = self._unidentified[~ready]
        is_pair = meetings["sender"] != NO_NUMBER
        if is_pair.any():
            self._exchanges.expect(self._table.take(meetings["id"][is_pair], "launch")["launch"])
        self._join.report(meetings)

    def measure(
        self, members_seen: dict[int, int], mixed: set[int], now_ns: int, *, is_whole: bool, final: bool
    ) -> MeasuredReplays:
        """Joins and measures what is complete; the clocks learn from it, and are waited for (`Unclocked.admit`)."""
        if not len(self._join.pending) and not self._unfinished:
            return MeasuredReplays(np.empty(0, COLLECTIVE), np.empty(0, np.int64))
        clocks = self._clocks
        clocks.correct(self._join.pending, self._table)
        met = self._join.take_ready(self._ends(), members_seen=members_seen, now_ns=now_ns, final=final)
        kernels = [self._measuring.gather(each) for each in met.collectives]
        for each in kernels:
            clocks.learn(each)
        if kernels:
            clocks.estimate(now_ns, final=final)
        clocks.correct(_ids_of(met), self._table)
        clocked = self._unclocked.admit(kernels, met.sends, met.receives, now_ns, is_whole=is_whole, final=final)
        added, _ = self._measuring.measure_joined(clocked, self._exchanges, clocks, mixed)
        none = np.empty(0, COLLECTIVE)
        return MeasuredReplays(row_ops.concat([none, *added]), self._finish(now_ns, final=final))

    def _meetings(self, ids: Ids, replays: Columns, now_ns: int) -> Columns:
        """Meetings (join.replays.MEETING) of the replays that other ranks can take part in."""
        members = [self._store.members[member] for member in replays["member"].tolist()]
        templates = self._store.templates_of(replays)
        own = np.asarray([NO_NUMBER if of.rank is None else of.rank for of in members], np.int32)
        collective = replays["coll_seq"] != NO_NUMBER
        receives = templates["op"] == _RECV
        meetings = np.empty(len(ids), MEETING)
        meetings["id"], meetings["reported_at_ns"] = ids, now_ns
        meetings["communicator"] = [of.communicator for of in members]
        sizes = np.asarray([self._store.communicators[of.communicator].size for of in members], np.int32)
        meetings["size"] = np.where(collective, sizes, 2)
        meetings["sender"] = np.where(collective, NO_NUMBER, np.where(receives, templates["root"], own))
        meetings["receiver"] = np.where(collective, NO_NUMBER, np.where(receives, own, templates["root"]))
        meetings["seq"] = np.where(collective, replays["coll_seq"], replays["pair_seq"])
        meetings["side"] = np.where(collective, own, receives)
        usable = (own >= 0) & (own < sizes) & (sizes > 1)
        is_pair = np.isin(templates["op"], (_SEND, _RECV)) & (templates["root"] >= 0) & (templates["root"] != own)
        usable &= collective | is_pair
        return meetings[usable]

    def _ends(self) -> NDArray[np.int64]:
        """When pending replays ended, on the reference clock where their host has one."""
        rows = self._table.take(self._join.pending, "end_ns", "end_true_ns")
        ends: NDArray[np.int64] = np.where(rows["end_true_ns"] == NO_TIME_NS, rows["end_ns"], rows["end_true_ns"])
        return ends

    def _finish(self, now_ns: int, *, final: bool) -> Ids:
        """Counts what has met its other sides or has waited too long; gives the captured operations it tells of."""
        left: list[tuple[int, Ids]] = []
        finished: list[Ids] = [np.empty(0, np.int64)]
        waiting = np.concatenate(
            [self._unidentified, self._join.pending, self._unclocked.waiting(), self._exchanges.waiting()]
        )
        for since_ns, ids in self._unfinished:
            is_over = final or now_ns - since_ns > self._join.patience_ns
            still = np.zeros(len(ids), bool) if is_over else np.isin(ids, waiting)
            finished.append(ids[~still])
            if still.any():
                left.append((since_ns, ids[still]))
            if is_over:
                self._unidentified = self._unidentified[~np.isin(self._unidentified, ids)]
        self._unfinished = left
        done = np.concatenate(finished)
        done = done[done >= self._table.first]
        at = self._table.at(done)
        self._table.rows["finished"][at] = True
        rows = self._table.rows[at]
        self._exchanges.forget(rows["launch"][rows["coll_seq"] == NO_NUMBER])
        again = rows[~rows["is_first"]]
        if len(again):
            self._series.count_settled(again)
        return self._tell_operations(rows[rows["is_first"]])

    def _tell_operations(self, replays: Columns) -> Ids:
        operations = self._store.operations
        replays = replays[replays["operation"] >= operations.first]
        at = operations.at(replays["operation"])
        for name in _MEASURES:
            operations.rows.put(name, at, replays[name])
        ids: Ids = replays["operation"]
        return ids


def _ids_of(met: Met) -> Ids:
    collectives = [each.operations[each.operations != NO_NUMBER] for each in met.collectives]
    return np.concatenate([met.sends, met.receives, *collectives])


_REPORTED: Final = (
    "member", "template", "coll_seq", "pair_seq", "match", "confidence", "launch", "kernel", "number_state"
)  # fmt: skip
_LIMITED: Final = (
    "member", "template", "message_bytes", "algorithm", "protocol", "launch", "limit", "limit_reference", "bottleneck"
)  # fmt: skip
"""Columns that limits depend on, and in which they are written."""


class MeasurementStage:
    """Measures, clocks and limits of one store."""

    def __init__(
        self,
        known: Store,
        communicators: Communicators,
        series: SeriesBook,
        usage: UsageCounts,
        patterns: Patterns,
        recent: RecentSums,
        make_estimator: Callable[[], ClockEstimator],
        retention: Retention,
        *,
        settle_ns: int,
        patience_ns: int,
    ) -> None:
        waits = {"settle_ns": settle_ns, "patience_ns": patience_ns}
        hosts = Hosts(known)
        self.joins = JoinStage(known, **waits)
        self.clocks = Clocks(known, hosts, make_estimator, retention)
        self.limits = Limits(known)
        self.inspection = Inspection(known, communicators, series, usage, patterns, hosts, self.clocks, **waits)
        self.replaying = Replaying(known, hosts, self.clocks, series, self.limits, **waits)
        self._store = known
        self._series = series
        self._recent = recent
        self._measuring = Measuring(known, hosts, self.limits)
        self._unclocked = Unclocked(self.clocks, hosts, known.operations)
        self._patience_ns = patience_ns
        self._unjoined: deque[tuple[int, Ids]] = deque()
        """(when reported, operations) that have a kernel and wait for the other ranks."""

    def set_clock_priors(self, priors: Mapping[str, ClockPrior]) -> None:
        """Estimates of the clocks of hosts, by name, that hold until operations give better ones."""
        self.clocks.believe(priors)

    def set_patience(self, patience_ns: int) -> None:
        """Ranks are waited for so long from now on."""
        self._patience_ns = patience_ns
        self.joins.set_patience(patience_ns)
        self.replaying.wait(patience_ns)

    def ingest_replays(self, replays: Columns, now_ns: int) -> None:
        """Replays (rows.REPLAYED) that were aligned."""
        self.inspection.mark_counted(replays)
        self.replaying.feed(replays, now_ns)

    def report_operations(self, decided: Ids, now_ns: int) -> None:
        """Reports to the joins what was decided, and finishes what need not wait for them."""
        rows = self._store.operations.take(decided, *_REPORTED)
        # A guess is worth showing, but nothing may be measured, and no clock be set, by it.
        captured = self._is_captured(rows)
        matched = has_kernel(rows) & ~captured
        self.inspection.withdraw(decided[matched])
        waiting = self.joins.report_operations(decided, rows, matched, now_ns)
        waiting = (waiting & matched) | captured
        self.finish(decided[~waiting])
        if waiting.any():
            self._unjoined.append((now_ns, decided[waiting]))

    def process_joined(self, decided: Ids, now_ns: int, *, is_aligned: bool, final: bool) -> Columns:
        """Joins and measures what is complete; gives the rows.COLLECTIVE that were added.

        `is_aligned`: whether everything that came was aligned; then clocks are not waited for any longer.
        """
        members_seen = {of.index: len(of.members or {}) for of in self._store.communicators}
        joined = self.joins.drain_collectives(members_seen, now_ns, final=final)
        kernels = [self._measuring.gather(each) for each in joined]
        for each in kernels:
            self.clocks.learn(each)
        sends, receives = self.joins.drain_pairs(now_ns, final=final)
        self.clocks.learn_messages(sends, receives)
        self.clocks.estimate(now_ns, final=final)
        self.clocks.correct(self._all_operations() if final else decided)
        is_whole = is_aligned and not self.joins.has_more and not self.joins.is_healing
        clocked = self._unclocked.admit(kernels, sends, receives, now_ns, is_whole=is_whole, final=final)
        mixed = self.joins.mixed
        added, joined_ids = self._measuring.measure_joined(clocked, self.joins.exchanges, self.clocks, mixed)
        replayed = self.replaying.measure(members_seen, mixed, now_ns, is_whole=is_whole, final=final)
        joined_ids.append(replayed.operations)
        measured = row_ops.concat([*added, replayed.collectives])
        measured = row_ops.take(measured, np.argsort(measured["end_true_ns"], kind="stable"))
        self._store.collectives.append(measured)
        self._series.count_joined(measured)
        self.finish(np.concatenate(joined_ids))
        return measured

    def process_inspected(self, now_ns: int, *, final: bool) -> Columns:
        """Measures by NCCL Inspector's records what no kernels measured; gives the rows.COLLECTIVE that were added."""
        measured, operations = self.inspection.advance(now_ns, final=final)
        self._store.collectives.append(measured)
        self._series.count_joined(measured)
        self._set_limits(self._store.operations.at(operations))
        return measured

    def drain_overdue(self, now_ns: int, *, final: bool) -> Iterator[Ids]:
        """Unfinished operations that have waited too long for other ranks."""
        while self._unjoined and (final or now_ns - self._unjoined[0][0] > self._patience_ns):
            _, operations = self._unjoined.popleft()
            operations = operations[operations >= self._store.operations.first]
            rows = self._store.operations.take(operations, "finished", "launch", "coll_seq")
            left = ~rows["finished"]
            yield operations[left]
            self.joins.exchanges.forget(rows["launch"][left & (rows["coll_seq"] == NO_NUMBER)])

    def finish(self, operations: Ids) -> None:
        """Sets the limits of these operations and counts them: nothing more will be learned about them."""
        table = self._store.operations
        at = table.at(operations)
        at = at[~table.rows["finished"][at]]
        matched_at = at[has_launch(table.rows.values("match", at))]
        if len(matched_at):
            self._set_limits(matched_at)
            self._series.count_measured(table.first + matched_at)
            self._series.count_compared(table.first + matched_at)
        self.close(at)

    def close(self, at: NDArray[np.intp]) -> None:
        """Marks the operations at these places as finished, each once."""
        self._store.finish(at)
        self._recent.finish(self._store.operations.first + at)

    def _is_captured(self, rows: Columns) -> NDArray[np.bool_]:
        """Which of these operations were captured into CUDA graphs: their replays are joined, not they."""
        captured = np.zeros(len(rows), bool)
        found = np.flatnonzero(rows["kernel"] >= self._store.kernels.first)
        nodes = self._store.kernels.take(rows["kernel"][found], "graph_node_id")
        captured[found] = nodes["graph_node_id"] != NO_NUMBER
        return captured

    def _all_operations(self) -> Ids:
        table = self._store.operations
        return np.arange(table.first, table.next_id, dtype=np.int64)

    def _set_limits(self, at: NDArray[np.intp]) -> None:
        """Sets what the operations at these places can be held against."""
        if not len(at):
            return
        rows = self._store.operations.rows
        limited = rows.take(at, *_LIMITED)
        measured = limits.busbw_by_baseline(self._store, limited)
        limited["limit"] = np.where(np.isnan(measured), self._series.baseline_of(limited), measured)
        limited["limit_reference"] = np.where(np.isnan(limited["limit"]), NO_NUMBER, LimitReference.BASELINE)
        self.limits.fill(limited)
        for name in ("limit", "limit_reference", "bottleneck"):
            rows.put(name, at, limited[name])
