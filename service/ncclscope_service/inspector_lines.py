"""The logged operations that NCCL Inspector's records may tell of, by rank and kind, in the order that NCCL numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.inspector_pairing import Lines
from ncclscope_service.store import Ids, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

Key = tuple[int, int, int]
"""Member, operation code, and peer: NO_NUMBER for collectives."""

_LOWERED = [OPERATION_CODES[name] for name in ("AlltoAll", "Gather", "Scatter")]
_PAIRED = [OPERATION_CODES["Send"], OPERATION_CODES["Recv"]]


@dataclass(slots=True)
class _Kept:
    """The lines of one key; arrays have room at the end."""

    base: int
    used: int = 0
    operations: Ids = field(default_factory=lambda: np.empty(64, np.int64))
    message_bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(64, np.int64))
    logged_at_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(64, np.int64))
    is_taken: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(64, bool))

    def add(self, operations: Ids, message_bytes: NDArray[np.int64], logged_at_ns: NDArray[np.int64]) -> None:
        end = self.used + len(operations)
        if end > len(self.operations):
            room = 2 * end
            self.operations = np.resize(self.operations, room)
            self.message_bytes = np.resize(self.message_bytes, room)
            self.logged_at_ns = np.resize(self.logged_at_ns, room)
            self.is_taken = np.concatenate([self.is_taken, np.zeros(room - len(self.is_taken), bool)])
        self.operations[self.used : end] = operations
        self.message_bytes[self.used : end] = message_bytes
        self.logged_at_ns[self.used : end] = logged_at_ns
        self.used = end

    def drop_before(self, operation: int) -> None:
        """Forgets lines that left the store."""
        gone = int(np.searchsorted(self.operations[: self.used], operation))
        if gone > self.used // 2:
            left = self.used - gone
            for array in (self.operations, self.message_bytes, self.logged_at_ns, self.is_taken):
                array[:left] = array[gone : self.used].copy()
            self.is_taken[left:] = False
            self.base += gone
            self.used = left

    def lines(self) -> Lines:
        return Lines(
            base=self.base,
            operations=self.operations[: self.used],
            message_bytes=self.message_bytes[: self.used],
            logged_at_ns=self.logged_at_ns[: self.used],
            is_taken=self.is_taken[: self.used],
        )


class LineBook:
    """Keeps the lines of every key; memory goes with the store's window."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._kept: dict[Key, _Kept] = {}
        self._lowering: set[int] = set()

    def feed(self, operations: Ids) -> None:
        """Takes note of new operations, in the order of their lines."""
        rows = self._store.operations.take(operations)
        templates = self._store.templates_of(rows)
        self._lowering.update(np.unique(rows["member"][np.isin(templates["op"], _LOWERED)]).tolist())
        numbers = np.where(np.isin(templates["op"], _PAIRED), rows["pair_seq"], rows["kind_seq"])
        peers = np.where(rows["kind_seq"] >= 0, NO_NUMBER, templates["root"])
        numbered = np.flatnonzero(numbers >= 0)
        if not len(numbered):
            return
        keys = np.stack([rows["member"], templates["op"], peers], axis=1).astype(np.int64)[numbered]
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(inverse.reshape(-1), kind="stable")
        cuts = np.cumsum(np.bincount(inverse.reshape(-1), minlength=len(distinct)))[:-1]
        for (member, op, peer), part in zip(distinct.tolist(), np.split(numbered[order], cuts), strict=True):
            self._add((member, op, peer), operations[part], rows[part], int(numbers[part[0]]))

    def lines(self, key: Key) -> Lines:
        """The lines of a key that are in the store."""
        kept = self._kept.get(key)
        if kept is None:
            return _Kept(base=0).lines()
        kept.drop_before(self._store.operations.first)
        return kept.lines()

    def splits_collectives(self, member: int) -> bool:
        """Whether collectives of that member become sends and receives, which no line of theirs shows."""
        return member in self._lowering

    def _add(self, key: Key, operations: Ids, rows: Columns, first: int) -> None:
        kept = self._kept.setdefault(key, _Kept(base=first))
        kept.add(operations, rows["message_bytes"], rows["logged_at_ns"])
