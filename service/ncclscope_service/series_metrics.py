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


def series_columns(store: Store, aliases: Aliases, budget: SeriesBudget, now_ns: int) -> Iterator[Column]:
    """Every metric of groups; the budget has been told of the jobs' activity and has admitted communicators."""
    rows = _of_active_jobs(store, budget, now_ns)
    codes = (rows["op"].astype(np.int64) << 8) | rows["size_class"]
    is_own = budget.admit_series(rows["communicator"].astype(np.int64), codes)
    labels = _labels_of_rows(store, aliases, rows, is_own)
    groups = _summed(rows, labels)
    kinds = _summed(rows, [(job, *rest) for job, _, *rest in labels])
    yield from (groups.column(*each) for each in _BY_NAME)
    yield from (kinds.column(*each) for each in _BY_KIND)
    agreement = _ratio(kinds.total("compared_kernel_ns"), kinds.total("compared_inspected_ns"))
    yield Column(name="ncclscope_inspector_busbw_ratio", labels=kinds.labels, values=agreement)
    yield from _bandwidths(store, rows, labels, is_own)


def _of_active_jobs(store: Store, budget: SeriesBudget, now_ns: int) -> Columns:
    rows = store.series.rows
    silent = [each.index for each in store.communicators if budget.is_silent(each.job, now_ns)]
    return rows[~np.isin(rows["communicator"], silent)] if silent else rows


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


def _summed(rows: Columns, labels: Sequence[Labels]) -> _Summed:
    positions: dict[Labels, int] = {}
    position = np.array([positions.setdefault(each, len(positions)) for each in labels], np.int64)
    return _Summed(rows=rows, labels=list(positions), position=position)


def _bandwidths(store: Store, rows: Columns, labels: Sequence[Labels], is_own: Bools) -> Iterator[Column]:
    own = [each for each, stands_alone in zip(labels, is_own.tolist(), strict=True) if stands_alone]
    busbw, baseline, limit = (rows[column][is_own] for column in ("busbw", "baseline", "limit"))
    of_limit, of_baseline = _ratio(busbw, limit), _ratio(busbw, baseline)
    measured = baseline_limits.series_busbw(store, rows)[is_own]
    of_reference = np.where(np.isnan(measured), of_baseline, busbw / measured)
    yield Column(name="ncclscope_busbw_bytes_per_second", labels=own, values=busbw)
    yield Column(
        name="ncclscope_efficiency_ratio",
        labels=[(*each, reference) for reference in ("topology", "baseline") for each in own],
        values=np.concatenate([of_limit, of_reference]),
    )
    yield Column(name="ncclscope_bandwidth_drift_ratio", labels=own, values=of_baseline - 1)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """NaN where the whole is 0 or not known."""
    ratio: Floats = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return ratio
