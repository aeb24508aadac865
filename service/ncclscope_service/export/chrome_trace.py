"""`trace.json.gz`: the run on one clock, as a Chrome trace that opens in Perfetto.

A process per rank with tracks for NVTX phases, parallelism and the kernels of each CUDA stream; a process
of findings; a process of counters. Events are made and written in batches, so memory does not grow with
the length of the run (beyond a few indices of eight bytes per row).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import orjson
from numpy.typing import NDArray

from ncclscope_service.export.findings_file import finding_record
from ncclscope_service.export.process_rows import (
    ProcessRows,
    process_name,
    process_ranks,
    processes_by_rank,
    rows_by_process,
)
from ncclscope_service.export.reference_clock import hosts_without_clock, shown_times
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.trace_arguments import significant
from ncclscope_service.export.trace_launches import ARROW_WAIT_NS, Arrows, Launches, arrows
from ncclscope_service.export.trace_process import Place, ProcessTrace
from ncclscope_service.export.trace_tracks import (
    COMMUNICATORS_PID,
    FINDINGS_PID,
    FIRST_RANK_PID,
    Axis,
    Event,
    ProcessTracks,
    Track,
    process_metadata,
)
from ncclscope_wire.terms import NO_TIME_NS

_GZIP_LEVEL: Final = 5
_ROWS_PER_BATCH: Final = 1 << 13
_STEP_NS: Final = 1000

REFERENCE_CLOCK: Final = "reference clock"
LOG_STAMPS: Final = "log stamps"
ORDER_ONLY: Final = "order only"
"""What the time axis is; "order only": no time is known, and one operation follows the other by 1 µs."""


@dataclass(frozen=True, slots=True)
class TraceCounts:
    """What was written."""

    events: int
    arrows: int
    arrows_left_out: int
    operations_without_time: int
    """Operations that have neither kernel nor stamp, in a run where others have: they are not in the trace."""


def write_trace(selection: Selection, path: Path) -> TraceCounts:
    """Writes the trace; what it shows and leaves out stands in its `otherData`."""
    trace = _Trace(selection)
    written = 0
    with gzip.open(path, "wb", compresslevel=_GZIP_LEVEL) as file:
        file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
        for events in trace.batches():
            if events:
                file.write(b",\n" if written else b"")
                file.write(_packed(events))
                written += len(events)
        counts = TraceCounts(written, trace.arrows_drawn, trace.arrows.left_out, trace.without_time)
        file.write(b'\n],"otherData":' + orjson.dumps(trace.metadata(counts)) + b"}\n")
    return counts


def _packed(events: list[Event]) -> bytes:
    """The events without the brackets around them; numbers that JSON does not have become null."""
    return orjson.dumps(events, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)[1:-1]


class _Trace:
    """One trace in the making."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._store = selection.store
        self.arrows: Arrows = arrows(selection)
        self.arrows_drawn = 0
        self.without_time = 0
        self._kernels = rows_by_process(selection.kernels)
        self._ranges = rows_by_process(selection.ranges)
        self._logged = rows_by_process(selection.operations, selection.operations.column("launch") < 0)
        self._ranks = process_ranks(selection)
        self._time = REFERENCE_CLOCK
        self._axis, self._last_ns = self._find_axis()
        wanted = frozenset(np.concatenate([self.arrows.late, self.arrows.waiting]).tolist())
        self._drawn = ProcessTrace(self._store, self._axis, Launches(selection), wanted)

    def batches(self) -> Iterator[list[Event]]:
        """All events: findings, counters, each process by rank, arrows."""
        yield from self._findings()
        yield from self._counters()
        for place, process in enumerate(processes_by_rank(self._selection)):
            yield from self._process(ProcessTracks(FIRST_RANK_PID + place), process)
        yield from self._arrow_events()

    def metadata(self, counts: TraceCounts) -> dict[str, object]:
        """What a reader must know to read the axis, and what was left out."""
        return {
            "producer": "ncclscope",
            "time": self._time,
            "time_origin_ns": self._axis.origin_ns if self._time != ORDER_ONLY else None,
            "clock_reference": self._store.clock_reference,
            "hosts_without_clock": hosts_without_clock(self._store),
            "arrow_threshold_us": ARROW_WAIT_NS / 1000,
            "events": counts.events,
            "arrows": counts.arrows,
            "arrows_left_out": counts.arrows_left_out,
            "operations_without_time": counts.operations_without_time,
        }

    def _find_axis(self) -> tuple[Axis, int]:
        """The axis from the earliest to the latest time of all that is drawn; also decides what it means."""
        if not len(self._selection.kernels):
            has_stamp = any(np.any(_stamps(rows) != NO_TIME_NS) for rows in self._logged.values())
            self._time = LOG_STAMPS if has_stamp else ORDER_ONLY
        if self._time == ORDER_ONLY:
            return Axis(0), max((len(rows) for rows in self._logged.values()), default=0) * _STEP_NS
        bounds = [(int(known.min()), int(known.max())) for known in self._all_times() if len(known)]
        return Axis(min((first for first, _ in bounds), default=0)), max((last for _, last in bounds), default=0)

    def _all_times(self) -> Iterator[NDArray[np.int64]]:
        """All times that are drawn, a process and a kind at a time."""
        for group in (self._kernels, self._ranges):
            for rows in group.values():
                yield self._shown(rows, rows.column("start_ns"))
                yield self._shown(rows, rows.column("end_ns"))
        for rows in self._logged.values():
            yield self._shown(rows, _stamps(rows))

    def _shown(self, rows: ProcessRows, host_times: NDArray[np.int64]) -> NDArray[np.int64]:
        is_known = host_times != NO_TIME_NS
        return shown_times(self._store, rows.column("process")[is_known], host_times[is_known])

    def _process(self, tracks: ProcessTracks, process: int) -> Iterator[list[Event]]:
        yield process_metadata(tracks.pid, process_name(self._selection, process, self._ranks), tracks.pid)
        if process in self._ranges:
            yield from self._drawn.ranges(tracks, self._ranges[process])
        if process in self._kernels:
            yield from self._drawn.kernels(tracks, self._kernels[process])
        if process in self._logged:
            yield from self._logged_events(tracks, self._logged[process])

    def _logged_events(self, tracks: ProcessTracks, rows: ProcessRows) -> Iterator[list[Event]]:
        if self._time == ORDER_ONLY:
            yield from self._drawn.logged(tracks, rows, np.arange(len(rows), dtype=np.int64) * _STEP_NS)
            return
        stamps = _stamps(rows)
        has_stamp = stamps != NO_TIME_NS
        self.without_time += int(np.count_nonzero(~has_stamp))
        yield from self._drawn.logged(tracks, rows.where(has_stamp), self._shown(rows, stamps))

    def _findings(self) -> Iterator[list[Event]]:
        findings = sorted(self._selection.findings, key=lambda finding: finding.since_ns)
        if not findings:
            return
        tracks = ProcessTracks(FINDINGS_PID)
        events = process_metadata(FINDINGS_PID, f"findings {' '.join(self._selection.jobs)}".strip(), FINDINGS_PID)
        for finding in findings:
            start = max(finding.since_ns, self._axis.origin_ns)
            end = max(start, self._last_ns if finding.until_ns is None else finding.until_ns)
            tid = tracks.place(Track(0, "findings"), start, end)
            event = self._axis.slice(f"{finding.kind.value}: {finding.summary}", FINDINGS_PID, tid, start, end)
            events.append(event | {"cname": "terrible", "args": finding_record(finding)})
        yield tracks.announcements() + events

    def _counters(self) -> Iterator[list[Event]]:
        """busbw of each communicator: the value of the collective that has just ended."""
        labels = {communicator.index: communicator for communicator in self._selection.communicators}
        announced = False
        for rows in self._selection.collectives.slices(_ROWS_PER_BATCH):
            measured = rows[np.isfinite(rows["busbw"]) & (rows["end_true_ns"] != NO_TIME_NS)]
            measured = measured[measured["end_true_ns"] >= self._axis.origin_ns]
            if len(measured) and not announced:
                yield process_metadata(COMMUNICATORS_PID, "bus bandwidth by communicator", COMMUNICATORS_PID)
                announced = True
            columns = (
                measured["communicator"].tolist(),
                measured["end_true_ns"].tolist(),
                significant(measured["busbw"] / 1e9).tolist(),
            )
            yield [
                {
                    "name": f"{labels[index].parallelism or ''} {labels[index].comm_id} busbw".strip(),
                    "ph": "C",
                    "ts": self._axis.at(at_ns),
                    "pid": COMMUNICATORS_PID,
                    "args": {"GB/s": busbw},
                }
                for index, at_ns, busbw in zip(*columns, strict=True)
                if index in labels
            ]

    def _arrow_events(self) -> Iterator[list[Event]]:
        columns = (self.arrows.late.tolist(), self.arrows.waiting.tolist(), self.arrows.wait_ns.tolist())
        events: list[Event] = []
        for number, (late, waiting, wait_ns) in enumerate(zip(*columns, strict=True), start=1):
            begin, end = self._drawn.places.get(late), self._drawn.places.get(waiting)
            if begin is None or end is None:
                continue
            arrow = self._arrow(number, begin, end, wait_ns)
            self.arrows_drawn += bool(arrow)
            events += arrow
            if len(events) >= _ROWS_PER_BATCH:
                yield events
                events = []
        yield events

    def _arrow(self, number: int, begin: Place, end: Place, wait_ns: int) -> list[Event]:
        """From the start of the late kernel to the end of the wait; none where the clocks contradict it."""
        arrives_ns = max(begin.start_ns, end.start_ns + wait_ns)
        if arrives_ns > end.end_ns:
            return []
        common: Event = {"name": "waited for", "cat": "wait", "id": number}
        return [
            common | {"ph": "s", "ts": self._axis.at(begin.start_ns), "pid": begin.pid, "tid": begin.tid},
            common | {"ph": "f", "bp": "e", "ts": self._axis.at(arrives_ns), "pid": end.pid, "tid": end.tid},
        ]


def _stamps(rows: ProcessRows) -> NDArray[np.int64]:
    """When an operation was logged, else when it arrived."""
    logged = rows.column("logged_at_ns")
    return np.where(logged == NO_TIME_NS, rows.column("observed_at_ns"), logged)
