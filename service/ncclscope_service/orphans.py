"""Kernels whose launch call is in no export: they started after a capture began and were launched before.

Neither their launch time nor their thread is known. Correlation ids grow in launch order, so both lie between those of
their neighbours. With stamps, an orphan belongs to the last line of its lane that has no kernel yet, since what
started on a stream before the border is in the export before; without, its thread is that of an earlier kernel with
the same neighbourhood.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

CONTEXT: Final = 16
"""So many kernels on either side of an orphan tell its thread."""

_CONTEXTS: Final = (
    *((size, size) for size in (CONTEXT, 8, 4, 2, 1)),
    *((size, 0) for size in (CONTEXT, 8, 4, 2, 1, 0)),
)

_HISTORY: Final = 8192


@dataclass(slots=True)
class Placing:
    """What placing by time looks at: pending lines and kernels of all threads."""

    launches: Columns
    """LAUNCH rows in order of their stamps."""
    kernels: Columns
    """TRACK_KERNEL rows in order of correlation ids."""
    tids: NDArray[np.int64]
    """Thread of each kernel; NO_NUMBER where it is not known."""
    fits: NDArray[np.bool_]
    """fits[i, j]: line i may be kernel j, by lane, class and type."""
    continues: NDArray[np.bool_]
    """Line i is launched together with the next line of its thread and lane."""


def place_by_time(given: Placing, orphans: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Launch time and thread of each orphan (ascending indices of kernels); NO_TIME_NS, NO_NUMBER where none is left.

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


def _taken(given: Placing, orphans: NDArray[np.intp]) -> NDArray[np.bool_]:
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


def _group_of(given: Placing, line: int) -> list[int]:
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

        What follows them only helps. NO_NUMBER stays where nothing alike was ever seen and several threads launch.
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

    What follows is left out where less does than goes before: nothing else may be launched one by one any more.
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
