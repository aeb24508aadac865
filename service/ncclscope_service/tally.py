"""Totals since the start over rows that the store forgets: collectives by histogram.

The store keeps a window; a counter must not fall when old rows leave it. So each row is counted once, when it
is final, and `feed` must be called before the rows are dropped (rows dropped uncounted are themselves counted).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.distinct import groups
from ncclscope_service.metric_table import METRICS, Kind
from ncclscope_service.rows import SIZE_CLASSES
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATIONS

_BOUNDS: Final = {metric.name: metric.buckets for metric in METRICS if metric.kind is Kind.HISTOGRAM}
_FIRST_LARGE: Final = SIZE_CLASSES.index("1MiB") + 1
"""Bus bandwidth of smaller messages is latency in disguise, and would bury that of the others."""

_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramLabels:
    """Whose collectives a histogram counts."""

    job: str
    parallelism: str
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemplar:
    """One collective that fell into a bucket, so that the bucket leads to it."""

    communicator: int
    coll_seq: int
    value: float


@dataclass(slots=True)
class Histogram:
    """Collectives by bucket, each bucket on its own (not cumulated)."""

    bounds: tuple[float, ...]
    """Upper bounds of all buckets but the last."""
    counts: NDArray[np.int64] = field(init=False)
    sum: float = 0.0
    exemplars: list[Exemplar | None] = field(init=False)
    """The newest of each bucket."""

    def __post_init__(self) -> None:
        self.counts = np.zeros(len(self.bounds) + 1, np.int64)
        self.exemplars = [None] * (len(self.bounds) + 1)

    def add(self, values: NDArray[np.float64], collectives: Columns) -> None:
        """Counts a value of each of these collectives (rows.COLLECTIVE); the last one of a bucket is its exemplar."""
        buckets = np.searchsorted(self.bounds, values, side="left")
        self.counts += np.bincount(buckets, minlength=len(self.counts))
        self.sum += float(values.sum())
        found, from_the_end = np.unique(buckets[::-1], return_index=True)
        for bucket, position in zip(found.tolist(), (len(buckets) - 1 - from_the_end).tolist(), strict=True):
            self.exemplars[bucket] = Exemplar(
                communicator=int(collectives["communicator"][position]),
                coll_seq=int(collectives["coll_seq"][position]),
                value=float(values[position]),
            )


def operation_name(code: int) -> str:
    """NCCL's spelling of an operation's code; "unknown" for one that this version does not know."""
    return OPERATIONS[code].name if 0 <= code < len(OPERATIONS) else _UNKNOWN


class Tally:
    """Counts each joined collective exactly once."""

    def __init__(self) -> None:
        self.histograms: dict[str, dict[HistogramLabels, Histogram]] = {name: {} for name in _BOUNDS}
        """By metric and labels."""
        self.missed = 0
        """Rows that left the store before they were counted."""
        self._next_collective = 0

    def feed(self, store: Store) -> None:
        """Counts what has become final since the last call; rows of `collectives` are final when appended."""
        table = store.collectives
        self.missed += max(0, table.first - self._next_collective)
        new = table.rows[max(0, self._next_collective - table.first) :]
        self._next_collective = table.next_id
        # Sends and receives are no collectives: the histograms are named after what they count.
        measured = whole_rows.kept(new, (new["ranks_seen"] > 0) & (new["coll_seq"] >= 0))
        by_labels: defaultdict[HistogramLabels, list[NDArray[np.intp]]] = defaultdict(list)
        for communicator_op, mine in groups(_communicator_and_op(measured)):
            communicator, op = divmod(communicator_op, 256)
            known = store.communicators[communicator]
            labels = HistogramLabels(job=known.job, parallelism=known.parallelism or _UNKNOWN, op=operation_name(op))
            by_labels[labels].append(mine)
        for labels, places in by_labels.items():
            self._add(labels, whole_rows.taken(measured, np.concatenate(places)))

    def _add(self, labels: HistogramLabels, collectives: Columns) -> None:
        for name, (values, is_counted) in _measures(collectives).items():
            if is_counted.any():
                histogram = self.histograms[name].setdefault(labels, Histogram(_BOUNDS[name]))
                histogram.add(values[is_counted], collectives[is_counted])


def _measures(collectives: Columns) -> dict[str, tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Of each histogram: the value of every collective, and which of them it counts."""
    busbw = collectives["busbw"].astype(np.float64)
    return {
        "ncclscope_collective_duration_seconds": (
            collectives["busy_ns"] / collectives["ranks_seen"] * 1e-9,
            np.ones(len(collectives), np.bool_),
        ),
        "ncclscope_collective_wait_seconds": (collectives["spread_ns"] * 1e-9, collectives["spread_ns"] >= 0),
        "ncclscope_collective_busbw_bytes_per_second": (
            busbw,
            np.isfinite(busbw) & (collectives["size_class"] >= _FIRST_LARGE),
        ),
    }


def _communicator_and_op(collectives: Columns) -> NDArray[np.int64]:
    keys: NDArray[np.int64] = collectives["communicator"].astype(np.int64) * 256 + collectives["op"]
    return keys
