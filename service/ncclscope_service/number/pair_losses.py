"""How many Sends or Recvs of a way lost their line before one of them, by the program of their process.

Every line is one place of a program that repeats itself (`align.lost_calls`), and the places between two lines lost
theirs. So a count of lines becomes a number of calls, which is the same on both sides of a way. What was lost before a
program is learnt from the first few hundred lines is not counted once lines of the way were numbered: then kernels have
shown it (`join.ranks`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.lost_calls import LostCalls
from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together, distinct_values, group_by
from ncclscope_service.nccl.launch_rules import SENDS_AND_RECVS
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

_LINE: Final = np.dtype([("id", "<i8"), ("member", "<i4"), ("text", "<i4"), ("op", "<u1"), ("peer", "<i4")])


@dataclass(slots=True)
class _Lines:
    calls: LostCalls = field(default_factory=lambda: LostCalls(("text",)))
    waiting: Columns = field(default_factory=lambda: np.empty(0, _LINE))


class PairLosses:
    """Lost lines of the Sends and Recvs of one store."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._processes: defaultdict[int, _Lines] = defaultdict(_Lines)
        self._lost: dict[tuple[int, ...], NDArray[np.int64]] = {}
        """By member, operation and peer: ids of the lines behind lost ones, ascending."""
        self._numbered: dict[tuple[int, ...], int] = {}
        """By the same: the last line that was numbered."""
        self._with_pairs: set[int] = set()
        """Processes that log Sends or Recvs."""
        self._next = 0

    def process_lines(self, has_ended: Callable[[int], bool]) -> None:
        """Looks at the lines that came since the last time. `has_ended`: whether a process will log nothing more."""
        table = self._store.operations
        ids = np.arange(max(self._next, table.first), table.next_id)
        self._next = table.next_id
        rows = table.take(ids, "process", "pair_seq")
        self._with_pairs.update(distinct_values(rows["process"][rows["pair_seq"] != NO_NUMBER]))
        ids = ids[np.isin(rows["process"], list(self._with_pairs))]
        for process, lines in self._lines(ids) if len(ids) else ():
            own = self._processes[process]
            own.waiting = row_ops.concat([own.waiting, lines])
        for process, own in self._processes.items():
            if len(own.waiting):
                filled = own.calls.fill(own.waiting, final=has_ended(process))
                own.waiting = own.waiting[filled.amount :]
                if filled.is_lost.any():
                    self._count(filled.rows[filled.is_lost], filled.rows["id"][filled.following])

    def _lines(self, ids: NDArray[np.int64]) -> Iterator[tuple[int, Columns]]:
        """Those of these operations that were logged, by process."""
        rows = self._store.operations.take(ids, "process", "template", "member", "line")
        templates = self._store.templates_of(rows, "op", "root")
        lines = np.empty(len(ids), _LINE)
        lines["id"], lines["member"], lines["text"] = ids, rows["member"], rows["template"]
        lines["op"], lines["peer"] = templates["op"], templates["root"]
        logged = np.flatnonzero(rows["line"] != NO_NUMBER)
        for process, mine in group_by(rows["process"][logged]):
            yield process, row_ops.take(lines, logged[mine])

    def number(self, operations: NDArray[np.int64]) -> NDArray[np.intp]:
        """Gives these Sends and Recvs numbers that count those whose line was lost; gives where in the table they are
        whose number it changed.
        """
        table = self._store.operations
        rows = table.take(operations, "member", "pair_seq", "template")
        templates = self._store.templates_of(rows, "op", "root")
        pairs = np.flatnonzero(rows["pair_seq"] != NO_NUMBER)
        if not len(pairs):
            return np.empty(0, np.intp)
        moved = np.zeros(len(pairs), np.int64)
        keys, of = distinct_together(rows["member"][pairs], templates["op"][pairs], templates["root"][pairs])
        for nth, mine in group_by(of):
            key = tuple(int(column[nth]) for column in keys)
            ids = operations[pairs[mine]]
            self._numbered[key] = max(self._numbered.get(key, NO_NUMBER), int(ids.max()))
            if key in self._lost:
                moved[mine] = np.searchsorted(self._lost[key], ids, side="right")
        pairs, moved = pairs[moved > 0], moved[moved > 0]
        at = table.at(operations[pairs])
        table.rows.put("pair_seq", at, rows["pair_seq"][pairs] + moved)
        return at

    def _count(self, lost: Columns, following: NDArray[np.int64]) -> None:
        keys, of = distinct_together(lost["member"], lost["op"], lost["peer"])
        for nth, mine in group_by(of):
            key = tuple(int(column[nth]) for column in keys)
            if key[1] in SENDS_AND_RECVS:
                new = following[mine]
                new = new[new > self._numbered.get(key, NO_NUMBER)]
                self._lost[key] = np.sort(np.concatenate([self._lost.get(key, new[:0]), new]))
