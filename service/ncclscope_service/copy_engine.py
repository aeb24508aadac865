"""Operations that copy engines carry out: NCCL launches no kernel for them, on no rank.

Only communicator rank 0 says so, in a TUNING line (`[Copy Engine]`, `[Hierarchical CE]`; 2.29.2 on); the other ranks'
lines of the same collective are found by its number, and must be of the same kind and size.

*Source:* NCCL `src/enqueue.cc` (2.29.2 to 2.30.4), `src/ce_coll.cc` (2.30.7).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.store import Ids, Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

NO_CHANNELS: Final = 0
"""`channels` of such an operation."""

COPIES_LIMIT: Final = 1_000_000
"""Collectives that are remembered; beyond, the oldest are forgotten."""

_COPY: Final = np.dtype([("member", "<i4"), ("coll_seq", "<i8"), ("op", "<u1"), ("message_bytes", "<i8")])
_COLLECTIVE: Final = np.dtype([("communicator", "<i8"), ("coll_seq", "<i8"), ("op", "<i8"), ("message_bytes", "<i8")])


def speaks_of_copies(tunings: Columns) -> NDArray[np.bool_]:
    """Which TUNING lines (store.TUNING) name copy engines: those with neither algorithm, channels nor estimate."""
    untold = (tunings["algorithm"] == NO_NUMBER) & (tunings["protocol"] == NO_NUMBER)
    copies: NDArray[np.bool_] = untold & (tunings["channels"] == NO_NUMBER) & np.isnan(tunings["expected_us"])
    return copies


@dataclass(slots=True)
class Copies:
    """The collectives of all communicators that rank 0 said are copied."""

    _store: Store
    _known: Columns = field(default_factory=lambda: np.empty(0, _COPY))

    def feed(self, operations: Ids) -> None:
        """Operations of which a TUNING line said it."""
        if len(operations):
            self._known = np.concatenate([self._known, self._rows(operations)])[-COPIES_LIMIT:]

    def holds(self, operations: Ids) -> NDArray[np.bool_]:
        """Which of these are, on any rank of their communicator."""
        if len(self._known) == 0 or len(operations) == 0:
            return np.zeros(len(operations), np.bool_)
        asked, known = self._collectives(self._rows(operations)), self._collectives(self._known)
        held: NDArray[np.bool_] = np.isin(asked, known) & (asked["coll_seq"] != NO_NUMBER)
        return held

    def _rows(self, operations: Ids) -> Columns:
        told = self._store.operations.take(operations, "template", "member", "coll_seq", "message_bytes")
        rows = np.empty(len(operations), _COPY)
        for name in ("member", "coll_seq", "message_bytes"):
            rows[name] = told[name]
        rows["op"] = self._store.templates_of(told, "op")["op"]
        return rows

    def _collectives(self, rows: Columns) -> Columns:
        communicator_of = np.asarray([member.communicator for member in self._store.members], np.int64)
        collectives = np.empty(len(rows), _COLLECTIVE)
        collectives["communicator"] = communicator_of[rows["member"]]
        for name in ("coll_seq", "op", "message_bytes"):
            collectives[name] = rows[name]
        return collectives
