"""Totals since the start over rows that the store forgets: durations by histogram, operations by match.

The store keeps a window; a counter must not fall when old rows leave it. So each row is counted once, when it
is final, and `feed` must be called before the rows are dropped (rows dropped uncounted are themselves counted).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.metric_table import DURATION_BOUNDS_SECONDS
from ncclscope_service.rows import Match
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATIONS

BUCKETS: Final = len(DURATION_BOUNDS_SECONDS) + 1

_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationLabels:
    """Whose durations a histogram counts."""

    job: str
    parallelism: str
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemplar:
    """One collective that fell into a bucket, so that the bucket leads to it."""

    communicator: int
    coll_seq: int
    seconds: float


@dataclass(slots=True)
class DurationHistogram:
    """Durations of collectives by bucket, each bucket on its own (not cumulated)."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BUCKETS, np.int64))
    sum_seconds: float = 0.0
    exemplars: list[Exemplar | None] = field(default_factory=lambda: [None] * BUCKETS)
    """The newest of each bucket."""


def operation_name(code: int) -> str:
    """NCCL's spelling of an operation's code; "unknown" for one that this version does not know."""
    return OPERATIONS[code].name if 0 <= code < len(OPERATIONS) else _UNKNOWN


class Tally:
    """Counts each joined collective and each settled operation exactly once.

    Memory: one byte per operation in the store's window, and the totals.
    """

    def __init__(self) -> None:
        self.durations: dict[DurationLabels, DurationHistogram] = {}
        self.matches: dict[tuple[str, Match], int] = {}
        """Settled operations by job and match."""
        self.missed = 0
        """Rows that left the store before they were counted."""
        self._next_collective = 0
        self._first_operation = 0
        self._counted: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def feed(self, store: Store) -> None:
        """Counts what has become final since the last call; rows of `collectives` are final when appended."""
        self._feed_collectives(store)
        self._feed_operations(store)

    def _feed_collectives(self, store: Store) -> None:
        table = store.collectives
        self.missed += max(0, table.first - self._next_collective)
        new = table.rows[max(0, self._next_collective - table.first) :]
        self._next_collective = table.next_id
        # Sends and receives are no collectives: the histogram is named after what it counts.
        measured = new[(new["ranks_seen"] > 0) & (new["coll_seq"] >= 0)]
        for communicator_op in np.unique(_communicator_and_op(measured)).tolist():
            communicator, op = divmod(communicator_op, 256)
            chosen = measured[_communicator_and_op(measured) == communicator_op]
            self._add_durations(self._histogram_of(store, communicator, op), chosen)

    def _histogram_of(self, store: Store, communicator: int, op: int) -> DurationHistogram:
        known = store.communicators[communicator]
        labels = DurationLabels(job=known.job, parallelism=known.parallelism or _UNKNOWN, op=operation_name(op))
        return self.durations.setdefault(labels, DurationHistogram())

    @staticmethod
    def _add_durations(histogram: DurationHistogram, collectives: Columns) -> None:
        seconds = collectives["busy_ns"] / collectives["ranks_seen"] * 1e-9
        buckets = np.searchsorted(DURATION_BOUNDS_SECONDS, seconds, side="left")
        histogram.counts += np.bincount(buckets, minlength=BUCKETS)
        histogram.sum_seconds += float(seconds.sum())
        newest = {int(bucket): position for position, bucket in enumerate(buckets)}
        for bucket, position in newest.items():
            histogram.exemplars[bucket] = Exemplar(
                communicator=int(collectives["communicator"][position]),
                coll_seq=int(collectives["coll_seq"][position]),
                seconds=float(seconds[position]),
            )

    def _feed_operations(self, store: Store) -> None:
        self._follow_window(store)
        operations = store.operations.rows
        new = np.flatnonzero(operations["finished"] & ~self._counted)
        if not len(new):
            return
        self._counted[new] = True
        names, job_of_process = np.unique(np.asarray(store.process_job, dtype=object), return_inverse=True)
        states = len(Match)
        keys = job_of_process[operations["process"][new]] * states + operations["match"][new]
        for key, amount in enumerate(np.bincount(keys).tolist()):
            if amount:
                label = (str(names[key // states]), Match(key % states))
                self.matches[label] = self.matches.get(label, 0) + amount

    def _follow_window(self, store: Store) -> None:
        """Makes `_counted` cover exactly the operations that the store has now."""
        gone = store.operations.first - self._first_operation
        self.missed += int(np.count_nonzero(~self._counted[:gone])) + max(0, gone - len(self._counted))
        kept = self._counted[gone:]
        self._counted = np.concatenate([kept, np.zeros(len(store.operations) - len(kept), np.bool_)])
        self._first_operation = store.operations.first


def _communicator_and_op(collectives: Columns) -> NDArray[np.int64]:
    keys: NDArray[np.int64] = collectives["communicator"].astype(np.int64) * 256 + collectives["op"]
    return keys
