"""Operations of which only NCCL Inspector tells become rows of `Store.operations`, as those of logs are.

A process whose log is not read has no rows otherwise. A row is made of a record once its collective was joined, and is
finished at once: what Inspector does not say (count, type, reduction, buffers, its number among the collectives of its
communicator) is unknown, and no other stage works on it. Of collectives `kind_seq` is Inspector's coll_sn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct_together
from ncclscope_service.columns.table import Ids
from ncclscope_service.measure.inspector_join import is_usable
from ncclscope_service.store.rows import OF_DUMPS, OPERATION_TEMPLATE, Match, empty_operations
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATIONS

_COPIED = ("source", "process", "line", "message_bytes", "algorithm", "protocol")


class InspectedRows:
    """Records that become rows, of one store."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._held: Ids = np.empty(0, np.int64)
        """Records whose row is not made yet."""
        self._member_of: NDArray[np.int32] = np.empty(0, np.int32)
        self._templates: dict[tuple[int, int, int, int], int] = {}
        """By process, operation code, peer and ranks."""

    def hold(self, records: Ids, members: NDArray[np.int64]) -> None:
        """Takes records of processes whose lines are not read, and the member that each is of."""
        self._held = np.concatenate([self._held, records])
        self._member_of = np.concatenate([self._member_of, members.astype(np.int32)])

    def make(self, joining: Ids) -> tuple[Ids, Columns]:
        """Makes the rows of records that are not among `joining`; gives the operations, and their records."""
        table = self._store.inspected
        is_left = self._held >= table.first
        is_ready = is_left & ~np.isin(self._held, joining)
        records, members = self._held[is_ready], self._member_of[is_ready]
        self._held, self._member_of = self._held[is_left & ~is_ready], self._member_of[is_left & ~is_ready]
        told = table.take(records)
        if not len(told):
            return records, told
        made = empty_operations(len(told))
        for name in _COPIED:
            made[name] = told[name]
        made["member"] = members
        made["template"] = self._templates_of(told)
        made["kind_seq"] = np.where(told["peer"] == NO_NUMBER, told["sequence"], NO_NUMBER)
        made["logged_at_ns"], made["observed_at_ns"] = told["started_at_ns"], told["dumped_at_ns"]
        made["match"] = Match.NOT_COVERED
        made["inspected_ns"] = np.where(is_usable(told), told["duration_ns"], NO_TIME_NS)
        made["inspected_confidence"] = 1.0
        made["inspected"] = True
        operations = self._store.operations.append(made)
        self._store.finish(self._store.operations.at(operations))
        return operations, told

    def _templates_of(self, told: Columns) -> NDArray[np.int32]:
        keys, of = distinct_together(told["process"], told["op"], told["peer"], told["nranks"])
        found = [self._template(*key) for key in zip(*(column.tolist() for column in keys), strict=True)]
        return np.asarray(found, np.int32)[of]

    def _template(self, process: int, op: int, peer: int, nranks: int) -> int:
        key = (process, op, peer, nranks)
        if key not in self._templates:
            template: Columns = np.zeros(1, OPERATION_TEMPLATE)
            for name in ("data_type", "reduction", "global_rank"):
                template[name] = NO_NUMBER
            template["device"] = OF_DUMPS
            template["process"], template["op"], template["root"], template["nranks"] = key[0], op, peer, nranks
            name = OPERATIONS[op].name if op < len(OPERATIONS) else "unknown"
            template["op_name"] = self._store.strings.index_of(name)
            self._templates[key] = int(self._store.operation_templates.append(template)[0])
        return self._templates[key]
