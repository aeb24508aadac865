"""Sums of the last minutes, added up as rows come and are finished, so that showing them reads no rows.

The store's window holds a million operations, of which a look would read one column after the other: a tenth of a
second each time. Here a row is read when it is logged, when it is decided and when it is finished, and looks are at
sums by process, member and communicator. They outlive rows that leave the store before the minutes are over.
`RecentSums.of_store` makes the same of a whole store, in one go.

A bucket whose minutes are over goes to the history of its job (`store.job_history`), and so does at once what is older
when it comes: everything is in exactly one of the two, and charts over the whole time of a job add both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.buckets import (
    BUCKET_NS,
    BUCKETS,
    Bools,
    BucketSpans,
    BucketSums,
    Floats,
    Int64s,
    LastingSums,
    Window,
    window_until,
)
from ncclscope_service.columns.group_by import distinct, group_by
from ncclscope_service.columns.intervals import Spans, union
from ncclscope_service.columns.table import Ids, Table
from ncclscope_service.rollup.window import first_known, starts_launch
from ncclscope_service.store.job_history import JobHistory
from ncclscope_service.store.records import Captures
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

SPAN: Final = np.dtype([("seat", "<i4"), ("start_ns", "<i8"), ("end_ns", "<i8")])
"""A captured stretch of one process."""


def jobs_with_kernels(store: Store, processes: Sequence[int]) -> frozenset[str]:
    """Jobs of which a capture or a kernel has been seen since the start; `processes`: those with kernels."""
    jobs = {store.process_job[index] for index in processes}
    series = store.series.rows
    with_kernels = series["communicator"][series["matched"] > 0]
    jobs |= {store.communicators[int(index)].job for index in np.unique(with_kernels) if index >= 0}
    return frozenset(jobs)


class CapturedSpans:
    """Times of captures, by host and process, as far as they reach into the window or come after it."""

    def __init__(self) -> None:
        self._read = 0
        """Captures of the store before this one."""
        self._seats: dict[tuple[str, int], int] = {}
        """Of every process that was captured, by host and pid."""
        self._spans: Columns = np.empty(0, SPAN)

    def process_captures(self, captures: Captures, window: Window) -> None:
        """Takes the captures that came since, and forgets what ended before the window."""
        new = captures.since(self._read)
        self._read = captures.next_id
        found = [
            (self._seats.setdefault((capture.host, pid), len(self._seats)), capture.start_ns, capture.end_ns)
            for _, capture in new
            for pid in capture.pids
        ]
        if found:
            self._spans = np.concatenate([self._spans, np.array(found, SPAN)])
        is_over = self._spans["end_ns"] < window.begin_ns
        if is_over.any():
            self._spans = row_ops.filter_rows(self._spans, ~is_over)

    def ratio(self, store: Store, processes: Int64s, first_ns: Int64s, last_ns: Int64s) -> float | None:
        """Share that captures cover of the time between the first and last operation of each of these processes.

        None if none of them was ever captured, or none has two times.
        """
        seats = np.asarray([self._seat(store, process) for process in processes.tolist()], np.int64)
        is_observed = first_ns < last_ns
        whole = int((last_ns - first_ns)[is_observed].sum())
        if not whole or not (seats >= 0).any():
            return None
        place_of = np.full(len(self._seats), -1, np.int64)
        place_of[seats[seats >= 0]] = np.flatnonzero(seats >= 0)
        places = place_of[self._spans["seat"]]
        spans, places = self._spans[places >= 0], places[places >= 0]
        start = np.maximum(spans["start_ns"], first_ns[places])
        end = np.minimum(spans["end_ns"], last_ns[places])
        held = np.flatnonzero(start < end)
        covered = union(Spans(places[held], start[held], end[held]))
        return round(int((covered.end - covered.start).sum()) / whole, 4)

    def _seat(self, store: Store, process: int) -> int:
        of = store.processes[process]
        return self._seats.get((of.host, of.pid), -1)


WAIT: Final = 0
DURATION: Final = 1
"""Columns of `RecentSums.waits`."""
BUSY: Final = 1
"""Beside WAIT, a column of `RecentSums.collectives`."""
MOVED: Final = 0
TRANSFER: Final = 1
"""Columns of `RecentSums.bandwidths`: bytes on the bus, and the time that they took."""

_AHEAD: Final = BUCKETS
"""Buckets after now that are kept: hosts' clocks may be ahead until they are known."""
_STATES: Final = len(Match)
_NOTHING: Final = np.empty(0, np.int64)
_SEEN: Final = np.dtype([("match", "<u1")])
_LOGGED: Final = ("process", "member", "message_bytes", "logged_at_ns", "observed_at_ns")
_FINISHED: Final = (
    "process", "member", "message_bytes", "logged_at_ns", "observed_at_ns", "launch", "start_ns", "end_ns", "censored",
    "start_true_ns", "wait_ns",
)  # fmt: skip

_MEASURED: Final = (
    "communicator", "op", "size_class", "end_true_ns", "wait_ns", "busy_ns", "busbw", "transfer_ns",
)  # fmt: skip


class RecentSums:
    """The sums of one store. Call `touch`, `finish` and `process_window`; `forget_before` when operations leave."""

    _keeps_history: bool = True

    def __init__(self, known: Store, *, keeps_history: bool = True) -> None:
        """`keeps_history`: what is older than the last minutes is added to `Store.job_histories`."""
        self._store = known
        self._keeps_history = keeps_history
        self.bytes = BucketSums(1)
        """Logged, by communicator as it was known then."""
        self.operations = BucketSums(1)
        """Logged operations, by process."""
        self.logged = BucketSpans()
        """By process."""
        self.waits = BucketSums(2)
        """By member: waits, and durations of the kernels of which the wait is known; each kernel once."""
        self.collectives = BucketSums(2)
        """By communicator: waits, and kernel time."""
        self.bandwidths = BucketSums(2)
        """By place in `series`."""
        self.captured = CapturedSpans()
        self.with_kernels: set[int] = set()
        """Processes of which a kernel was seen."""
        self._places: dict[int, int] = {}
        """Of what is in `bandwidths`, by `series_key`."""
        self._seen = Table(_SEEN)
        """Of each operation in the store: the state that it is counted in."""
        self._matches: Int64s = np.zeros(0, np.int64)
        """Operations in the store by process and state."""
        self._of_member: Int64s = np.zeros(0, np.int64)
        """Operations in the store by member."""
        self._touched: list[Ids] = []
        self._finished: list[Ids] = []
        self._next_kernel = 0
        self._next_collective = 0
        self._has_unstamped = False
        """Whether a line without any time was seen."""

    @classmethod
    def of_store(cls, known: Store, now_ns: int, *, keeps_history: bool = False) -> RecentSums:
        """The sums of all that is in a store; `keeps_history` for a store that has no histories yet."""
        sums = cls(known, keeps_history=keeps_history)
        everything = np.arange(known.operations.first, known.operations.next_id, dtype=np.int64)
        sums._seen.first = known.operations.first
        sums.touch(everything)
        sums.finish(everything)
        sums.process_window(now_ns)
        return sums

    def touch(self, operations: Ids) -> None:
        """The state of these operations may have changed since the last `process_window`."""
        self._touched.append(operations)

    def finish(self, operations: Ids) -> None:
        """Nothing more will be learned of these operations; each is passed exactly once."""
        self._finished.append(operations)

    def process_window(self, now_ns: int) -> None:
        """Counts what came since; `now_ns` is the service's wall clock."""
        window = window_until(now_ns)
        touched, ended = self._touched, self._finished
        self._touched, self._finished = [], []
        self._forget_before(window)
        self._count_logged(window)
        finished = self._in_store(ended)
        self._count_states(self._in_store([*touched, finished]))
        self._count_waits(finished, window)
        self._count_collectives(window)
        self._note_kernels()
        self.captured.process_captures(self._store.captures, window)

    def evict_before(self, operation: int) -> None:
        """Operations with a smaller id leave the store; call it while they are there."""
        seen, table = self._seen, self._store.operations
        leaving = np.arange(max(seen.first, table.first), min(operation, seen.next_id), dtype=np.int64)
        if not len(leaving):
            return
        rows = table.take(leaving, "process", "member")
        states = rows["process"].astype(np.int64) * _STATES + seen.take(leaving, "match")["match"]
        self._matches -= np.bincount(states, minlength=len(self._matches))
        members = rows["member"][rows["member"] >= 0]
        self._of_member -= np.bincount(members, minlength=len(self._of_member))
        seen.drop_before(operation)

    def bytes_by_bucket(self, window: Window, communicators: Int64s, into: Int64s, count: int) -> Floats:
        """Logged bytes of these communicators, each added to a row of `into`; shape (count, buckets)."""
        found = self.bytes.by_bucket(0, window, communicators, into, count)
        if (history := self._history_of(window)) is not None:
            found += history.bytes.by_bucket(0, window, communicators, into, count)
        return found

    def waits_by_bucket(self, column: int, window: Window, members: Int64s, into: Int64s, count: int) -> Floats:
        """The same of a column of `waits`, by member."""
        found = self.waits.by_bucket(column, window, members, into, count)
        if (history := self._history_of(window)) is not None:
            found += history.waits.by_bucket(column, window, members, into, count)
        return found

    def whole_waits(self, window: Window) -> Floats:
        """`waits` by member over the window; shape (columns, members)."""
        members = np.arange(len(self._store.members))
        found = self.waits.whole(window, len(members))
        if (history := self._history_of(window)) is not None:
            found += history.waits.whole(window, members)
        return found

    def bandwidth_by_bucket(self, window: Window, keys: Int64s, into: Int64s, count: int) -> Floats:
        """Bus bandwidth of these series (`series_key`), all of a row together: bytes that passed the bus in a bucket
        over the time that their transfers took; shape (count, buckets), NaN without any.
        """
        places = np.array([self._places.get(key, NO_NUMBER) for key in keys.tolist()], np.int64)
        known = places >= 0
        sums = [self.bandwidths.by_bucket(of, window, places[known], into[known], count) for of in (MOVED, TRANSFER)]
        if (history := self._history_of(window)) is not None:
            for of in (MOVED, TRANSFER):
                sums[of] += history.bandwidths.by_bucket(of, window, keys, into, count)
        return ratio(sums[MOVED], sums[TRANSFER])

    def _history_of(self, window: Window) -> JobHistory | None:
        return None if window.job is None else self._store.job_histories.get(window.job)

    def _forget_before(self, window: Window) -> None:
        """Drops the buckets before the window, those that last to the histories of their jobs."""
        for passing in (self.operations, self.logged, self.collectives):
            passing.keep(window)
        for sums, choose in ((self.bytes, _bytes_of), (self.waits, _waits_of), (self.bandwidths, _bandwidths_of)):
            for begin_ns, found in sums.keep(window):
                at = np.flatnonzero(found.any(axis=0))
                groups = self.series_keys()[at] if sums is self.bandwidths else at
                of = self._communicator_of_member()[at] if sums is self.waits else groups
                of = groups >> 16 if sums is self.bandwidths else of
                self._add_to_history(choose, np.full(len(at), begin_ns), groups, of, *found[:, at])

    def _add_to_history(
        self,
        choose: Callable[[JobHistory], LastingSums],
        times: Int64s,
        groups: Int64s,
        communicators: Int64s,
        *values: Int64s | Floats,
    ) -> None:
        """Adds to those sums of the jobs that these communicators are of."""
        if not self._keeps_history or not len(times):
            return
        jobs = {job: place for place, job in enumerate(dict.fromkeys(each.job for each in self._store.communicators))}
        job_of, names = np.array([jobs[each.job] for each in self._store.communicators], np.int64), list(jobs)
        for job, mine in group_by(job_of[communicators]):
            history = self._store.job_histories[names[job]]
            choose(history).add(times[mine], groups[mine], *(each[mine] for each in values))

    def _communicator_of_member(self) -> Int64s:
        return np.array([each.communicator for each in self._store.members], np.int64)

    def matches(self) -> Int64s:
        """Operations in the store; shape (processes, states of rows.Match)."""
        return _grown(self._matches, len(self._store.processes) * _STATES).reshape(-1, _STATES)

    def of_member(self) -> Int64s:
        """Operations in the store by member."""
        return _grown(self._of_member, len(self._store.members))

    def series_keys(self) -> Int64s:
        """`series_key` of each place in `bandwidths`."""
        return np.fromiter(self._places, np.int64, len(self._places))

    def _in_store(self, ids: list[Ids]) -> Ids:
        """These operations, each once, ascending; without those that have left."""
        if not ids:
            return _NOTHING
        found: Ids = np.sort(np.concatenate(ids))  # a tenth of what numpy.unique takes, which hashes
        is_first = np.concatenate([np.ones(min(1, len(found)), np.bool_), found[1:] != found[:-1]])
        return found[is_first & (found >= self._store.operations.first)]

    def _count_logged(self, window: Window) -> None:
        table = self._store.operations
        new = np.arange(self._seen.next_id, table.next_id, dtype=np.int64)
        if not len(new):
            return
        rows = table.take(new, *_LOGGED)
        self._seen.append(np.zeros(len(new), _SEEN))
        processes, members = rows["process"].astype(np.int64), rows["member"].astype(np.int64)
        self._matches = _grown(self._matches, len(self._store.processes) * _STATES)
        self._matches += np.bincount(processes * _STATES + Match.PENDING, minlength=len(self._matches))
        self._of_member = _grown(self._of_member, len(self._store.members))
        self._of_member += np.bincount(members[members >= 0], minlength=len(self._of_member))
        times = first_known(rows["logged_at_ns"], rows["observed_at_ns"])
        self._has_unstamped |= bool((times == NO_TIME_NS).any())
        self._add_logged(rows, times, window)

    def _add_logged(self, rows: Columns, times: Int64s, window: Window) -> None:
        inside = np.flatnonzero(_is_kept(times, window))
        processes = rows["process"][inside].astype(np.int64)
        self.operations.add(times[inside], processes, np.ones(len(inside), np.int64))
        self.logged.add(times[inside], processes)
        communicator_of = np.append(self._communicator_of_member(), NO_NUMBER)
        communicators = communicator_of[np.maximum(rows["member"], -1)]
        sizes = self._store.moved_bytes(communicators, rows["message_bytes"])
        self._add(self.bytes, _bytes_of, window, times, (communicators, communicators), sizes)

    def _count_states(self, operations: Ids) -> None:
        if not len(operations):
            return
        table, seen = self._store.operations, self._seen
        at = seen.at(operations)
        rows, before = table.take(operations, "process", "match"), seen.rows["match"][at]
        changed = np.flatnonzero(rows["match"] != before)
        processes = rows["process"][changed].astype(np.int64) * _STATES
        amount = len(self._matches)
        self._matches += np.bincount(processes + rows["match"][changed], minlength=amount)
        self._matches -= np.bincount(processes + before[changed], minlength=amount)
        seen.rows["match"][at[changed]] = rows["match"][changed]

    def _count_waits(self, finished: Ids, window: Window) -> None:
        table = self._store.operations
        if self._has_unstamped and len(finished):
            self._count_unstamped(finished, window)
        # Most have no known wait, and are looked at no closer.
        finished = finished[table.take(finished, "wait_ns")["wait_ns"] >= 0]
        if not len(finished):
            return
        rows = table.take(finished, *_FINISHED)
        at = table.at(finished)
        before = table.rows.values("launch", np.maximum(at - 1, 0))
        times = first_known(rows["start_true_ns"], rows["start_ns"])
        durations = rows["end_ns"] - rows["start_ns"]
        chosen = (rows["start_ns"] != NO_TIME_NS) & (rows["end_ns"] != NO_TIME_NS) & ~rows["censored"]
        chosen &= (durations > 0) & (rows["member"] >= 0)
        chosen &= (at == 0) | starts_launch(before, rows["launch"])
        own = np.flatnonzero(chosen)
        members = rows["member"][own].astype(np.int64)
        groups = members, self._communicator_of_member()[members]
        self._add(self.waits, _waits_of, window, times[own], groups, rows["wait_ns"][own], durations[own])

    def _add(
        self,
        sums: BucketSums,
        choose: Callable[[JobHistory], LastingSums],
        window: Window,
        times: Int64s,
        groups: tuple[Int64s, Int64s],
        *values: Int64s | Floats,
    ) -> None:
        """Adds to sums of the last minutes, and what is older to those of its job; `groups`: in either, and the
        communicators that they are of, NO_NUMBER for what is left out.
        """
        of, communicators = groups
        inside = np.flatnonzero(_is_kept(times, window) & (communicators >= 0))
        sums.add(times[inside], of[inside], *(each[inside] for each in values))
        older = np.flatnonzero((times < window.begin_ns) & (times != NO_TIME_NS) & (communicators >= 0))
        self._add_to_history(choose, times[older], of[older], communicators[older], *(each[older] for each in values))

    def _count_unstamped(self, finished: Ids, window: Window) -> None:
        """Counts operations whose lines have no time, at the time of their kernels."""
        rows = self._store.operations.take(finished, *_FINISHED)
        rows = rows[first_known(rows["logged_at_ns"], rows["observed_at_ns"]) == NO_TIME_NS]
        self._add_logged(rows, first_known(rows["start_true_ns"], rows["start_ns"]), window)

    def _count_collectives(self, window: Window) -> None:
        table = self._store.collectives
        at = np.arange(max(0, self._next_collective - table.first), len(table))
        self._next_collective = table.next_id
        new = table.rows.take(at, *_MEASURED)
        new = new[new["communicator"] >= 0]
        times = new["end_true_ns"].astype(np.int64)
        inside = np.flatnonzero(_is_kept(times, window))
        rows = new[inside]
        self.collectives.add(times[inside], rows["communicator"].astype(np.int64), rows["wait_ns"], rows["busy_ns"])
        measured = np.isfinite(new["busbw"]) & (new["transfer_ns"] > 0)
        new, times = new[measured], times[measured]
        keys = series_key(new["communicator"], new["op"], new["size_class"])
        transfer = new["transfer_ns"].astype(np.float64)
        moved, inside = new["busbw"] * transfer, np.flatnonzero(_is_kept(times, window))
        found, inverse = distinct(keys[inside])
        places = np.asarray([self._places.setdefault(key, len(self._places)) for key in found.tolist()], np.int64)
        self.bandwidths.add(times[inside], places[inverse], moved[inside], transfer[inside])
        older = np.flatnonzero((times < window.begin_ns) & (times != NO_TIME_NS))
        self._add_to_history(
            _bandwidths_of, times[older], keys[older], keys[older] >> 16, moved[older], transfer[older]
        )

    def _note_kernels(self) -> None:
        table = self._store.kernels
        new = table.rows["process"][max(0, self._next_kernel - table.first) :]
        self._next_kernel = table.next_id
        self.with_kernels.update(distinct(new[new >= 0])[0].tolist())


def series_key(communicators: Int64s, ops: Int64s, size_classes: Int64s) -> Int64s:
    """One number for each communicator, operation and size class."""
    key: Int64s = (communicators.astype(np.int64) << 16) | (ops.astype(np.int64) << 8) | size_classes.astype(np.int64)
    return key


def ratio(part: Floats, whole: Floats) -> Floats:
    """`part` over `whole`; NaN if the whole is 0."""
    found: Floats = np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)
    return found


def _bytes_of(history: JobHistory) -> LastingSums:
    return history.bytes


def _waits_of(history: JobHistory) -> LastingSums:
    return history.waits


def _bandwidths_of(history: JobHistory) -> LastingSums:
    return history.bandwidths


def _is_kept(times_ns: Int64s, window: Window) -> Bools:
    return (times_ns >= window.begin_ns) & (times_ns < window.end_ns + _AHEAD * BUCKET_NS)


def _grown(counts: Int64s, amount: int) -> Int64s:
    return counts if len(counts) >= amount else np.concatenate([counts, np.zeros(amount - len(counts), np.int64)])
