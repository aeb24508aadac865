"""NCCL Inspector as a source of timing: its records find their communicator, their operation, and each other.

    feed      records ─▶ store.inspected, and wait for their communicator
    advance   communicator by hash ─ operation by number ─ join of the ranks ─▶ measures

A communicator is known by NCCL's hash; one that no log names is made. What a kernel of nsys tells is never changed: an
operation that has one keeps its measures, and Inspector's duration is held against it. Records of processes whose log
is not read become rows of operations themselves (`inspector_rows.py`).

Verbose dumps say when kernels began and ended, so that operations between captures have starts and ends, and hosts
without captures have clocks. The plug-in takes these times on the host, a moment after the GPU: durations stay those of
the GPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.host_clocks import Clocks
from ncclscope_service.columns.group_by import distinct_together
from ncclscope_service.columns.table import Ids
from ncclscope_service.intake.communicators import Communicators
from ncclscope_service.measure.inspector_join import InspectedReplays, InspectorJoin, is_usable
from ncclscope_service.measure.inspector_pairing import Key, LineBook, Pairing, Pairs
from ncclscope_service.measure.inspector_rows import InspectedRows
from ncclscope_service.nccl import bandwidth
from ncclscope_service.rollup.series import SeriesBook
from ncclscope_service.rollup.usage import Patterns, UsageCounts
from ncclscope_service.store import rows
from ncclscope_service.store.rows import A_GUESS, Match, empty_operations, has_kernel
from ncclscope_service.store.tables import Hosts, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_SURE: Final = 1.0
_LIKELY: Final = 0.9
_BETWEEN: Final = 0.95
_MEASURES: Final = ("wait_ns", "transfer_ns", "ranks_seen", "algbw", "busbw", "busbw_apparent")
_CELLS: Final = ("match", "confidence", "number_state", "coll_seq", "logged_at_ns")
_CELL: Final = np.dtype([(name, rows.OPERATION[name]) for name in _CELLS])
_NEVER: Final = np.iinfo(np.int64).max
_BUSBW_STEP: Final = 500.0
"""Bytes per second: printed are six digits of GB/s."""


class Inspection:
    """Follows the records of all ranks in one store."""

    def __init__(
        self,
        known: Store,
        communicators: Communicators,
        series: SeriesBook,
        usage: UsageCounts,
        patterns: Patterns,
        hosts: Hosts,
        clocks: Clocks,
        *,
        settle_ns: int,
        patience_ns: int,
    ) -> None:
        self._store = known
        self._hosts = hosts
        self._clocks = clocks
        self._communicators = communicators
        self._series = series
        self._usage = usage
        self._patterns = patterns
        self._settle_ns = settle_ns
        self._join = InspectorJoin(known, settle_ns=settle_ns, patience_ns=patience_ns)
        self._lines = LineBook(known)
        self._replays = InspectedReplays()
        self._rows = InspectedRows(known)
        self._is_used = False
        self._new_lines: list[Ids] = []
        self._unplaced: Ids = np.empty(0, np.int64)
        self._pairings: dict[Key, Pairing] = {}
        self._lossy: set[Key] = set()
        """Keys whose pairs are given as less sure, since lines of theirs were found to be lost."""
        self._next_pair: Counter[tuple[int, int]] = Counter()
        """By (communicator, rank): the next p2p_sn; NO_NUMBER for good once one is missing."""
        self._pairs_told: Counter[Key] = Counter()

    def feed_operations(self, operations: Ids) -> None:
        """New operations, placed in their communicators. Without any Inspector this costs nothing."""
        if self._is_used:
            self._new_lines.append(operations)

    def feed(self, records: Columns) -> None:
        """New records (rows.INSPECTED), of one source in their order."""
        if not len(records):
            return
        if not self._is_used:
            self._is_used = True
            table = self._store.operations
            self._new_lines.append(np.arange(table.first, table.next_id, dtype=np.int64))
        records = records.copy()
        records["arrived_at_ns"] = NO_TIME_NS
        self._unplaced = np.concatenate([self._unplaced, self._store.inspected.append(records)])

    def advance(self, now_ns: int, *, final: bool) -> tuple[Columns, Ids]:
        """Works on what came since.

        Gives the collectives (rows.COLLECTIVE) that no kernels measured, and the operations whose measures are
        Inspector's since now.
        """
        none = np.empty(0, rows.COLLECTIVE)
        if not self._is_used:
            return none, np.empty(0, np.int64)
        lines, self._new_lines = self._new_lines, []
        for operations in lines:
            self._lines.feed(operations[operations >= self._store.operations.first])
        placed = self._place(now_ns, final=final)
        self._pair(placed)
        timed = [self._decide(key, pairing, final=final) for key, pairing in self._pairings.items()]
        self._join.report(placed)
        collectives, measured = [none], list(timed)
        joined = [self._join.measure(records) for records in self._join.take_ready(now_ns, final=final)]
        if sum(self._learn_clocks(matrix) for _, matrix in joined):
            self._clocks.estimate(now_ns, final=final)
        for found, matrix in joined:
            kept, operations = self._measure(found, matrix)
            collectives.append(kept)
            measured.append(operations)
        made, told = self._rows.make(self._join.waiting)
        self._write(made, told)
        measured.append(made)
        return np.concatenate(collectives), np.unique(np.concatenate([np.empty(0, np.int64), *measured]))

    def withdraw(self, operations: Ids) -> None:
        """Operations whose kernels came: what Inspector measured gives way to them; durations stay to compare."""
        table = self._store.operations
        at = table.at(operations)
        at = at[table.rows.values("inspected_ns", at) != NO_TIME_NS]
        nothing = empty_operations(len(at))
        for name in _MEASURES:
            table.rows.put(name, at, nothing[name])

    # Communicators

    def _place(self, now_ns: int, *, final: bool) -> Ids:
        """Finds the communicator of records that wait for it; gives the records that have one since now."""
        table = self._store.inspected
        waiting = self._unplaced[self._unplaced >= table.first]
        if not len(waiting):
            self._unplaced = waiting
            return waiting
        at = table.at(waiting)
        arrived = table.rows["arrived_at_ns"]
        arrived[at] = np.where(arrived[at] == NO_TIME_NS, now_ns, arrived[at])
        keys = table.rows.take(at, "process", "comm_hash", "name", "rank", "nranks")
        distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        since = table.rows["arrived_at_ns"][at[first]]
        found = np.asarray(
            [
                self._communicator(key, make=final or now_ns - arrived_ns > self._settle_ns)
                for key, arrived_ns in zip(distinct, since.tolist(), strict=True)
            ],
            np.int32,
        )[inverse]
        table.rows["communicator"][at] = found
        self._unplaced = waiting[found == NO_NUMBER]
        placed: Ids = waiting[found != NO_NUMBER]
        told = table.take(placed)
        self._series.count_inspected(told)
        self._check_busbw(told)
        return placed

    def _communicator(self, key: np.void, *, make: bool) -> int:
        process, comm_hash, rank, nranks = (int(key[name]) for name in ("process", "comm_hash", "rank", "nranks"))
        found = self._communicators.of_hash(self._store.process_job[process], comm_hash)
        if found is None or rank not in (self._store.communicators[found].members or {}):
            if not make:
                return NO_NUMBER
            found = self._communicators.inspected(process, comm_hash, size=nranks, rank=rank)
        self._communicators.name_unnamed(found, self._store.strings[int(key["name"])])
        return found

    def _check_busbw(self, told: Columns) -> None:
        """Counts records whose busbw is not what size, time and ranks give."""
        factors = bandwidth.factor(told["op"], told["nranks"])
        ours = bandwidth.busbw(told["message_bytes"], told["duration_ns"], factors)
        differs = np.abs(ours - told["busbw"]) > np.maximum(_BUSBW_STEP * 2, 1e-6 * np.abs(ours))
        amount = int(np.count_nonzero(differs & np.isfinite(ours) & np.isfinite(told["busbw"])))
        if amount:
            self._store.skipped["inspector_busbw_differs"] += amount

    # Operations

    def _pair(self, placed: Ids) -> None:
        """Gives new records to the pairing of their rank and kind."""
        told = self._store.inspected.take(placed)
        numbers = told["sequence"].copy()
        for at in np.flatnonzero(told["peer"] != NO_NUMBER).tolist():
            numbers[at] = self._number_of_pair(told[at])
        members = self._members_of(told)
        unlogged = self._unlogged(told, members)
        self._count_unlogged(told[unlogged], members[unlogged])
        self._rows.hold(placed[unlogged], members[unlogged])
        timed = is_usable(told)
        is_paired = timed & (members >= 0) & (numbers >= 0)
        self._count("not_gpu_timed", told["process"][~timed])
        self._count("without_operation", told["process"][timed & ~is_paired])
        usable = np.flatnonzero(is_paired)
        keys = np.stack([members, told["op"], told["peer"]], axis=1).astype(np.int64)[usable]
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        for index, (member, op, peer) in enumerate(distinct.tolist()):
            chosen = usable[inverse.reshape(-1) == index]
            pairing = self._pairings.setdefault((member, op, peer), Pairing())
            pairing.waiting.add(
                placed[chosen], numbers[chosen], told["message_bytes"][chosen], told["dumped_at_ns"][chosen]
            )

    def _unlogged(self, told: Columns, members: NDArray[np.int64]) -> NDArray[np.intp]:
        """Which of these records are of processes whose lines are not read."""
        processes, place = distinct_together(told["process"])
        has_log = [process in self._store.process_source for process in processes[0].tolist()]
        return np.flatnonzero(~np.asarray(has_log, np.bool_)[place] & (members >= 0))

    def _count_unlogged(self, told: Columns, members: NDArray[np.int64]) -> None:
        """Counts what processes carry whose lines are not read: nothing else tells what their groups are for."""
        if len(told):
            self._usage.count_inspected(told)
            self._patterns.count_logged(members, told["op"], told["peer"])

    def _member(self, communicator: int, rank: int, process: int) -> int:
        member = (self._store.communicators[communicator].members or {}).get(rank, NO_NUMBER)
        return member if member >= 0 and self._store.members[member].process == process else NO_NUMBER

    def _number_of_pair(self, record: np.void) -> int:
        """The number of a Send or Recv among those with its peer; NO_NUMBER once the plug-in left one out."""
        communicator, rank = int(record["communicator"]), int(record["rank"])
        expected = self._next_pair[communicator, rank]
        if expected == NO_NUMBER or int(record["sequence"]) != expected + 1:
            self._next_pair[communicator, rank] = NO_NUMBER
            return NO_NUMBER
        self._next_pair[communicator, rank] = expected + 1
        member = self._member(communicator, rank, int(record["process"]))
        if self._lines.splits_collectives(member):
            return NO_NUMBER
        key = (member, int(record["op"]), int(record["peer"]))
        self._pairs_told[key] += 1
        return self._pairs_told[key] - 1

    def _decide(self, key: Key, pairing: Pairing, *, final: bool) -> Ids:
        """Decides what can be decided of one rank and kind; gives the operations that are timed by it."""
        if not len(pairing.waiting):
            if key not in self._lossy and self._is_lossy(key[0]):
                self._doubt(key)
            return np.empty(0, np.int64)
        pairs = pairing.decide(self._lines.lines(key), final=final, is_lossy=self._is_lossy(key[0]))
        kept = pairs.records >= self._store.inspected.first
        found = kept & (pairs.operations != NO_NUMBER)
        table = self._store.inspected
        table.rows["operation"][table.at(pairs.records[found])] = pairs.operations[found]
        process = self._store.members[key[0]].process
        self._count("with_operation", np.full(np.count_nonzero(found), process))
        self._count("without_operation", np.full(np.count_nonzero(~found), process))
        if key not in self._lossy and (pairing.has_slipped or self._is_lossy(key[0])):
            self._doubt(key)
        return self._time(pairs, found, is_lossy=key in self._lossy)

    def _doubt(self, key: Key) -> None:
        """Lowers what was said of earlier pairs: between equal sizes nothing tells where the lines were lost."""
        self._lossy.add(key)
        lines = self._lines.lines(key)
        told = lines.operations[lines.is_taken]
        table = self._store.operations
        at = table.at(told[told >= table.first])
        confidence = table.rows.values("inspected_confidence", at)
        table.rows.put("inspected_confidence", at, np.where(confidence > _BETWEEN, _LIKELY, A_GUESS))

    def _count(self, outcome: str, processes: NDArray[np.integer]) -> None:
        for process, amount in zip(*np.unique(processes, return_counts=True), strict=True):
            self._store.inspector_records[self._store.process_job[int(process)], outcome] += int(amount)

    def _time(self, pairs: Pairs, found: NDArray[np.bool_], *, is_lossy: bool) -> Ids:
        """Writes durations, and what the records measured already, to the operations that were found."""
        operations = pairs.operations[found]
        table = self._store.operations
        at = table.at(operations)
        told = self._store.inspected.take(pairs.records[found])
        table.rows.put("inspected_ns", at, told["duration_ns"])
        sure, unsure = (_LIKELY, A_GUESS) if is_lossy else (_SURE, _LIKELY)
        table.rows.put("inspected_confidence", at, np.where(pairs.is_sure[found], sure, unsure))
        now_sure = pairs.now_sure[pairs.now_sure >= table.first]
        table.rows.put("inspected_confidence", table.at(now_sure), sure)
        finished = table.rows["finished"][at] & (table.rows["match"][at] == Match.MATCHED)
        self._series.count_compared(operations[finished])
        self._write(operations, told)
        return operations[~has_kernel(table.rows.take(at, "match", "confidence", "number_state"))]

    def _is_lossy(self, member: int) -> bool:
        """Whether lines of that member's log are known to be lost."""
        source = self._store.process_source.get(self._store.members[member].process)
        return source is not None and bool(self._store.torn_lines.get(source) or self._store.gaps.get(source))

    def _write(self, operations: Ids, told: Columns) -> None:
        """Writes the measures of records to their operations if no kernel gives them."""
        table = self._store.operations
        at = table.at(operations)
        free = ~has_kernel(table.rows.take(at, "match", "confidence", "number_state"))
        at, told = at[free], told[free]
        has_times = told["start_ns"] != NO_TIME_NS
        for name in ("start_ns", "end_ns"):
            table.rows.put(name, at[has_times], told[name][has_times])
        factors = bandwidth.factor(told["op"], told["nranks"])
        table.rows.put("busbw_apparent", at, bandwidth.busbw(told["message_bytes"], told["duration_ns"], factors))
        joined = told["transfer_ns"] != NO_TIME_NS
        at, told, factors = at[joined], told[joined], factors[joined]
        for name in ("wait_ns", "transfer_ns", "ranks_seen"):
            table.rows.put(name, at, told[name])
        table.rows.put("algbw", at, bandwidth.algbw(told["message_bytes"], told["transfer_ns"]))
        table.rows.put("busbw", at, bandwidth.busbw(told["message_bytes"], told["transfer_ns"], factors))

    # Measures

    def _told(self, matrix: Ids) -> tuple[Columns, NDArray[np.bool_]]:
        """The records of a matrix, and which of its cells have one."""
        present = matrix != NO_NUMBER
        told = np.zeros(matrix.shape, rows.INSPECTED)
        told[present] = self._store.inspected.take(matrix[present])
        return told, present

    def _learn_clocks(self, matrix: Ids) -> bool:
        """Learns the clocks of hosts from collectives of one communicator; False if these records say no times."""
        told, present = self._told(matrix)
        present &= told["start_ns"] != NO_TIME_NS
        table = self._store.operations
        known = present & (told["operation"] >= table.first)
        present[known] &= ~has_kernel(table.take(told["operation"][known], "match", "confidence", "number_state"))
        ranks = np.flatnonzero(present.any(axis=0))
        if not len(ranks):
            return False
        hosts = self._hosts.of_processes()[told["process"][present[:, ranks].argmax(axis=0), ranks]]
        starts, ends = (np.where(present, told[name], NO_TIME_NS)[:, ranks] for name in ("start_ns", "end_ns"))
        durations = np.where(present, told["duration_ns"], _NEVER).min(axis=1)
        seen = present.any(axis=1)
        self._clocks.learn_times(hosts.tolist(), starts[seen], ends[seen], durations[seen])
        return True

    def _measure(self, collectives: Columns, matrix: Ids) -> tuple[Columns, Ids]:
        """Of joined collectives of one communicator, those that no kernels measured, and their operations."""
        if not len(collectives):
            return collectives, np.empty(0, np.int64)
        told, present = self._told(matrix)
        table = self._store.operations
        known = present & (told["operation"] >= table.first)
        cells = np.zeros(matrix.shape, _CELL)
        cells[known] = table.take(told["operation"][known], *(_CELL.names or ()))
        self._write(told["operation"][known], told[known])
        by_kernel = has_kernel(cells) & known
        is_replay = present & ~known
        members = self._members_of(told[is_replay])
        by_kernel[is_replay] = self._replays.have_kernels(self._store, told[is_replay], members)
        is_new = by_kernel.sum(axis=1) < 2
        counted = is_new[:, None] & is_replay
        self._replays.count(told[counted], self._members_of(told[counted]))
        self._date(collectives, told, present, cells, known)
        own = is_new[:, None] & known
        table.rows.put("inspected", table.at(told["operation"][own]), values=True)
        self._series.count_waits(told[is_new[:, None] & present])
        return collectives[is_new], told["operation"][own & ~has_kernel(cells)]

    def mark_counted(self, replays: Columns) -> None:
        """Marks replays (rows.REPLAYED) whose collectives were counted from records before nsys told of them."""
        if self._is_used:
            replays["inspected"] = self._replays.were_counted(self._store, replays)

    def _members_of(self, told: Columns) -> NDArray[np.int64]:
        """The member of each record; NO_NUMBER if the process is not that rank."""
        members = np.full(len(told), NO_NUMBER, np.int64)
        (communicators, ranks, processes), place = distinct_together(
            told["communicator"], told["rank"], told["process"]
        )
        found = [
            self._member(*each) for each in zip(communicators.tolist(), ranks.tolist(), processes.tolist(), strict=True)
        ]
        if found:
            members = np.asarray(found, np.int64)[place]
        return members

    def _date(
        self,
        collectives: Columns,
        told: Columns,
        present: NDArray[np.bool_],
        cells: Columns,
        known: NDArray[np.bool_],
    ) -> None:
        """Sets number and times: by verbose records on the reference clock; else the end from when the last arriver
        called it, else the earliest dump, which came after its end.
        """
        numbers = np.where(known, cells["coll_seq"], NO_NUMBER).max(axis=1)
        collectives["coll_seq"] = numbers
        last = np.arange(len(told)), np.maximum(collectives["last_rank"], 0)
        called = np.where(known, cells["logged_at_ns"], NO_TIME_NS)[last]
        started = np.where(present, told["started_at_ns"], NO_TIME_NS)[last]
        dumped = np.where(present, told["dumped_at_ns"], _NEVER).min(axis=1)
        called = np.where(called == NO_TIME_NS, started, called)
        collectives["end_true_ns"] = np.where(called == NO_TIME_NS, dumped, called + collectives["transfer_ns"])
        hosts = np.where(present, self._hosts.of_processes()[told["process"]], NO_NUMBER)
        starts, ends = (self._clocks.on_reference(told[name], hosts) for name in ("start_ns", "end_ns"))
        timed = np.flatnonzero(((starts != NO_TIME_NS) & (ends != NO_TIME_NS) | ~present).all(axis=1))
        collectives["first_start_true_ns"][timed] = np.where(present, starts, _NEVER)[timed].min(axis=1, initial=_NEVER)
        collectives["end_true_ns"][timed] = ends[timed].max(axis=1, initial=NO_TIME_NS)
