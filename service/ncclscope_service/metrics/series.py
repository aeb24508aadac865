"""Series of `/metrics`: the values that one scrape keeps for the next, and the groups that have series of their own.

Values that change seldom or cost much are kept (`ScrapeCache`), and can be dropped at any time. Iterations are summed
up again every few seconds, since that reads each of the newest operations; labels of series and hosts of a communicator
are made again when they have changed.

A group is a communicator, operation and size class; it has counters and bandwidths.

Groups for which there is no room are summed as communicator="other", so that sums over all groups stay right; medians
cannot be summed, so bandwidths exist only of groups that have series of their own.

Which groups have series of their own is decided first come, first served, and for good, so that a scrape stays below
`table.MAX_SERIES`: a group that is summed as "other" today and has its own series tomorrow would make two counters
jump. Only the series of a job that has been silent for an hour make room, all at once: they are then not exposed at
all, neither apart nor summed, and come back with their totals if the job does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.buckets import Bools, Floats, Int64s
from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.job.iterations import IterationSummaries
from ncclscope_service.job.ranks import hosts_of
from ncclscope_service.measure import expected_times, limits
from ncclscope_service.metrics.table import MAX_COMMUNICATORS, MAX_GROUP_SERIES
from ncclscope_service.rollup.recent_sums import series_key
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.show.communicators import size_class_name
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns


class HostCounts:
    """Number of hosts that each communicator spans."""

    def __init__(self) -> None:
        self._by_communicator: dict[int, tuple[int, int, int]] = {}
        """By communicator: how many members it had, the sum of their indices, and its hosts."""

    def host_count(self, store: Store, communicator: Communicator) -> int:
        """Of one communicator; counted again if its members changed."""
        members = communicator.members or {}
        amount, total = len(members), sum(members.values())
        known = self._by_communicator.get(communicator.index)
        if known is None or known[:2] != (amount, total):
            known = self._by_communicator[communicator.index] = (amount, total, len(hosts_of(store, communicator)))
        return known[2]


class ScrapeCache:
    """Everything that scrapes of one store keep."""

    def __init__(self) -> None:
        self.iterations = IterationSummaries()
        self.hosts = HostCounts()
        self.labels = SeriesLabels()


SILENT_NS: Final = 3_600_000_000_000
"""Inactivity after which a job's groups have no series."""

_BITS: Final = 16
"""Of the lowest bits of a key of series: operation and size class; the communicator is above."""


@dataclass(slots=True)
class _Activity:
    operations: int
    changed_ns: int


class SeriesBudget:
    """Groups that were admitted. Memory: a number per group, at most the limits."""

    def __init__(self, *, max_communicators: int = MAX_COMMUNICATORS, max_group_series: int = MAX_GROUP_SERIES) -> None:
        self._max_communicators = max_communicators
        self._max_group_series = max_group_series
        self._communicators: dict[int, str] = {}
        """Those with series of their own, with their jobs."""
        self._keys: set[int] = set()
        self._activity: dict[str, _Activity] = {}

    def record_activity(self, operations_of: Mapping[str, int], now_ns: int) -> None:
        """Takes how many operations each job has counted so far; drops jobs that have been silent."""
        for job, operations in operations_of.items():
            known = self._activity.get(job)
            if known is None or known.operations != operations:
                self._activity[job] = _Activity(operations, now_ns)
        silent = {job for job in self._activity if self.is_silent(job, now_ns)}
        gone = {index for index, job in self._communicators.items() if job in silent}
        if gone:
            self._communicators = {index: job for index, job in self._communicators.items() if index not in gone}
            self._keys = {key for key in self._keys if key >> _BITS not in gone}

    def is_silent(self, job: str, now_ns: int) -> bool:
        """Whether this job was inactive for so long that its groups are not exposed."""
        known = self._activity.get(job)
        return known is not None and now_ns - known.changed_ns >= SILENT_NS

    def admit_communicator(self, index: int, job: str) -> bool:
        """Whether this communicator has series of its own; the first time it is asked decides."""
        if index in self._communicators:
            return True
        if len(self._communicators) >= self._max_communicators:
            return False
        self._communicators[index] = job
        return True

    def admit_series(self, communicators: NDArray[np.int64], codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these have series of their own, by communicator and a code (below 2**16) of operation and size."""
        admitted = np.zeros(len(communicators), np.bool_)
        for position, key in enumerate(((communicators << _BITS) | codes).tolist()):
            if key in self._keys:
                admitted[position] = True
            elif len(self._keys) < self._max_group_series and key >> _BITS in self._communicators:
                self._keys.add(key)
                admitted[position] = True
        return admitted


OTHER: Final = "other"
"""The communicator label of what is summed because there are too many communicators."""

UNKNOWN: Final = "unknown"

Labels = tuple[str, ...]

_BY_NAME: Final = (
    ("ncclscope_operations", "operations", 1.0, None),
    ("ncclscope_bytes", "bytes", 1.0, None),
    ("ncclscope_kernel_seconds", "duration_ns", 1e-9, "matched"),
    ("ncclscope_joined_kernel_seconds", "waiting_duration_ns", 1e-9, "waiting_duration_ns"),
    ("ncclscope_wait_seconds", "wait_ns", 1e-9, "waiting_duration_ns"),
)
"""Metrics by group: name, column of rows.SERIES, unit of the column, and the column that must be above 0 for the metric
to be known."""

_BY_KIND: Final = (
    ("ncclscope_matched_operations", "matched", 1.0, "matched"),
    ("ncclscope_collectives", "collectives", 1.0, "collectives"),
    ("ncclscope_transfer_seconds", "transfer_ns", 1e-9, "collectives"),
    ("ncclscope_inspector_records", "inspected", 1.0, "inspected"),
    ("ncclscope_inspector_kernel_seconds", "inspected_ns", 1e-9, "inspected"),
)
"""The same of metrics without the label communicator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples of one metric: label values in the table's order, and a value each."""

    labels: Sequence[Labels]
    values: Floats
    """NaN if not known; such samples are not exposed."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Different labels, and of each row of rows.SERIES the place of its own among them."""

    labels: list[Labels]
    position: Int64s

    def total(self, rows: Columns, column: str) -> Floats:
        sums = np.bincount(self.position, weights=rows[column], minlength=len(self.labels))
        return sums.astype(np.float64)

    def samples(self, rows: Columns, column: str, unit: float, known_by: str | None) -> Samples:
        values = self.total(rows, column) * unit
        if known_by is not None:
            values = np.where(self.total(rows, known_by) > 0, values, np.nan)
        return Samples(labels=self.labels, values=values)


@dataclass(frozen=True, slots=True)
class _Labelled:
    """The labels of some rows of rows.SERIES."""

    groups: _Places
    kinds: _Places
    """Without the communicator."""
    own: list[Labels]
    """Of the rows that have series of their own."""
    by_reference: list[Labels]
    """The same, once for each reference of a bandwidth."""


class SeriesLabels:
    """Labels of all series, made again when a series is new, was summed under "other", or got another name."""

    def __init__(self) -> None:
        self._names = -1
        self._keys: Int64s = np.empty(0, np.int64)
        self._labelled: _Labelled | None = None

    def labels_of(self, store: Store, aliases: Aliases, rows: Columns, is_own: Bools) -> _Labelled:
        """Labels of these rows of one store's series."""
        keys = (series_key(rows["communicator"], rows["op"], rows["size_class"]) << 1) | is_own
        if self._labelled is None or self._names != aliases.names_given or not np.array_equal(self._keys, keys):
            self._names, self._keys = aliases.names_given, keys
            self._labelled = _labelled(_labels_of_rows(store, aliases, rows, is_own), is_own)
        return self._labelled


def series_columns(
    store: Store,
    aliases: Aliases,
    budget: SeriesBudget,
    now_ns: int,
    known: SeriesLabels,
    *,
    series: Columns | None = None,
) -> Iterator[tuple[str, Samples]]:
    """Every metric of groups, by name; the budget knows the jobs' activity and has admitted communicators.

    `known`: labels of earlier scrapes; `series` replaces the store's series.
    """
    rows = _of_active_jobs(store, store.series.rows.copy() if series is None else series, budget, now_ns)
    codes = (rows["op"].astype(np.int64) << 8) | rows["size_class"]
    is_own = budget.admit_series(rows["communicator"].astype(np.int64), codes)
    labelled = known.labels_of(store, aliases, rows, is_own)
    for places, metrics in ((labelled.groups, _BY_NAME), (labelled.kinds, _BY_KIND)):
        for name, column, unit, known_by in metrics:
            yield name, places.samples(rows, column, unit, known_by)
    kinds = labelled.kinds
    agreement = _ratio(kinds.total(rows, "compared_kernel_ns"), kinds.total(rows, "compared_inspected_ns"))
    yield "ncclscope_inspector_busbw_ratio", Samples(labels=kinds.labels, values=agreement)
    yield from _bandwidths(store, rows, labelled, is_own)


def _of_active_jobs(store: Store, rows: Columns, budget: SeriesBudget, now_ns: int) -> Columns:
    silent = [each.index for each in store.communicators if budget.is_silent(each.job, now_ns)]
    return rows[~np.isin(rows["communicator"], silent)] if silent else rows


def _labelled(labels: Sequence[Labels], is_own: Bools) -> _Labelled:
    own = [each for each, stands_alone in zip(labels, is_own.tolist(), strict=True) if stands_alone]
    return _Labelled(
        groups=_places(labels),
        kinds=_places([(job, *rest) for job, _, *rest in labels]),
        own=own,
        by_reference=[(*each, reference) for reference in ("topology", "baseline") for each in own],
    )


def _labels_of_rows(store: Store, aliases: Aliases, rows: Columns, is_own: Bools) -> list[Labels]:
    columns = (rows[name].tolist() for name in ("communicator", "op", "size_class"))
    return [
        _labels(store, aliases, own, index, op, size_class)
        for own, index, op, size_class in zip(is_own.tolist(), *columns, strict=True)
    ]


def _labels(store: Store, aliases: Aliases, is_own: bool, index: int, op: int, size_class: int) -> Labels:
    what = (operation_name(op), size_class_name(size_class))
    if index < 0:
        return (UNKNOWN, UNKNOWN, UNKNOWN, *what)
    communicator = store.communicators[index]
    return (communicator.job, aliases[index] if is_own else OTHER, communicator.parallelism or UNKNOWN, *what)


def _places(labels: Sequence[Labels]) -> _Places:
    positions: dict[Labels, int] = {}
    position = np.array([positions.setdefault(each, len(positions)) for each in labels], np.int64)
    return _Places(list(positions), position)


def _bandwidths(store: Store, rows: Columns, labelled: _Labelled, is_own: Bools) -> Iterator[tuple[str, Samples]]:
    busbw, baseline, limit = (rows[column][is_own] for column in ("busbw", "baseline", "limit"))
    of_limit, of_baseline = _ratio(busbw, limit), _ratio(busbw, baseline)
    measured = limits.series_busbw(store, rows)[is_own]
    of_reference = np.where(np.isnan(measured), of_baseline, busbw / measured)
    efficiency = np.concatenate([of_limit, of_reference])
    yield "ncclscope_busbw_bytes_per_second", Samples(labels=labelled.own, values=busbw)
    yield "ncclscope_efficiency_ratio", Samples(labels=labelled.by_reference, values=efficiency)
    yield "ncclscope_bandwidth_drift_ratio", Samples(labels=labelled.own, values=of_baseline - 1)
    if store.calibration is not None:
        over = _ratio(expected_times.calibrated_busbw(store, rows[is_own]), busbw)
        yield "ncclscope_transfer_over_expected_ratio", Samples(labels=labelled.own, values=over)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """NaN if the whole is 0 or not known."""
    ratio: Floats = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return ratio
