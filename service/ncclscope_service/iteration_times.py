"""How long each iteration of each rank took, how much of it was communication, and how much of that was exposed.

An iteration lasts from the enqueuing of its first operation to that of the next iteration's first, on the host's own
clock: the launch call where nsys recorded it, else the stamp of the line. Communication is the time in which any NCCL
kernel of the iteration ran, waiting included, each moment counted once. Exposed is what of it no other kernel of that
GPU covered; it is known only where computation was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import whole_rows
from ncclscope_service.distinct import distinct_together, groups
from ncclscope_service.intervals import Coverage, Integers, Spans, union
from ncclscope_service.rows import Match
from ncclscope_service.store import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

ITERATION: Final = np.dtype(
    [
        ("process", "<i4"),
        ("rank", "<i4"),  # global; NO_NUMBER
        ("iteration", "<i4"),
        ("by", "<i1"),  # rows.IterationBy of its first operation
        ("begin_ns", "<i8"),  # first operation enqueued, host's clock; NO_TIME_NS
        ("duration_ns", "<i8"),  # NO_TIME_NS where its begin or that of the next iteration is not known
        ("operations", "<i8"),
        ("bytes", "<i8"),
        ("launching", "<i8"),  # operations for which NCCL launches a kernel
        ("matched", "<i8"),  # of those, whose kernel is known
        ("communication_ns", "<i8"),  # NO_TIME_NS unless all of those kernels are known
        ("exposed_ns", "<i8"),  # NO_TIME_NS also where computation was not recorded
    ]
)
"""One iteration of one rank."""

OPERATION_COLUMNS: Final = (
    "process", "member", "iteration", "iteration_by", "message_bytes", "logged_at_ns", "kernel", "match"
)  # fmt: skip
"""What of operations is looked at."""

_NEVER: Final = np.iinfo(np.int64).max
_P90: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSummary:
    """The iterations of one job; None where not known."""

    iterations: int
    """Different numbers."""
    median_ns: float | None
    p90_ns: float | None
    communication_ratio: float | None
    """Time with a NCCL kernel on a rank as a share of its iterations'."""
    exposed_ratio: float | None
    """Of that, time without another kernel, as a share of its iterations'."""


def iteration_times(store: Store, operations: Columns) -> Columns:
    """ITERATION rows by process, rank and iteration; operations without an iteration are left out.

    `operations` has OPERATION_COLUMNS. Costs 0.3 s and 100 MB for a million operations with kernels.
    """
    known = np.flatnonzero(operations["iteration"] != NO_NUMBER)
    taken = whole_rows.columns(operations, known, OPERATION_COLUMNS)
    rank_of = np.asarray(
        [NO_NUMBER if each.global_rank is None else each.global_rank for each in store.members], np.int32
    )
    ranks = rank_of[taken["member"]] if len(rank_of) else np.empty(0, np.int32)
    keys, place = distinct_together(taken["process"], ranks, taken["iteration"])
    found: Columns = np.zeros(len(keys[0]), ITERATION)
    for name, key in zip(("process", "rank", "iteration"), keys, strict=True):
        found[name] = key
    found["by"][place[::-1]] = taken["iteration_by"][::-1]
    matched = (taken["match"] == Match.MATCHED) & (taken["kernel"] >= store.kernels.first)
    for name, amount in (
        ("operations", np.ones(len(known), np.int64)),
        ("bytes", np.maximum(taken["message_bytes"], 0)),
        ("launching", (taken["match"] != Match.NO_KERNEL).astype(np.int64)),
        ("matched", matched.astype(np.int64)),
    ):
        sums = np.zeros(len(found), np.int64)
        np.add.at(sums, place, amount)  # a tenth of what adding to a column of wide rows takes
        found[name] = sums
    _add_durations(found, place, _enqueued_at(store, taken["logged_at_ns"], taken["kernel"]))
    _add_communication(store, found, place[matched].astype(np.int64), taken["kernel"][matched])
    return found


def summarise(iterations: Columns) -> IterationSummary:
    """Times and shares over all ranks and iterations of one job."""
    durations = iterations["duration_ns"][iterations["duration_ns"] != NO_TIME_NS]
    return IterationSummary(
        iterations=len(np.unique(iterations["iteration"])),
        median_ns=float(np.median(durations)) if len(durations) else None,
        p90_ns=float(np.quantile(durations, _P90)) if len(durations) else None,
        communication_ratio=share(iterations, "communication_ns"),
        exposed_ratio=share(iterations, "exposed_ns"),
    )


def share(iterations: Columns, name: str) -> float | None:
    """A time as a share of the duration, over the iterations of which both are known; None without any."""
    known = (iterations[name] != NO_TIME_NS) & (iterations["duration_ns"] > 0)
    whole = int(iterations["duration_ns"][known].sum())
    return int(iterations[name][known].sum()) / whole if whole else None


def _enqueued_at(store: Store, stamps: Integers, kernels: Integers) -> Integers:
    """Host time of the launch call, else of the log line."""
    times: Integers = stamps.copy()
    with_kernel = np.flatnonzero(kernels >= store.kernels.first)
    launched = store.kernels.take(kernels[with_kernel], "launch_start_ns")["launch_start_ns"]
    times[with_kernel] = np.where(launched != NO_TIME_NS, launched, times[with_kernel])
    return times


def _add_durations(found: Columns, place: NDArray[np.intp], times: Integers) -> None:
    begin = np.full(len(found), _NEVER)
    np.minimum.at(begin, place, np.where(times == NO_TIME_NS, _NEVER, times))
    found["begin_ns"] = np.where(begin == _NEVER, NO_TIME_NS, begin)
    found["duration_ns"] = NO_TIME_NS
    follows = (
        (np.diff(found["iteration"]) == 1)
        & (found["process"][1:] == found["process"][:-1])
        & (found["rank"][1:] == found["rank"][:-1])
        & (begin[1:] != _NEVER)
        & (begin[:-1] != _NEVER)
    )
    at = np.flatnonzero(follows)
    found["duration_ns"][at] = begin[at + 1] - begin[at]


def _add_communication(store: Store, found: Columns, place: Integers, kernels: Integers) -> None:
    rows = store.kernels.take(kernels, "process", "template", "start_ns", "end_ns")
    spans = union(Spans(place, rows["start_ns"].astype(np.int64), rows["end_ns"].astype(np.int64)))
    is_whole = (found["matched"] == found["launching"]) & (found["matched"] > 0)
    communication = spans.lengths_by_group(len(found))
    found["communication_ns"] = np.where(is_whole, communication, NO_TIME_NS)
    devices = np.full(len(found), NO_NUMBER, np.int64)
    devices[place] = store.kernel_templates.take(rows["template"], "device_id")["device_id"]
    hidden, is_recorded = _hidden(store, found, devices, spans)
    found["exposed_ns"] = np.where(is_whole & is_recorded, communication - hidden, NO_TIME_NS)


def _hidden(store: Store, found: Columns, devices: Integers, spans: Spans) -> tuple[Integers, NDArray[np.bool_]]:
    """What other kernels of the same GPU cover of these spans, by iteration; and whether any were recorded there."""
    hidden, is_recorded = np.zeros(len(found), np.int64), np.zeros(len(found), np.bool_)
    busy = store.busy.rows
    lane_of_busy = busy["process"].astype(np.int64) << 16 | (busy["device_id"].astype(np.int64) & 0xFFFF)
    lane_of_span = (found["process"].astype(np.int64) << 16 | (devices & 0xFFFF))[spans.group]
    by_lane = dict(groups(lane_of_busy))
    for lane, mine in groups(lane_of_span):
        if lane not in by_lane:
            continue
        theirs = by_lane[lane]
        union_of = union(Spans(np.zeros(len(theirs), np.int64), busy["start_ns"][theirs], busy["end_ns"][theirs]))
        covered = Coverage(union_of.start, union_of.end).covered(spans.start[mine], spans.end[mine])
        np.add.at(hidden, spans.group[mine], covered)
        is_recorded[spans.group[mine]] = True
    return hidden, is_recorded
