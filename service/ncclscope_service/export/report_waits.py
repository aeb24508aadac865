"""Who waited: by rank and kind of communicator, and by rank and iteration, else time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.export.operation_view import OperationView
from ncclscope_service.export.operations_file import operation_column
from ncclscope_service.export.reference_clock import reference_times
from ncclscope_service.export.report_iterations import Bins
from ncclscope_service.export.report_signatures import NOT_KNOWN
from ncclscope_service.export.report_time import lanes
from ncclscope_service.export.selection import Selection
from ncclscope_wire.terms import NO_TIME_NS, OPERATION_CODES

MAX_HEAT_ROWS: Final = 512
TIME_BINS: Final = 96
_MOSTLY: Final = 0.9
_EVERYBODY: Final = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll")
_IS_OF_EVERYBODY: Final = np.isin(np.arange(256), [OPERATION_CODES[name] for name in _EVERYBODY])


def kind_waits(selection: Selection) -> dict[str, object] | None:
    """Waiting as a share of NCCL kernel time, by rank and kind of communicator; None where no wait is known."""
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
    """Waiting as a share, by rank and column; None where nothing is known."""

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
    """Iterations."""

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
    """Where nearly all kernels' operations lie in known iterations: bins of time would cut these at random."""
    iteration = selection.operations.column("iteration").astype(np.int64)
    with_kernel = selection.operations.column("start_ns") != NO_TIME_NS
    known = iteration[with_kernel & (iteration >= 0)]
    if len(known) < max(1, _MOSTLY * int(np.count_nonzero(with_kernel))) or known.min() == known.max():
        return None
    return _IterationAxis(Bins(known))


def _time_axis(selection: Selection) -> _TimeAxis | None:
    span = _span(selection)
    return None if span is None else _TimeAxis(span[0], max(1, -(-(span[1] + 1 - span[0]) // TIME_BINS)))


def _add_waits(
    view: OperationView, place: NDArray[np.int64], waited: NDArray[np.int64], busy: NDArray[np.int64]
) -> None:
    """Each launch once would be exact; operations that share one have the same wait and duration, so shares agree."""
    wait, duration = operation_column(view, "wait_ns"), operation_column(view, "duration_ns")
    is_known = wait.is_known & duration.is_known & (place >= 0)
    places = view.rows["process"][is_known], place[is_known]
    np.add.at(waited, places, wait.values[is_known])
    np.add.at(busy, places, duration.values[is_known])


def _span(selection: Selection) -> tuple[int, int] | None:
    part = selection.operations
    start, end = (
        reference_times(selection.store, part.column("process"), part.column(name)) for name in ("start_ns", "end_ns")
    )
    is_known = (start != NO_TIME_NS) & (end != NO_TIME_NS)
    return (int(start[is_known].min()), int(end[is_known].max())) if is_known.any() else None
