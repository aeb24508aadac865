"""Operations that were captured into CUDA graphs, over the whole store: one `ProcessGraphs` per process.

`process_graphs` decides; here its decisions become `match`, `launch`, `kernel` and times of the captured operations,
`launch` and `replay` of the kernels, and a row of `Store.replays` for every replay of every captured operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.process_graphs import CapturedLaunch, ProcessGraphs
from ncclscope_service.align.records import AlignerRows
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.store import rows
from ncclscope_service.store.errors import InternalErrors
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

UNKNOWN_REPLAY: Final = "replay_of_unknown_capture"
"""Why a kernel of a graph has no operation, as it is counted: its capture is not in the log, or no line fits it."""

REMEMBERED_LINES: Final = 100_000
"""Operations that are remembered beyond the store's window, the newest of each process, in equal shares: a graph that
was captured when the job began replays to its end, and may be recorded at any time. Half a kilobyte each."""

_NOTHING: Final = np.empty(0, np.int64)


@dataclass(slots=True)
class _Process:
    graphs: ProcessGraphs
    captured: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    """Captured operations, ascending."""
    new: list[Ids] = field(default_factory=list[Ids])
    """Those that were not drained yet."""
    operations: dict[int, Columns] = field(default_factory=dict[int, Columns])
    """Rows of the operations of each captured launch, by the id of the first: they outlive those in the store."""
    launch_ids: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(slots=True)
class _Remembered:
    """The last operations of one process that left the store: ids and rows (rows.OPERATION), oldest first."""

    parts: deque[tuple[Ids, Columns]] = field(default_factory=deque[tuple[Ids, Columns]])
    amount: int = 0

    def add(self, operations: Ids, table: Columns) -> None:
        self.parts.append((operations, table))
        self.amount += len(operations)

    def evict_all_but(self, limit: int) -> None:
        while self.parts and self.amount - len(self.parts[0][0]) >= limit:
            self.amount -= len(self.parts.popleft()[0])
        excess = self.amount - limit
        if excess > 0:
            operations, table = self.parts.popleft()
            self.parts.appendleft((operations[excess:].copy(), row_ops.copy(table[excess:])))
            self.amount = limit

    def all(self) -> tuple[Ids, Columns]:
        ids = np.concatenate([_NOTHING, *(operations for operations, _ in self.parts)])
        return ids, np.concatenate([np.empty(0, rows.OPERATION), *(table for _, table in self.parts)])


class GraphReplays:
    """The CUDA graphs of all processes of a store."""

    def __init__(
        self,
        known: Store,
        version_of: Callable[[int], str | None],
        aligner_rows: AlignerRows,
        errors: InternalErrors,
    ) -> None:
        self._errors = errors
        self._store = known
        self._version_of = version_of
        self._aligner_rows = aligner_rows
        self._processes: dict[int, _Process] = {}
        self._replays: list[Columns] = []
        self._remembered: dict[int, _Remembered] = {}
        """By process."""

    def ingest_kernels(self, process: int, kernels: Columns) -> None:
        """Kernels of graphs (records.ALIGN_KERNEL) of one process."""
        if process not in self._processes:
            self._processes[process] = _Process(ProcessGraphs(self._version_of(process)))
        self._processes[process].graphs.ingest_kernels(kernels)

    def remember(self, operations: Ids) -> None:
        """Operations, ascending, that are about to leave the store: their graph may be recorded later."""
        table = self._store.operations
        for process, chosen in group_by(table.take(operations, "process")["process"]):
            kept = chosen[-REMEMBERED_LINES:]
            remembered = self._remembered.setdefault(process, _Remembered())
            remembered.add(operations[kept], table.take(operations[kept]))
        for remembered in self._remembered.values():
            remembered.evict_all_but(REMEMBERED_LINES // len(self._remembered))

    def evict_process(self, process: int) -> None:
        """Drops what is known of a process that is long silent: its graphs are replayed no more."""
        self._processes.pop(process, None)
        self._remembered.pop(process, None)

    def has_graphs(self, process: int) -> bool:
        """Whether a kernel of a process was launched by a graph."""
        return process in self._processes

    def captured_of(self, process: int) -> Ids:
        """The operations of a process that are known to be captured, ascending."""
        return self._processes[process].captured if process in self._processes else _NOTHING

    def is_captured(self, process: int, operations: Ids) -> NDArray[np.bool_]:
        """Which of these operations of a process are known to be captured."""
        captured = self.captured_of(process)
        return np.isin(operations, captured) if len(captured) else np.zeros(len(operations), np.bool_)

    def without_captured(self, operations: Ids) -> Ids:
        """Those of these operations, of any processes, that are not known to be captured."""
        for process in self._processes.values():
            if len(process.captured):
                operations = operations[~np.isin(operations, process.captured)]
        return operations

    def drain_captured(self) -> dict[int, Ids]:
        """Operations that were found to be captured since the last call, by process."""
        found = {index: np.concatenate(process.new) for index, process in self._processes.items() if process.new}
        for process in self._processes.values():
            process.new.clear()
        return found

    def drain_replays(self) -> Columns:
        """Replays (rows.REPLAYED) that were decided since the last call."""
        replays, self._replays = self._replays, []
        return np.concatenate([np.empty(0, rows.REPLAYED), *replays])

    def resolve_replays(self, *, final: bool, ended: Collection[int] = ()) -> Ids:
        """Resolves replays as far as possible; returns the captured operations that were pending until now."""
        decided = [_NOTHING]
        waiting = [(index, process) for index, process in self._processes.items() if process.graphs.waits]
        amounts = self._amounts() if waiting else _NOTHING
        for index, process in waiting:
            is_over = final or index in ended
            with self._errors.isolated("align", f"CUDA graphs of process {self._store.processes[index].pid}"):
                if process.graphs.wants_lines(int(amounts[index]), final=is_over):
                    decided.append(self._look_for_lines(index, process, final=is_over))
                self._write(process, process.graphs.drain_replays(final=is_over))
                continue
            del self._processes[index]  # it begins again: what it had found stays as it was written
        return np.concatenate(decided)

    def _amounts(self) -> NDArray[np.int64]:
        """How many operations of each process are known, those that left the store and are remembered included."""
        amounts = np.bincount(self._store.operations.rows["process"], minlength=len(self._store.processes))
        for index, remembered in self._remembered.items():
            amounts[index] += remembered.amount
        return amounts

    def _look_for_lines(self, index: int, process: _Process, *, final: bool) -> Ids:
        table = self._store.operations
        at = np.flatnonzero(table.rows["process"] == index)
        ids, left = self._remembered.get(index, _Remembered()).all()
        operations, known = np.concatenate([ids, table.first + at]), np.concatenate([left, table.rows[at]])
        matched = operations[known["match"] == Match.MATCHED]
        found = process.graphs.look_for_lines(
            self._aligner_rows.operations(operations, known), matched, self._launched(index), final=final
        )
        for launch in found:
            self._record_launch(process, launch, known[np.searchsorted(operations, launch.operations)])
        ids = np.concatenate([_NOTHING, *(each.operations for each in found)])
        ids = ids[ids >= table.first]
        undecided: Ids = ids[known["match"][np.searchsorted(operations, ids)] == Match.PENDING]
        if len(ids):
            process.new.append(ids)
            process.captured = np.sort(np.concatenate([process.captured, ids]))
        return undecided

    def _launched(self, index: int) -> Columns:
        """The kernels of a process that no graph launched."""
        table = self._store.kernels
        at = np.flatnonzero((table.rows["process"] == index) & (table.rows["graph_node_id"] == NO_NUMBER))
        return self._aligner_rows.kernels(table.first + at, table.rows[at])

    def _record_launch(self, process: _Process, launch: CapturedLaunch, known: Columns) -> None:
        """Keeps the rows of a captured launch, and marks them as matched in the store."""
        if len(launch.operations) == 0:
            return
        table = self._store.operations
        at = table.at(launch.operations[launch.operations >= table.first])
        table.rows["match"][at] = Match.MATCHED
        table.rows.put("confidence", at, launch.confidence)
        captured = np.zeros(len(known), rows.REPLAYED)
        for name in rows.OPERATION.names or ():
            captured[name] = known[name]
        captured["match"], captured["confidence"] = Match.MATCHED, launch.confidence
        captured["operation"] = launch.operations
        captured["finished"] = False
        captured["ranks_seen"] = 0
        captured["inspected"] = False
        for name in ("start_true_ns", "end_true_ns", "clock_uncertainty_ns", "wait_ns", "transfer_ns", "inspected_ns"):
            captured[name] = NO_TIME_NS
        for name in ("algbw", "busbw", "busbw_apparent", "limit"):
            captured[name] = np.nan
        first = int(launch.operations[0])
        process.operations[first] = captured
        process.launch_ids[first] = int(self._store.new_launches(1)[0])

    def _write(self, process: _Process, replays: Columns) -> None:
        """Writes what is known of these kernels (process_graphs.REPLAY), and makes rows of what they ran."""
        kernels = self._store.kernels
        unknown = np.count_nonzero(replays["launch"] == NO_NUMBER)
        if unknown:
            self._store.skipped[UNKNOWN_REPLAY] += int(unknown)
        replays = replays[(replays["launch"] != NO_NUMBER) & (replays["kernel"] >= kernels.first)]
        if len(replays) == 0:
            return
        launches = replays["launch"].tolist()
        launch_ids = np.asarray([process.launch_ids[launch] for launch in launches], np.int64)
        at = kernels.at(replays["kernel"])
        kernels.rows["launch"][at], kernels.rows["replay"][at] = launch_ids, replays["replay"]
        sizes = np.asarray([len(process.operations[launch]) for launch in launches])
        ran = np.concatenate([process.operations[launch] for launch in launches])
        of = np.repeat(np.arange(len(replays)), sizes)
        for name in ("start_ns", "end_ns", "censored"):
            ran[name] = kernels.rows[name][at][of]
        ran["kernel"] = ran["launch"] = replays["kernel"][of]
        ran["captured_launch"] = launch_ids[of]
        for name in ("replay", "is_first"):
            ran[name] = replays[name][of]
        self._name_kernels(ran[ran["is_first"]])
        self._replays.append(ran)

    def _name_kernels(self, first: Columns) -> None:
        """Captured operations name the first kernel of their launch that was recorded."""
        table = self._store.operations
        first = first[first["operation"] >= table.first]
        at = table.at(first["operation"])
        self._store.kernel_references.record(first["operation"], first["kernel"])
        for name in ("kernel", "start_ns", "end_ns", "censored"):
            table.rows.put(name, at, first[name])
        table.rows.put("launch", at, first["captured_launch"])
