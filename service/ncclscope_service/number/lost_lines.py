"""Operations whose line was lost, found by their kernels: launches count, not lines.

Between two lines of one communicator that follow each other in the log, and whose kernels are on one stream, no line
can come any more. So a kernel between theirs that no line is of, on a stream that no other communicator uses, is an
operation of which only the line was lost. It gets a row (`Match.LINE_LOST`) and a number, and the lines behind it move
up by one. What is known of it comes from the kernel; its size from the other ranks once they are joined.

A kernel between lines of which some have none is left alone: it may be theirs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import CombinationIndex, distinct, distinct_values, group_by
from ncclscope_service.columns.table import Ids
from ncclscope_service.nccl.launch_rules import KernelClass, parse_kernel_name
from ncclscope_service.store.rows import OPERATION_TEMPLATE, Match, NumberState, empty_operations, has_kernel
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES, OPERATIONS

_OPERATION_OF: Final = {
    KernelClass.ALL_REDUCE: OPERATION_CODES["AllReduce"],
    KernelClass.ALL_GATHER: OPERATION_CODES["AllGather"],
    KernelClass.REDUCE_SCATTER: OPERATION_CODES["ReduceScatter"],
    KernelClass.BROADCAST: OPERATION_CODES["Broadcast"],
    KernelClass.REDUCE: OPERATION_CODES["Reduce"],
}
_DECIDED: Final = np.dtype(
    [
        ("member", "<i4"),
        ("coll_seq", "<i8"),  # count of its line
        ("id", "<i8"),
        ("kernel", "<i8"),  # NO_NUMBER without one that is certain
        ("lane", "<i4"),  # device and stream of its process
        ("correlation_id", "<i8"),
    ]
)
_SHIFT: Final = 44
"""Correlation ids of one process are smaller than this many bits hold."""
_APART: Final = -2
"""Device of templates of lost lines, which come out of order: no period of a rank's calls is learnt from them."""
_BY_KERNEL: Final = "kernel"


class LostLines:
    """Finds the operations of one store whose line was lost."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._lanes = CombinationIndex(("process", "device_id", "stream_id"))
        self._members_of_lane: dict[int, set[int]] = {}
        self._processes: set[int] = set()
        """With a line that has a kernel."""
        self._ends: Columns = np.empty(0, _DECIDED)
        """Decided collectives of which the one before or the next is not decided yet."""

        self._newest: dict[int, int] = {}
        """By member: the highest count of a line that was decided."""
        self._moved: list[tuple[int, int, int]] = []
        """(member, number, lost lines): from this number on, lines that have a number already are that much further."""
        self._free: Ids = np.empty(0, np.int64)
        """Kernels that no line is of, so far."""
        self._next_kernel = 0
        self._lost_before: dict[int, list[int]] = {}
        """By member: counts of lines in front of which one was lost."""
        self._unsized: set[int] = set()
        self._templates: dict[tuple[int, ...], int] = {}

    def recover(self, decided: Ids) -> Ids:
        """Gives operations that were aligned their number, and adds those between them whose line was lost.

        Gives these and those in the order of their numbers.
        """
        table = self._store.operations
        rows = table.take(decided, "member", "coll_seq", "match", "confidence", "kernel")
        new = np.zeros(len(decided), _DECIDED)
        for name in ("member", "coll_seq", "kernel"):
            new[name] = rows[name]
        new["id"] = decided
        new["kernel"][~has_kernel(rows) | (rows["kernel"] < self._store.kernels.first)] = NO_NUMBER
        new = new[rows["coll_seq"] != NO_NUMBER]
        lost: list[Ids] = []
        if len(new):
            self._place_on_lanes(new)
            free, keys = self._free_kernels()
            for after, kernels in self._pairs_around(new, free, keys):
                lost.append(self._add(after, kernels, new["id"]))
            self._renumber(new)
            for member, mine in group_by(new["member"]):
                newest = int(new["coll_seq"][mine].max())
                self._newest[member] = max(newest, self._newest.get(member, newest))
        return np.concatenate([decided, *lost])

    def drain_moved(self) -> list[tuple[int, int, int]]:
        """(member, number, lines): so many lost lines were found in front of lines that have this number already."""
        moved, self._moved = self._moved, []
        return moved

    def _free_kernels(self) -> tuple[Ids, NDArray[np.int64]]:
        """Kernels that have no line, in order of their keys (lane and correlation id), and these."""
        table = self._store.kernels
        begin = max(self._next_kernel, table.first)
        self._next_kernel = table.next_id
        waiting = np.concatenate([self._free[self._free >= table.first], np.arange(begin, table.next_id)])
        rows = table.take(waiting, "launch", "graph_node_id", "process")
        is_free = (rows["launch"] == NO_NUMBER) & (rows["graph_node_id"] == NO_NUMBER)
        self._free = waiting[is_free]
        # Of a process without a line that has a kernel nothing is known, and its kernels may be past knowing.
        waiting = waiting[is_free & np.isin(rows["process"], sorted(self._processes))]
        lanes, correlations = self._lanes_of(waiting)
        keys = lanes.astype(np.int64) << _SHIFT | correlations
        order = np.argsort(keys, kind="stable")
        return waiting[order], keys[order]

    def _lanes_of(self, kernels: Ids) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        rows = self._store.kernels.take(kernels, "template", "correlation_id")
        found, inverse = distinct(rows["template"])
        lanes = self._lanes.number(self._store.kernel_templates.take(found.astype(np.int64)))
        return lanes[inverse], rows["correlation_id"].astype(np.int64)

    def _place_on_lanes(self, new: Columns) -> None:
        timed = np.flatnonzero(new["kernel"] != NO_NUMBER)
        kernels = self._store.kernels.take(new["kernel"][timed], "process")
        self._processes.update(distinct_values(kernels["process"]))
        new["lane"] = NO_NUMBER
        new["lane"][timed], new["correlation_id"][timed] = self._lanes_of(new["kernel"][timed])
        both = new["lane"][timed].astype(np.int64) << 32 | new["member"][timed]
        for lane, member in (divmod(each, 1 << 32) for each in distinct(both)[0].tolist()):
            self._members_of_lane.setdefault(lane, set()).add(member)

    def _pairs_around(self, new: Columns, free: Ids, keys: NDArray[np.int64]) -> list[tuple[Columns, Ids]]:
        """Collectives with the free kernels between theirs and that of the line before."""
        ends = row_ops.concat([self._ends, new])
        ends = ends[np.lexsort((ends["coll_seq"], ends["member"]))]
        follows = (ends["member"][1:] == ends["member"][:-1]) & (ends["coll_seq"][1:] == ends["coll_seq"][:-1] + 1)
        # Lines are not decided in their order: both ends of a stretch wait for what is beside them.
        is_inside = np.append(follows, False) & np.append(False, follows)
        self._ends = ends[~is_inside & (ends["id"] >= self._store.operations.first)]
        if not len(free):
            return []
        follows &= (ends["lane"][1:] == ends["lane"][:-1]) & (ends["lane"][1:] != NO_NUMBER)
        at = np.flatnonzero(follows)
        own = ends["lane"].astype(np.int64) << _SHIFT | ends["correlation_id"]
        begin = np.searchsorted(keys, own[at], side="right")
        end = np.searchsorted(keys, own[at + 1], side="left")
        return [
            (ends[at[each] + 1 : at[each] + 2], free[begin[each] : end[each]])
            for each in np.flatnonzero(end > begin).tolist()
            if self._is_alone(int(ends["lane"][at[each]]), int(ends["member"][at[each]]))
        ]

    def _is_alone(self, lane: int, member: int) -> bool:
        """Whether no other communicator uses the lane of one, as far as is known."""
        others = self._members_of_lane[lane] - {member}
        return not any(self._store.members[other].is_alive for other in others)

    def _add(self, after: Columns, kernels: Ids, new: Ids) -> Ids:
        """Adds a row for each of these kernels, in front of the collective after them; gives their ids."""
        known = self._store
        rows = known.kernels.take(kernels)
        names = known.kernel_templates_of(rows, "name")["name"].tolist()
        parsed = [parse_kernel_name(known.strings[name]) for name in names]
        chosen = [at for at, name in enumerate(parsed) if name.kernel_class in _OPERATION_OF]
        if not chosen:
            return np.empty(0, np.int64)
        kernels, rows = kernels[chosen], rows[chosen]
        self._free = self._free[~np.isin(self._free, kernels)]
        beside = known.operations.take(after["id"])
        added = empty_operations(len(chosen))
        for name in ("source", "process", "member", "iteration", "iteration_by"):
            added[name] = beside[name]
        added["template"] = [
            self._template(int(beside["template"][0]), _OPERATION_OF[parsed[at].kernel_class], parsed[at].data_type)
            for at in chosen
        ]
        added["line"] = NO_NUMBER
        added["match"] = Match.LINE_LOST
        added["number_state"] = NumberState.HEALED
        added["confidence"] = beside["confidence"]
        added["kernel"] = kernels
        added["launch"] = known.new_launches(len(chosen))
        for name in ("start_ns", "end_ns", "censored"):
            added[name] = rows[name]
        count = int(after["coll_seq"][0])
        before = self._lost_before.setdefault(int(after["member"][0]), [])
        first = count + bisect_left(before, count)
        added["coll_seq"] = np.arange(first, first + len(chosen))
        for _ in chosen:
            insort(before, count)
        if count <= self._newest.get(int(after["member"][0]), NO_NUMBER):
            self._move(int(after["member"][0]), first, len(chosen), new)
        ids = known.operations.append(added)
        at = known.kernels.at(kernels)
        known.kernels.rows.put("launch", at, added["launch"])
        known.kernels.rows.put("replay", at, 0)
        known.kernel_references.record(ids, kernels)
        known.numbers_healed[known.process_job[int(beside["process"][0])], _BY_KERNEL] += len(chosen)
        self._unsized.update(ids.tolist())
        return ids

    def _move(self, member: int, first: int, amount: int, new: Ids) -> None:
        """Lines from this number on were decided before the `new` ones, of which some are in front of them."""
        rows = self._store.operations.rows
        at = np.flatnonzero((rows["member"] == member) & (rows["match"] != Match.PENDING))
        at = at[~np.isin(at, self._store.operations.at(new))]
        numbers = rows.values("coll_seq", at)
        at, numbers = at[numbers >= first], numbers[numbers >= first]
        rows.put("coll_seq", at, numbers + amount)
        rows.put("number_state", at, NumberState.HEALED)
        self._moved.append((member, first, amount))

    def _renumber(self, new: Columns) -> None:
        """Moves lines up behind those that were lost."""
        table = self._store.operations
        for member, lost in self._lost_before.items():
            mine = new[new["member"] == member]
            if len(mine):
                at = table.at(mine["id"])
                moved = np.searchsorted(np.asarray(lost), mine["coll_seq"], side="right")
                table.rows.put("coll_seq", at, mine["coll_seq"] + moved)
                table.rows.put("number_state", at[moved > 0], NumberState.HEALED)

    def size(self, operations: Ids) -> None:
        """Gives operations whose line was lost the size that their siblings have: K x R, as they were joined."""
        if not self._unsized:
            return
        table = self._store.operations
        hits = np.isin(operations, np.fromiter(self._unsized, np.int64, len(self._unsized)))
        for row, rank in zip(*(axis.tolist() for axis in np.nonzero(hits)), strict=True):
            siblings = operations[row][(operations[row] != NO_NUMBER) & ~hits[row]]
            lost = int(operations[row, rank])
            if not len(siblings):
                continue
            like = table.take(siblings[:1], "template", "message_bytes")
            at = table.at(np.asarray([lost]))
            own, other = int(table.take(np.asarray([lost]), "template")["template"][0]), int(like["template"][0])
            templates = self._store.operation_templates.rows
            if templates["op"][own] == templates["op"][other]:
                table.rows.put("template", at, self._sized_template(own, other))
                table.rows.put("message_bytes", at, like["message_bytes"])
                self._unsized.discard(lost)

    def _template(self, beside: int, op: int, data_type: int) -> int:
        """A template of the communicator of another one, of which only operation and type are known."""
        template = self._store.operation_templates.take(np.asarray([beside]))
        template["op"], template["data_type"] = op, data_type
        template["op_name"] = self._store.strings.index_of(OPERATIONS[op].name)
        for name in ("reduction", "root"):
            template[name] = NO_NUMBER
        template["device"] = _APART
        for name in ("count", "send_buffer", "recv_buffer"):
            template[name] = 0
        return self._interned(template)

    def _sized_template(self, own: int, other: int) -> int:
        templates = self._store.operation_templates.take(np.asarray([own, other]))
        template = templates[:1]
        for name in ("count", "data_type", "reduction", "root"):
            template[name] = templates[name][1]
        return self._interned(template)

    def _interned(self, template: Columns) -> int:
        key = tuple(int(template[name][0]) for name in OPERATION_TEMPLATE.names or ())
        if key not in self._templates:
            self._templates[key] = int(self._store.operation_templates.append(template)[0])
        return self._templates[key]
