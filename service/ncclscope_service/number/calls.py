"""Operations of the store as calls that can be compared between ranks."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import CombinationIndex
from ncclscope_service.columns.table import Ids
from ncclscope_service.number.across_ranks import CALL
from ncclscope_service.store.rows import Match, has_kernel, has_launch
from ncclscope_service.store.tables import Hosts, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATIONS

_IS_N_TO_N: Final = np.array(
    [operation.is_collective and not operation.is_rooted for operation in OPERATIONS]
    + [False] * (256 - len(OPERATIONS))
)
_COLUMNS: Final = (
    "template", "match", "confidence", "censored", "start_ns", "end_ns", "logged_at_ns", "op_count", "message_bytes",
    "number_state", "iteration",
)  # fmt: skip
_COMPARED: Final = ("op", "count", "data_type", "root")


class Calls:
    """Makes calls (CALL) of operations; what is equal on all ranks has the same symbol."""

    def __init__(self, known: Store, begun_amid: Set[int] = frozenset()) -> None:
        """`begun_amid`: processes of which it is not known at which step of their logs the capture began."""
        self._store = known
        self._begun_amid = begun_amid
        self._hosts = Hosts(known)
        self._index = CombinationIndex(_COMPARED)
        self._kinds = CombinationIndex(_COMPARED[:1])
        self._sizes = CombinationIndex(("message_bytes",))
        self._symbol_of_template: NDArray[np.int32] = np.empty((0, 3), np.int32)
        """By template: symbol, kind, whether it is N-to-N."""

    def of(self, operations: Ids) -> Columns:
        """The calls of these operations; NO_NUMBER: one of which nothing is known yet."""
        table = self._store.operations
        calls = np.zeros(len(operations), CALL)
        calls["id"] = operations
        is_known = operations >= table.first
        rows = table.take(operations if is_known.all() else operations[is_known], *_COLUMNS)
        described = calls if is_known.all() else calls[is_known]
        symbols = self._symbols()[rows["template"]]
        described["symbol"], described["kind"] = symbols[:, 0], symbols[:, 1]
        described["is_counted"] = rows["match"] != Match.LINE_LOST
        described["is_sized"] = described["is_counted"] | (rows["message_bytes"] != NO_NUMBER)
        timed = has_kernel(rows) & ~rows["censored"]
        described["is_n_to_n"] = symbols[:, 2] & timed
        described["start_ns"] = np.where(timed, rows["start_ns"], NO_TIME_NS)
        described["end_ns"] = np.where(timed, rows["end_ns"], NO_TIME_NS)
        described["stamp_ns"] = rows["logged_at_ns"]
        described["op_count"] = rows["op_count"].astype(np.int64)
        described["step"] = rows["iteration"]
        if not is_known.all():
            calls[is_known] = described
            for name in ("start_ns", "end_ns", "stamp_ns"):
                calls[name][~is_known] = NO_TIME_NS
            for name in ("kind", "step"):
                calls[name][~is_known] = NO_NUMBER
        return calls

    def of_pairs(self, operations: Ids) -> Columns:
        """The calls of these Sends and Recvs, all in memory: those of one message have the same symbol."""
        calls = self.of(operations)
        calls["symbol"] = self._sizes.number(self._store.operations.take(operations, "message_bytes"))
        calls["kind"] = 0
        calls["is_n_to_n"] = calls["end_ns"] != NO_TIME_NS
        return calls

    def have_unknown_kernels(self, operations: Ids) -> NDArray[np.bool_]:
        """Which of these operations, none with a kernel that is certain, ran while all kernels were recorded."""
        unknown = operations >= self._store.operations.first
        match = self._store.operations.take(operations[unknown], "match")["match"]
        unknown[unknown] = has_launch(match) | (match == Match.UNMATCHED)
        return unknown

    def have_losses(self, communicator: int) -> bool:
        """Whether lines of the job of a communicator were lost."""
        job = self._store.communicators[communicator].job
        return any(amount > 0 for (of, _), amount in self._store.numbers_healed.items() if of == job)

    def have_begun_amid(self, communicator: int) -> bool:
        """Whether ranks of a communicator may be whole training steps apart."""
        members = self._store.communicators[communicator].members or {} if self._begun_amid else {}
        return any(self._store.members[member].process in self._begun_amid for member in members.values())

    def hosts(self, communicator: int, size: int) -> NDArray[np.int32]:
        """The host of each rank; another number for each that is not known."""
        hosts = -1 - np.arange(size, dtype=np.int32)
        host_of = self._hosts.of_processes()
        for rank, member in (self._store.communicators[communicator].members or {}).items():
            if 0 <= rank < size:
                hosts[rank] = host_of[self._store.members[member].process]
        return hosts

    def _symbols(self) -> NDArray[np.int32]:
        known = len(self._symbol_of_template)
        templates = self._store.operation_templates
        if templates.next_id > known:
            new = templates.take(np.arange(known, templates.next_id, dtype=np.int64), *_COMPARED)
            numbers = np.stack(
                [self._index.number(new), self._kinds.number(new), _IS_N_TO_N[new["op"]].astype(np.int32)], axis=1
            )
            self._symbol_of_template = np.concatenate([self._symbol_of_template, numbers.astype(np.int32)])
        return self._symbol_of_template
