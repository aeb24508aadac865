"""Operations to kernels, over the whole store: one aligner per process, fed with its rows, results written back.

`align.py` decides; here store rows become its columns, and its matches become `match`, `launch`, `kernel`,
`confidence` and times of the operations, and `launch` of the kernels. Operations that were captured into CUDA graphs
are found before (`graph_replays`) and kept from the aligners.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.align import ProcessAligner
from ncclscope_service.align_rows import ALIGN_KERNEL, ALIGN_OPERATION, PLAN
from ncclscope_service.arrivals import Portion
from ncclscope_service.copy_engine import NO_CHANNELS, Copies
from ncclscope_service.distinct import distinct, firsts, groups
from ncclscope_service.exact_join import ExactJoin
from ncclscope_service.graph_replays import GraphReplays
from ncclscope_service.kernel_name import parse_kernel_name
from ncclscope_service.mistakes import Mistakes
from ncclscope_service.rows import OPERATION, Match
from ncclscope_service.store import API_CALL, OPERATION_TEMPLATE, Ids, Store, Table
from ncclscope_service.verdicts import Verdicts
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CaptureSeen
from ncclscope_wire.terms import NO_NUMBER

_Column = NDArray[np.generic]
_ALIGNED: Final = ("template", *(name for name in ALIGN_OPERATION.names or () if name in (OPERATION.names or ())))
_ALIGNED_TEMPLATE: Final = tuple(
    name for name in ALIGN_OPERATION.names or () if name in (OPERATION_TEMPLATE.names or ()) and name != "device"
)
"""Columns that an aligner needs of an operation, and of its template."""

FORGOTTEN_KERNEL: Final = "line_came_after_its_kernel_was_forgotten"
"""Why an operation inside a capture has no kernel, as it is counted: its line came a window later."""

_PLANS_LIMIT: Final = 65_536
"""Further kernels of a process's launches that wait for their first ones."""


class Alignment:
    """The aligners of all processes of a store."""

    def __init__(self, known: Store, version_of: Callable[[int], str | None], mistakes: Mistakes | None = None) -> None:
        """`version_of`: NCCL version of a process, asked once, when its first kernel or capture comes; `mistakes`:
        where they are borne, a process of which anything fails is given up, and begins anew.
        """
        self._store = known
        self._mistakes = mistakes or Mistakes()
        self._lost: list[tuple[int, Ids]] = []
        """Processes that were given up since that was last asked, with the operations that were lost."""
        self._version_of = version_of
        self._aligners: dict[int, ProcessAligner] = {}
        self._not_captured: dict[int, list[Ids]] = {}
        """Operations of processes of which nothing was captured so far: they need no aligner yet."""
        self._kernels: dict[int, list[Columns]] = {}
        self._coverage: dict[int, list[tuple[int, int]]] = {}
        self._arrived: list[Ids] = []
        """Operations since the last `advance`, which may find that they were captured."""
        self.graphs = GraphReplays(known, version_of, self._operation_columns, self._kernel_columns, self._mistakes)
        self._exact: dict[int, ExactJoin | None] = {}
        """Exact joins of the processes that were captured; None where NVTX ranges tell nothing."""
        self._verdicts: dict[int, Verdicts] = {}
        self._captured: dict[int, list[Columns]] = {}
        """Kernels of each process (ALIGN_KERNEL) since its last finished capture."""
        self._called: dict[int, list[Columns]] = {}
        """Ranges of NCCL's calls likewise (store.API_CALL)."""
        self._plans: dict[int, Columns] = {}
        """Further kernels of launches (align_rows.PLAN) by process, until their first kernel is written."""
        self._touched: set[int] = set()
        self._silent: set[int] = set()
        """Processes of which nothing came for so long that the next `advance` decides all that waits of them."""
        self._name_columns: dict[int, tuple[int, int]] = {}
        self._copies = Copies(known)

    def feed(self, portion: Portion) -> None:
        """What comes next of one process."""
        self.feed_operations(portion.operations)
        with self._given_up_where_it_fails(portion.process):
            if len(portion.kernels):
                self.feed_kernels(portion.kernels)
            for calls in portion.calls:
                self.feed_calls(calls)
            for capture in portion.captures:
                self.feed_capture(capture, {0: portion.process})

    def feed_operations(self, operations: Ids) -> None:
        """New operations, already placed in their communicators, in log order."""
        self._arrived.append(operations)

    def _feed_operations(self, operations: Ids) -> None:
        operations = self.graphs.without_captured(operations)
        if not len(operations):
            return
        # Most often all are of one process. Rows lie apart in memory: what is needed of them is read in one go.
        table = self._store.operations
        first = int(table.rows["process"][table.at(operations[:1])][0])
        rows = table.take(operations, "process", *(_ALIGNED if first in self._aligners else ()))
        for process, at in groups(rows["process"]):
            mine, own = operations[at], rows if len(at) == len(rows) else whole_rows.taken(rows, at)
            if process in self._aligners:
                with self._given_up_where_it_fails(process):
                    self._feed(process, mine, own if first in self._aligners else table.take(mine, *_ALIGNED))
            else:
                self._not_captured.setdefault(process, []).append(mine)

    def feed_kernels(self, kernels: Ids) -> None:
        """New kernel records, of any processes, in any order."""
        rows = self._store.kernels.take(kernels)
        for process, chosen in groups(rows["process"]):
            columns = self._kernel_columns(kernels[chosen], whole_rows.taken(rows, chosen))
            is_replay = columns["graph_node_id"] != NO_NUMBER
            if is_replay.any():
                self.graphs.feed_kernels(process, columns[is_replay])
                columns = columns[~is_replay]
            self._kernels.setdefault(process, []).append(columns)
            if self._exact.setdefault(process, ExactJoin()) is not None:
                self._captured.setdefault(process, []).append(columns)
            self._touched.add(process)

    def feed_copied(self, operations: Ids) -> None:
        """Operations of which a TUNING line said that copy engines carry them out."""
        self._copies.feed(operations)

    def feed_calls(self, calls: Columns) -> None:
        """Calls of NCCL's API that an export holds (store.API_CALL), before its capture is said to be finished."""
        for process, mine in groups(calls["process"]):
            self._called.setdefault(process, []).append(whole_rows.taken(calls, mine))

    def feed_capture(self, capture: CaptureSeen, processes: Mapping[int, int]) -> None:
        """A finished capture; `processes`: process index by pid, for the pids that it recorded."""
        for process in processes.values():
            self._coverage.setdefault(process, []).append((capture.start_ns, capture.end_ns))
            self._feed_exact(process, capture)
            self._touched.add(process)

    def _feed_arrived(self) -> None:
        """Hands on what has come, but for operations that are known to be captured."""
        for process, captured in self.graphs.take_captured().items():
            if process in self._aligners:
                self._aligners[process].withdraw(captured)
        arrived, self._arrived = self._arrived, []
        for operations in arrived:
            self._feed_operations(operations)
        kernels, self._kernels = self._kernels, {}
        coverage, self._coverage = self._coverage, {}
        for process in sorted({*kernels, *coverage}):
            with self._given_up_where_it_fails(process):
                aligner = self._aligner(process)
                for rows in kernels.get(process, ()):
                    aligner.feed_kernels(rows)
                for begin_ns, end_ns in coverage.get(process, ()):
                    aligner.feed_coverage(begin_ns, end_ns)

    def _feed_exact(self, process: int, capture: CaptureSeen) -> None:
        """Gives a finished capture to the exact join; a process whose first one has no calls has none."""
        calls = _taken(self._called, process, np.empty(0, API_CALL), capture)
        kernels = _taken(self._captured, process, np.empty(0, ALIGN_KERNEL), capture)
        exact = self._exact.setdefault(process, ExactJoin())
        if exact is None:
            return
        exact.feed_capture(calls, kernels, capture.end_ns)
        if not exact.is_active:
            self._exact[process] = None

    def advance(self, *, final: bool = False, ended: Sequence[int] = ()) -> Ids:
        """Decides what can be decided, writes it to the store, and gives the operations that were decided.

        Everything of all processes with `final`, and everything of those that have `ended`. What fails of a process is
        given up with all that waits of it, where mistakes are borne.
        """
        decided = [self.graphs.advance(final=final, ended=ended)]
        self._feed_arrived()
        over = {*ended, *self._silent}
        touched = set(self._aligners) if final else self._touched | over
        self._touched, self._silent = set(), set()
        for process in sorted(touched & set(self._aligners)):
            with self._given_up_where_it_fails(process):
                decided.append(self._advance(process, final=final or process in over))
        if final:
            decided.append(self.give_up_uncaptured())
        else:
            decided += [self._give_up(process) for process in ended if process in self._not_captured]
        return np.concatenate(decided)

    def _advance(self, process: int, *, final: bool) -> Ids:
        matches = self._aligners[process].advance(final=final)
        matches = self._judged(process, matches, final=final)
        self._feed_plans(process)
        is_captured = self.graphs.is_captured(process, matches["operation"])
        if is_captured.any():
            matches = whole_rows.kept(matches, ~is_captured)
        self._leave_forgotten(matches)
        try:
            self._write(process, matches)
        except Exception:
            table = self._store.operations  # what was written of it is not to be relied on
            table.rows["match"][table.at(matches["operation"])] = Match.PENDING
            raise
        decided: Ids = matches["operation"]
        return decided

    def _leave_forgotten(self, matches: Columns) -> None:
        """Kernels that left the store before their lines came are nobody's any more."""
        kernels = matches["kernel"]
        is_gone = (kernels != NO_NUMBER) & (kernels < self._store.kernels.first)
        if is_gone.any():
            matches["match"][is_gone] = Match.UNMATCHED
            matches["kernel"][is_gone] = matches["launch"][is_gone] = NO_NUMBER
            self._store.skipped[FORGOTTEN_KERNEL] += int(np.count_nonzero(is_gone))

    def _judged(self, process: int, matches: Columns, *, final: bool) -> Columns:
        """What is settled of an aligner's matches beside exact joins; it waits for captures that are being read."""
        if len(self.graphs.captured_of(process)):
            self._exact[process] = None  # the calls of a CUDA graph's capture launch nothing themselves
        exact = self._exact[process]
        verdicts = self._verdicts[process]
        if exact is None:
            return verdicts.release(matches)
        checked, disagreements = verdicts.checked, verdicts.disagreements
        first = self._store.kernels.first
        settled = verdicts.merge(matches, exact.advance(final=final), final=final, first_kernel=first)
        job = self._store.process_job[process]
        self._store.alignment_checked[job] += verdicts.checked - checked
        self._store.alignment_disagreements[job] += verdicts.disagreements - disagreements
        return settled

    def processes(self) -> set[int]:
        """Of which operations wait here, or may."""
        return {*self._aligners, *self._not_captured}

    def captured(self) -> set[int]:
        """Processes of which something was captured so far."""
        return set(self._aligners)

    def give_up(self, process: int, before: int) -> Ids:
        """Lets operations of a process with an id below `before` wait no longer for a capture; gives those of a process
        that never had one. What belongs to one that had is decided with the next `advance`.
        """
        self._feed_arrived()
        if process in self._aligners:
            with self._given_up_where_it_fails(process):
                self._give_up_in_aligner(process, before)
        return self._give_up(process, before) if process in self._not_captured else np.empty(0, np.int64)

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
        """Lets operations of processes of which nothing was captured wait no longer, and gives them."""
        self._feed_arrived()
        given_up = [self._give_up(process) for process in list(self._not_captured)]
        return np.concatenate([np.empty(0, np.int64), *given_up])

    def leave(self, processes: Iterable[int]) -> None:
        """Lets go of what was learnt of processes of which nothing waits."""
        for process in processes:
            if process not in self._not_captured:
                self._let_go(process)
                self.graphs.leave(process)

    def take_lost(self) -> list[tuple[int, Ids]]:
        """Processes of which a mistake of ours was made since the last call, each with its operations that were not
        decided: they count as not covered from now on.
        """
        lost, self._lost = self._lost, []
        return lost

    @contextmanager
    def _given_up_where_it_fails(self, process: int) -> Generator[None]:
        try:
            yield
        except Exception as error:
            of = self._store.processes[process]
            self._mistakes.bear(error, "align", f"process {of.pid} of {of.host}")
            self._lost.append((process, self._forget(process)))

    def _forget(self, process: int) -> Ids:
        """Begins anew with a process; gives its operations that nothing was decided of."""
        self._not_captured.pop(process, None)
        self._let_go(process)
        table = self._store.operations
        at = np.flatnonzero((table.rows["process"] == process) & (table.rows["match"] == Match.PENDING))
        self._arrived = [ids[~np.isin(ids, table.first + at)] for ids in self._arrived]
        table.rows["match"][at], table.rows["confidence"][at] = Match.NOT_COVERED, 0.0
        return table.first + at

    def _let_go(self, process: int) -> None:
        for known in (
            self._aligners, self._kernels, self._coverage, self._exact, self._verdicts, self._captured, self._called,
            self._plans,
        ):  # fmt: skip
            known.pop(process, None)
        self._touched.discard(process)
        self._silent.discard(process)

    def _give_up(self, process: int, before: int | None = None) -> Ids:
        ids = self.graphs.without_captured(np.concatenate(self._not_captured.pop(process)))
        decided = ids if before is None else ids[ids < before]
        if len(decided) < len(ids):
            self._not_captured[process] = [ids[len(decided) :]]
        at = self._store.operations.at(decided)
        table = self._store.operations.rows
        launches_none = self._store.operation_templates.take(table["template"][at], "nranks")["nranks"] == 1
        launches_none |= (table["channels"][at] == NO_CHANNELS) | self._copies.holds(decided)
        table["match"][at] = np.where(launches_none, Match.NO_KERNEL, Match.NOT_COVERED)
        table["confidence"][at] = 1.0
        return decided

    def _aligner(self, process: int) -> ProcessAligner:
        aligner = self._aligners.get(process)
        if aligner is None:
            aligner = self._aligners[process] = ProcessAligner(self._version_of(process))
            captured = self.graphs.captured_of(process)
            if len(captured):
                aligner.withdraw(captured)
            self._exact.setdefault(process, ExactJoin())
            self._verdicts[process] = Verdicts()
            waiting = self._not_captured.pop(process, None)
            if waiting:
                operations = self.graphs.without_captured(np.concatenate(waiting))
                self._feed(process, operations, self._store.operations.take(operations, *_ALIGNED))
        return aligner

    def _feed(self, process: int, operations: Ids, rows: Columns) -> None:
        columns = self._operation_columns(operations, rows)
        self._aligners[process].feed_operations(columns)
        if (exact := self._exact[process]) is not None:
            exact.feed_operations(columns)
        self._touched.add(process)

    def _operation_columns(self, operations: Ids, rows: Columns) -> Columns:
        templates = self._store.templates_of(rows, *_ALIGNED_TEMPLATE)
        computed: dict[str, _Column] = {
            "id": operations,
            "one_rank": templates["nranks"] == 1,
            "device": self._devices(rows["member"]),
            "text": rows["template"],
        }
        return _filled(ALIGN_OPERATION, len(rows), computed, rows, templates)

    def _devices(self, members: NDArray[np.int32]) -> NDArray[np.int32]:
        """CUDA ordinal of these members, where their Init lines said it."""
        found, inverse = distinct(members)
        devices = [self._store.members[member].cuda_device for member in found.tolist()]
        return np.asarray([NO_NUMBER if device is None else device for device in devices], np.int32)[inverse]

    def _kernel_columns(self, kernels: Ids, rows: Columns) -> Columns:
        templates = self._store.kernel_templates_of(rows)
        names, inverse = distinct(templates["name"])
        parsed = np.asarray([self._parsed_name(name) for name in names.tolist()], np.int64).reshape(-1, 2)[inverse]
        computed: dict[str, _Column] = {
            "id": kernels,
            "kernel_class": parsed[:, 0],
            "data_type": parsed[:, 1],
        }
        return _filled(ALIGN_KERNEL, len(rows), computed, rows, templates)

    def _parsed_name(self, name: int) -> tuple[int, int]:
        if name not in self._name_columns:
            parsed = parse_kernel_name(self._store.strings[name])
            self._name_columns[name] = (int(parsed.kernel_class), parsed.data_type)
        return self._name_columns[name]

    def _feed_plans(self, process: int) -> None:
        """Takes further kernels of launches; those of exact joins come first."""
        exact = self._exact[process]
        new = [self._aligners[process].take_plans()] if exact is None else [exact.take_plans()]
        if exact is not None:
            new.append(self._aligners[process].take_plans())
        if any(len(each) for each in new):
            known = self._plans.get(process, np.empty(0, PLAN))
            self._plans[process] = whole_rows.joined([known, *new])[-_PLANS_LIMIT:]

    def _take_plans(self, process: int, firsts: NDArray[np.int64]) -> Columns:
        """The further kernels of launches that begin with these kernels, each once."""
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

    def _write(self, process: int, matches: Columns) -> None:
        operations, kernels = self._store.operations, self._store.kernels
        at = operations.at(matches["operation"])
        table = operations.rows
        table["match"][at] = matches["match"]
        idle = np.flatnonzero((matches["match"] == Match.UNMATCHED) | (matches["match"] == Match.NOT_COVERED))
        table["match"][at[idle[self._copies.holds(matches["operation"][idle])]]] = Match.NO_KERNEL
        table["confidence"][at] = matches["confidence"]
        found = np.flatnonzero(matches["kernel"] != NO_NUMBER)
        if not len(found) and process not in self._plans:
            return
        at, matches = at[found], whole_rows.taken(matches, found)
        launches, inverse = distinct(matches["launch"])
        first = firsts(matches["launch"])
        ids = self._store.new_launches(len(launches))
        table["launch"][at] = ids[inverse]
        table["kernel"][at] = matches["kernel"]
        self._store.named_kernels.note(matches["operation"], matches["kernel"])
        kernel_at = kernels.at(matches["kernel"][first])
        kernels.rows["launch"][kernel_at] = ids
        kernels.rows["replay"][kernel_at] = 0
        plans = self._take_plans(process, np.unique(matches["kernel"]))
        kernels.rows["launch"][kernels.at(plans["kernel"])] = kernels.take(plans["first"], "launch")["launch"]
        kernels.rows["replay"][kernels.at(plans["kernel"])] = 0
        times = _spans(
            kernels.take(matches["kernel"], "start_ns", "end_ns", "censored"), matches["kernel"], plans, kernels
        )
        for name in ("start_ns", "end_ns", "censored"):
            table[name][at] = times[name]


def _spans(own: Columns, firsts: NDArray[np.int64], plans: Columns, kernels: Table) -> Columns:
    """From the start of a launch's first kernel to the end of its last: `own` are the times of the first ones."""
    further = kernels.take(plans["kernel"], "start_ns", "end_ns", "censored")
    for plan, first in enumerate(plans["first"].tolist()):
        mine = firsts == first
        own["start_ns"][mine] = np.minimum(own["start_ns"][mine], further["start_ns"][plan])
        own["end_ns"][mine] = np.maximum(own["end_ns"][mine], further["end_ns"][plan])
        own["censored"][mine] |= further["censored"][plan]
    return own


def _taken(waiting: dict[int, list[Columns]], process: int, none: Columns, capture: CaptureSeen) -> Columns:
    """The rows of a process that a capture holds, by their start; those of captures still being read stay."""
    rows = whole_rows.joined([none, *waiting.pop(process, ())])
    is_inside = (rows["start_ns"] >= capture.start_ns) & (rows["start_ns"] <= capture.end_ns)
    if is_inside.all():
        return rows
    is_later = rows["start_ns"] > capture.end_ns
    if is_later.any():
        waiting[process] = [whole_rows.kept(rows, is_later)]
    return whole_rows.kept(rows, is_inside)


def _filled(dtype: np.dtype[np.void], amount: int, computed: Mapping[str, _Column], *tables: Columns) -> Columns:
    """A table of that dtype: each column computed, or else from the first table that has it."""
    filled = np.zeros(amount, dtype)
    for name in dtype.names or ():
        if name in computed:
            filled[name] = computed[name]
        else:
            filled[name] = next(table[name] for table in tables if name in (table.dtype.names or ()))
    return filled
