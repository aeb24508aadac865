"""Replays of captured operations from alignment to measures: joins them across ranks, and writes what came of it.

Their rows (`Store.replays`) have the columns of operations, so what measures operations measures them too. The first
recorded replay is what the captured operation's own row tells of, so that row gets its measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.clocks import Clocks
from ncclscope_service.exchanges import ExchangeBook
from ncclscope_service.hosts import Hosts
from ncclscope_service.measuring import Measuring
from ncclscope_service.replay_join import MEETING, Met, ReplayJoin
from ncclscope_service.series import SeriesBook
from ncclscope_service.store import Ids, Store
from ncclscope_service.unclocked import Unclocked
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
"""What the captured operation takes over from its first replay."""
_A_GUESS: Final = 0.5
"""Confidence up to which nothing is measured by a match."""


@dataclass(frozen=True, slots=True)
class MeasuredReplays:
    """What became known of replays."""

    collectives: Columns
    """rows.COLLECTIVE, one for each launch that was measured."""
    operations: Ids
    """Captured operations of which nothing more will be learnt."""


class Replaying:
    """All replays of a store."""

    def __init__(
        self, known: Store, hosts: Hosts, clocks: Clocks, series: SeriesBook, *, settle_ns: int, patience_ns: int
    ) -> None:
        self._store = known
        self._table = known.replays
        self._series = series
        self._clocks = clocks
        self._measuring = Measuring(known, hosts, known.replays)
        self._unclocked = Unclocked(clocks, hosts, known.replays)
        self._join = ReplayJoin(settle_ns=settle_ns, patience_ns=patience_ns)
        self._exchanges = ExchangeBook()
        self._unfinished: list[tuple[int, Ids]] = []
        self._unidentified = np.empty(0, np.int64)

    def wait(self, patience_ns: int) -> None:
        """So long any rank is waited for, from now on."""
        self._join.patience_ns = patience_ns

    def feed(self, replays: Columns, now_ns: int) -> None:
        """Takes replays (rows.REPLAYED) that were told by the alignment."""
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
            return MeasuredReplays(self._store.collectives.rows[:0], np.empty(0, np.int64))
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
        none = self._store.collectives.rows[:0]
        return MeasuredReplays(whole_rows.joined([none, *added]), self._finish(now_ns, final=final))

    def _meetings(self, ids: Ids, replays: Columns, now_ns: int) -> Columns:
        """What is waited for, of those that can be waited for."""
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
        rows = self._table.take(self._join.pending)
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
            operations.rows[name][at] = replays[name]
        ids: Ids = replays["operation"]
        return ids


def _ids_of(met: Met) -> Ids:
    collectives = [each.operations[each.operations != NO_NUMBER] for each in met.collectives]
    return np.concatenate([met.sends, met.receives, *collectives])
