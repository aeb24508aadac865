"""The last minutes of the store as columns.

Everything is vectorised and bounded: the newest rows up to a limit, a fixed number of buckets. At more
operations than the limit the older buckets are empty, which shows as "not recorded" and never as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.buckets import Bools, Floats, Int64s
from ncclscope_service.columns.table import Table
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

MAX_OPERATIONS: Final = 300_000
"""Operations looked at for one answer about single operations: keeps it near 0.1 s of one core."""

MAX_COLLECTIVES: Final = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentOperations:
    """The newest operations as plain columns of equal length, in the store's order."""

    process: Int64s
    communicator: Int64s
    """NO_NUMBER if unknown."""
    rank: Int64s
    """Global; NO_NUMBER if unknown."""
    op: Int64s
    message_bytes: Int64s
    kernel_ns: Int64s
    """Start of the kernel on the reference clock, else on the host's; NO_TIME_NS without a kernel."""
    duration_ns: Int64s
    """0 without a kernel."""
    wait_ns: Int64s
    starts_launch: Bools
    """False for a row that follows another of the same launch: their kernel is counted once."""
    has_wait: Bools
    """Has a kernel and a known wait, and is the first row of its launch."""
    transfer_ns: Int64s
    busbw: Floats
    match: Int64s


_SHOWN: Final = (
    "process", "member", "template", "message_bytes", "match", "launch", "start_ns", "end_ns", "censored",
    "start_true_ns", "wait_ns", "transfer_ns", "busbw",
)  # fmt: skip


def recent_operations(store: Store) -> RecentOperations:
    """The newest operations of the store, MAX_OPERATIONS at most."""
    rows = _newest(store.operations, MAX_OPERATIONS, *_SHOWN)
    templates = store.operation_templates.rows
    start, end = rows["start_ns"].astype(np.int64), rows["end_ns"].astype(np.int64)
    has_kernel = (start != NO_TIME_NS) & (end != NO_TIME_NS) & ~rows["censored"]
    duration = np.where(has_kernel, end - start, 0)
    wait = rows["wait_ns"].astype(np.int64)
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = starts_launch(rows["launch"][:-1], rows["launch"][1:])
    return RecentOperations(
        process=rows["process"].astype(np.int64),
        communicator=_of_member([each.communicator for each in store.members], rows["member"]),
        rank=_of_member(
            [NO_NUMBER if each.global_rank is None else each.global_rank for each in store.members], rows["member"]
        ),
        op=templates["op"][rows["template"]].astype(np.int64),
        message_bytes=rows["message_bytes"].astype(np.int64),
        kernel_ns=first_known(rows["start_true_ns"], start),
        duration_ns=duration,
        wait_ns=wait,
        starts_launch=is_first,
        has_wait=has_kernel & (wait >= 0) & (duration > 0) & is_first,
        transfer_ns=rows["transfer_ns"].astype(np.int64),
        busbw=rows["busbw"].astype(np.float64),
        match=rows["match"].astype(np.int64),
    )


def recent_collectives(store: Store) -> Columns:
    """The newest joined collectives of the store, MAX_COLLECTIVES at most."""
    return _newest(store.collectives, MAX_COLLECTIVES)


def _newest(table: Table, limit: int, *names: str) -> Columns:
    return table.rows.take(np.arange(max(0, len(table) - limit), len(table)), *names)


def _of_member(values: list[int], members: NDArray[np.int32]) -> Int64s:
    """The value of each row's member; NO_NUMBER if the row has none."""
    lookup = np.array([*values, NO_NUMBER], np.int64)
    return lookup[np.where(members < 0, len(values), members)]


def first_known(*columns: NDArray[np.int64]) -> Int64s:
    """The first of these times that is known, row by row; NO_TIME_NS if none is."""
    times = columns[0].astype(np.int64)
    for column in columns[1:]:
        times = np.where(times == NO_TIME_NS, column, times)
    return times


def starts_launch(before: NDArray[np.int64], launches: NDArray[np.int64]) -> Bools:
    """False for a row that follows one of the same launch: a kernel is counted once. `before`: of the rows before."""
    starts: Bools = (launches != before) | (launches < 0)
    return starts
