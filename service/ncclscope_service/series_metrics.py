"""The metrics of groups as columns: counters and bandwidths by communicator, operation and size class.

Groups for which there is no room are summed as communicator="other", so that sums over all groups stay right; medians
cannot be summed, so bandwidths exist only of groups that have series of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service import baseline_limits
from ncclscope_service.aliases import Aliases
from ncclscope_service.communicator_views import size_class_name
from ncclscope_service.recent_sums import series_key
from ncclscope_service.series_budget import SeriesBudget
from ncclscope_service.store import Store
from ncclscope_service.tally import operation_name
from ncclscope_service.window import Bools, Floats, Int64s
from ncclscope_wire.batch import Columns

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
class Column:
    """All samples of one metric."""

    name: str
    labels: Sequence[Labels]
    values: Floats
    """NaN where not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summed:
    """Rows of rows.SERIES, and the labels under which they are summed."""

    rows: Columns
    labels: list[Labels]
    position: Int64s
    """Of each row: the place of its labels."""

    def total(self, column: str) -> Floats:
        sums = np.bincount(self.position, weights=self.rows[column], minlength=len(self.labels))
        return sums.astype(np.float64)

    def column(self, name: str, column: str, unit: float, known_by: str | None) -> Column:
        values = self.total(column) * unit
        if known_by is not None:
            values = np.where(self.total(known_by) > 0, values, np.nan)
        return Column(name=name, labels=self.labels, values=values)


@dataclass(frozen=True, slots=True)
class _Places:
    """Different labels, and of each row the place of its own among them."""

    labels: list[Labels]
    position: Int64s

    def of(self, rows: Columns) -> _Summed:
        return _Summed(rows=rows, labels=self.labels, position=self.position)


@dataclass(frozen=True, slots=True)
class _Labelled:
    """The labels of some rows of rows.SERIES."""

    groups: _Places
    kinds: _Places
    """Without the communicator."""
    own: list[Labels]
    """Of the rows that have series of their own."""
    by_reference: list[Labels]
    """Those for each thing that a bandwidth is held against."""


class SeriesLabels:
    """The labels of all series, made anew when a series is new, lost its own series, or was given another name."""

    def __init__(self) -> None:
        self._names = -1
        self._keys: Int64s = np.empty(0, np.int64)
        self._labelled: _Labelled | None = None

    def of(self, store: Store, aliases: Aliases, rows: Columns, is_own: Bools) -> _Labelled:
        """Of these rows of one store's series."""
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
) -> Iterator[Column]:
    """Every metric of groups; the budget has been told of the jobs' activity and has admitted communicators.

    `known`: labels of the scrapes before; `series` takes the place of those of the store.
    """
    rows = _of_active_jobs(store, store.series.rows if series is None else series, budget, now_ns)
    codes = (rows["op"].astype(np.int64) << 8) | rows["size_class"]
    is_own = budget.admit_series(rows["communicator"].astype(np.int64), codes)
    labelled = known.of(store, aliases, rows, is_own)
    groups, kinds = labelled.groups.of(rows), labelled.kinds.of(rows)
    yield from (groups.column(*each) for each in _BY_NAME)
    yield from (kinds.column(*each) for each in _BY_KIND)
    agreement = _ratio(kinds.total("compared_kernel_ns"), kinds.total("compared_inspected_ns"))
    yield Column(name="ncclscope_inspector_busbw_ratio", labels=kinds.labels, values=agreement)
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


def _bandwidths(store: Store, rows: Columns, labelled: _Labelled, is_own: Bools) -> Iterator[Column]:
    busbw, baseline, limit = (rows[column][is_own] for column in ("busbw", "baseline", "limit"))
    of_limit, of_baseline = _ratio(busbw, limit), _ratio(busbw, baseline)
    measured = baseline_limits.series_busbw(store, rows)[is_own]
    of_reference = np.where(np.isnan(measured), of_baseline, busbw / measured)
    yield Column(name="ncclscope_busbw_bytes_per_second", labels=labelled.own, values=busbw)
    yield Column(
        name="ncclscope_efficiency_ratio",
        labels=labelled.by_reference,
        values=np.concatenate([of_limit, of_reference]),
    )
    yield Column(name="ncclscope_bandwidth_drift_ratio", labels=labelled.own, values=of_baseline - 1)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """NaN where the whole is 0 or not known."""
    ratio: Floats = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return ratio
