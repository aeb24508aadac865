"""Kernels of a process whose thread or launch time no export tells, until the lines around them do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.align_rows import ALIGN_KERNEL, launch_times
from ncclscope_service.kernel_queue import FAR_FUTURE_NS
from ncclscope_service.orphans import CONTEXT, Placing, ThreadMemory, place_by_time
from ncclscope_service.threads import Threads
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_NEAR_NS: Final = 1_000_000_000
"""Lines this much older than the launch before an orphan are looked at, for it."""

_AFTER_ORPHANS: Final = 256
"""Kernels behind an orphan that are looked at, to tell which lines are theirs."""


@dataclass(slots=True)
class HeldKernels:
    """Kernels from the first on that cannot be placed yet; none overtakes it."""

    _threads: Threads
    since_ns: int = FAR_FUTURE_NS
    """The launch before the first held kernel: from there on nothing can be decided by time."""
    _held: Columns = field(default_factory=lambda: np.empty(0, dtype=ALIGN_KERNEL))
    _placed_until_ns: int = NO_TIME_NS
    _memory: ThreadMemory = field(default_factory=ThreadMemory)

    def __len__(self) -> int:
        return len(self._held)

    def placed_by_time(self, rows: Columns, *, told_until_ns: int, final: bool) -> Columns:
        """Kernels (ALIGN_KERNEL) with thread and launch time told; the rest is held.

        `told_until_ns`: all lines with an older stamp are launches by now.
        """
        if len(self._held) == 0 and (rows["launch_start_ns"] != NO_TIME_NS).all():
            if len(rows):
                self._placed_until_ns = max(self._placed_until_ns, int(rows["launch_start_ns"].max()))
            return rows
        rows = self._with_held(rows)
        is_orphan = rows["launch_start_ns"] == NO_TIME_NS
        before_ns = np.maximum.accumulate(np.where(is_orphan, self._placed_until_ns, rows["launch_start_ns"]))
        latest_ns = np.minimum.accumulate(launch_times(rows)[::-1])[::-1]
        early = np.flatnonzero(is_orphan & (latest_ns >= told_until_ns))
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
        """The same without stamps: the thread is told by the kernels around, the launch time remains unknown."""
        rows = self._with_held(rows)
        if not self._threads.are_told:
            return rows
        orphans = np.flatnonzero(rows["launch_tid"] == NO_NUMBER)
        early = orphans[orphans + CONTEXT >= len(rows)]
        amount = len(rows) if final or len(early) == 0 else int(early[0])
        symbols = (self._threads.kernel_lanes_of(rows).astype(np.int64) << 16) | rows["kernel_class"]
        rows["launch_tid"][:amount] = self._memory.recall(symbols, rows["launch_tid"].copy(), amount)
        self._held = rows[amount:]
        return rows[:amount]

    def _with_held(self, rows: Columns) -> Columns:
        rows = whole_rows.joined([self._held, rows])
        return whole_rows.taken(rows, np.argsort(rows["correlation_id"], kind="stable"))

    def _place_orphans(self, rows: Columns, orphans: NDArray[np.intp], since_ns: int) -> None:
        """Gives orphans the time just after the line that they belong to."""
        if not len(self._threads):
            return
        kernels, until_ns = self._threads.columns_of(rows), int(launch_times(rows)[orphans].max())
        tids = rows["launch_tid"] if self._threads.are_told else np.zeros(len(rows), dtype=np.int64)
        pending = [
            (track.kernels[track.kernels["time_ns"] >= since_ns - _NEAR_NS], tid)
            for tid, track in self._threads.items()
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
        times, threads = place_by_time(Placing(launches, kernels[:last], tids[:last], fits, continues), places)
        found = times != NO_TIME_NS
        rows["launch_start_ns"][orphans[found]] = times[found]
        rows["launch_tid"][orphans[found]] = threads[found]

    def _lines_between(
        self, since_ns: int, until_ns: int, kernels: Columns, tids: NDArray[np.int64]
    ) -> tuple[Columns, NDArray[np.bool_]]:
        """Pending launches of all threads logged between two times, and which are launched with their next one."""
        found: list[Columns] = []
        together: list[NDArray[np.bool_]] = []
        for tid, track in self._threads.items():
            near, joins = track.launched_together(since_ns, until_ns, kernels[(tids == tid) & ~kernels["is_orphan"]])
            own = near.copy()
            own["tid"] = tid
            found.append(own)
            together.append(joins)
        launches, continues = np.concatenate(found), np.concatenate(together)
        order = np.argsort(launches["logged_at_ns"], kind="stable")
        return launches[order], continues[order]
