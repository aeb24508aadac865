"""`communicators.parquet`: one row per communicator, in order of first appearance.

A row gives what the communicator did in the selected part: rows, bytes, first and last time, busbw, wait.
"""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ncclscope_service.columns.table import AnyRows
from ncclscope_service.export.json_files import reference_times
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.export.tables.operations_file import write_slices
from ncclscope_service.export.totals import mix_of, signatures
from ncclscope_service.intake.aliases import Names
from ncclscope_service.job.ranks import hosts_of
from ncclscope_service.measure.limits import large_messages_by_baseline
from ncclscope_service.rollup.usage import Signature
from ncclscope_service.store.records import Communicator, Member
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_TIME_NS

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Activity:
    """Sums and times of communicators, as columns by communicator index."""

    operations: NDArray[np.int64]
    bytes: NDArray[np.int64]
    """Sum of the message bytes that are known, and go to another rank."""
    first_ns: NDArray[np.int64]
    """NO_TIME_NS if no operation has any time."""
    last_ns: NDArray[np.int64]


def activity(selection: Selection) -> Activity:
    """Counts over the operations, a slice at a time.

    Times are the kernels' on the reference clock; if an operation has none, its stamp.
    """
    size = len(selection.store.communicators)
    operations, moved = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    first, last = np.full(size, _NEVER), np.full(size, NO_TIME_NS)
    for rows in selection.operations.slices():
        view = OperationView(selection.store, rows)
        known = np.flatnonzero(view.communicators() >= 0)
        communicator = view.communicators()[known]
        begin, end = (times[known] for times in _begin_end(selection.store, rows))
        operations += np.bincount(communicator, minlength=size)
        np.add.at(moved, communicator, view.moved_bytes()[known])
        np.minimum.at(first, communicator, np.where(begin == NO_TIME_NS, _NEVER, begin))
        np.maximum.at(last, communicator, end)
    return Activity(operations, moved, np.where(first == _NEVER, NO_TIME_NS, first), last)


def _begin_end(store: Store, rows: AnyRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    stamp = rows["logged_at_ns"]
    begin, end = (reference_times(store, rows["process"], rows[name]) for name in ("start_ns", "end_ns"))
    return np.where(begin == NO_TIME_NS, stamp, begin), np.where(end == NO_TIME_NS, stamp, end)


MAX_LISTED_RANKS: Final = 1 << 20
"""A communicator that says it is larger lists the ranks that were seen only: its size may be a torn line's."""


def write_communicators(selection: Selection, path: Path, known: Mapping[int, Signature] | None = None) -> None:
    """Writes the file; `known`: the signatures by communicator, if they are computed already."""
    write_slices([communicators_table(selection, known)], schema.COMMUNICATORS, path)


def communicators_table(selection: Selection, known: Mapping[int, Signature] | None = None) -> pa.Table:
    """The selected communicators with the columns of `schema.COMMUNICATORS`."""
    done = activity(selection)
    known = signatures(selection) if known is None else known
    records = [
        _record(selection.store, communicator, done, selection.names) | _signature(known.get(communicator.index))
        for communicator in selection.communicators
    ]
    return pa.Table.from_pylist(records, schema=schema.COMMUNICATORS)


def members_by_rank(store: Store, communicator: Communicator) -> dict[int, Member]:
    """The members that were seen, by communicator rank."""
    members = communicator.members or {}
    return {rank: store.members[index] for rank, index in sorted(members.items())}


def global_ranks(store: Store, communicator: Communicator) -> list[int | None]:
    """Global ranks by communicator rank; None if a rank has not been seen."""
    members = members_by_rank(store, communicator)
    if not members:
        return []
    size = communicator.size if max(members) < communicator.size <= MAX_LISTED_RANKS else max(members) + 1
    return [members[rank].global_rank if rank in members else None for rank in range(size)]


def _are_inferred(store: Store, communicator: Communicator) -> bool | None:
    """Whether any of its global ranks is printed by no line; None if it has none."""
    known = [each for each in members_by_rank(store, communicator).values() if each.global_rank is not None]
    return any(each.global_rank_is_inferred for each in known) if known else None


def _record(store: Store, communicator: Communicator, done: Activity, names: Names) -> dict[str, object]:
    index = communicator.index
    return {
        "job": communicator.job,
        "comm_id": communicator.comm_id,
        "communicator": names[communicator.job, communicator.comm_id],
        "group_name": communicator.name,
        "size": communicator.size,
        "parallelism": communicator.parallelism,
        "parallelism_confidence": None if communicator.parallelism is None else communicator.parallelism_confidence,
        "ranks": global_ranks(store, communicator),
        "ranks_are_inferred": _are_inferred(store, communicator),
        "hosts": list(hosts_of(store, communicator)),
        "parent_comm_id": communicator.parent_comm_id,
        "split_count": communicator.split_count,
        "color": communicator.color,
        "identity": communicator.identity.value,
        "identity_confidence": communicator.identity_confidence,
        "operations": int(done.operations[index]),
        "bytes": int(done.bytes[index]),
        "first_ns": time_or_none(int(done.first_ns[index])),
        "last_ns": time_or_none(int(done.last_ns[index])),
        "limits": communicator_limits(store, index),
        "bottleneck": None if communicator.bottleneck is None else communicator.bottleneck.name,
    }


def _signature(of: Signature | None) -> dict[str, object]:
    if of is None:
        return {}
    return {
        "operation_mix": mix_of(of),
        "message_sizes": of.sizes,
        "message_bytes_low": of.p10_bytes,
        "message_bytes_median": of.median_bytes,
        "message_bytes_high": of.p90_bytes,
        "message_bytes_largest": of.largest_bytes,
        "operations_per_iteration": of.operations_per_iteration,
        "bytes_per_iteration": of.bytes_per_iteration,
        "burstiness": of.burstiness,
        "period_ns": of.period_ns,
        "active_ratio": of.active_ratio,
        "bursts_per_iteration": of.bursts_per_iteration,
        "burst_ns": of.burst_ns,
        "pause_ns": of.pause_ns,
    }


def communicator_limits(store: Store, communicator: int) -> dict[str, float | None]:
    """Limits by reference, bytes per second: its narrowest cut, what NCCL expects, what nccl-tests or it have shown."""
    series = store.series.rows
    ours = series[series["communicator"] == communicator]
    limits = ours["limit"][np.isfinite(ours["limit"])]
    of = store.communicators[communicator]
    narrowest = float(limits.min()) if len(limits) else None
    shown = ours["baseline"][np.isfinite(ours["baseline"])]
    return {
        "topology": narrowest if of.bottleneck is None else of.bottleneck.bytes_per_second,
        "nccl_model": of.model_limit,
        "baseline": large_messages_by_baseline(store, of) or (float(shown.max()) if len(shown) else None),
    }


def time_or_none(at_ns: int) -> int | None:
    """A time of a column as a record's: None if it is not known."""
    return None if at_ns == NO_TIME_NS else at_ns
