"""Alignment of the whole store: one aligner per process gets its rows, and the results are written back.

`process_aligner` decides; here store rows become its columns, and its matches become `match`, `launch`, `kernel`,
`confidence` and times of the operations, and `launch` of the kernels. Operations that were captured into CUDA graphs
are found before (`graph_replays`) and kept from the aligners.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.backlog import Portion
from ncclscope_service.align.certain import is_call_within
from ncclscope_service.align.certain_pairing import CertainPairing
from ncclscope_service.align.exact_join import ExactJoin, MatchReconciler
from ncclscope_service.align.graph_replays import GraphReplays
from ncclscope_service.align.process_aligner import ProcessAligner
from ncclscope_service.align.records import ALIGN_KERNEL, OPERATION_COLUMNS, PLAN, AlignerRows
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import group_by
from ncclscope_service.columns.table import Ids, Table
from ncclscope_service.intake.tuning import NO_CHANNELS, Copies
from ncclscope_service.store.errors import InternalErrors
from ncclscope_service.store.rows import API_CALL, Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CaptureSeen
from ncclscope_wire.terms import NO_NUMBER

FORGOTTEN_KERNEL: Final = "line_came_after_its_kernel_was_forgotten"
"""Why an operation inside a capture has no kernel, as it is counted: its line came a window later."""

_PLANS_LIMIT: Final = 65_536
"""Further kernels of a process's launches that wait for their first ones."""


class MatchWriter:
    """Writes matches of all processes into the store, with the launches and times of their kernels."""

    def __init__(self, known: Store, copies: Copies) -> None:
        self._store = known
        self._copies = copies
        self._plans: dict[int, Columns] = {}
        """Further kernels of launches (records.PLAN) by process, until their first kernel is written."""

    def add_plans(self, process: int, plans: Sequence[Columns]) -> None:
        """Adds further kernels of launches (records.PLAN)."""
        if any(len(each) for each in plans):
            known = self._plans.get(process, np.empty(0, PLAN))
            self._plans[process] = row_ops.concat([known, *plans])[-_PLANS_LIMIT:]

    def evict(self, process: int) -> None:
        """Drops what waits of a process."""
        self._plans.pop(process, None)

    def write(self, process: int, matches: Columns) -> None:
        """Writes matches (records.MATCH); if that fails they count as pending."""
        self._unmatch_evicted(matches)
        with ExitStack() as on_failure:
            on_failure.callback(self._count_as_pending, matches)
            self._write(process, matches)
            on_failure.pop_all()

    def _count_as_pending(self, matches: Columns) -> None:
        table = self._store.operations  # what was written of them is not to be relied on
        table.rows["match"][table.at(matches["operation"])] = Match.PENDING

    def _write(self, process: int, matches: Columns) -> None:
        operations, kernels = self._store.operations, self._store.kernels
        at = operations.at(matches["operation"])
        table = operations.rows
        table["match"][at] = matches["match"]
        idle = np.flatnonzero((matches["match"] == Match.UNMATCHED) | (matches["match"] == Match.NOT_COVERED))
        table["match"][at[idle[self._copies.holds(matches["operation"][idle])]]] = Match.NO_KERNEL
        table.put("confidence", at, matches["confidence"])
        found = np.flatnonzero(matches["kernel"] != NO_NUMBER)
        if not len(found) and process not in self._plans:
            return
        at, matches = at[found], row_ops.take(matches, found)
        order = np.argsort(matches["launch"], kind="stable")  # most are in order: that is faster than counting
        is_first = np.ones(len(order), bool)
        is_first[1:] = np.diff(matches["launch"][order]) != 0
        first = order[is_first]
        ids = self._store.new_launches(len(first))
        table.put("launch", at[order], ids[np.cumsum(is_first) - 1])
        table.put("kernel", at, matches["kernel"])
        self._store.kernel_references.record(matches["operation"], matches["kernel"])
        kernel_at = kernels.at(matches["kernel"][first])
        kernels.rows["launch"][kernel_at] = ids
        kernels.rows["replay"][kernel_at] = 0
        plans = self._drain_plans(process, matches["kernel"])
        kernels.rows["launch"][kernels.at(plans["kernel"])] = kernels.take(plans["first"], "launch")["launch"]
        kernels.rows["replay"][kernels.at(plans["kernel"])] = 0
        times = _spans(
            kernels.take(matches["kernel"], "start_ns", "end_ns", "censored"), matches["kernel"], plans, kernels
        )
        for name in ("start_ns", "end_ns", "censored"):
            table.put(name, at, times[name])

    def _unmatch_evicted(self, matches: Columns) -> None:
        """Drops matches with kernels that left the store before their lines came."""
        kernels = matches["kernel"]
        is_gone = (kernels != NO_NUMBER) & (kernels < self._store.kernels.first)
        if is_gone.any():
            matches["match"][is_gone] = Match.UNMATCHED
            matches["kernel"][is_gone] = matches["launch"][is_gone] = NO_NUMBER
            self._store.skipped[FORGOTTEN_KERNEL] += int(np.count_nonzero(is_gone))

    def _drain_plans(self, process: int, firsts: NDArray[np.int64]) -> Columns:
        """The further kernels of launches that begin with one of these kernels, each once."""
        plans = self._plans.get(process)
        if plans is None:
            return np.empty(0, PLAN)
        kernels = self._store.kernels
        plans = plans[(plans["first"] >= kernels.first) & (plans["kernel"] >= kernels.first)]
        mine = np.isin(plans["first"], firsts)
        chosen, left = plans[mine], plans[~mine]
        # What was written before as another launch's, or its own, is that.
        self._plans[process] = left[kernels.take(left["first"], "launch")["launch"] == NO_NUMBER]
        chosen = chosen[~np.isin(chosen["kernel"], firsts)]
        chosen = chosen[kernels.take(chosen["kernel"], "launch")["launch"] == NO_NUMBER]
        _, once = np.unique(chosen["kernel"], return_index=True)
        taken: Columns = chosen[once]
        return taken


def _spans(own: Columns, firsts: NDArray[np.int64], plans: Columns, kernels: Table) -> Columns:
    """From the start of a launch's first kernel to the end of its last: `own` are the times of the first ones."""
    further = kernels.take(plans["kernel"], "start_ns", "end_ns", "censored")
    for plan, first in enumerate(plans["first"].tolist()):
        mine = firsts == first
        own["start_ns"][mine] = np.minimum(own["start_ns"][mine], further["start_ns"][plan])
        own["end_ns"][mine] = np.maximum(own["end_ns"][mine], further["end_ns"][plan])
        own["censored"][mine] |= further["censored"][plan]
    return own


class Alignment:
    """The aligners of all processes of a store."""

    def __init__(
        self, known: Store, version_of: Callable[[int], str | None], errors: InternalErrors | None = None
    ) -> None:
        """`version_of`: NCCL version of a process, asked once, when its first kernel or capture comes; `errors`:
        if they are isolated, a process that fails is given up, and starts again.
        """
        self._store = known
        self._errors = errors or InternalErrors()
        self._lost: list[tuple[int, Ids]] = []
        """Processes that were given up since the last call, with the operations that were lost."""
        self._version_of = version_of
        self._aligners: dict[int, ProcessAligner] = {}
        self._waiting: dict[int, list[Ids]] = {}
        """Operations of processes without a capture so far: they need no aligner yet."""
        self._kernels: dict[int, list[Columns]] = {}
        self._finished: dict[int, list[CaptureSeen]] = {}
        """Kernels of processes (ALIGN_KERNEL), and their captures that were finished, since the last `align_ready`."""
        self._arrived: list[Ids] = []
        """Operations since the last `align_ready`, which may find that they were captured."""
        self._rows = AlignerRows(known)
        self.graphs = GraphReplays(known, version_of, self._rows, self._errors)
        self._exact: dict[int, ExactJoin | None] = {}
        """Exact joins of the processes that were captured; None without NVTX ranges."""
        self._reconcilers: dict[int, MatchReconciler] = {}
        self._captured: dict[int, list[Columns]] = {}
        """Kernels of each process (ALIGN_KERNEL) for exact joins, since its last finished capture."""
        self._called: dict[int, list[Columns]] = {}
        """Ranges of NCCL's calls (rows.API_CALL) since then."""
        self._touched: set[int] = set()
        self._silent: set[int] = set()
        """Processes that were silent for so long that the next `align_ready` decides all that waits of them."""
        self._copies = Copies(known)
        self._writer = MatchWriter(known, self._copies)
        self._certain = CertainPairing(known, self._rows)
        self._certain_matches: dict[int, list[Columns]] = {}
        """Certain matches of processes (MATCH), which were not written yet."""

    def ingest_portion(self, portion: Portion) -> None:
        """Ingests the next rows of one process."""
        self.ingest_operations(portion.operations)
        with self._isolated(portion.process):
            if len(portion.kernels):
                self.ingest_kernels(portion.kernels)
            for calls in portion.calls:
                self.ingest_calls(calls)
            for capture in portion.captures:
                self.ingest_capture(capture, {0: portion.process})

    def ingest_operations(self, operations: Ids) -> None:
        """New operations, already placed in their communicators, in log order."""
        self._arrived.append(operations)

    def _drain_arrived(self) -> None:
        """Operations that arrived wait with those of their process, but for those that are known to be captured."""
        arrived, self._arrived = self._arrived, []
        for operations in map(self.graphs.without_captured, arrived):
            for process, at in group_by(self._store.operations.take(operations, "process")["process"]):
                self._waiting.setdefault(process, []).append(operations[at])

    def ingest_kernels(self, kernels: Ids) -> None:
        """New kernel records, of any processes, in any order."""
        rows = self._store.kernels.take(kernels)
        for process, chosen in group_by(rows["process"]):
            columns = self._rows.kernels(kernels[chosen], row_ops.take(rows, chosen))
            is_replay = columns["graph_node_id"] != NO_NUMBER
            if is_replay.any():
                self.graphs.ingest_kernels(process, columns[is_replay])
                columns = columns[~is_replay]
            self._kernels.setdefault(process, []).append(columns)

    def ingest_copied(self, operations: Ids) -> None:
        """Operations that copy engines carry out, by their TUNING line."""
        self._copies.ingest_operations(operations)

    def ingest_calls(self, calls: Columns) -> None:
        """Calls of NCCL's API that an export holds (rows.API_CALL), before its capture is reported as finished."""
        for process, mine in group_by(calls["process"]):
            self._called.setdefault(process, []).append(row_ops.take(calls, mine))

    def ingest_capture(self, capture: CaptureSeen, processes: Mapping[int, int]) -> None:
        """A finished capture; `processes`: process index by pid, for the pids that it recorded."""
        for process in processes.values():
            self._finished.setdefault(process, []).append(capture)

    def _ingest_arrived(self, *, over: Container[int] = (), final: bool = False) -> None:
        """Passes on what has come, but for operations that are known to be captured; no more will of those `over`."""
        for process, captured in self.graphs.drain_captured().items():
            if process in self._aligners:
                self._aligners[process].withdraw(captured)
        self._drain_arrived()
        kernels, self._kernels = self._kernels, {}
        finished, self._finished = self._finished, {}
        for process in sorted({*kernels, *finished, *(self._waiting.keys() & self._aligners.keys())}):
            with self._isolated(process):
                rows = row_ops.concat([np.empty(0, ALIGN_KERNEL), *kernels.get(process, ())])
                is_last = final or process in over
                self._ingest_process(process, rows, finished.get(process, ()), is_last=is_last)

    def _ingest_process(
        self, process: int, kernels: Columns, captures: Sequence[CaptureSeen], *, is_last: bool
    ) -> None:
        """Passes on what waits of a process: to its careful aligners what is not certain."""
        aligner = self._aligner(process)
        exact = self._exact[process]
        self._touched.add(process)
        operations = np.concatenate([np.empty(0, np.int64), *self._waiting.pop(process, ())])
        operations = self.graphs.without_captured(operations)
        skipped: NDArray[np.int64] | None = None
        if captures and len(operations) and len(kernels) and not self.graphs.has_graphs(process):
            operations, kernels, skipped = self._pair_certain(process, operations, kernels, captures, is_last=is_last)
        if len(operations):
            rows = self._rows.operations(operations, self._store.operations.take(operations, *OPERATION_COLUMNS))
            aligner.ingest_operations(rows, skipped)
            if exact is not None:
                exact.ingest_operations(rows)
        aligner.ingest_kernels(kernels)
        if exact is not None:
            self._captured.setdefault(process, []).append(kernels)
        for capture in captures:
            aligner.ingest_coverage(capture.start_ns, capture.end_ns, is_of_profiler=capture.is_of_profiler)
            self._ingest_exact(process, capture)

    def _pair_certain(
        self, process: int, operations: Ids, kernels: Columns, captures: Sequence[CaptureSeen], *, is_last: bool
    ) -> tuple[Ids, Columns, NDArray[np.int64] | None]:
        """Decides what is certain; gives the rest, and how many operations of its thread were decided before each."""
        exact = self._exact[process]
        calls = row_ops.concat([np.empty(0, API_CALL), *self._called.get(process, ())])
        if exact is not None and exact.is_active and not len(calls):
            return operations, kernels, None
        found = self._certain.pair(
            self._aligners[process],
            operations,
            kernels,
            calls if exact is not None else calls[:0],
            captures,
            is_last=is_last,
        )
        if found is None:
            return operations, kernels, None
        self._certain_matches.setdefault(process, []).append(found.matches)
        if exact is not None and len(calls):
            exact.observe_certain(found.stretches, found.lanes)
            self._called[process] = [row_ops.filter_rows(calls, ~is_call_within(calls, found.stretches))]
            checked = int(np.count_nonzero(found.matches["match"] == Match.MATCHED))
            self._store.alignment_checked[self._store.process_job[process]] += checked
        return operations[found.left], row_ops.filter_rows(kernels, found.left_kernels), found.skipped

    def _ingest_exact(self, process: int, capture: CaptureSeen) -> None:
        """Ingests a finished capture into the exact join; a process whose first one has no calls has none."""
        calls = _taken(self._called, process, np.empty(0, API_CALL), capture)
        kernels = _taken(self._captured, process, np.empty(0, ALIGN_KERNEL), capture)
        exact = self._exact.setdefault(process, ExactJoin())
        if exact is None:
            return
        exact.ingest_capture(calls, kernels, capture.end_ns)
        if not exact.is_active:
            self._exact[process] = None

    def align_ready(self, *, final: bool = False, ended: Sequence[int] = ()) -> Ids:
        """Decides what can be decided, writes it to the store, and returns the operations that were decided.

        With `final` all of all processes, and all of those that have `ended`. A process that fails is given up with
        all that waits of it, if internal errors are isolated.
        """
        decided = [self.graphs.resolve_replays(final=final, ended=ended)]
        over = {*ended, *self._silent}
        self._ingest_arrived(over=over, final=final)
        touched = set(self._aligners) if final else self._touched | over
        self._touched, self._silent = set(), set()
        for process in sorted(touched & set(self._aligners)):
            with self._isolated(process):
                decided.append(self._align_process(process, final=final or process in over))
        if final:
            decided.append(self.give_up_uncaptured())
        else:
            decided += [self._give_up(process) for process in ended if process in self._waiting]
        return np.concatenate(decided)

    def _align_process(self, process: int, *, final: bool) -> Ids:
        aligner = self._aligners[process]
        matches = self._reconciled(process, aligner.align_ready(final=final), final=final)
        matches = row_ops.concat([matches, *self._certain_matches.pop(process, ())])
        # Further kernels of exact joins come first.
        exact = self._exact[process]
        self._writer.add_plans(process, [*([exact.drain_plans()] if exact is not None else []), aligner.drain_plans()])
        is_captured = self.graphs.is_captured(process, matches["operation"])
        if is_captured.any():
            matches = row_ops.filter_rows(matches, ~is_captured)
        self._writer.write(process, matches)
        decided: Ids = matches["operation"]
        return decided

    def _reconciled(self, process: int, matches: Columns, *, final: bool) -> Columns:
        """An aligner's matches, resolved against exact joins; they wait for captures that are being read."""
        if len(self.graphs.captured_of(process)):
            self._exact[process] = None  # the calls of a CUDA graph's capture launch nothing themselves
        exact = self._exact[process]
        reconciler = self._reconcilers[process]
        if exact is None:
            return reconciler.release(matches)
        checked, disagreements = reconciler.checked, reconciler.disagreements
        first = self._store.kernels.first
        joined = exact.join_ready(final=final, begins_with_log=self._aligners[process].begins_with_log)
        settled = reconciler.merge(matches, joined, final=final, first_kernel=first)
        job = self._store.process_job[process]
        self._store.alignment_checked[job] += reconciler.checked - checked
        self._store.alignment_disagreements[job] += reconciler.disagreements - disagreements
        return settled

    def processes(self) -> set[int]:
        """Processes whose operations wait here, or may."""
        return {*self._aligners, *self._waiting}

    def knows_beginning(self, process: int) -> bool:
        """Whether it is known which lines the first kernels of a process are of."""
        return process not in self._aligners or self._aligners[process].knows_beginning

    def captured(self) -> set[int]:
        """Processes with a capture so far."""
        return set(self._aligners)

    def give_up(self, process: int, before: int) -> Ids:
        """Stops waiting for a capture of operations with an id below `before`.

        Returns those of a process that never had one; those of the others are decided with the next `align_ready`.
        """
        self._ingest_arrived()
        if process in self._aligners:
            with self._isolated(process):
                self._give_up_in_aligner(process, before)
        return self._give_up(process, before) if process in self._waiting else np.empty(0, np.int64)

    def _give_up_in_aligner(self, process: int, before: int) -> None:
        aligner, exact = self._aligners[process], self._exact[process]
        if aligner.newest_operation < before:
            self._silent.add(process)  # what its last lines launched is as well known as it will ever be
            return
        aligner.give_up(before)
        if exact is not None:
            exact.give_up(before)
        self._touched.add(process)

    def give_up_uncaptured(self) -> Ids:
        """Stops waiting for processes without a capture, and returns their operations."""
        self._ingest_arrived()
        given_up = [self._give_up(process) for process in list(self._waiting)]
        return np.concatenate([np.empty(0, np.int64), *given_up])

    def evict_processes(self, processes: Iterable[int]) -> None:
        """Drops what was learnt about processes without a backlog."""
        for process in processes:
            if process not in self._waiting:
                self._evict(process)
                self.graphs.evict_process(process)

    def drain_lost(self) -> list[tuple[int, Ids]]:
        """Processes on which our own code failed since the last call, each with its operations that were not
        decided: they count as not covered from now on.
        """
        lost, self._lost = self._lost, []
        return lost

    def _isolated(self, process: int) -> AbstractContextManager[None]:
        of = self._store.processes[process]
        return self._errors.isolated(
            "align",
            f"process {of.pid} of {of.host}",
            on_error=lambda: self._lost.append((process, self._forget(process))),
        )

    def _forget(self, process: int) -> Ids:
        """Starts a process again; returns its operations that were pending."""
        self._waiting.pop(process, None)
        self._evict(process)
        table = self._store.operations
        at = np.flatnonzero((table.rows["process"] == process) & (table.rows["match"] == Match.PENDING))
        self._arrived = [ids[~np.isin(ids, table.first + at)] for ids in self._arrived]
        table.rows["match"][at] = Match.NOT_COVERED
        table.rows.put("confidence", at, 0.0)
        return table.first + at

    def _evict(self, process: int) -> None:
        for known in (
            self._aligners, self._kernels, self._finished, self._certain_matches, self._exact, self._reconcilers,
            self._captured, self._called,
        ):  # fmt: skip
            known.pop(process, None)
        self._writer.evict(process)
        self._touched.discard(process)
        self._silent.discard(process)

    def _give_up(self, process: int, before: int | None = None) -> Ids:
        ids = self.graphs.without_captured(np.concatenate(self._waiting.pop(process)))
        decided = ids if before is None else ids[ids < before]
        if len(decided) < len(ids):
            self._waiting[process] = [ids[len(decided) :]]
        at = self._store.operations.at(decided)
        table = self._store.operations.rows
        launches_none = self._store.operation_templates.take(table["template"][at], "nranks")["nranks"] == 1
        launches_none |= (table.values("channels", at) == NO_CHANNELS) | self._copies.holds(decided)
        table["match"][at] = np.where(launches_none, Match.NO_KERNEL, Match.NOT_COVERED)
        table.put("confidence", at, 1.0)
        return decided

    def _aligner(self, process: int) -> ProcessAligner:
        aligner = self._aligners.get(process)
        if aligner is None:
            aligner = self._aligners[process] = ProcessAligner(self._version_of(process))
            captured = self.graphs.captured_of(process)
            if len(captured):
                aligner.withdraw(captured)
            self._exact.setdefault(process, ExactJoin())
            self._reconcilers[process] = MatchReconciler()
        return aligner


def _taken(waiting: dict[int, list[Columns]], process: int, none: Columns, capture: CaptureSeen) -> Columns:
    """The rows of a process that a capture holds, by their start; those of captures still being read stay."""
    rows = row_ops.concat([none, *waiting.pop(process, ())])
    is_inside = (rows["start_ns"] >= capture.start_ns) & (rows["start_ns"] <= capture.end_ns)
    if is_inside.all():
        return rows
    is_later = rows["start_ns"] > capture.end_ns
    if is_later.any():
        waiting[process] = [row_ops.filter_rows(rows, is_later)]
    return row_ops.filter_rows(rows, is_inside)
