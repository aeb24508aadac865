"""Numbers operations by iteration if no marks do, from the period of what each rank calls.

A rank's period is looked for until it is found, and again when it no longer fits; then each operation is numbered soon
after it is read, those of all ranks in one go: 0.5 us each. When everything has been read, all that is still in memory
is numbered again by what was learnt last, so that portions make no difference.

Live, a bounded number of operations is looked at in one go, those of ranks first that have the most to show since they
were last looked at; the others' turn comes with the next call. The bounds are rows, not time: a restart finds the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import pairwise
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct, group_by
from ncclscope_service.columns.table import Ids, Table
from ncclscope_service.job.recurrence import (
    Calls,
    Counted,
    Cycle,
    Integers,
    count_of_ranks,
    find_cycle,
    lost_marks,
    phases_of,
)
from ncclscope_service.nccl import bandwidth
from ncclscope_service.store.rows import OF_DUMPS, IterationBy
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_LOOKED_AT: Final = 20_000
"""Operations of one rank in which a period is looked for: the latest."""
_GROWN: Final = 1.5
"""A rank is looked at again when its operations have grown by this factor."""
_LOOKED_AT_ONCE: Final = 65_536
"""Operations in which periods are looked for in one go: about 30 ms."""
_LEAST_LOOK: Final = 512
"""Least number of operations that a look at a rank counts for."""
_NUMBERED_AT_ONCE: Final = 65_536
"""Operations that are numbered in one go, and after which the next go is due: about 30 ms."""
_AGREED_AT_ONCE: Final = 131_072
"""Operations that are brought in line with marks in one go."""
_LEARNT: Final = 8
"""Iterations from which a period was learnt on which it is not looked for again, if there was as much to look at as
there ever is: of less, microbatches of the first iteration may be all that repeated."""
_STALE: Final = 8
"""Periods without any mark after which a period no longer fits."""
_AGREES: Final = 0.8
"""Share of the operations with marks on which a period must agree with them."""
_LISTENED: Final = 8
"""Ranks whose stamps tell how long an iteration lasts."""
_ENDS_KEPT: Final = 21
_LEAST_ENDS: Final = 4
"""Ends of iterations without which their distance is no duration."""
_REDUCES: Final = 1
_BEGINS: Final = 2
_SCALAR_BYTES: Final = 1024
_TENSOR_BYTES: Final = 64 * 1024
_IS_REDUCING: Final = np.isin(
    np.arange(256), [OPERATION_CODES[name] for name in ("AllReduce", "ReduceScatter", "Reduce")]
)
"""By operation code."""
_IS_SCALAR: Final = np.isin(np.arange(256), [OPERATION_CODES[name] for name in ("AllReduce", "AllGather", "Reduce")])
"""By operation code."""
_SCANNED_AT_ONCE: Final = 65_536
"""Ranks of operations that are looked through in one go: they stay in the cache."""
_CALL: Final = ("op", "data_type", "reduction", "root", "count", "communicator", "stream")
_BUFFERS: Final = ("send_buffer", "recv_buffer")


_LANE: Final = np.dtype(
    [
        ("process", "<i4"),
        ("seen", "<i8"),  # operations
        ("looked_at", "<i8"),  # of those, when its period was last looked for
        ("marks", "<i8"),  # of its period; 0: not known
        ("iterations", "<i8"),  # from which that was learnt
        ("operations", "<i8"),  # in an iteration
        ("reductions", "<i8"),  # Cycle.reductions
        ("iteration", "<i8"),  # iterations that have ended
        ("mark", "<i8"),  # phase of the last mark in this one; -1 before the first
        ("since", "<i8"),  # the last mark: operations after it the next mark may show to be of other iterations
        ("since_mark", "<i8"),  # how many came since the last mark
        ("offset", "<i8"),  # what the numbers of marks have on those of the period
        ("agrees", "?"),  # whether that is known
        ("is_of_dumps", "?"),  # its rows are NCCL Inspector's records, whose order is not that of the calls
    ]
)
"""One rank of one process."""
_OF_LANE: Final = np.dtype([("lane", "<i4")])


@dataclass(frozen=True, slots=True)
class _Learnt:
    """The period of a rank, and its templates as columns of equal length."""

    cycle: Cycle
    templates: list[int]
    phases: Integers
    roles: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByLane:
    """Operations rank by rank, those of each in the order of its log."""

    lanes: Integers
    begins: Integers
    """Where those of each rank begin, and at last where all end."""
    order: NDArray[np.intp]
    """Which of those that were asked for."""
    operations: Ids
    templates: NDArray[np.int32]
    phases: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Operations rank by rank, those of each in the order of its log; columns of equal length."""

    operations: NDArray[np.intp]
    """Which of those that were asked for."""
    lanes: Integers
    """Of which rank each is: a number of its own."""
    phases: Integers
    """Its place among the marks of a step; -1: none."""
    marks: Integers
    """How many marks a step of that rank has."""


def calls_of_kinds(kinds: Integers, ops: NDArray[np.integer], sizes: NDArray[np.integer]) -> Calls:
    """Calls of one rank by their kinds, in order; `ops` and `sizes`: code and bytes of each kind."""
    is_tensor = _IS_REDUCING[ops] & (sizes > _TENSOR_BYTES)
    is_scalar = _IS_SCALAR[ops] & (sizes >= 0) & (sizes <= _SCALAR_BYTES)
    return Calls(kind=kinds, is_tensor_reduction=is_tensor[kinds], is_scalar=is_scalar[kinds])


class Periods:
    """Follows the periods of a store's ranks."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._lanes: Columns = np.empty(0, _LANE)
        self._index: dict[int, int] = {}
        """By process and device, together one number: its rank's place in `_lanes`."""
        self._cycles: list[Cycle | None] = []
        self._templates: list[list[int]] = []
        """Of each rank, those whose place in an iteration is known."""
        self._ends_ns: list[list[int]] = []
        """Of each rank, stamps of the last iterations' last marks, if there are stamps."""
        self.settled_before = 0
        """All operations with a smaller id are numbered, as far as they can be."""
        self._numbered = Table(_OF_LANE)
        """Of each operation that was numbered, its rank's place in `_lanes`: a column of its own, since to look for a
        rank's operations in the wide rows of millions takes a quarter of a second."""
        self._steps_ns: dict[str, int] = {}
        self._steps_are_told = True
        """Whether `_steps_ns` is what `_ends_ns` tell."""
        self._is_behind = False
        """Whether ranks were left out that were to be looked at."""
        self._final_before = 0
        """All ranks were looked at for the last time when operations with a smaller id had been read."""
        self._apart: NDArray[np.intp] = np.empty(0, np.intp)
        """Ranks that were left out whose numbers are not yet those of their marks."""
        self._templates_seen = 0
        self._lane_of_template: Integers = np.empty(0, np.int64)
        self._phases: NDArray[np.int32] = np.empty(0, np.int32)
        """Of each template, its place among the marks of its rank's iteration; -1."""
        self._roles: NDArray[np.uint8] = np.empty(0, np.uint8)
        """Of each template, `_REDUCES` and `_BEGINS` of its rank's iteration."""

    def settle(self) -> None:
        """Numbers what was read since the last time."""
        self._reserve()
        table = self._store.operations
        while self.settled_before < table.next_id:
            begin = max(self.settled_before, table.first)
            self.number(np.arange(begin, min(begin + _NUMBERED_AT_ONCE, table.next_id), dtype=np.int64))

    def number(self, operations: Ids) -> None:
        """Numbers operations that were just read: consecutive ones, in the order of their logs."""
        if not len(operations):
            return
        self.settled_before = int(operations[-1]) + 1
        lanes = self._lanes_of(operations)
        self._note_lanes(int(operations[0]), lanes)
        amounts = np.bincount(lanes, minlength=len(self._lanes))
        amounts[self._lanes["is_of_dumps"]] = 0  # so that no period is looked for
        self._lanes["seen"] += amounts
        waits = (amounts > 0) & (self._lanes["reductions"] > 0)
        new = operations[self._lanes["marks"][lanes] > 0]
        self._count(np.concatenate([self._waiting(waits, int(operations[0])), new]), amounts)

    def learn(self, *, final: bool) -> None:
        """Numbers what was read, and looks for the periods of ranks that have none: of all ranks when `final`."""
        self.settle()
        self._look(final=final)
        self._agree_with_marks(final=final)

    def go_on(self) -> None:
        """Between two calls of `learn`: numbers what was read, if much, and looks at ranks that were left out."""
        if self._store.operations.next_id - self.settled_before >= _NUMBERED_AT_ONCE:
            self.settle()
        if self._is_behind:
            self.settle()
            self._look(final=False)
        if len(self._apart):
            self._agree_with_some(self._apart)

    def steps(self, templates: NDArray[np.int32]) -> Steps:
        """Where in the steps of their ranks these operations are; those of ranks whose period is not known left out."""
        self._reserve()
        lanes, inverse = distinct(self._lane_of_template[templates])
        marks = self._lanes["marks"][lanes]
        order = _stable_order(inverse, len(lanes))
        order = order[marks[inverse[order]] > 0]
        of = inverse[order]
        phases = self._phases[templates[order]].astype(np.int64)
        return Steps(operations=order, phases=phases, lanes=lanes[of].astype(np.int64), marks=marks[of])

    def iterations(self) -> dict[str, int]:
        """How many iterations each job has done, the median of its ranks; without jobs of which that is unknown."""
        by_job: defaultdict[str, list[int]] = defaultdict(list)
        known = self._lanes[self._lanes["marks"] > 0]
        for process, iteration in zip(known["process"].tolist(), known["iteration"].tolist(), strict=True):
            by_job[self._store.process_job[process]].append(iteration)
        return {job: round(median(counts)) for job, counts in by_job.items()}

    def steps_ns(self) -> dict[str, int]:
        """How long a recent iteration of each job took by the stamps of its lines: the median over a few ranks; without
        jobs that have no stamps.
        """
        if not self._steps_are_told:
            self._steps_ns, self._steps_are_told = self._told_steps_ns(), True
        return self._steps_ns

    def _told_steps_ns(self) -> dict[str, int]:
        known, processes = self._store.processes, self._lanes["process"].tolist()
        heard: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)
        for lane, ends in enumerate(self._ends_ns):
            if len(ends) >= _LEAST_ENDS:
                process = processes[lane]
                heard[self._store.process_job[process]].append((known[process].host, known[process].pid, lane))
        return {
            job: int(
                median(median(np.diff(self._ends_ns[lane]).tolist()) for _, _, lane in nsmallest(_LISTENED, lanes))
            )
            for job, lanes in heard.items()
        }

    def _look(self, *, final: bool) -> None:
        """Looks for periods, in a bounded number of operations; of all ranks when `final`, once."""
        if final:
            if self._final_before == self.settled_before:
                return
            self._final_before = self.settled_before
        due = self._due(anew=final and self._store.operations.first == 0)
        if not final:
            evidence = self._lanes["seen"][due]
            due = due[np.argsort(-evidence / (self._lanes["looked_at"][due] + 1), kind="stable")]
            costs = self._lanes["seen"].clip(_LEAST_LOOK, _LOOKED_AT)
            due, self._is_behind = _first_of(due, costs, _LOOKED_AT_ONCE)
        if not len(due):
            return
        self._lanes["looked_at"][due] = self._lanes["seen"][due]
        anew = [np.empty(0, np.int64)]
        ranks = dict(self._operations_of(due))
        if not ranks:  # all that they did has left memory
            return
        for (lane, operations), found in zip(ranks.items(), self._found(list(ranks.values())), strict=True):
            cycle = self._cycles[lane]
            if found is not None and (final or cycle is None or found.cycle.kinds != cycle.kinds):
                anew.append(self._start(lane, found, operations))
            elif found is not None:
                self._follow(lane, found.cycle)
        self._count(np.sort(np.concatenate(anew)))

    def _due(self, *, anew: bool) -> NDArray[np.intp]:
        """Ranks that are to be looked at."""
        lanes = self._lanes
        grown = lanes["seen"] >= _GROWN * lanes["looked_at"]
        stale = lanes["since_mark"] > _STALE * lanes["operations"]
        stale &= lanes["seen"] - lanes["looked_at"] >= lanes["operations"]
        is_learnt = (lanes["marks"] > 0) & (lanes["iterations"] >= _LEARNT) & (lanes["looked_at"] >= _LOOKED_AT)
        return np.flatnonzero((lanes["seen"] > 0) & (anew | np.where(is_learnt, stale, grown)))

    def _start(self, lane: int, learnt: _Learnt, operations: Ids) -> Ids:
        """Begins to number a rank by a period: from its first operation if that is in memory, else from now on.

        Gives those that are to be numbered now.
        """
        self._forget(lane)
        self._templates[lane] = learnt.templates
        self._phases[learnt.templates], self._roles[learnt.templates] = learnt.phases, learnt.roles
        self._follow(lane, learnt.cycle)
        of = self._lanes[lane]
        of["mark"], of["since_mark"] = -1, 0
        if len(operations) < of["seen"]:
            of["iteration"] += 1
            of["since"] = self.settled_before - 1
            return operations[:0]
        of["iteration"], of["since"] = 0, self._store.operations.first - 1
        return operations

    def _follow(self, lane: int, cycle: Cycle) -> None:
        of = self._lanes[lane]
        of["marks"], of["iterations"] = len(cycle.kinds), cycle.iterations
        of["operations"], of["reductions"] = cycle.operations, cycle.reductions
        self._cycles[lane] = cycle
        self._store.iteration_confidence[int(of["process"])] = cycle.confidence

    def _forget(self, lane: int) -> None:
        self._phases[self._templates[lane]] = -1
        self._roles[self._templates[lane]] = 0
        self._templates[lane], self._cycles[lane] = [], None
        self._lanes["marks"][lane] = self._lanes["reductions"][lane] = 0
        self._ends_ns[lane].clear()
        self._steps_are_told = False

    def _agree_with_marks(self, *, final: bool) -> None:
        """Shifts the numbers of each rank's periods to those of its marks, if it has both."""
        self._reserve()
        is_open = (self._lanes["marks"] > 0) & (final | ~self._lanes["agrees"])
        lanes = self._with_marks(is_open) if is_open.any() else np.empty(0, np.intp)
        if not final:
            self._agree_with_some(lanes)
            return
        self._apart = lanes[:0]
        for lane, operations in self._operations_of(lanes):
            self._agree(lane, operations)

    def _agree_with_some(self, lanes: NDArray[np.intp]) -> None:
        """Does so with the first of these ranks, in a bounded number of operations; the others are left for later."""
        lanes = lanes[(self._lanes["marks"][lanes] > 0) & ~self._lanes["agrees"][lanes]]
        costs = self._lanes["seen"].clip(_LEAST_LOOK, len(self._store.operations))
        chosen, _ = _first_of(lanes, costs, _AGREED_AT_ONCE)
        self._apart = lanes[len(chosen) :]
        for lane, operations in self._operations_of(chosen):
            self._agree(lane, operations)

    def _with_marks(self, is_asked: NDArray[np.bool_]) -> NDArray[np.intp]:
        """Those of these ranks of which an operation in memory is numbered by marks."""
        rows, all_lanes = self._store.operations.rows, self._lanes_in_memory()
        has_marks = np.zeros(len(self._lanes), np.bool_)
        for begin in range(0, len(all_lanes), _SCANNED_AT_ONCE):
            lanes = all_lanes[begin : begin + _SCANNED_AT_ONCE]
            at = np.flatnonzero(is_asked[lanes])
            has_marks[lanes[at[rows.values("iteration_by", begin + at) == IterationBy.MARKS]]] = True
        return np.flatnonzero(has_marks)

    def _agree(self, lane: int, operations: Ids) -> None:
        rows, at = self._store.operations.rows, self._store.operations.at(operations)
        by_marks = rows.values("iteration_by", at) == IterationBy.MARKS
        if not by_marks.any():  # they have left memory
            return
        of = self._lanes[lane : lane + 1].copy()
        of["iteration"], of["mark"] = 0, -1
        counted = self._counted(self._by_lane(operations), of)
        shifts, amounts = np.unique(
            rows.values("iteration", at[by_marks]) - counted.iterations[by_marks], return_counts=True
        )
        others = at[~by_marks]
        if amounts.max() < _AGREES * amounts.sum():  # whatever recurs here is not the iteration
            rows.put("iteration", others, NO_NUMBER)
            rows.put("iteration_by", others, NO_NUMBER)
            self._forget(lane)
            return
        shift = int(shifts[amounts.argmax()])
        rows.put("iteration", others, counted.iterations[~by_marks] + shift)
        self._lanes["offset"][lane] = shift - (self._lanes["iteration"][lane] - counted.iteration[0])
        self._lanes["agrees"][lane] = True

    def _count(self, operations: Ids, new: Integers | None = None) -> None:
        """Numbers operations of ranks whose period is known. `new`: how many of each rank are read for the first time;
        None: all.
        """
        if not len(operations):
            return
        by_lane = self._by_lane(operations)
        lanes = by_lane.lanes
        known = self._lanes[lanes]
        counted = self._counted(by_lane, known)
        numbers = counted.iterations + np.repeat(known["offset"], np.diff(by_lane.begins))
        in_order = np.empty(len(numbers), np.int64)
        in_order[by_lane.order] = numbers
        self._number_late(lanes[counted.is_late], numbers[by_lane.begins[:-1]][counted.is_late])
        self._write(operations, in_order)
        self._lanes["iteration"][lanes], self._lanes["mark"][lanes] = counted.iteration, counted.mark
        self._note_last_marks(by_lane, np.diff(by_lane.begins) if new is None else new[lanes])
        self._note_ends(by_lane)

    def _counted(self, by_lane: _ByLane, known: Columns) -> Counted:
        """The iterations of these operations; if an iteration has one mark, with the marks that were lost."""
        begins, phases = by_lane.begins, by_lane.phases
        counted = count_of_ranks(phases, begins, known["marks"], known["iteration"], known["mark"])
        roles = self._roles[by_lane.templates]
        is_reduction, is_first = (roles & _REDUCES) > 0, (roles & _BEGINS) > 0
        for place in _lossy(phases, is_reduction, begins, known["reductions"]).tolist():
            mine = slice(int(begins[place]), int(begins[place + 1]))
            reductions = int(known["reductions"][place])
            lost = lost_marks(phases[mine] >= 0, is_reduction[mine], is_first[mine], reductions)
            counted.iterations[mine] += lost
            counted.iteration[place] += lost[-1]
        return counted

    def _waiting(self, is_asked: NDArray[np.bool_], before: int) -> Ids:
        """Operations of these ranks since their last marks."""
        if not is_asked.any():
            return np.empty(0, np.int64)
        first = max(self._store.operations.first, int(self._lanes["since"][is_asked].min()) + 1)
        operations = np.arange(min(first, before), before, dtype=np.int64)
        lanes = self._lanes_of(operations)
        return operations[is_asked[lanes] & (operations > self._lanes["since"][lanes])]

    def _number_late(self, lanes: Integers, numbers: Integers) -> None:
        """Numbers what came since the last marks of these ranks: it is of the iteration that the next one is of."""
        is_late, number = np.zeros(len(self._lanes), np.bool_), np.zeros(len(self._lanes), np.int64)
        is_late[lanes], number[lanes] = True, numbers
        operations = self._waiting(is_late, self.settled_before)
        self._write(operations, number[self._lanes_of(operations)])

    def _note_last_marks(self, by_lane: _ByLane, new: Integers) -> None:
        lanes, ends = by_lane.lanes, by_lane.begins[1:]
        at = np.flatnonzero(by_lane.phases >= 0)
        last = np.full(len(lanes), NO_NUMBER)
        last[np.searchsorted(by_lane.begins, at, side="right") - 1] = at  # the last one stays
        has = last >= 0
        self._lanes["since"][lanes[has]] = by_lane.operations[last[has]]
        self._lanes["since_mark"][lanes] = np.where(has, ends - 1 - last, self._lanes["since_mark"][lanes] + new)
        fits = self._lanes["since_mark"][lanes] <= _STALE * self._lanes["operations"][lanes]
        self._lanes["since"][lanes[~fits]] = by_lane.operations[ends[~fits] - 1]

    def _note_ends(self, by_lane: _ByLane) -> None:
        of = np.repeat(np.arange(len(by_lane.lanes)), np.diff(by_lane.begins))
        last_marks = np.flatnonzero(by_lane.phases == self._lanes["marks"][by_lane.lanes][of] - 1)
        stamps = self._store.operations.take(by_lane.operations[last_marks], "logged_at_ns")["logged_at_ns"]
        timed = stamps != NO_TIME_NS
        self._steps_are_told = False
        for place, mine in group_by(of[last_marks][timed]):
            lane = int(by_lane.lanes[place])
            new = stamps[timed][mine[-_ENDS_KEPT:]].tolist()
            self._ends_ns[lane] = [*self._ends_ns[lane], *new][-_ENDS_KEPT:]

    def _write(self, operations: Ids, numbers: Integers) -> None:
        table = self._store.operations
        at = table.at(operations)
        unmarked = table.rows.values("iteration_by", at) != IterationBy.MARKS
        table.rows.put("iteration", at[unmarked], numbers[unmarked])
        table.rows.put("iteration_by", at[unmarked], IterationBy.PERIOD)

    def _found(self, ranks: Sequence[Ids]) -> Iterator[_Learnt | None]:
        """The periods of ranks with these operations, and what their templates are in them."""
        latest = [operations[-_LOOKED_AT:] for operations in ranks]
        rows = self._store.operations.take(np.concatenate(latest), "template", "logged_at_ns")
        used, inverse = distinct(rows["template"])
        templates = self._store.operation_templates.take(used.astype(np.int64))
        lanes = self._lane_of_template[used]
        sizes = bandwidth.message_bytes(
            templates["op"], templates["count"], templates["data_type"], templates["nranks"]
        )
        kinds = _kinds(lanes, templates, sizes)
        is_tensor = _IS_REDUCING[templates["op"]] & (sizes > _TENSOR_BYTES)
        is_scalar = _IS_SCALAR[templates["op"]] & (sizes >= 0) & (sizes <= _SCALAR_BYTES)
        of_lane = dict(group_by(lanes))
        times = rows["logged_at_ns"].astype(np.int64)
        ends = np.cumsum([len(operations) for operations in latest]).tolist()
        for begin, end in pairwise([0, *ends]):
            of = inverse[begin:end]
            own = of_lane[int(lanes[of[0]])]
            first, last = int(kinds[own].min()), int(kinds[own].max())
            at_ns = times[begin:end]
            calls = Calls(
                kind=kinds[of] - first,
                is_tensor_reduction=is_tensor[of],
                is_scalar=is_scalar[of],
                at_ns=None if (at_ns == NO_TIME_NS).any() else at_ns,
            )
            cycle = find_cycle(calls)
            if cycle is None:
                yield None
                continue
            phases = phases_of(kinds[own] - first, cycle.kinds, last - first + 1)
            begins = kinds[own] - first == cycle.first_kind
            roles = _REDUCES * is_tensor[own].astype(np.uint8) + _BEGINS * begins.astype(np.uint8)
            yield _Learnt(cycle, used[own].tolist(), phases, roles)

    def _operations_of(self, lanes: NDArray[np.intp]) -> Iterator[tuple[int, Ids]]:
        """Operations in memory of each of these ranks, in the order of its log."""
        if not len(lanes):
            return
        first, all_lanes = self._store.operations.first, self._lanes_in_memory()
        is_asked = np.zeros(len(self._lanes), np.bool_)
        is_asked[lanes] = True
        at = np.concatenate(
            [
                begin + np.flatnonzero(is_asked[all_lanes[begin : begin + _SCANNED_AT_ONCE]])
                for begin in range(0, max(1, len(all_lanes)), _SCANNED_AT_ONCE)
            ]
        )
        for lane, mine in group_by(all_lanes[at]):
            yield lane, first + at[mine]

    def _lanes_in_memory(self) -> NDArray[np.int32]:
        """Of which rank each operation of the store is."""
        table, numbered = self._store.operations, self._numbered
        numbered.drop_before(table.first)
        known: NDArray[np.int32] = numbered.rows["lane"]
        new = np.arange(table.first + len(known), table.next_id, dtype=np.int64)
        return np.concatenate([known, self._lanes_of(new).astype(np.int32)]) if len(new) else known

    def _note_lanes(self, first: int, lanes: Integers) -> None:
        """Remembers of which ranks operations are that follow those before, or the first that are in memory."""
        if self._numbered.next_id != first:
            self._numbered = Table(_OF_LANE)
            self._numbered.first = first
        rows = np.empty(len(lanes), _OF_LANE)
        rows["lane"] = lanes
        self._numbered.drop_before(self._store.operations.first)
        self._numbered.append(rows)

    def _by_lane(self, operations: Ids) -> _ByLane:
        templates = self._store.operations.take(operations, "template")["template"]
        lanes, inverse = distinct(self._lane_of_template[templates])
        order = _stable_order(inverse, len(lanes))
        templates = templates[order]
        return _ByLane(
            lanes=lanes.astype(np.int64),
            begins=np.concatenate([[0], np.cumsum(np.bincount(inverse, minlength=len(lanes)))]),
            order=order,
            operations=operations[order],
            templates=templates,
            phases=self._phases[templates].astype(np.int64),
        )

    def _lanes_of(self, operations: Ids) -> Integers:
        """Of which rank each of these operations is."""
        self._reserve()
        lanes: Integers = self._lane_of_template[self._store.operations.take(operations, "template")["template"]]
        return lanes

    def _reserve(self) -> None:
        """Makes room for templates that came, and ranks of which they are the first."""
        amount, known = len(self._store.operation_templates), self._templates_seen
        if amount == known:
            return
        if amount > len(self._phases):
            more = max(amount, 2 * len(self._phases)) - len(self._phases)
            self._lane_of_template = np.concatenate([self._lane_of_template, np.zeros(more, np.int64)])
            self._roles = np.concatenate([self._roles, np.zeros(more, np.uint8)])
            self._phases = np.concatenate([self._phases, np.full(more, -1, np.int32)])
        new = self._store.operation_templates.rows[known:]
        keys, inverse = distinct(new["process"].astype(np.int64) << 8 | (new["device"].astype(np.int64) & 0xFF))
        self._add_lanes([key for key in keys.tolist() if key not in self._index])
        lanes = np.asarray([self._index[key] for key in keys.tolist()], np.int64)
        self._lane_of_template[known:amount] = lanes[inverse]
        self._templates_seen = amount

    def _add_lanes(self, keys: list[int]) -> None:
        new = np.zeros(len(keys), _LANE)
        new["process"], new["mark"] = np.asarray(keys, np.int64) >> 8, -1
        new["is_of_dumps"] = np.asarray(keys, np.int64) & 0xFF == OF_DUMPS & 0xFF
        self._lanes = np.concatenate([self._lanes, new])
        for key in keys:
            self._index[key] = len(self._cycles)
            self._cycles.append(None)
            self._templates.append([])
            self._ends_ns.append([])


def _first_of(lanes: NDArray[np.intp], costs: Integers, most: int) -> tuple[NDArray[np.intp], bool]:
    """The first of these ranks that together cost no more than that, one at least; and whether some are left."""
    amount = max(1, int(np.searchsorted(np.cumsum(costs[lanes]), most, side="right")))
    return lanes[:amount], amount < len(lanes)


def _stable_order(inverse: NDArray[np.intp], amount: int) -> NDArray[np.intp]:
    # Few values fit the 16 bits that numpy sorts by counting.
    return np.argsort(inverse.astype(np.uint16) if amount < 2**16 else inverse, kind="stable")


def _lossy(phases: Integers, is_reduction: NDArray[np.bool_], begins: Integers, reductions: Integers) -> Integers:
    """Ranks (their places) with too many tensor reductions between two marks: a mark between them was lost."""
    if not reductions.any():
        return np.empty(0, np.int64)
    reduced = np.concatenate([[0], np.cumsum(is_reduction)])
    at = np.flatnonzero(phases >= 0)
    of = np.searchsorted(begins, at, side="right") - 1
    is_first = np.diff(of, prepend=-1) != 0
    here = reduced[at + 1] - np.where(is_first, reduced[begins[of]], np.roll(reduced[at + 1], 1))
    usual = reductions[of]
    is_lost = (usual > 0) & (np.rint(here / np.maximum(usual, 1)) > 1)
    return np.unique(of[is_lost])


def _kinds(lanes: Integers, templates: Columns, sizes: Integers) -> Integers:
    """Which templates of a rank are the same call, numbered rank by rank.

    Gradients keep their buffers, those of small messages are anywhere.
    """
    calls = [templates[name] for name in _CALL]
    buffers = [np.where(sizes > _TENSOR_BYTES, templates[name], 0) for name in _BUFFERS]
    columns = [lanes, *calls, *buffers]
    order = np.lexsort(columns[::-1])
    is_new = np.zeros(len(order), np.bool_)
    for column in columns:
        is_new[1:] |= np.diff(column[order]) != 0
    kinds = np.empty(len(order), np.int64)
    kinds[order] = np.cumsum(is_new)
    return kinds
