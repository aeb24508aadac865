"""The counters of a trace: by communicator and by kind of communicator, from the joined launches.

busbw of a communicator is that of the launch that has just ended. busbw of a kind (TP, DP, ...) is the mean over its
launches that transfer just now, 0 if none does. Bytes in flight of a kind are the message bytes of its launches that
are under way, from the first rank's start to the end: those of a collective count once, those of sends and receives
once at each side.
"""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ncclscope_service.export.selection import Selection
from ncclscope_service.export.trace.arguments import significant
from ncclscope_service.export.trace.event_text import (
    COMMUNICATORS_PID,
    Axis,
    EventText,
    joined,
    micros,
    numbers,
    of_objects,
    of_texts,
    process_metadata,
    words,
)
from ncclscope_service.store.records import Communicator
from ncclscope_wire.terms import NO_TIME_NS

MAX_POINTS: Final = 50_000
"""Points of one counter by kind; if there would be more, each stretch of time keeps its highest and its last."""

_ROWS_PER_BATCH: Final = 1 << 13
_NOT_KNOWN: Final = "not known"


def counter_events(selection: Selection, axis: Axis) -> Iterator[EventText]:
    """All counters, after the events that name their process; nothing if nothing was joined."""
    rows = selection.collectives.column("end_true_ns")
    if not np.any((rows != NO_TIME_NS) & (rows >= axis.origin_ns)):
        return
    yield of_objects(process_metadata(COMMUNICATORS_PID, "communicators", COMMUNICATORS_PID))
    yield from _by_kind(selection, axis)
    names = {each.index: f"busbw {_label(each)}" for each in selection.communicators}
    for part in selection.collectives.slices(_ROWS_PER_BATCH):
        measured = part[np.isfinite(part["busbw"]) & (part["end_true_ns"] >= axis.origin_ns)]
        measured = measured[np.isin(measured["communicator"], list(names))]
        whose = words([names[index] for index in measured["communicator"].tolist()])
        yield _points(whose, "GB/s", axis, measured["end_true_ns"], significant(measured["busbw"] / 1e9))


def _label(communicator: Communicator) -> str:
    return f"{communicator.parallelism or ''} {communicator.comm_id}".strip()


def _by_kind(selection: Selection, axis: Axis) -> Iterator[EventText]:
    kinds: dict[str, list[int]] = {}
    for communicator in selection.communicators:
        kinds.setdefault(communicator.parallelism or _NOT_KNOWN, []).append(communicator.index)
    whose = selection.collectives.column("communicator")
    names = ("first_start_true_ns", "end_true_ns", "transfer_ns", "message_bytes", "busbw")
    starts, ends, transfers, sizes, rates = (selection.collectives.column(name) for name in names)
    has_end = (ends != NO_TIME_NS) & (ends >= axis.origin_ns)
    is_rated = has_end & np.isfinite(rates) & (transfers > 0)
    is_sized = has_end & (starts != NO_TIME_NS) & (starts <= ends) & (sizes > 0)
    for kind, indices in sorted(kinds.items()):
        is_ours = np.isin(whose, indices)
        chosen = is_ours & is_rated
        speed = np.where(np.isfinite(rates), rates, 0)[chosen].astype(np.int64)
        yield from _steps(
            f"busbw {kind}", "GB/s", axis, *_mean_of_open(ends[chosen] - transfers[chosen], ends[chosen], speed)
        )
        chosen = is_ours & is_sized
        at_ns, total, _ = _sums_of_open(starts[chosen], ends[chosen], sizes[chosen].astype(np.int64))
        yield from _steps(f"bytes in flight {kind}", "bytes", axis, at_ns, total)


def _mean_of_open(
    starts: NDArray[np.number], ends: NDArray[np.number], values: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """When the mean of the open intervals' values (bytes per second) changes, and what it is then, in GB/s."""
    at_ns, total, count = _sums_of_open(starts, ends, values)
    return at_ns, significant(np.divide(total, count, out=np.zeros(len(total)), where=count > 0) / 1e9)


def _sums_of_open(
    starts: NDArray[np.number], ends: NDArray[np.number], values: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The times at which intervals begin or end, the sum of the open ones' values from then on, and their number."""
    times = np.concatenate([starts, ends]).astype(np.int64)
    order = np.argsort(times, kind="stable")
    total = np.cumsum(np.concatenate([values, -values])[order])
    count = np.cumsum(np.repeat(np.array([1, -1]), len(values))[order])
    is_last = np.append(np.diff(times[order]) > 0, True)[: len(order)]
    return times[order][is_last], total[is_last], count[is_last]


def _steps(
    name: str, unit: str, axis: Axis, at_ns: NDArray[np.int64], values: NDArray[np.number]
) -> Iterator[EventText]:
    """One counter: its points where it changes."""
    at_ns, values = _thinned(at_ns, values)
    changes = np.append(True, values[1:] != values[:-1])[: len(values)]
    if changes.any():
        times = np.maximum(at_ns[changes], axis.origin_ns)
        yield _points(words([name] * len(times)), unit, axis, times, values[changes])


def _thinned(at_ns: NDArray[np.int64], values: NDArray[np.number]) -> tuple[NDArray[np.int64], NDArray[np.number]]:
    """The highest and the last point of each of `MAX_POINTS / 2` equal stretches of time."""
    if len(at_ns) <= MAX_POINTS:
        return at_ns, values
    stretch = (at_ns - at_ns[0]) // (-(-(int(at_ns[-1] - at_ns[0]) + 1) // (MAX_POINTS // 2)))
    order = np.lexsort([values, stretch])
    is_highest = np.append(np.diff(stretch[order]) > 0, True)
    is_last = np.append(np.diff(stretch) > 0, True)
    kept = np.unique(np.concatenate([order[is_highest], np.nonzero(is_last)[0]]))
    return at_ns[kept], values[kept]


def _points(names: pa.Array, unit: str, axis: Axis, at_ns: NDArray[np.int64], values: NDArray[np.number]) -> EventText:
    times = micros(at_ns.astype(np.int64) - axis.origin_ns)
    where = f',"pid":{COMMUNICATORS_PID},"args":{{"{unit}":'
    return of_texts(joined(',{"name":', names, ',"ph":"C","ts":', times, where, numbers(values), "}}"), len(at_ns))
