"""Backlog of what waits to be aligned, and the order in which processes leave it.

An operation can be aligned when a capture of its process brings its kernels, seconds to minutes after the log. Until
then it waits here: an aligner that gets a few operations twice a second does the work of a hundred.

The exports of a capture come from all hosts at once, and aligning them takes seconds. So processes queue here, and are
aligned in bounded portions, those first that have waited longest; the rest stays for the next tick.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import OperationsByProcess, group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.store.settings import WITHOUT_CAPTURE_NS
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CaptureSeen

_OF_PROCESS: Final = 250
_PER_KERNEL: Final = 4
"""Fixed cost of aligning a process, in kernels, and how many operations or calls cost as much as a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Rows of one process that are aligned in one go."""

    process: int
    operations: Ids
    """In the order of their log."""
    kernels: Ids
    calls: tuple[Columns, ...]
    """rows.API_CALL."""
    captures: tuple[CaptureSeen, ...]
    """Finished captures of it. All their kernels and calls are in this portion or in earlier ones, and no kernel that
    came later is in an earlier one."""
    has_ended: bool
    """Nothing more will come of it."""
    gives_up: bool
    """Operations that have waited for too long are to be given up."""


@dataclass(slots=True)
class _Part:
    """Kernels of a process that came together, and the captures of it that were finished then."""

    kernels: Ids
    captures: list[CaptureSeen] = field(default_factory=list[CaptureSeen])


@dataclass(slots=True)
class _Queued:
    """Backlog of one process, without its operations."""

    parts: deque[_Part] = field(default_factory=deque[_Part])
    """In the order in which they came."""
    calls: list[Columns] = field(default_factory=list[Columns])
    has_ended: bool = False
    gives_up: bool = False

    def append_capture(self, capture: CaptureSeen) -> None:
        """A capture that is finished, whose kernels have come before."""
        if not self.parts:
            self.parts.append(_Part(_joined([])))
        self.parts[-1].captures.append(capture)

    def drain_parts(self, most: float) -> _Part:
        """The oldest parts: up to `most` kernels and the rest of the last part; at least one part."""
        taken: list[_Part] = []
        amount = 0
        while self.parts and (not taken or amount < most):
            taken.append(self.parts.popleft())
            amount += len(taken[-1].kernels)
        return _Part(_joined(part.kernels for part in taken), [each for part in taken for each in part.captures])


@dataclass(slots=True)
class _Waiting:
    """Operations that came together."""

    at_ns: int
    first: int
    """The smallest id among them."""
    rows: OperationsByProcess
    waits: NDArray[np.bool_]
    """By process: its operations were not drained yet."""
    left: int
    """Operations that were not drained."""
    is_due: bool = False
    """Their processes were queued."""
    gives_up: bool = False
    """And shall give up operations."""

    def processes(self) -> list[int]:
        """Those whose operations wait."""
        waiting: list[int] = self.rows.processes[self.waits].tolist()
        return waiting

    def drain_operations(self, chosen: NDArray[np.int64]) -> Iterator[tuple[int, Ids]]:
        """The operations of each of these processes (ascending, each once), which wait no longer."""
        places = self.rows.places(chosen)
        places = places[self.waits[places]]
        self.waits[places] = False
        for place in places.tolist():
            operations = self.rows.at(place)
            self.left -= len(operations)
            yield int(self.rows.processes[place]), operations

    def compact(self) -> None:
        """Frees what was drained once that is most of it."""
        if 2 * self.left < len(self.rows.operations):
            self.rows = self.rows.select(np.flatnonzero(self.waits))
            self.waits = np.ones(len(self.rows.processes), np.bool_)


@dataclass(slots=True)
class AlignmentBacklog:
    """Filled batch by batch; `drain_portions` empties it, but for operations that wait."""

    rows: int = 0
    """Kernels and calls that wait."""
    _queue: dict[int, _Queued] = field(default_factory=dict[int, _Queued])
    """By process, those that have waited longest first."""
    _new: list[Ids] = field(default_factory=list[Ids])
    _waiting: deque[_Waiting] = field(default_factory=deque[_Waiting])
    """Oldest first."""
    _amounts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Operations that wait, by process; zeros behind the last."""
    _captured: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(process, end) of captures since they were last drained."""

    def __len__(self) -> int:
        """Processes that have something to align."""
        return len(self._queue)

    def queued(self) -> NDArray[np.int64]:
        """Processes that have something to align, those that have waited longest first."""
        return np.fromiter(self._queue, np.int64, len(self._queue))

    def due_operations(self) -> int:
        """Operations that could be aligned at once: of processes that queue."""
        queued = self.queued()
        return int(self._amounts[queued[queued < len(self._amounts)]].sum())

    def append_operations(self, operations: Ids) -> None:
        """Operations that were numbered, in the order in which they came."""
        self._new.append(operations)

    def append_kernels(self, kernels: Ids, processes: NDArray[np.int32]) -> None:
        """Kernels, and the process of each."""
        self.rows += len(kernels)
        for process, mine in group_by(processes):
            self._of_process(process).parts.append(_Part(kernels[mine]))

    def append_calls(self, calls: Columns) -> None:
        """Calls of NCCL's API (rows.API_CALL)."""
        self.rows += len(calls)
        for process, mine in group_by(calls["process"]):
            self._of_process(process).calls.append(row_ops.take(calls, mine))

    def append_capture(self, capture: CaptureSeen, processes: Mapping[int, int]) -> None:
        """A finished capture; `processes`: process index by pid."""
        for process in processes.values():
            self._of_process(process).append_capture(capture)
            self._captured.append((process, capture.end_ns))

    def queue(self, processes: Iterable[int]) -> None:
        """Operations of these processes can be aligned now: their captures came before them."""
        for process in processes:
            self._of_process(process)

    def end(self, processes: Iterable[int]) -> None:
        """Nothing more will come of these processes."""
        for process in processes:
            self._of_process(process).has_ended = True

    def give_up(self, processes: Iterable[int]) -> None:
        """Operations of these processes are to be given up."""
        for process in processes:
            self._of_process(process).gives_up = True

    def drain_new(self, known: Store, now_ns: int) -> list[Ids]:
        """Operations since the last call; from now on they wait."""
        new, self._new = [operations for operations in self._new if len(operations)], []
        if new:
            operations = np.concatenate(new)
            rows = OperationsByProcess.from_operations(
                operations, known.operations.take(operations, "process")["process"]
            )
            waits = np.ones(len(rows.processes), np.bool_)
            self._waiting.append(_Waiting(now_ns, int(operations.min()), rows, waits, len(operations)))
            self._reserve(int(rows.processes[-1]) + 1)
            self._amounts[rows.processes] += np.diff(rows.ends, prepend=0)
        return new

    def drain_captured(self) -> list[tuple[int, int]]:
        """(process, end) of captures since the last call."""
        captured, self._captured = self._captured, []
        return captured

    def drain_portions(self, now_ns: int, *, before: int, most: int | None) -> list[Portion]:
        """Portions to be aligned now, with all operations that wait of each process.

        A process is due if something of it was captured, if it was queued or has ended, or if an operation of it has
        waited for long or has an id below `before`.

        As many processes as it takes for the work of `most` kernels, and at least one; None: all of them.
        """
        for waiting in self._waiting:
            gives_up = waiting.first < before
            if now_ns - waiting.at_ns < WITHOUT_CAPTURE_NS and not gives_up:
                break
            self._queue_all(waiting, gives_up=gives_up)
        chosen = self._choose(np.inf if most is None else most)
        operations_of = self._operations_of(sorted(chosen))
        return [self._portion(process, _joined(operations_of[process]), part) for process, part in chosen.items()]

    def _queue_all(self, waiting: _Waiting, *, gives_up: bool) -> None:
        """Queues the processes of operations that are due: once, and once more to give them up."""
        if waiting.is_due and (waiting.gives_up or not gives_up):
            return
        waiting.is_due, waiting.gives_up = True, gives_up
        for process in waiting.processes():
            self._of_process(process).gives_up |= gives_up

    def _choose(self, most: float) -> dict[int, _Part]:
        """Processes from the front of the queue, with the kernels and captures of their portion."""
        chosen: dict[int, _Part] = {}
        for process, queued in self._queue.items():
            if most <= 0:
                break
            self._reserve(process + 1)
            others = sum(map(len, queued.calls)) + int(self._amounts[process])
            most -= _OF_PROCESS + others // _PER_KERNEL
            chosen[process] = queued.drain_parts(most)
            most -= len(chosen[process].kernels)
        return chosen

    def _portion(self, process: int, operations: Ids, part: _Part) -> Portion:
        """Portion with that part; a process that has more goes to the end of the queue."""
        queued = self._queue.pop(process)
        calls, queued.calls = tuple(queued.calls), []
        self.rows -= len(part.kernels) + sum(map(len, calls))
        is_all = not queued.parts
        if not is_all:
            self._queue[process] = queued
        return Portion(
            process=process,
            operations=operations,
            kernels=part.kernels,
            calls=calls,
            captures=tuple(part.captures),
            has_ended=is_all and queued.has_ended,
            gives_up=is_all and queued.gives_up,
        )

    def _operations_of(self, chosen: list[int]) -> defaultdict[int, list[Ids]]:
        """Takes the operations of these processes, ascending, out of those that wait."""
        found: defaultdict[int, list[Ids]] = defaultdict(list)
        processes = np.asarray(chosen, np.int64)
        processes = processes[self._amounts[processes] > 0]
        if not len(processes):
            return found
        self._amounts[processes] = 0
        for waiting in self._waiting:
            for process, operations in waiting.drain_operations(processes):
                found[process].append(operations)
            waiting.compact()
        self._waiting = deque(waiting for waiting in self._waiting if waiting.left)
        return found

    def _reserve(self, processes: int) -> None:
        """Makes room for the amounts of this many processes."""
        if processes > len(self._amounts):
            more = max(processes, 2 * len(self._amounts)) - len(self._amounts)
            self._amounts = np.concatenate([self._amounts, np.zeros(more, np.int64)])

    def _of_process(self, process: int) -> _Queued:
        return self._queue.setdefault(process, _Queued())


def _joined(ids: Iterable[Ids]) -> Ids:
    return np.concatenate([np.empty(0, np.int64), *ids])
