"""Totals since the start over rows that the store forgets: histograms of collectives, and sums of each series.

The store keeps a window; a counter must not fall when old rows leave it. So each row is counted once, when it
is final, and `count_rows` must be called before the rows are dropped (rows dropped uncounted are themselves counted).

A series is a (communicator, operation, size class). Its counters only grow, and survive the operations that they count.
Recent busbw is a median over windows of one second with data; the baseline is the best that the series has shown, as
the 90th percentile of its windows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import accumulate, distinct_together, group_by, sort_into_groups
from ncclscope_service.columns.table import Ids, Table
from ncclscope_service.nccl.bandwidth import SIZE_CLASSES, classify
from ncclscope_service.store import rows
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATIONS

DURATION_BOUNDS_SECONDS: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0, 10.0)
"""Upper bounds of the histograms of times; with +Inf twelve buckets, each about three times the last."""

BUSBW_BOUNDS: Final = (1e8, 1e9, 5e9, 1e10, 2e10, 3e10, 4e10, 5e10, 1e11, 2e11, 4e11)
"""Bytes per second: fine between 10 and 50 GB/s, where networks of 100 to 400 Gbit/s are, coarse elsewhere."""
HISTOGRAM_BOUNDS: Final = {
    "ncclscope_collective_duration_seconds": DURATION_BOUNDS_SECONDS,
    "ncclscope_collective_wait_seconds": DURATION_BOUNDS_SECONDS,
    "ncclscope_collective_busbw_bytes_per_second": BUSBW_BOUNDS,
}
"""By metric: the upper bounds of its buckets, +Inf left out."""
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
    """The newest exemplar of each bucket."""

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
        self.histograms: dict[str, dict[HistogramLabels, Histogram]] = {name: {} for name in HISTOGRAM_BOUNDS}
        """By metric and labels."""
        self.missed = 0
        """Rows that left the store before they were counted."""
        self._next_collective = 0

    def count_rows(self, store: Store) -> None:
        """Counts what has become final since the last call; rows of `collectives` are final when appended."""
        table = store.collectives
        self.missed += max(0, table.first - self._next_collective)
        new = table.rows[max(0, self._next_collective - table.first) :]
        self._next_collective = table.next_id
        # Sends and receives are no collectives: the histograms are named after what they count.
        measured = new[(new["ranks_seen"] > 0) & (new["coll_seq"] >= 0)]
        by_labels: defaultdict[HistogramLabels, list[NDArray[np.intp]]] = defaultdict(list)
        for communicator_op, mine in group_by(_communicator_and_op(measured)):
            communicator, op = divmod(communicator_op, 256)
            known = store.communicators[communicator]
            labels = HistogramLabels(job=known.job, parallelism=known.parallelism or _UNKNOWN, op=operation_name(op))
            by_labels[labels].append(mine)
        for labels, places in by_labels.items():
            self._add(labels, row_ops.take(measured, np.concatenate(places)))

    def _add(self, labels: HistogramLabels, collectives: Columns) -> None:
        for name, (values, is_counted) in _measures(collectives).items():
            if is_counted.any():
                histogram = self.histograms[name].setdefault(labels, Histogram(HISTOGRAM_BOUNDS[name]))
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


_Integers = NDArray[np.integer]

_WINDOW_NS: Final = 1_000_000_000
_RECENT_WINDOWS: Final = 60
_KEPT_WINDOWS: Final = 600
"""Ten minutes with data: enough for a baseline, and a bound on memory."""
_BASELINE_QUANTILE: Final = 0.9
_KEY: Final = ("member", "template", "message_bytes")
"""Columns of an operation that decide its series."""
_TOLD_BY: Final = ("communicator", "op", "size_class")
_RECENT: Final = ("busbw", "baseline", "limit")
_COUNTED: Final = tuple(name for name in rows.SERIES.names or () if name not in (*_TOLD_BY, *_RECENT))


@dataclass(slots=True)
class _Windows:
    """Medians of busbw of one series, a window each, oldest first."""

    starts: deque[int] = field(default_factory=lambda: deque[int](maxlen=_KEPT_WINDOWS))
    busbw: deque[float] = field(default_factory=lambda: deque[float](maxlen=_KEPT_WINDOWS))


class SeriesBook:
    """Keeps `Store.series` up to date."""

    def __init__(self, known: Store) -> None:
        self._store = known
        self._index: dict[int, int] = {}
        self._windows: dict[int, _Windows] = {}
        self._limited = 0
        """Series before this one have their limit."""

    def count_run(self, chosen: Columns) -> None:
        """Operations (with the columns `_KEY`) that were read from a log, or run again by a CUDA graph: each once."""
        series = self._series_of(chosen)
        table = self._store.series.rows
        _add(table["operations"], series, np.ones(len(series), np.int64))
        _add(table["bytes"], series, self._store.moved_bytes(table["communicator"][series], chosen["message_bytes"]))

    def expected(self, operations: Columns, amounts: NDArray[np.int64]) -> Columns:
        """`Store.series` as it will be when `amounts` more operations like each of these (with the columns `_KEY`) are
        counted; those of series that are new are left out.
        """
        expected = self._store.series.rows.copy()
        keys = self._keys_of(operations)
        places = np.asarray([self._index.get(key, NO_NUMBER) for key in keys.tolist()], np.int64)
        known = places != NO_NUMBER
        places, amounts = places[known], amounts[known]
        _add(expected["operations"], places, amounts)
        moved = self._store.moved_bytes(expected["communicator"][places], operations["message_bytes"][known])
        _add(expected["bytes"], places, amounts * moved)
        return expected

    def count_measured(self, operations: Ids) -> None:
        """Operations whose kernel is known and whose measures are settled: each exactly once."""
        self.count_settled(self._store.operations.take(operations, *_KEY, "start_ns", "end_ns", "wait_ns", "inspected"))

    def count_settled(self, chosen: Columns) -> None:
        """As `count_measured`, of rows (rows.OPERATION)."""
        series = self._series_of(chosen)
        duration = chosen["end_ns"] - chosen["start_ns"]
        waits = (chosen["wait_ns"] != NO_TIME_NS) & ~chosen["inspected"]
        table = self._store.series.rows
        _add(table["matched"], series, np.ones(len(series), np.int64))
        _add(table["duration_ns"], series, duration)
        _add(table["wait_ns"], series[waits], chosen["wait_ns"][waits])
        _add(table["waiting_duration_ns"], series[waits], duration[waits])

    def count_joined(self, collectives: Columns) -> None:
        """Collectives (rows.COLLECTIVE) that were measured: each exactly once."""
        if not len(collectives):
            return
        series = self._rows_of(
            collectives["communicator"].astype(np.int64), collectives["op"], collectives["size_class"]
        )
        table = self._store.series.rows
        _add(table["collectives"], series, np.ones(len(series), np.int64))
        _add(table["transfer_ns"], series, collectives["transfer_ns"])
        times = np.where(
            collectives["end_true_ns"] == NO_TIME_NS, collectives["first_start_true_ns"], collectives["end_true_ns"]
        )
        self._add_windows(series, times, collectives["busbw"])

    def count_inspected(self, records: Columns) -> None:
        """Records of NCCL Inspector (rows.INSPECTED) whose communicator is known: each exactly once."""
        series = self._rows_of(
            records["communicator"].astype(np.int64), records["op"], classify(records["message_bytes"])
        )
        table = self._store.series.rows
        np.add.at(table["inspected"], series, 1)
        np.add.at(table["inspected_ns"], series, np.maximum(records["duration_ns"], 0))

    def count_waits(self, records: Columns) -> None:
        """Counts the waits of those records that have a known wait and no kernel: each exactly once."""
        series = self._rows_of(
            records["communicator"].astype(np.int64), records["op"], classify(records["message_bytes"])
        )
        table = self._store.series.rows
        np.add.at(table["wait_ns"], series, records["wait_ns"])
        np.add.at(table["waiting_duration_ns"], series, records["duration_ns"])

    def count_compared(self, operations: Ids) -> None:
        """Operations of which a kernel and a record of NCCL Inspector are known: each exactly once."""
        if not self._store.inspected.next_id:
            return
        told = self._store.operations.take(operations, "inspected_ns")["inspected_ns"]
        operations = operations[told != NO_TIME_NS]
        if not len(operations):
            return
        columns = (*_KEY, "launch", "start_ns", "end_ns", "censored", "inspected_ns")
        chosen = self._store.operations.take(operations, *columns)
        # A kernel that several operations share is longer than what Inspector prints of each. They stand together.
        rows, at = self._store.operations.rows, self._store.operations.at(operations)
        shared = rows.values("launch", np.maximum(at - 1, 0)) == np.where(at > 0, chosen["launch"], NO_NUMBER)
        last = len(rows) - 1
        shared |= rows.values("launch", np.minimum(at + 1, last)) == np.where(at < last, chosen["launch"], NO_NUMBER)
        chosen = chosen[
            ~shared & ~chosen["censored"] & (chosen["start_ns"] != NO_TIME_NS) & (chosen["inspected_ns"] != NO_TIME_NS)
        ]
        series = self._series_of(chosen)
        table = self._store.series.rows
        np.add.at(table["compared"], series, 1)
        np.add.at(table["compared_kernel_ns"], series, chosen["end_ns"] - chosen["start_ns"])
        np.add.at(table["compared_inspected_ns"], series, chosen["inspected_ns"])

    def baseline_of(self, operations: Columns) -> NDArray[np.float64]:
        """The baseline of each of these operations' series; NaN if there is none."""
        series = self._series_of(operations)
        baselines: NDArray[np.float64] = self._store.series.rows["baseline"][series]
        return baselines

    def absorb(self, into: Mapping[int, int]) -> None:
        """Adds what was counted for some communicators to others, by index; of recent bandwidth theirs is kept."""
        old = self._store.series.rows.copy()
        for index in into:
            old["communicator"][old["communicator"] == index] = into[index]
        keys = _packed(old["communicator"], old["op"], old["size_class"])
        distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        merged = old[first]
        for name in _COUNTED:
            merged[name] = 0
            np.add.at(merged[name], inverse, old[name])
        for name in _RECENT:
            known = np.flatnonzero(np.isfinite(old[name]))
            merged[name][inverse[known]] = old[name][known]
        self._store.series = Table(rows.SERIES)
        self._store.series.append(merged)
        self._index = {key: row for row, key in enumerate(distinct.tolist())}
        self._windows = {int(inverse[row]): windows for row, windows in self._windows.items()}
        self._limited = 0

    def set_limits(self, limit_of: Callable[[int, int], float], changed: Collection[int]) -> None:
        """Sets the limit by topology of each series that is new or of one of the communicators that changed.

        `limit_of` gives it from a communicator and an operation.
        """
        table = self._store.series.rows
        old = np.isin(table["communicator"][: self._limited], list(changed))
        at = np.concatenate([np.flatnonzero(old), np.arange(self._limited, len(table))])
        self._limited = len(table)
        (communicators, codes), inverse = distinct_together(table["communicator"][at], table["op"][at])
        pairs = zip(communicators.tolist(), codes.tolist(), strict=True)
        table["limit"][at] = np.asarray([limit_of(*pair) for pair in pairs], np.float64)[inverse]

    def _add_windows(self, series: NDArray[np.int64], times_ns: NDArray[np.int64], busbw: NDArray[np.float64]) -> None:
        usable = np.isfinite(busbw) & (times_ns != NO_TIME_NS)
        if not usable.any():
            return
        (of, starts), window = distinct_together(series[usable], times_ns[usable] // _WINDOW_NS)
        order = np.argsort(busbw[usable])
        by_window = sort_into_groups(window[order])
        busbw, ends = busbw[usable][order[by_window.order]], by_window.ends
        begins = np.append(0, ends[:-1])
        medians = (busbw[(begins + ends - 1) // 2] + busbw[(begins + ends) // 2]) / 2
        for index, mine in group_by(of):
            windows = self._windows.setdefault(index, _Windows())
            windows.starts.extend(starts[mine].tolist())
            windows.busbw.extend(medians[mine].tolist())
            self._refresh(index, windows)

    def _refresh(self, index: int, windows: _Windows) -> None:
        medians = np.fromiter(windows.busbw, float)
        starts = np.fromiter(windows.starts, np.int64)
        recent = medians[starts > starts.max() - _RECENT_WINDOWS]
        row = self._store.series.rows
        row["busbw"][index] = np.median(recent)
        row["baseline"][index] = np.quantile(medians, _BASELINE_QUANTILE)

    def _series_of(self, operations: Columns) -> NDArray[np.int64]:
        return self._rows_of(*self._named(operations))

    def _keys_of(self, operations: Columns) -> NDArray[np.int64]:
        return _packed(*self._named(operations))

    def _named(self, operations: Columns) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8]]:
        """Communicator, operation and size class of each of these operations."""
        members = operations["member"].astype(np.int64)
        communicator_of = np.asarray([member.communicator for member in self._store.members], np.int64)
        codes = self._store.templates_of(operations, "op")["op"]
        return communicator_of[members], codes, classify(operations["message_bytes"])

    def _rows_of(
        self,
        communicators: NDArray[np.int64],
        codes: NDArray[np.uint8],
        classes: NDArray[np.uint8],
    ) -> NDArray[np.int64]:
        """Row of `Store.series` for each; made if it is new."""
        keys, inverse = distinct_together(communicators, codes, classes)
        found = np.asarray([self._row_of(key) for key in _packed(*keys).tolist()], np.int64)
        return found[inverse]

    def _row_of(self, key: int) -> int:
        index = self._index.get(key)
        if index is None:
            fresh = np.zeros(1, rows.SERIES)
            fresh["communicator"], fresh["op"], fresh["size_class"] = key >> 16, (key >> 8) & 0xFF, key & 0xFF
            for name in ("busbw", "baseline", "limit"):
                fresh[name] = np.nan
            index = self._index[key] = int(self._store.series.append(fresh)[0])
        return index


def _packed(communicators: _Integers, codes: _Integers, classes: _Integers) -> NDArray[np.int64]:
    """One number for each (communicator, operation, size class)."""
    return (communicators.astype(np.int64) << 16) | (codes.astype(np.int64) << 8) | classes.astype(np.int64)


def _add(totals: NDArray[np.int64], places: NDArray[np.int64], values: NDArray[np.int64]) -> None:
    """Adds each value to the total at its place; totals are a column of rows, to which `add.at` is 100 times slower."""
    sums = np.zeros(len(totals), np.int64)
    accumulate(np.add, sums, places, values)
    totals += sums
