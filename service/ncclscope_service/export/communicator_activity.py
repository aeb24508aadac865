"""What each communicator has done in the selected part: rows, bytes, first and last time, busbw, wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.export.operation_view import OperationView
from ncclscope_service.export.reference_clock import reference_times
from ncclscope_service.export.selection import Selection
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Activity:
    """By communicator index."""

    operations: NDArray[np.int64]
    bytes: NDArray[np.int64]
    """Sum of the message bytes that are known."""
    first_ns: NDArray[np.int64]
    """NO_TIME_NS where no operation has any time."""
    last_ns: NDArray[np.int64]


def activity(selection: Selection) -> Activity:
    """Counts over the operations, a slice at a time.

    Times are the kernels' on the reference clock; where an operation has none, its stamp.
    """
    size = len(selection.store.communicators)
    operations, moved = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    first, last = np.full(size, _NEVER), np.full(size, NO_TIME_NS)
    for rows in selection.operations.slices():
        communicator = OperationView(selection.store, rows).communicators()
        known = rows[communicator >= 0]
        communicator = communicator[communicator >= 0]
        operations += np.bincount(communicator, minlength=size)
        np.add.at(moved, communicator, np.maximum(known["message_bytes"], 0))
        begin, end = _begin_end(selection.store, known)
        np.minimum.at(first, communicator, np.where(begin == NO_TIME_NS, _NEVER, begin))
        np.maximum.at(last, communicator, end)
    return Activity(operations, moved, np.where(first == _NEVER, NO_TIME_NS, first), last)


def _begin_end(store: Store, rows: Columns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    stamp = rows["logged_at_ns"]
    begin, end = (reference_times(store, rows["process"], rows[name]) for name in ("start_ns", "end_ns"))
    return np.where(begin == NO_TIME_NS, stamp, begin), np.where(end == NO_TIME_NS, stamp, end)
