"""Groups of operations in a log, from the CALL lines of ncclGroupStart and ncclGroupEnd.

A group is what lies between the outermost pair of one thread; pairs inside it do not count (applications nest them,
and up to 2.22 ncclSend and ncclRecv open one of their own). An operation line comes when the operation is enqueued,
its own CALL line after it; ncclGroupStart is printed when the group is open, ncclGroupEnd when all of it is launched.
So the operation lines between the two are the group, and CALL lines of operations are not needed.

A lost line would put the rest of a thread into one group. After a torn line nothing is said of groups until the
depth is certain again; nor if the very same call, buffers included, comes twice in what seems to be one group.

*Source:* NCCL `src/group.cc` (ncclGroupStart, ncclGroupEnd), `src/enqueue.cc:ncclEnqueueCheck`, `src/collectives.cc`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns
from ncclscope_wire.tables import CALLS_BEGIN, CALLS_TORN, GROUP_START
from ncclscope_wire.terms import NO_NUMBER

ALONE: Final = -2
"""The group of an operation that is known to be in none."""

DOUBTFUL_MARKS: Final = 64
"""Starts and ends of groups after a torn line until the depth is believed again: the least depth among them is 0."""

MARKS_LIMIT: Final = 8192
"""Starts and ends inside one group; beyond, its end was lost."""

_NUMBERS_PER_SOURCE: Final = 1 << 40


@dataclass(slots=True)
class _Thread:
    """State of the groups of one thread."""

    depth: int = 0
    number: int = NO_NUMBER
    """Of the outermost group that is open."""
    calls: set[int] = field(default_factory=set[int])
    """Calls in the open group."""
    doubtful: int = 0
    """Marks that must still come before the depth is believed."""
    least: int = 0
    """The least depth since the doubt began."""
    within: int = 0
    """Marks since the thread was last in no group."""

    def doubt(self) -> None:
        self.doubtful = DOUBTFUL_MARKS
        self.least = self.depth

    def enqueue(self, calls: list[int]) -> int:
        """Takes operations of the open group; gives how many came before one that is in it already (a doubt)."""
        if self.depth and not self.doubtful:
            for at, call in enumerate(calls):
                if call in self.calls:
                    self.doubt()
                    return at
                self.calls.add(call)
        return len(calls)

    def step(self, kind: int, next_number: int) -> bool:
        """Applies the start or end of a group; True if it took the next number."""
        opens = kind == GROUP_START and self.depth == 0
        if kind == GROUP_START:
            self.depth += 1
            if opens:
                self.number = next_number
                self.calls.clear()
        else:
            self.depth = max(0, self.depth - 1)
        self.within = 0 if self.depth == 0 else self.within + 1
        if self.within > MARKS_LIMIT and not self.doubtful:
            self.doubt()
        if self.doubtful:
            self._settle()
        return opens

    def _settle(self) -> None:
        self.least = min(self.least, self.depth)
        self.doubtful = max(1, self.doubtful - 1)
        if self.doubtful == 1 and self.depth == self.least:
            self.depth = self.doubtful = self.within = 0

    @property
    def group(self) -> int:
        """The group of an operation that is enqueued now."""
        if self.doubtful:
            return NO_NUMBER
        return self.number if self.depth else ALONE


@dataclass(slots=True)
class CallGroups:
    """The groups of one log, in the order of its lines; numbers of two sources never meet."""

    source: int = 0
    _next: int = 0
    _threads: dict[int, _Thread] = field(default_factory=dict[int, _Thread])
    _processes: set[int] = field(default_factory=set[int])
    """Processes (thread >> 32) that print CALL lines."""

    @property
    def is_idle(self) -> bool:
        """Whether no CALL line came so far."""
        return not self._processes

    def group_operations(
        self,
        *,
        threads: NDArray[np.int64],
        lines: NDArray[np.int64],
        calls: NDArray[np.int32],
        marks: Columns,
        mark_threads: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """The group of each operation of a batch: a number, ALONE, or NO_NUMBER if it is uncertain.

        `threads` are process << 32 | tid; `calls` tell operations with other buffers, sizes or communicators apart;
        `marks` are tables.CALL_MARK of the same lines. Both are in the order of the file.
        """
        groups = np.full(len(lines), NO_NUMBER, dtype=np.int64)
        torn = marks["line"][marks["kind"] == CALLS_TORN]
        begins = {int(row["line"]): int(thread) >> 32 for row, thread in _of_kind(marks, mark_threads, CALLS_BEGIN)}
        since = {process: line for line, process in begins.items()}
        for thread in np.unique(np.concatenate([threads, mark_threads[marks["kind"] != CALLS_TORN]])).tolist():
            process = thread >> 32
            if process not in self._processes and process not in since:
                continue
            mine = np.flatnonzero(threads == thread)
            own = marks[(mark_threads == thread) & (marks["kind"] != CALLS_TORN) & (marks["kind"] != CALLS_BEGIN)]
            groups[mine] = self._feed_thread(thread, lines[mine], calls[mine], own, torn)
            groups[mine[lines[mine] < since.get(process, 0)]] = NO_NUMBER
        self._processes.update(since)
        return groups

    def _feed_thread(
        self,
        key: int,
        lines: NDArray[np.int64],
        calls: NDArray[np.int32],
        marks: Columns,
        torn: NDArray[np.uint32],
    ) -> NDArray[np.int64]:
        thread = self._threads.setdefault(key, _Thread())
        steps = np.concatenate([marks["line"], torn]).astype(np.int64)
        kinds = np.concatenate([marks["kind"], np.full(len(torn), CALLS_TORN, np.uint8)])
        order = np.argsort(steps, kind="stable")
        bounds = [0, *np.searchsorted(lines, steps[order]).tolist(), len(lines)]
        groups = np.full(len(lines), NO_NUMBER, dtype=np.int64)
        for at, (begin, end) in enumerate(pairwise(bounds)):
            if at:
                kind = int(kinds[order[at - 1]])
                if kind == CALLS_TORN:
                    thread.doubt()
                else:
                    self._next += thread.step(kind, self.source * _NUMBERS_PER_SOURCE + self._next)
            if begin < end:
                groups[begin:end] = thread.group
                kept = thread.enqueue(calls[begin:end].tolist())
                groups[begin + kept : end] = thread.group
        return groups


def _of_kind(marks: Columns, threads: NDArray[np.int64], kind: int) -> zip[tuple[np.void, int]]:
    chosen = marks["kind"] == kind
    return zip(marks[chosen], threads[chosen].tolist(), strict=True)
