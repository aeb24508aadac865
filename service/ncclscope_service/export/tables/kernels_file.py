"""`kernels.parquet`: one row per record of a kernel that communicates; NCCL's in store order, then all others."""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct, distinct_together, group_by
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.export.json_files import reference_times
from ncclscope_service.export.selection import Part, Selection
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.columns import (
    Column,
    numbers,
    optional_words_at,
    plain,
    rates,
    spans,
    times,
    words_at,
)
from ncclscope_service.export.tables.operations_file import write_slices
from ncclscope_service.measure.outside import measure_outside, ranks_of_kernels
from ncclscope_service.nccl.launch_rules import KernelClass, parse_kernel_name
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_OPERATIONS: Final = {
    KernelClass.ALL_REDUCE: "AllReduce",
    KernelClass.ALL_GATHER: "AllGather",
    KernelClass.REDUCE_SCATTER: "ReduceScatter",
    KernelClass.BROADCAST: "Broadcast",
    KernelClass.REDUCE: "Reduce",
    KernelClass.SEND_RECV: "SendRecv",
    KernelClass.ALL_GATHER_V: "AllGatherV",
}


def kernel_operation(name: str) -> str | None:
    """The operation that a kernel is named after ("AllReduce", "SendRecv"); None if its name says none."""
    return _OPERATIONS.get(parse_kernel_name(name).kernel_class)


def write_kernels(selection: Selection, path: Path) -> None:
    """Writes the file, a slice at a time."""
    store = selection.store
    plans = launch_plans(store.kernels.rows)
    positions = selection.kernels.positions
    ours = plans if positions is None else plans[positions]
    at = np.arange(len(store.kernels)) if positions is None else positions
    tables = _tables(selection.kernels, store, ours, kernel_measures(store, store.kernels.first + at))
    outside = selection.outside
    none = np.full(len(outside), NO_NUMBER, np.int32)
    others = _tables(outside, store, none, outside_measures(selection))
    write_slices(chain(tables, others), schema.KERNELS, path)


def launch_plans(kernels: AnyRows) -> NDArray[np.int32]:
    """The place of each kernel among those of its launch and replay, from 0; NO_NUMBER without a launch.

    A launch that does not fit into one kernel is cut into several, which NCCL calls plans.
    Source: NCCL src/enqueue.cc:ncclLaunchPrepare.
    """
    plans = np.full(len(kernels), NO_NUMBER, dtype=np.int32)
    placed = np.nonzero(kernels["launch"] >= 0)[0]
    order = placed[np.lexsort([kernels[name][placed] for name in ("start_ns", "replay", "launch")])]
    launch, replay = kernels["launch"][order], kernels["replay"][order]
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = (launch[1:] != launch[:-1]) | (replay[1:] != replay[:-1])
    begins = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    plans[order] = np.arange(len(order)) - begins
    return plans


_MEASURES: Final = np.dtype([("wait_ns", "<i8"), ("transfer_ns", "<i8"), ("busbw", "<f8"), ("ranks_seen", "<i4")])


def kernel_measures(store: Store, kernels: NDArray[np.int64]) -> Columns:
    """Wait, transfer, busbw and ranks seen of each of these kernels (row ids): those of an operation that it ran.

    Kernels that CUDA graphs launched have those of the replay.
    """
    measures = np.zeros(len(kernels), _MEASURES)
    measures["wait_ns"] = measures["transfer_ns"] = NO_TIME_NS
    measures["busbw"] = np.nan
    for table in (store.operations.rows, store.replays.rows):
        ran = np.flatnonzero(table["kernel"] >= 0)
        ran = ran[np.argsort(table["kernel"][ran], kind="stable")]
        places = np.searchsorted(table["kernel"][ran], kernels)
        found = np.flatnonzero(places < len(ran))
        found = found[table["kernel"][ran[places[found]]] == kernels[found]]
        for name in _MEASURES.names or ():
            measures[name][found] = table[name][ran[places[found]]]
    return measures


def is_duplicate(part: Part) -> NDArray[np.bool_]:
    """Which of these kernels stand in another export too: one recording that was exported twice.

    The same are kernels of one process with one correlation id and one start; within one export none are the same.
    """
    columns = {name: part.column(name).astype(np.int64) for name in ("process", "source")}
    duplicate = np.zeros(len(part), dtype=np.bool_)
    (processes, _), _ = distinct_together(columns["process"], columns["source"])
    if len(distinct(processes)[0]) == len(processes):
        return duplicate  # every process has one export
    columns |= {name: part.column(name).astype(np.int64) for name in ("correlation_id", "start_ns")}
    order = np.lexsort([columns[name] for name in ("source", "start_ns", "correlation_id", "process")])
    is_same = np.ones(max(0, len(part) - 1), dtype=np.bool_)
    for name in ("process", "correlation_id", "start_ns"):
        is_same &= columns[name][order][1:] == columns[name][order][:-1]
    is_same &= columns["source"][order][1:] != columns["source"][order][:-1]
    duplicate[order[1:][is_same]] = True
    return duplicate


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All kernels of one name."""

    name: str
    kernels: int
    duration_ns: int | None
    """Sum over those whose end is known; None if no end is."""
    median_ns: int | None


def kernel_totals(selection: Selection) -> list[KernelTotal]:
    """Sums by name of kernel over all processes, most time first; kernels of two exports count once."""
    part, store = selection.kernels, selection.store
    kept = ~is_duplicate(part)
    names = store.kernel_templates.rows["name"][part.column("template").astype(np.intp)][kept]
    start, end = part.column("start_ns").astype(np.int64)[kept], part.column("end_ns").astype(np.int64)[kept]
    is_whole = ~part.column("censored").astype(np.bool_)[kept] & (start != NO_TIME_NS) & (end != NO_TIME_NS)
    found: list[KernelTotal] = []
    for name, ours in group_by(names):
        whole = (end - start)[ours[is_whole[ours]]]
        total, median = (int(whole.sum()), round(float(np.median(whole)))) if len(whole) else (None, None)
        found.append(KernelTotal(store.strings[name], len(ours), total, median))
    return sorted(found, key=lambda each: -(each.duration_ns or 0))


def outside_measures(selection: Selection) -> Columns:
    """As `kernel_measures`, of the kernels that communicate without NCCL: matched by their times."""
    store, part = selection.store, selection.outside
    columns = {name: part.column(name).astype(np.int64) for name in ("process", "template", "start_ns", "end_ns")}
    templates = store.kernel_templates.take(columns["template"], "device_id", "name")
    ranks = ranks_of_kernels(store, columns["process"], templates["device_id"])
    start, end = (reference_times(store, columns["process"], columns[name]) for name in ("start_ns", "end_ns"))
    start[part.column("censored").astype(np.bool_)] = NO_TIME_NS
    measures = np.zeros(len(part), _MEASURES)
    measures["wait_ns"] = measures["transfer_ns"] = NO_TIME_NS
    measures["busbw"] = np.nan
    job_of = np.asarray(store.process_job, dtype=object)[columns["process"]]
    for job in selection.jobs:
        mine = np.flatnonzero(job_of == job)
        groups = [_global_ranks(store, each) for each in selection.communicators if each.job == job]
        found = measure_outside(templates["name"][mine], ranks[mine], start[mine], end[mine], groups)
        for name in ("wait_ns", "transfer_ns", "ranks_seen"):
            measures[name][mine] = found[name]
    return measures


def _global_ranks(store: Store, communicator: Communicator) -> tuple[int, ...]:
    """Of all of its members; empty if one is not known."""
    members = [store.members[each] for each in (communicator.members or {}).values()]
    ranks = sorted({each.global_rank for each in members if each.global_rank is not None})
    return tuple(ranks) if len(ranks) == communicator.size else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideTotal:
    """All kernels of one name that communicate without NCCL."""

    library: str
    kernel: str
    kernels: int
    ranks: int
    """Processes that ran any."""
    duration_ns: int
    """Sum over those whose end is known."""
    matched: int
    """Kernels whose counterparts on other ranks are known."""
    wait_ns: int | None
    """Sum over these; None without any."""
    transfer_ns: int | None


def outside_totals(selection: Selection) -> list[OutsideTotal]:
    """Sums by library and kernel, most time first."""
    store, part = selection.store, selection.outside
    if not len(part):
        return []
    measures = outside_measures(selection)
    names = store.kernel_templates.take(part.column("template").astype(np.int64), "name")["name"]
    durations = np.where(part.column("censored"), 0, part.column("end_ns") - part.column("start_ns"))
    found: list[OutsideTotal] = []
    for name, mine in group_by(names):
        library, _, kernel = store.strings[name].rpartition("/")
        matched = mine[measures["wait_ns"][mine] != NO_TIME_NS]
        wait, transfer = (int(measures[each][matched].sum()) for each in ("wait_ns", "transfer_ns"))
        found.append(
            OutsideTotal(
                library=library,
                kernel=kernel,
                kernels=len(mine),
                ranks=len(np.unique(part.column("process")[mine])),
                duration_ns=int(durations[mine].sum()),
                matched=len(matched),
                wait_ns=wait if len(matched) else None,
                transfer_ns=transfer if len(matched) else None,
            )
        )
    return sorted(found, key=lambda each: -each.duration_ns)


def _tables(part: Part, store: Store, plans: NDArray[np.int32], measures: Columns) -> Iterator[pa.Table]:
    begin = 0
    for rows in part.slices():
        own = slice(begin, begin + len(rows))
        yield kernels_table(store, rows, plans[own], measures[own])
        begin += len(rows)


def kernels_table(store: Store, rows: AnyRows, plans: NDArray[np.int32], measures: Columns) -> pa.Table:
    """These kernels with the columns of `schema.KERNELS`; `plans` and `measures` have a row for each."""
    columns = _columns(store, rows, plans, measures)
    arrays = [columns[field.name].arrow(field.type) for field in schema.KERNELS]
    return pa.Table.from_arrays(arrays, names=schema.KERNELS.names)


def _columns(store: Store, rows: AnyRows, plans: NDArray[np.int32], measures: Columns) -> dict[str, Column]:
    templates = store.kernel_templates_of(rows)
    pids = np.array([process.pid for process in store.processes], dtype=np.int64)
    names = store.strings.values
    kernel_names = set(np.unique(store.kernel_templates.rows["name"]).tolist())
    operations = [kernel_operation(name) if index in kernel_names else None for index, name in enumerate(names)]
    parts = [name.rpartition("/") if index in kernel_names else ("", "", name) for index, name in enumerate(names)]
    return {
        "host": optional_words_at(rows["process"], [process.host for process in store.processes]),
        "pid": plain(pids[rows["process"]]),
        "kernel_file": optional_words_at(rows["source"], [state.source.name for state in store.sources]),
        "correlation_id": plain(rows["correlation_id"]),
        "library": words_at(templates["name"], [library or "NCCL" for library, _, _ in parts]),
        "name": words_at(templates["name"], [name for _, _, name in parts]),
        "op": optional_words_at(templates["name"], operations),
        **{name: numbers(templates[name]) for name in _TEMPLATE_NUMBERS},
        **{name: times(rows[name]) for name in ("launch_start_ns", "launch_end_ns", "start_ns", "end_ns")},
        "launch_tid": numbers(rows["launch_tid"]),
        "start_true_ns": times(reference_times(store, rows["process"], rows["start_ns"])),
        "end_true_ns": times(reference_times(store, rows["process"], rows["end_ns"])),
        "censored": plain(rows["censored"]),
        "launch_id": numbers(rows["launch"]),
        "plan": numbers(plans),
        "replay": numbers(rows["replay"]).where(rows["launch"] >= 0),
        "wait_ns": spans(measures["wait_ns"]),
        "transfer_ns": spans(measures["transfer_ns"]),
        "busbw_bytes_per_second": rates(measures["busbw"]),
        "ranks_seen": numbers(measures["ranks_seen"]).where(measures["ranks_seen"] > 0),
    }


_TEMPLATE_NUMBERS: Final = (
    "device_id",
    "stream_id",
    "grid_x",
    "block_x",
    "static_shared_bytes",
    "dynamic_shared_bytes",
    "registers",
)
