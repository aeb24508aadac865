"""What the report shows over time: kernels running or not, and a few iterations in detail."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.export.kernels_file import is_duplicate, kernel_measures, kernel_operation
from ncclscope_service.export.process_rows import process_ranks, processes_by_rank
from ncclscope_service.export.reference_clock import reference_times
from ncclscope_service.export.selection import Selection
from ncclscope_service.intervals import covered_ns
from ncclscope_wire.terms import NO_TIME_NS

Times = NDArray[np.int64]

ON_OFF_BINS: Final = 200
MAX_ROWS: Final = 256
MAX_LANES: Final = 16
MAX_BARS: Final = 3000
"""Kernels in the timeline: what a browser draws without delay and a person can still see."""


def lanes(selection: Selection, limit: int) -> tuple[list[int], list[str], int]:
    """At most so many processes in the order of their ranks, their names, and that only every n-th is shown."""
    ranks, processes = process_ranks(selection), processes_by_rank(selection)
    every = max(1, -(-len(processes) // limit))
    shown, records = processes[::every], selection.store.processes
    names = [
        ",".join(map(str, ranks[index])) if index in ranks else f"{records[index].host}:{records[index].pid}"
        for index in shown
    ]
    return shown, names, every


def on_off(selection: Selection) -> dict[str, object] | None:
    """By rank, the share of each stretch of time in which an NCCL kernel ran; None where nothing was recorded.

    Where a capture covers a part of a stretch the share is that of the part.
    """
    process, start, end, _ = _kernels(selection)
    if not len(start):
        return None
    begin, until = int(start.min()), int(end.max())
    borders = np.linspace(begin, until, ON_OFF_BINS + 1).astype(np.int64)
    shown, names, every = lanes(selection, MAX_ROWS)
    share: list[list[float | None]] = []
    for index in shown:
        mine = process == index
        running = covered_ns(start[mine], end[mine], borders)
        captured = _captured_ns(selection, index, borders)
        ratio = np.divide(running, captured, out=np.full(len(running), np.nan), where=captured > 0)
        share.append([None if np.isnan(value) else round(min(1.0, value), 3) for value in ratio.tolist()])
    return {"ranks": names, "every": every, "seconds_per_bin": (until - begin) / 1e9 / ON_OFF_BINS, "share": share}


def _kernels(selection: Selection) -> tuple[Times, Times, Times, NDArray[np.intp]]:
    """Process, start and end on the reference clock, and row of the kernels that are on it; a duplicate counts once."""
    part, store = selection.kernels, selection.store
    process = part.column("process").astype(np.int64)
    start, end = (reference_times(store, process, part.column(name)) for name in ("start_ns", "end_ns"))
    known = np.flatnonzero((start != NO_TIME_NS) & (end != NO_TIME_NS) & ~is_duplicate(part))
    rows = known if part.positions is None else part.positions[known]
    return process[known], start[known], end[known], rows


def _captured_ns(selection: Selection, process: int, borders: Times) -> Times:
    """How much of each stretch a capture of this process covers; all of it where no capture says what it covers."""
    record = selection.store.processes[process]
    of_host = [capture for _, capture in selection.store.captures if capture.host == record.host]
    mine = [capture for capture in of_host if record.pid in capture.pids]
    if not mine:
        return np.diff(borders) if not of_host else np.zeros(len(borders) - 1, dtype=np.int64)
    spans = np.array([(capture.start_ns, capture.end_ns) for capture in mine], dtype=np.int64)
    processes = np.full(len(spans), process)
    start, end = (reference_times(selection.store, processes, spans[:, side]) for side in (0, 1))
    return covered_ns(start, end, borders)


def timeline(selection: Selection) -> dict[str, object] | None:
    """Kernels of a few ranks over two iterations like most, or over the middle of the run where iterations are unknown.

    Times are in milliseconds since the window's begin; `wait` is null where it is not known.
    """
    process, start, end, rows = _kernels(selection)
    if not len(start):
        return None
    shown, names, every = lanes(selection, MAX_LANES)
    window, iterations = _window(selection)
    chosen = np.flatnonzero(np.isin(process, shown))
    if window is not None:
        chosen = chosen[(end[chosen] > window[0]) & (start[chosen] < window[1])]
    chosen = chosen[np.argsort(start[chosen], kind="stable")]
    skipped = 0 if window is not None else max(0, (len(chosen) - MAX_BARS) // 2)
    is_cut = len(chosen) > MAX_BARS
    chosen = chosen[skipped : skipped + MAX_BARS]
    if not len(chosen):
        return None
    begin = int(start[chosen].min()) if window is None else window[0]
    return {
        "ranks": names,
        "every": every,
        "iterations": iterations,
        "is_cut": is_cut,
        "ops": _bars(selection, rows[chosen], [shown.index(index) for index in process[chosen].tolist()], begin),
    }


def _bars(selection: Selection, rows: NDArray[np.intp], lane: list[int], begin_ns: int) -> dict[str, object]:
    store = selection.store
    kernels = store.kernels.rows[rows]
    measured = kernel_measures(store, store.kernels.first + rows.astype(np.int64))
    start, end = (reference_times(store, kernels["process"], kernels[name]) for name in ("start_ns", "end_ns"))
    texts = [store.strings[index] for index in store.kernel_templates_of(kernels, "name")["name"].tolist()]
    bars: dict[str, dict[str, list[object]]] = {}
    columns = (texts, lane, start.tolist(), end.tolist(), measured["wait_ns"].tolist())
    for text, place, first, last, wait in zip(*columns, strict=True):
        series = bars.setdefault(
            kernel_operation(text) or text[:60], {"lane": [], "start": [], "length": [], "wait": []}
        )
        series["lane"].append(place)
        series["start"].append(round((first - begin_ns) / 1e6, 4))
        series["length"].append(round((last - first) / 1e6, 4))
        series["wait"].append(None if wait < 0 else round(wait / 1e6, 4))
    return dict(sorted(bars.items()))


def _window(selection: Selection) -> tuple[tuple[int, int] | None, list[int] | None]:
    """Begin and end of the iteration whose length is nearest to the median and of the next one, and their numbers."""
    part = selection.operations
    start, end = (
        reference_times(selection.store, part.column("process"), part.column(name)) for name in ("start_ns", "end_ns")
    )
    iteration = part.column("iteration").astype(np.int64)
    known = (iteration >= 0) & (start != NO_TIME_NS) & (end != NO_TIME_NS)
    numbers, places = np.unique(iteration[known], return_inverse=True)
    if len(numbers) < 3:
        return None, None
    begins = np.full(len(numbers), np.iinfo(np.int64).max)
    ends = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(begins, places, start[known])
    np.maximum.at(ends, places, end[known])
    lengths = np.diff(begins)[:-1]
    middle = int(np.argmin(np.abs(lengths - np.median(lengths))))
    return (int(begins[middle]), int(ends[middle + 1])), numbers[middle : middle + 2].tolist()
