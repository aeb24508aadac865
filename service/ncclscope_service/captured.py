"""How much of a job's time captures of GPU kernels cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ncclscope_service import whole_rows
from ncclscope_service.captures import Captures
from ncclscope_service.intervals import Spans, union
from ncclscope_service.store import Store
from ncclscope_service.window import Int64s, Window
from ncclscope_wire.batch import Columns

SPAN: Final = np.dtype([("seat", "<i4"), ("start_ns", "<i8"), ("end_ns", "<i8")])
"""A captured stretch of one process."""


def jobs_with_kernels(store: Store, processes: Sequence[int]) -> frozenset[str]:
    """Jobs of which a capture or a kernel has been seen since the start; `processes`: those with kernels."""
    jobs = {store.process_job[index] for index in processes}
    series = store.series.rows
    with_kernels = series["communicator"][series["matched"] > 0]
    jobs |= {store.communicators[int(index)].job for index in np.unique(with_kernels) if index >= 0}
    return frozenset(jobs)


class CapturedSpans:
    """Where captures lie in time, by host and process, as far as they reach into the window or come after it."""

    def __init__(self) -> None:
        self._read = 0
        """Captures of the store before this one."""
        self._seats: dict[tuple[str, int], int] = {}
        """Of every process that was captured, by host and pid."""
        self._spans: Columns = np.empty(0, SPAN)

    def advance(self, captures: Captures, window: Window) -> None:
        """Takes the captures that came since, and forgets what ended before the window."""
        new = captures.since(self._read)
        self._read = captures.next_id
        found = [
            (self._seats.setdefault((capture.host, pid), len(self._seats)), capture.start_ns, capture.end_ns)
            for _, capture in new
            for pid in capture.pids
        ]
        if found:
            self._spans = np.concatenate([self._spans, np.array(found, SPAN)])
        is_over = self._spans["end_ns"] < window.begin_ns
        if is_over.any():
            self._spans = whole_rows.kept(self._spans, ~is_over)

    def ratio(self, store: Store, processes: Int64s, first_ns: Int64s, last_ns: Int64s) -> float | None:
        """Share that captures cover of the time between the first and last operation of each of these processes.

        None where none of them was ever captured, or none has two times.
        """
        seats = np.asarray([self._seat(store, process) for process in processes.tolist()], np.int64)
        is_observed = first_ns < last_ns
        whole = int((last_ns - first_ns)[is_observed].sum())
        if not whole or not (seats >= 0).any():
            return None
        place_of = np.full(len(self._seats), -1, np.int64)
        place_of[seats[seats >= 0]] = np.flatnonzero(seats >= 0)
        places = place_of[self._spans["seat"]]
        spans, places = self._spans[places >= 0], places[places >= 0]
        start = np.maximum(spans["start_ns"], first_ns[places])
        end = np.minimum(spans["end_ns"], last_ns[places])
        held = np.flatnonzero(start < end)
        covered = union(Spans(places[held], start[held], end[held]))
        return round(int((covered.end - covered.start).sum()) / whole, 4)

    def _seat(self, store: Store, process: int) -> int:
        of = store.processes[process]
        return self._seats.get((of.host, of.pid), -1)
