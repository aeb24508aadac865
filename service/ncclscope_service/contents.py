"""What each communicator has carried: how many operations of which kind, type, reduction and size.

Counted by template, since operations of one template carry the same; a template costs eight bytes here, and each
operation an addition. Templates are put together only when somebody asks.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import bandwidth
from ncclscope_service.distinct import distinct_together
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

CONTENT: Final = np.dtype(
    [
        ("communicator", "<i4"),
        ("op", "<u1"),
        ("data_type", "<i2"),
        ("reduction", "<i2"),  # user operations are all REDUCTION_OF_USER
        ("message_bytes", "<i8"),
        ("operations", "<i8"),  # over all ranks
        ("templates", "<i8"),  # distinct ones, over all ranks: calls that differ in their buffers too
    ]
)
"""Operations of one communicator that carry the same."""

REDUCTION_OF_USER: Final = 5


class Contents:
    """Counts a store's operations by template."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._members: NDArray[np.int32] = np.zeros(0, np.int32)
        self.operations = 0
        """How many were counted."""

    def count_logged(self, rows: Columns) -> None:
        """Operations (rows.PLACED) that were read from a log: each exactly once."""
        self._reserve(len(self._store.operation_templates))
        np.add.at(self._counts, np.ascontiguousarray(rows["template"]), 1)
        # A pointer that is used again makes the same template another communicator's; the newest one has all.
        self._members[rows["template"]] = rows["member"]
        self.operations += len(rows)

    def table(self) -> Columns:
        """What was counted, as CONTENT rows."""
        used = np.flatnonzero(self._counts)
        communicator_of = np.asarray([member.communicator for member in self._store.members], np.int32)
        templates = self._store.operation_templates.take(
            used.astype(np.int64), "op", "data_type", "reduction", "count", "nranks"
        )
        sizes = bandwidth.message_bytes(
            templates["op"], templates["count"], templates["data_type"], templates["nranks"]
        )
        members = self._members[used]
        reductions = templates["reduction"]
        user = (reductions < 0) | (reductions >= REDUCTION_OF_USER)
        columns = (
            np.where(members >= 0, communicator_of[members] if len(communicator_of) else 0, NO_NUMBER).astype(np.int32),
            templates["op"],
            templates["data_type"],
            np.where(user, REDUCTION_OF_USER, reductions).astype(np.int16),
            sizes,
        )
        keys, inverse = distinct_together(*columns)
        table: Columns = np.zeros(len(keys[0]), CONTENT)
        for name, key in zip(("communicator", "op", "data_type", "reduction", "message_bytes"), keys, strict=True):
            table[name] = key
        np.add.at(table["operations"], inverse, self._counts[used])
        np.add.at(table["templates"], inverse, 1)
        return table

    def _reserve(self, templates: int) -> None:
        if templates > len(self._counts):
            grown = max(templates, 2 * len(self._counts))
            self._counts = np.concatenate([self._counts, np.zeros(grown - len(self._counts), np.int64)])
            self._members = np.concatenate([self._members, np.full(grown - len(self._members), NO_NUMBER, np.int32)])
