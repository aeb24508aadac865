"""Kernels of a process that cannot be given to a thread yet.

Exports are sorted by start, so a kernel that queued long comes long after its launch: kernels wait until all that were
launched before them have come (`KernelQueue`).

A kernel that started after a capture began but was launched before has its launch call in no export (an orphan):
neither its launch time nor its thread is known. Correlation ids grow in launch order, so both lie between those of its
neighbours. With stamps, an orphan belongs to the last line of its lane that has no kernel yet, since what started on a
stream before the border is in the export before; without, its thread is that of an earlier kernel with the same
neighbourhood. Such kernels, and those behind them, are held until the lines around them have come (`HeldKernels`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ncclscope_service.align.records import ALIGN_KERNEL, launch_times
from ncclscope_service.align.threads import Threads
from ncclscope_service.columns import row_ops
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

FAR_FUTURE_NS: Final = 2**62
"""After every launch."""

CONTEXT: Final = 16
"""Kernels on either side of an orphan by which its thread is recognised."""

_CONTEXTS: Final = (
    *((size, size) for size in (CONTEXT, 8, 4, 2, 1)),
    *((size, 0) for size in (CONTEXT, 8, 4, 2, 1, 0)),
)

_HISTORY: Final = 8192

_NEAR_NS: Final = 1_000_000_000
"""Lines this much older than the launch before an orphan are looked at, for it."""

_AFTER_ORPHANS: Final = 256
"""Kernels behind an orphan whose lines are excluded for it."""


@dataclass(slots=True)
class KernelQueue:
    """Kernels (ALIGN_KERNEL) that come in the order of their starts and leave in that of their launches."""

    _waiting: list[Columns] = field(default_factory=list[Columns])
    _newest_start_ns: int = NO_TIME_NS
    _longest_queue_ns: int = 0

    def ingest_kernels(self, rows: Columns) -> None:
        """Ingests further kernels, in any order."""
        self.observe(rows)
        self._waiting.append(rows)

    def observe(self, rows: Columns) -> None:
        """Kernels that come, or do not since others decided them: how long they queued."""
        launched = rows["launch_start_ns"] != NO_TIME_NS
        if launched.any():
            queue = int((rows["start_ns"] - rows["launch_start_ns"])[launched].max())
            self._longest_queue_ns = max(self._longest_queue_ns, queue)
        self._newest_start_ns = max(self._newest_start_ns, int(rows["start_ns"].max()))

    def known_until(self, *, final: bool) -> int:
        """The launch time before which all kernels have come; the margin is one and a half times the longest queue."""
        if final:
            return FAR_FUTURE_NS
        if self._newest_start_ns == NO_TIME_NS:
            return NO_TIME_NS
        return self._newest_start_ns - self._longest_queue_ns * 3 // 2 - 1

    def drain_launched(self, until_ns: int) -> Columns:
        """Removes and returns the kernels that were launched until then."""
        if not self._waiting:
            return np.empty(0, dtype=ALIGN_KERNEL)
        rows = row_ops.concat(self._waiting)
        is_known = launch_times(rows) <= until_ns
        if is_known.all():
            self._waiting = []
            return rows
        self._waiting = [row_ops.filter_rows(rows, ~is_known)]
        return row_ops.filter_rows(rows, is_known)


@dataclass(slots=True)
class PlacingInput:
    """Pending lines and kernels of all threads, for placing by time."""

    launches: Columns
    """LAUNCH rows in order of their stamps."""
    kernels: Columns
    """THREAD_KERNEL rows in order of correlation ids."""
    tids: NDArray[np.int64]
    """Thread of each kernel; NO_NUMBER if it is not known."""
    fits: NDArray[np.bool_]
    """fits[i, j]: line i may be kernel j, by lane, class and type."""
    continues: NDArray[np.bool_]
    """Line i is launched together with the next line of its thread and lane."""


def place_by_time(given: PlacingInput, orphans: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Launch time and thread of each orphan (ascending indices of kernels); NO_TIME_NS, NO_NUMBER if none is left.

    From the last to the first: each gets the last line that fits, is older than it, and has no kernel.
    """
    times = np.full(len(orphans), NO_TIME_NS, dtype=np.int64)
    tids = np.full(len(orphans), NO_NUMBER, dtype=np.int64)
    is_free = ~_taken(given, orphans)
    stamps = given.launches["logged_at_ns"]
    latest = np.minimum.accumulate(given.kernels["time_ns"][::-1])[::-1]
    for turn in range(len(orphans) - 1, -1, -1):
        kernel = int(orphans[turn])
        chosen = np.flatnonzero(is_free & given.fits[:, kernel] & (stamps < latest[kernel]))
        if len(chosen) == 0:
            continue
        line = int(chosen[-1])
        times[turn], tids[turn] = int(stamps[line]) + 1, int(given.launches["tid"][line])
        is_free[_group_of(given, line)] = False
        same_lane = given.launches["lane"] == given.launches["lane"][line]
        same_thread = given.launches["tid"] == given.launches["tid"][line]
        is_free[line:] &= ~(same_lane & same_thread)[line:]
    return times, tids


def _taken(given: PlacingInput, orphans: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Lines that are those of kernels whose launch is known, or older than such on their thread and lane."""
    taken = np.zeros(len(given.launches), dtype=bool)
    known = np.ones(len(given.kernels), dtype=bool)
    known[orphans] = False
    first = int(orphans[0])
    stamps, tids = given.launches["logged_at_ns"], given.launches["tid"]
    for kernel in np.flatnonzero(known).tolist():
        mine = given.fits[:, kernel] & (tids == given.tids[kernel]) & (stamps <= given.kernels["time_ns"][kernel])
        lines = np.flatnonzero(mine)
        if len(lines) == 0:
            continue
        taken[_group_of(given, int(lines[-1]))] = True
        if kernel < first:
            same_lane = given.launches["lane"] == given.launches["lane"][lines[-1]]
            taken[: int(lines[-1])] |= (same_lane & (tids == given.tids[kernel]))[: int(lines[-1])]
    return taken


def _group_of(given: PlacingInput, line: int) -> list[int]:
    """The line, and those before it that are launched together with it."""
    group = [line]
    same = (given.launches["lane"] == given.launches["lane"][line]) & (
        given.launches["tid"] == given.launches["tid"][line]
    )
    for earlier in np.flatnonzero(same[:line])[::-1].tolist():
        if not given.continues[earlier]:
            break
        group.append(earlier)
    return group


@dataclass(slots=True)
class ThreadMemory:
    """Which thread launched which kernel, by its neighbourhood in launch order."""

    _symbols: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _tids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def recall(self, symbols: NDArray[np.int64], tids: NDArray[np.int64], amount: int) -> NDArray[np.int64]:
        """Threads of the first `amount` kernels, with those of orphans (NO_NUMBER) filled in; remembers them.

        What follows them only helps. NO_NUMBER stays if nothing alike was ever seen and several threads launch.
        """
        past = len(self._symbols)
        symbols = np.concatenate([self._symbols, symbols])
        tids = np.concatenate([self._tids, tids])
        for orphan in (np.flatnonzero(tids[past : past + amount] == NO_NUMBER) + past).tolist():
            tids[orphan] = _thread_of(symbols, tids, orphan)
        known_until = past + amount
        self._symbols = symbols[max(0, known_until - _HISTORY) : known_until]
        self._tids = tids[max(0, known_until - _HISTORY) : known_until]
        return tids[past:known_until]


def _thread_of(symbols: NDArray[np.int64], tids: NDArray[np.int64], orphan: int) -> int:
    """The thread of an earlier kernel in the same place, the wider the better; else that of all that are near.

    What follows is left out if it is shorter than what goes before: nothing else may be launched one by one any more.
    """
    for before, after in _CONTEXTS:
        begin, end = orphan - before, orphan + after + 1
        past = begin if before else orphan
        if end > len(symbols) or past < end - begin:
            continue
        windows = sliding_window_view(symbols[:past], end - begin)
        same = np.flatnonzero((windows == symbols[begin:end]).all(axis=1))
        if len(same) == 0:
            continue
        own, theirs = tids[begin:end], sliding_window_view(tids[:past], end - begin)[same]
        usable = theirs[:, before] != NO_NUMBER
        agree = ((theirs == own) | (own == NO_NUMBER) | (theirs == NO_NUMBER)).all(axis=1)
        if (usable & agree).any():
            values, counts = np.unique(theirs[usable & agree, before], return_counts=True)
            return int(values[counts.argmax()])
    near = tids[max(0, orphan - CONTEXT) : orphan + CONTEXT + 1]
    near = np.unique(near[near != NO_NUMBER])
    return int(near[0]) if len(near) == 1 else NO_NUMBER


@dataclass(slots=True)
class HeldKernels:
    """Kernels from the first on that cannot be placed yet; none overtakes it."""

    _threads: Threads
    since_ns: int = FAR_FUTURE_NS
    """The launch before the first held kernel: from there on nothing can be decided by time."""
    _held: Columns = field(default_factory=lambda: np.empty(0, dtype=ALIGN_KERNEL))
    _placed_until_ns: int = NO_TIME_NS
    _memory: ThreadMemory = field(default_factory=ThreadMemory)

    def placed_by_time(self, rows: Columns, *, logged_until_ns: int, final: bool) -> Columns:
        """Kernels (ALIGN_KERNEL) with thread and launch time filled in; the rest is held.

        `logged_until_ns`: all lines with an older stamp are launches by now.
        """
        if len(self._held) == 0 and (rows["launch_start_ns"] != NO_TIME_NS).all():
            if len(rows):
                self._placed_until_ns = max(self._placed_until_ns, int(rows["launch_start_ns"].max()))
            return rows
        rows = self._with_held(rows)
        is_orphan = rows["launch_start_ns"] == NO_TIME_NS
        before_ns = np.maximum.accumulate(np.where(is_orphan, self._placed_until_ns, rows["launch_start_ns"]))
        latest_ns = np.minimum.accumulate(launch_times(rows)[::-1])[::-1]
        early = np.flatnonzero(is_orphan & (latest_ns >= logged_until_ns))
        amount = len(rows) if final or len(early) == 0 else int(early[0])
        self._held, rows = rows[amount:], rows[:amount].copy()
        self.since_ns = int(before_ns[amount]) if amount < len(before_ns) else FAR_FUTURE_NS
        orphans = np.flatnonzero(rows["launch_start_ns"] == NO_TIME_NS)
        if len(orphans):
            self._place_orphans(rows, orphans, int(before_ns[orphans[0]]))
        known = rows["launch_start_ns"][rows["launch_start_ns"] != NO_TIME_NS]
        if len(known):
            self._placed_until_ns = max(self._placed_until_ns, int(known.max()))
        return rows

    def placed_by_order(self, rows: Columns, *, final: bool) -> Columns:
        """The same without stamps: the thread follows from the kernels around, the launch time remains unknown."""
        rows = self._with_held(rows)
        if not self._threads.are_separate:
            return rows
        orphans = np.flatnonzero(rows["launch_tid"] == NO_NUMBER)
        early = orphans[orphans + CONTEXT >= len(rows)]
        amount = len(rows) if final or len(early) == 0 else int(early[0])
        symbols = (self._threads.kernel_lanes_of(rows).astype(np.int64) << 16) | rows["kernel_class"]
        rows["launch_tid"][:amount] = self._memory.recall(symbols, rows["launch_tid"].copy(), amount)
        self._held = rows[amount:]
        return rows[:amount]

    def _with_held(self, rows: Columns) -> Columns:
        rows = row_ops.concat([self._held, rows])
        return row_ops.take(rows, np.argsort(rows["correlation_id"], kind="stable"))

    def _place_orphans(self, rows: Columns, orphans: NDArray[np.intp], since_ns: int) -> None:
        """Gives orphans the time just after the line that they belong to."""
        if not len(self._threads):
            return
        kernels, until_ns = self._threads.columns_of(rows), int(launch_times(rows)[orphans].max())
        tids = rows["launch_tid"] if self._threads.are_separate else np.zeros(len(rows), dtype=np.int64)
        pending = [
            (thread.backlog.kernels[thread.backlog.kernels["time_ns"] >= since_ns - _NEAR_NS], tid)
            for tid, thread in self._threads.items()
        ]
        kernels = np.concatenate([*(own for own, _ in pending), kernels])
        tids = np.concatenate([*(np.full(len(own), tid, dtype=np.int64) for own, tid in pending), tids])
        order = np.argsort(kernels["correlation_id"], kind="stable")
        places = np.argsort(order)[len(kernels) - len(rows) :][orphans]
        launches, continues = self._lines_between(since_ns - _NEAR_NS, until_ns + _NEAR_NS, kernels, tids)
        if len(launches) == 0:
            return
        kernels, tids = kernels[order], tids[order]
        last = int(places[-1]) + _AFTER_ORPHANS
        fits = self._threads.lanes.fits(launches, kernels[:last])
        times, threads = place_by_time(PlacingInput(launches, kernels[:last], tids[:last], fits, continues), places)
        found = times != NO_TIME_NS
        rows["launch_start_ns"][orphans[found]] = times[found]
        rows["launch_tid"][orphans[found]] = threads[found]

    def _lines_between(
        self, since_ns: int, until_ns: int, kernels: Columns, tids: NDArray[np.int64]
    ) -> tuple[Columns, NDArray[np.bool_]]:
        """Pending launches of all threads logged between two times, and which are launched with their next one."""
        found: list[Columns] = []
        together: list[NDArray[np.bool_]] = []
        for tid, thread in self._threads.items():
            near, joins = thread.launched_together(since_ns, until_ns, kernels[(tids == tid) & ~kernels["is_orphan"]])
            own = near.copy()
            own["tid"] = tid
            found.append(own)
            together.append(joins)
        launches, continues = np.concatenate(found), np.concatenate(together)
        order = np.argsort(launches["logged_at_ns"], kind="stable")
        return launches[order], continues[order]
