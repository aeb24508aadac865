"""Numbers operations by iteration where no mark does, from the period of what each rank calls.

A rank's period is looked for until it is found, and again when it no longer fits; then each operation is numbered as it
is read. When everything has been read, all that is still in memory is numbered anew by what was learnt at last, so that
portions make no difference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import bandwidth
from ncclscope_service.distinct import distinct, groups
from ncclscope_service.period import (
    Calls,
    Cycle,
    Integers,
    Place,
    count_iterations,
    find_cycle,
    lost_marks,
    phases_of,
)
from ncclscope_service.rows import IterationBy
from ncclscope_service.store import Ids, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

_LOOKED_AT: Final = 20_000
"""Operations of one rank in which a period is looked for: the latest."""
_GROWN: Final = 1.5
"""A rank is looked at again when it has so many times the operations."""
_AT_ONCE: Final = 64
"""Ranks that are looked at in one go: a few milliseconds each."""
_LEARNT: Final = 8
"""Iterations from which a period was learnt on which it is not looked for again."""
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
_REDUCING: Final = [OPERATION_CODES[name] for name in ("AllReduce", "ReduceScatter", "Reduce")]
_SCALARS: Final = [OPERATION_CODES[name] for name in ("AllReduce", "AllGather", "Reduce")]
_CALL: Final = ("op", "data_type", "reduction", "root", "count", "communicator", "stream")
_BUFFERS: Final = ("send_buffer", "recv_buffer")


@dataclass(slots=True)
class _Lane:
    """One rank of one process."""

    process: int = NO_NUMBER
    seen: int = 0
    looked_at: int = 0
    cycle: Cycle | None = None
    place: Place = field(default_factory=Place)
    unsure: list[Ids] = field(default_factory=list[Ids])
    """Operations since the last mark, which the next one may show to be of the next iteration."""
    since_mark: int = 0
    offset: int | None = None
    """What the numbers of marks have on those of the period; None while there are no marks to compare with."""
    gap: list[Ids] = field(default_factory=list[Ids])
    """Where an iteration has one mark: the operations since the last one, which the next one may show to be of several
    iterations."""
    ends_ns: list[int] = field(default_factory=list[int])
    """Stamps of the last iterations' last marks, where there are stamps."""
    templates: list[int] = field(default_factory=list[int])
    """Those whose place in an iteration is known."""


@dataclass(frozen=True, slots=True)
class _Learnt:
    """The period of a rank, and its templates as columns of equal length."""

    cycle: Cycle
    templates: list[int]
    phases: Integers
    roles: NDArray[np.uint8]


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


class Periods:
    """Follows the periods of a store's ranks."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._lanes: defaultdict[int, _Lane] = defaultdict(_Lane)
        self._fed: list[Ids] = []
        self.settled_before = 0
        """All operations with a smaller id are numbered, as far as they can be."""
        self._lane_of_template: Integers = np.empty(0, np.int64)
        self._phases: NDArray[np.int32] = np.empty(0, np.int32)
        """Of each template, its place among the marks of its rank's iteration; -1."""
        self._roles: NDArray[np.uint8] = np.empty(0, np.uint8)
        """Of each template, `_REDUCES` and `_BEGINS` of its rank's iteration."""

    def feed(self, operations: Ids) -> None:
        """Takes operations that were just read, in the order of their log; they are numbered when there are many."""
        self._fed.append(operations)

    def settle(self) -> None:
        """Numbers what was fed: a rank costs as much as a hundred of its operations."""
        fed, self._fed = self._fed, []
        self.settled_before = self._store.operations.next_id
        operations = np.concatenate([np.empty(0, np.int64), *fed])
        self.number(operations[operations >= self._store.operations.first])

    def number(self, operations: Ids) -> None:
        """Numbers operations that were just read, in the order of their log."""
        templates = self._store.operations.take(operations, "template")["template"]
        self._reserve()
        for key, mine in groups(self._lane_of(templates)):
            lane = self._lanes[key]
            lane.process = key >> 8
            lane.seen += len(mine)
            if lane.cycle is not None:
                self._number(lane, operations[mine], templates[mine])

    def learn(self, *, final: bool) -> None:
        """Looks for the period of ranks that have none, a bounded number at a time; of all ranks when `final`."""
        self.settle()
        anew = final and self._store.operations.first == 0
        due = [key for key, lane in self._lanes.items() if anew or _is_due(lane)]
        for key, operations in self._operations_of(due if final else due[:_AT_ONCE]):
            lane = self._lanes[key]
            lane.looked_at = lane.seen
            found = self._find(operations)
            if found is not None and (final or lane.cycle is None or found.cycle.kinds != lane.cycle.kinds):
                self._start(lane, found, operations)
            elif found is not None:
                lane.cycle = found.cycle
        self._agree_with_marks(final=final)

    def _start(self, lane: _Lane, learnt: _Learnt, operations: Ids) -> None:
        """Begins to number a rank by a period: from its first operation if that is in memory, else from now on."""
        self._mark(lane, learnt)
        lane.unsure.clear()
        if len(operations) == lane.seen:
            lane.place = Place()
            self._number(lane, operations, self._store.operations.take(operations, "template")["template"])
        else:
            lane.place = Place(iteration=lane.place.iteration + 1)

    def steps(self, templates: NDArray[np.int32]) -> Steps:
        """Where in the steps of their ranks these operations are; those of ranks whose period is not known left out."""
        self._reserve()
        lanes, inverse = distinct(self._lane_of_template[templates])
        known = [self._lanes.get(lane) for lane in lanes.tolist()]
        marks = np.asarray([len(of.cycle.kinds) if of is not None and of.cycle else 0 for of in known], np.int64)
        # Few values fit the 16 bits that numpy sorts by counting.
        order = np.argsort(inverse.astype(np.uint16) if len(lanes) < 2**16 else inverse, kind="stable")
        order = order[marks[inverse[order]] > 0]
        of = inverse[order]
        phases = self._phases[templates[order]].astype(np.int64)
        return Steps(operations=order, phases=phases, lanes=lanes[of].astype(np.int64), marks=marks[of])

    def iterations(self) -> dict[str, int]:
        """How many iterations each job has done, the median of its ranks; without jobs of which that is unknown."""
        by_job: defaultdict[str, list[int]] = defaultdict(list)
        for lane in self._lanes.values():
            if lane.cycle is not None:
                by_job[self._store.process_job[lane.process]].append(lane.place.iteration)
        return {job: round(median(counts)) for job, counts in by_job.items()}

    def step_ns(self) -> int | None:
        """The duration of a recent iteration by the stamps of its lines: the median over a few ranks; None without."""
        known = self._store.processes
        heard = (lane for lane in self._lanes.values() if lane.cycle is not None and len(lane.ends_ns) >= _LEAST_ENDS)
        lanes = sorted(heard, key=lambda lane: (known[lane.process].host, known[lane.process].pid))[:_LISTENED]
        return int(median(median(np.diff(lane.ends_ns).tolist()) for lane in lanes)) if lanes else None

    def _agree_with_marks(self, *, final: bool) -> None:
        """Shifts the numbers of each rank's periods to those of its marks, where it has both."""
        if not (self._store.operations.rows["iteration_by"] == IterationBy.MARKS).any():
            return
        open_ones = [key for key, lane in self._lanes.items() if lane.cycle and (final or lane.offset is None)]
        for key, operations in self._operations_of(open_ones):
            self._agree(self._lanes[key], operations)

    def _agree(self, lane: _Lane, operations: Ids) -> None:
        table = self._store.operations.rows
        at = self._store.operations.at(operations)
        by_marks = table["iteration_by"][at] == IterationBy.MARKS
        if not by_marks.any():
            return
        counted, place, _ = self._counted(lane, table["template"][at], Place())
        shifts, amounts = np.unique(table["iteration"][at[by_marks]] - counted[by_marks], return_counts=True)
        others = at[~by_marks]
        if amounts.max() < _AGREES * amounts.sum():  # whatever recurs here is not the iteration
            table["iteration"][others], table["iteration_by"][others] = NO_NUMBER, NO_NUMBER
            self._forget(lane)
            return
        shift = int(shifts[amounts.argmax()])
        table["iteration"][others] = counted[~by_marks] + shift
        lane.offset = shift - (lane.place.iteration - place.iteration)

    def _number(self, lane: _Lane, operations: Ids, templates: NDArray[np.int32]) -> None:
        assert lane.cycle is not None, "only a rank whose period is known is numbered by it"
        new = len(operations)
        if lane.gap:
            operations = np.concatenate([*lane.gap, operations])
            operations = operations[operations >= self._store.operations.first]
            templates = self._store.operations.take(operations, "template")["template"]
        counted, lane.place, late = self._counted(lane, templates, lane.place)
        if late:
            for waiting in lane.unsure:
                self._write(waiting[waiting >= self._store.operations.first], counted[0] + (lane.offset or 0))
        self._write(operations, counted + (lane.offset or 0))
        phases = self._phases[templates]
        marks = np.flatnonzero(phases >= 0)
        rest = operations[int(marks[-1]) + 1 :] if len(marks) else operations
        lane.since_mark = len(rest) if len(marks) else lane.since_mark + new
        if len(marks):
            lane.unsure.clear()
            self._note_ends(lane, operations[phases == len(lane.cycle.kinds) - 1])
        fits = lane.since_mark <= _STALE * lane.cycle.operations
        if lane.place.mark >= 0 and fits:
            lane.unsure.append(rest)
        lane.gap = [rest] if lane.cycle.reductions and fits else []

    def _counted(self, lane: _Lane, templates: NDArray[np.int32], place: Place) -> tuple[Integers, Place, bool]:
        """As `count_iterations`; where an iteration has one mark, with the marks that were lost."""
        assert lane.cycle is not None, "only a rank whose period is known is numbered by it"
        phases = self._phases[templates].astype(np.int64)
        counted, reached, late = count_iterations(phases, len(lane.cycle.kinds), place)
        if lane.cycle.reductions and len(phases):
            roles = self._roles[templates]
            lost = lost_marks(phases >= 0, (roles & _REDUCES) > 0, (roles & _BEGINS) > 0, lane.cycle.reductions)
            counted, reached = counted + lost, replace(reached, iteration=reached.iteration + int(lost[-1]))
        return counted, reached, late

    def _note_ends(self, lane: _Lane, last_marks: Ids) -> None:
        stamps = self._store.operations.take(last_marks[-_ENDS_KEPT:], "logged_at_ns")["logged_at_ns"]
        lane.ends_ns = (lane.ends_ns + stamps[stamps != NO_TIME_NS].tolist())[-_ENDS_KEPT:]

    def _write(self, operations: Ids, numbers: Integers | np.int64) -> None:
        table = self._store.operations
        at = table.at(operations)
        unmarked = table.rows["iteration_by"][at] != IterationBy.MARKS
        table.rows["iteration"][at[unmarked]] = np.broadcast_to(numbers, len(at))[unmarked]
        table.rows["iteration_by"][at[unmarked]] = IterationBy.PERIOD

    def _mark(self, lane: _Lane, learnt: _Learnt) -> None:
        self._forget(lane)
        lane.templates = learnt.templates
        self._phases[lane.templates] = learnt.phases
        self._roles[lane.templates] = learnt.roles
        lane.cycle, lane.since_mark = learnt.cycle, 0
        self._store.iteration_confidence[lane.process] = learnt.cycle.confidence

    def _forget(self, lane: _Lane) -> None:
        self._phases[lane.templates] = -1
        self._roles[lane.templates] = 0
        lane.templates, lane.cycle = [], None
        lane.gap.clear()
        lane.ends_ns.clear()

    def _find(self, operations: Ids) -> _Learnt | None:
        """The period of one rank, and what its templates are in it."""
        latest = operations[-_LOOKED_AT:]
        rows = self._store.operations.take(latest, "template", "logged_at_ns")
        used, inverse = np.unique(rows["template"], return_inverse=True)
        kind_of, templates = _kinds(self._store.operation_templates.take(used.astype(np.int64)))
        sizes = bandwidth.message_bytes(
            templates["op"], templates["count"], templates["data_type"], templates["nranks"]
        )
        is_tensor = np.isin(templates["op"], _REDUCING) & (sizes > _TENSOR_BYTES)
        is_scalar = np.isin(templates["op"], _SCALARS) & (sizes >= 0) & (sizes <= _SCALAR_BYTES)
        times = rows["logged_at_ns"].astype(np.int64)
        cycle = find_cycle(
            Calls(
                kind=kind_of[inverse],
                is_tensor_reduction=is_tensor[inverse],
                is_scalar=is_scalar[inverse],
                at_ns=None if (times == NO_TIME_NS).any() else times,
            )
        )
        if cycle is None:
            return None
        phases = phases_of(kind_of, cycle.kinds, int(kind_of.max()) + 1)
        roles = _REDUCES * is_tensor.astype(np.uint8) + _BEGINS * (kind_of == cycle.first_kind).astype(np.uint8)
        return _Learnt(cycle, used.tolist(), phases, roles)

    def _operations_of(self, lanes: list[int]) -> Iterator[tuple[int, Ids]]:
        """What is in memory of each of these ranks, in the order of its log."""
        if not lanes:
            return
        table = self._store.operations
        self._reserve()
        is_theirs = np.isin(self._lane_of_template, lanes)
        at = np.flatnonzero(is_theirs[table.rows["template"]])
        for key, mine in groups(self._lane_of(table.rows["template"][at])):
            yield key, table.first + at[mine]

    def _lane_of(self, templates: NDArray[np.int32]) -> Integers:
        return self._lane_of_template[templates]

    def _reserve(self) -> None:
        amount = len(self._store.operation_templates)
        new = self._store.operation_templates.rows[len(self._lane_of_template) :]
        if len(new):
            lanes = new["process"].astype(np.int64) << 8 | (new["device"].astype(np.int64) & 0xFF)
            self._lane_of_template = np.concatenate([self._lane_of_template, lanes])
        if amount > len(self._phases):
            grown = max(amount, 2 * len(self._phases))
            self._roles = np.concatenate([self._roles, np.zeros(grown - len(self._roles), np.uint8)])
            self._phases = np.concatenate([self._phases, np.full(grown - len(self._phases), -1, np.int32)])


def _is_due(lane: _Lane) -> bool:
    if lane.cycle is not None and lane.cycle.iterations >= _LEARNT:
        is_stale = lane.since_mark > _STALE * lane.cycle.operations
        return is_stale and lane.seen - lane.looked_at >= lane.cycle.operations
    return lane.seen >= _GROWN * lane.looked_at


def _kinds(templates: Columns) -> tuple[Integers, Columns]:
    """Which templates are the same call: gradients keep their buffers, those of small messages are anywhere."""
    sizes = bandwidth.message_bytes(templates["op"], templates["count"], templates["data_type"], templates["nranks"])
    keys = np.zeros(len(templates), np.dtype([(name, templates.dtype[name]) for name in (*_CALL, *_BUFFERS)]))
    for name in _CALL:
        keys[name] = templates[name]
    for name in _BUFFERS:
        keys[name] = np.where(sizes > _TENSOR_BYTES, templates[name], 0)
    return np.unique(keys, return_inverse=True)[1].astype(np.int64), templates
