"""Report data over time: kernels running or not, a few iterations in detail, and waiting.

Waiting is given by rank and kind of communicator, and by rank and iteration, or time if iterations are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import distinct
from ncclscope_service.columns.intervals import covered_ns
from ncclscope_service.export.json_files import reference_times
from ncclscope_service.export.report.iterations import NOT_KNOWN, Bins
from ncclscope_service.export.selection import Selection, process_ranks, processes_by_rank
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.export.tables.kernels_file import is_duplicate, kernel_measures, kernel_operation
from ncclscope_service.export.tables.operations_file import operation_column
from ncclscope_wire.terms import NO_TIME_NS, OPERATION_CODES

Times = NDArray[np.int64]
PlacedKernels: TypeAlias = tuple[Times, Times, Times, NDArray[np.intp]]

ON_OFF_BINS: Final = 200
MAX_ROWS: Final = 256
MAX_LANES: Final = 16
MAX_BARS: Final = 3000
"""Kernels in the timeline: what a browser draws without delay and a person can still see."""


def lanes(selection: Selection, limit: int) -> tuple[list[int], list[str], int]:
    """At most `limit` processes in the order of their ranks, their names, and that only every n-th is shown."""
    processes = processes_by_rank(selection)
    every = max(1, -(-len(processes) // limit))
    return processes[::every], labels(selection, processes[::every]), every


def labels(selection: Selection, processes: Sequence[int]) -> list[str]:
    """The names of processes in figures: their ranks, else host and pid."""
    ranks, records = process_ranks(selection), selection.store.processes
    return [
        ",".join(map(str, ranks[index])) if index in ranks else f"{records[index].host}:{records[index].pid}"
        for index in processes
    ]


def on_off(selection: Selection, kernels: PlacedKernels) -> dict[str, object] | None:
    """By rank, the share of each stretch of time in which an NCCL kernel ran; None if nothing was recorded.

    If a capture covers a part of a stretch the share is that of the part.
    """
    process, start, end, _ = kernels
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


def placed_kernels(selection: Selection) -> PlacedKernels:
    """Process, start and end on the reference clock, and row of the kernels that are on it; a duplicate counts once."""
    part, store = selection.kernels, selection.store
    process = part.column("process").astype(np.int64)
    start, end = (reference_times(store, process, part.column(name)) for name in ("start_ns", "end_ns"))
    known = np.flatnonzero((start != NO_TIME_NS) & (end != NO_TIME_NS) & ~is_duplicate(part))
    rows = known if part.positions is None else part.positions[known]
    return process[known], start[known], end[known], rows


def _captured_ns(selection: Selection, process: int, borders: Times) -> Times:
    """How much of each stretch a capture of this process covers; all of it if no capture says what it covers."""
    record = selection.store.processes[process]
    of_host = [capture for _, capture in selection.store.captures if capture.host == record.host]
    mine = [capture for capture in of_host if record.pid in capture.pids]
    if not mine:
        return np.diff(borders) if not of_host else np.zeros(len(borders) - 1, dtype=np.int64)
    spans = np.array([(capture.start_ns, capture.end_ns) for capture in mine], dtype=np.int64)
    processes = np.full(len(spans), process)
    start, end = (reference_times(selection.store, processes, spans[:, side]) for side in (0, 1))
    return covered_ns(start, end, borders)


def timeline(selection: Selection, kernels: PlacedKernels) -> dict[str, object] | None:
    """Kernels of a few ranks over two iterations like most, or over the middle of the run if iterations are unknown.

    Times are in milliseconds since the window's begin; `wait` is null if it is not known.
    """
    process, start, end, rows = kernels
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
    numbers, places = distinct(iteration[known])
    if len(numbers) < 3:
        return None, None
    begins = np.full(len(numbers), np.iinfo(np.int64).max)
    ends = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(begins, places, start[known])
    np.maximum.at(ends, places, end[known])
    lengths = np.diff(begins)[:-1]
    middle = int(np.argmin(np.abs(lengths - np.median(lengths))))
    return (int(begins[middle]), int(ends[middle + 1])), numbers[middle : middle + 2].tolist()


MAX_HEAT_ROWS: Final = 512
TIME_BINS: Final = 96
_MOSTLY: Final = 0.9
_EVERYBODY: Final = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll")
_IS_OF_EVERYBODY: Final = np.isin(np.arange(256), [OPERATION_CODES[name] for name in _EVERYBODY])


def kind_waits(selection: Selection) -> dict[str, object] | None:
    """Waiting as a share of NCCL kernel time, by rank and kind of communicator; None if no wait is known."""
    store = selection.store
    kinds = [*dict.fromkeys(each.parallelism or NOT_KNOWN for each in selection.communicators)]
    places = {kind: place for place, kind in enumerate(kinds)}
    # Communicators outside the selection, for instance those that were put together with another, have no column.
    elsewhere = len(kinds)
    kind_of = np.asarray(
        [*(places.get(each.parallelism or NOT_KNOWN, elsewhere) for each in store.communicators), elsewhere]
    )

    def column(view: OperationView) -> NDArray[np.int64]:
        found: NDArray[np.int64] = kind_of[view.communicators()]
        return np.where(found < elsewhere, found, -1)

    found = _shares(selection, column, len(kinds))
    if found is None:
        return None
    used = [place for place in range(len(kinds)) if any(row[place] is not None for row in found.share)]
    return {
        "ranks": found.ranks,
        "every": found.every,
        "kinds": [kinds[place] for place in used],
        "share": [[row[place] for place in used] for row in found.share],
    }


def waits(selection: Selection) -> dict[str, object] | None:
    """The same by rank and iteration, else time, of collectives of everybody with everybody.

    Sends and Recvs are left out: the stages of a pipeline wait for each other by design.
    """
    axis = _iteration_axis(selection) or _time_axis(selection)
    found = None if axis is None else _shares(selection, lambda view: _of_everybody(view, axis), axis.bins)
    if axis is None or found is None:
        return None
    return {"ranks": found.ranks, "every": found.every, **axis.document(), "share": found.share}


def _of_everybody(view: OperationView, axis: _TimeAxis | _IterationAxis) -> NDArray[np.int64]:
    return np.where(view.is_op(_IS_OF_EVERYBODY), axis.of(view), -1)


@dataclass(frozen=True, slots=True)
class _Shares:
    """Waiting as a share, by rank and column; None if nothing is known."""

    ranks: list[str]
    every: int
    share: list[list[float | None]]


def _shares(selection: Selection, column: Callable[[OperationView], NDArray[np.int64]], columns: int) -> _Shares | None:
    shape = (len(selection.store.processes), columns)
    waited, busy = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for rows in selection.operations.slices():
        view = OperationView(selection.store, rows)
        _add_waits(view, column(view), waited, busy)
    if not busy.any():
        return None
    shown, names, every = lanes(selection, MAX_HEAT_ROWS)
    share = np.divide(waited, busy, out=np.full(shape, np.nan), where=busy > 0)[shown]
    return _Shares(
        names, every, [[None if np.isnan(value) else round(value, 3) for value in row] for row in share.tolist()]
    )


@dataclass(frozen=True, slots=True)
class _TimeAxis:
    """Stretches of time since the first kernel."""

    begin_ns: int
    width_ns: int
    bins: int = TIME_BINS

    def of(self, view: OperationView) -> NDArray[np.int64]:
        """The bin of each operation; -1 without any."""
        start = reference_times(view.store, view.rows["process"], view.rows["start_ns"])
        place = np.clip((start - self.begin_ns) // self.width_ns, 0, TIME_BINS - 1)
        return np.where(start == NO_TIME_NS, -1, place)

    def document(self) -> dict[str, object]:
        return {"seconds_per_bin": self.width_ns / 1e9}


@dataclass(frozen=True, slots=True)
class _IterationAxis:
    """Columns by iteration."""

    numbers: Bins

    @property
    def bins(self) -> int:
        return self.numbers.count

    def of(self, view: OperationView) -> NDArray[np.int64]:
        """The bin of each operation; -1 without any."""
        iteration = view.rows["iteration"]
        return np.where(iteration < 0, -1, self.numbers.of(iteration))

    def document(self) -> dict[str, object]:
        return {"first": self.numbers.first, "per_bin": self.numbers.per_bin}


def _iteration_axis(selection: Selection) -> _IterationAxis | None:
    """Iterations, if nearly all operations with a kernel lie in known ones: bins of time would cut these at random.

    Spans those that only NCCL Inspector measured too.
    """
    iteration = selection.operations.column("iteration").astype(np.int64)
    with_kernel = selection.operations.column("start_ns") != NO_TIME_NS
    known = iteration[with_kernel & (iteration >= 0)]
    if len(known) < max(1, _MOSTLY * int(np.count_nonzero(with_kernel))) or known.min() == known.max():
        return None
    is_measured = with_kernel | (selection.operations.column("wait_ns") != NO_TIME_NS)
    return _IterationAxis(Bins(iteration[is_measured & (iteration >= 0)]))


def _time_axis(selection: Selection) -> _TimeAxis | None:
    span = _span(selection)
    return None if span is None else _TimeAxis(span[0], max(1, -(-(span[1] + 1 - span[0]) // TIME_BINS)))


def _add_waits(
    view: OperationView, place: NDArray[np.int64], waited: NDArray[np.int64], busy: NDArray[np.int64]
) -> None:
    """Each launch once would be exact; operations that share one have the same wait and duration, so shares agree."""
    wait, duration = operation_column(view, "wait_ns"), operation_column(view, "duration_ns")
    is_known = wait.is_known & duration.is_known & (place >= 0)
    places = (view.rows["process"].astype(np.int64) * waited.shape[1] + place)[is_known]
    np.add.at(waited.reshape(-1), places, wait.values[is_known])  # ten times as fast as by pairs of places
    np.add.at(busy.reshape(-1), places, duration.values[is_known])


def _span(selection: Selection) -> tuple[int, int] | None:
    part = selection.operations
    start, end = (
        reference_times(selection.store, part.column("process"), part.column(name)) for name in ("start_ns", "end_ns")
    )
    is_known = (start != NO_TIME_NS) & (end != NO_TIME_NS)
    return (int(start[is_known].min()), int(end[is_known].max())) if is_known.any() else None
