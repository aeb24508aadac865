"""How much of a job's time captures of GPU kernels cover."""

from __future__ import annotations

from typing import Final

import numpy as np

from ncclscope_service.store import Store
from ncclscope_service.window import RecentOperations, Window
from ncclscope_wire.terms import NO_TIME_NS

_ARRIVAL_SLACK_NS: Final = 600_000_000_000
"""Captures arrive out of order by less than this: an older one ends the search backwards. nsys's maker
supports captures of up to five minutes."""


def jobs_with_kernels(store: Store) -> frozenset[str]:
    """Jobs of which a capture or a kernel has been seen, since the start."""
    processes = store.kernels.rows["process"]
    seen = np.flatnonzero(np.bincount(processes[processes >= 0]))
    jobs = {store.process_job[int(index)] for index in seen}
    series = store.series.rows
    with_kernels = series["communicator"][series["matched"] > 0]
    jobs |= {store.communicators[int(index)].job for index in np.unique(with_kernels) if index >= 0}
    return frozenset(jobs)


def captured_ratio(store: Store, job: str, operations: RecentOperations, window: Window) -> float | None:
    """Share of the window covered by captures, mean over the job's processes that logged in it.

    Of a process counts the stretch from its first operation in the window to its last. None where the job
    has no capture at all, or no line of it has a time.
    """
    observed = _observed(store, job, operations, window)
    captures = _captures_by_process(store, job, window)
    if not observed or not captures:
        return None
    covered = sum(_overlap_ns(captures.get(process, []), *span) for process, span in observed.items())
    return round(covered / sum(end - begin for begin, end in observed.values()), 4)


def _observed(store: Store, job: str, operations: RecentOperations, window: Window) -> dict[int, tuple[int, int]]:
    """By process of the job: times of its first and last operation in the window."""
    inside = window.holds(operations.logged_ns)
    processes, times = operations.process[inside], operations.logged_ns[inside]
    first = np.full(len(store.processes), np.iinfo(np.int64).max, np.int64)
    last = np.full(len(store.processes), NO_TIME_NS, np.int64)
    np.minimum.at(first, processes, times)
    np.maximum.at(last, processes, times)
    return {
        int(process): (int(first[process]), int(last[process]))
        for process in np.flatnonzero(first < last)
        if store.process_job[process] == job
    }


def _captures_by_process(store: Store, job: str, window: Window) -> dict[int, list[tuple[int, int]]]:
    """Captured stretches by process of the job that was captured, the recent ones at least."""
    index_of = {
        (process.host, process.pid): index
        for index, process in enumerate(store.processes)
        if store.process_job[index] == job
    }
    stretches: dict[int, list[tuple[int, int]]] = {}
    for _, capture in reversed(store.captures):
        if capture.end_ns < window.begin_ns - _ARRIVAL_SLACK_NS and stretches:
            break
        for pid in capture.pids:
            process = index_of.get((capture.host, pid))
            if process is not None:
                stretches.setdefault(process, []).append((capture.start_ns, capture.end_ns))
    return stretches


def _overlap_ns(stretches: list[tuple[int, int]], begin: int, end: int) -> int:
    """How much of begin..end the union of the stretches covers."""
    covered, reached = 0, begin
    for start, stop in sorted(stretches):
        start_here, stop_here = max(start, reached), min(stop, end)
        if stop_here > start_here:
            covered += stop_here - start_here
            reached = stop_here
    return covered
