"""The events of a trace: the run on one clock, whatever the file's format.

A process per rank with tracks for NVTX phases, parallelism and the kernels of each CUDA stream; a process of findings
with arrows to the operations that prove them; a process of counters. Events come in batches.

Counters are by communicator and by kind of communicator, from the joined launches. busbw of a communicator is that of
the launch that has just ended. busbw of a kind (TP, DP, ...) is the mean over its launches that transfer just now, 0 if
none does. Bytes in flight of a kind are the message bytes of its launches that are under way, from the first rank's
start to the end: those of a collective count once, those of sends and receives once at each side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.export.json_files import clock_reference, finding_record, hosts_without_clock, shown_times
from ncclscope_service.export.selection import (
    ProcessRows,
    Selection,
    process_name,
    process_ranks,
    processes_by_rank,
    rows_by_process,
)
from ncclscope_service.export.trace.arguments import significant
from ncclscope_service.export.trace.event_text import (
    COMMUNICATORS_PID,
    FINDINGS_PID,
    FIRST_RANK_PID,
    Axis,
    Event,
    EventText,
    PlacedSlices,
    ProcessTracks,
    Track,
    joined,
    micros,
    numbers,
    of_objects,
    of_texts,
    process_metadata,
    words,
)
from ncclscope_service.export.trace.launches import (
    ARROW_WAIT_NS,
    Arrows,
    Launches,
    arrows,
    collective_text,
    evidence_collectives,
    launches_of,
)
from ncclscope_service.export.trace.process import Place, ProcessTrace
from ncclscope_wire.terms import NO_TIME_NS

_ROWS_PER_BATCH: Final = 1 << 13
_STEP_NS: Final = 1000

REFERENCE_CLOCK: Final = "reference clock"
LOG_STAMPS: Final = "log stamps"
ORDER_ONLY: Final = "order only"
"""Kinds of time axis; "order only": no time is known, and one operation follows the other by 1 µs."""


@dataclass(frozen=True, slots=True)
class TraceCounts:
    """Counts of what a trace shows and leaves out."""

    events: int
    arrows: int
    arrows_left_out: int
    operations_without_time: int
    """Operations that have neither kernel nor stamp, in a run with others that do: drawn beside the one before them."""


class TraceEvents:
    """Builds one trace."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._store = selection.store
        self.arrows: Arrows = arrows(selection)
        self.arrows_drawn = 0
        self.without_time = 0
        self._kernels = rows_by_process(selection.kernels)
        self._ranges = rows_by_process(selection.ranges)
        self._logged = rows_by_process(selection.operations, selection.operations.column("launch") < 0)
        self._operations = rows_by_process(selection.operations)
        self._ranks = process_ranks(selection)
        self._time = REFERENCE_CLOCK
        self._axis, self._last_ns = self._find_axis()
        self._proofs = {
            number: evidence_collectives(selection, finding) for number, finding in enumerate(selection.findings)
        }
        self._proof_launches = launches_of(selection, {one for proofs in self._proofs.values() for one in proofs})
        self._drawn_findings: dict[int, Place] = {}
        wanted = {*self.arrows.late.tolist(), *self.arrows.waiting.tolist()}
        wanted |= {launch for launches in self._proof_launches.values() for launch, _ in launches}
        self._drawn = ProcessTrace(self._store, self._axis, Launches(selection), wanted)

    def batches(self) -> Iterator[EventText]:
        """All events: findings, counters, each process by rank, arrows."""
        yield from self._findings()
        yield from counter_events(self._selection, self._axis)
        for place, process in enumerate(processes_by_rank(self._selection)):
            yield from self._process(ProcessTracks(FIRST_RANK_PID + place), process)
        yield from self._arrow_events()
        yield of_objects(self._proof_arrows())

    def counts(self, events: int) -> TraceCounts:
        """Counts of what was drawn, once all batches were taken; `events` is how many events they held."""
        return TraceCounts(events, self.arrows_drawn, self.arrows.left_out, self.without_time)

    def metadata(self, counts: TraceCounts) -> dict[str, object]:
        """Facts that a reader needs for the time axis, and counts of what was left out."""
        return {
            "producer": "ncclscope",
            "time": self._time,
            "time_origin_ns": self._axis.origin_ns if self._time != ORDER_ONLY else None,
            "clock_reference": clock_reference(self._store, self._selection.jobs),
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
            without_stamp = REFERENCE_CLOCK if len(self._selection.ranges) else ORDER_ONLY
            self._time = LOG_STAMPS if has_stamp else without_stamp
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

    def _process(self, tracks: ProcessTracks, process: int) -> Iterator[EventText]:
        name = process_name(self._selection, process, self._ranks)
        yield of_objects(process_metadata(tracks.pid, name, tracks.pid))
        if process in self._ranges:
            yield from self._drawn.ranges(tracks, self._ranges[process])
        if process in self._kernels:
            yield from self._drawn.kernels(tracks, self._kernels[process])
        if process in self._logged:
            yield from self._logged_events(tracks, process, self._logged[process])

    def _logged_events(self, tracks: ProcessTracks, process: int, rows: ProcessRows) -> Iterator[EventText]:
        if self._time == ORDER_ONLY:
            yield from self._drawn.logged(tracks, rows, np.arange(len(rows), dtype=np.int64) * _STEP_NS)
            return
        stamps = _stamps(rows)
        has_stamp = stamps != NO_TIME_NS
        self.without_time += int(np.count_nonzero(~has_stamp))
        yield from self._drawn.logged(tracks, rows.where(has_stamp), self._shown(rows, stamps))
        if not has_stamp.all():
            untimed = rows.where(~has_stamp)
            yield from self._drawn.untimed(tracks, untimed, self._times_around(process, untimed))

    def _times_around(self, process: int, untimed: ProcessRows) -> NDArray[np.int64]:
        """For operations without any time: that of the nearest one that the process logged before, else after."""
        rows = self._operations[process]
        starts = rows.column("start_ns")
        at_ns = np.where(starts == NO_TIME_NS, _stamps(rows), starts)
        timed = rows.where(at_ns != NO_TIME_NS)
        if not len(timed):
            return np.full(len(untimed), self._axis.origin_ns, dtype=np.int64)
        before = np.searchsorted(timed.positions, untimed.positions) - 1
        return self._shown(timed, at_ns[at_ns != NO_TIME_NS])[np.maximum(before, 0)]

    def _findings(self) -> Iterator[EventText]:
        findings = sorted(enumerate(self._selection.findings), key=lambda numbered: numbered[1].since_ns)
        if not findings:
            return
        tracks = ProcessTracks(FINDINGS_PID)
        events: list[Event] = []
        for number, finding in findings:
            start = max(finding.since_ns, self._axis.origin_ns)
            end = max(start, self._last_ns if finding.until_ns is None else finding.until_ns)
            times = np.array([start]), np.array([end])
            tid = int(tracks.place([PlacedSlices(Track(0, "findings"), np.zeros(1, np.intp), *times)])[0][0])
            self._drawn_findings[number] = Place(FINDINGS_PID, tid, start, end)
            event = self._axis.slice(f"{finding.kind.value}: {finding.summary}", FINDINGS_PID, tid, start, end)
            proofs = [collective_text(self._selection, one) for one in self._proofs[number]]
            args = finding_record(finding) | ({"collective_ids": proofs} if proofs else {})
            events.append(event | {"cname": "terrible", "args": args})
        name = f"findings {' '.join(self._selection.jobs)}".strip()
        yield of_objects(process_metadata(FINDINGS_PID, name, FINDINGS_PID) + tracks.announcements() + events)

    def _proof_arrows(self) -> list[Event]:
        """From each finding to the kernels of its culprits (or of all ranks) in the collectives that prove it."""
        events: list[Event] = []
        for number, proofs in self._proofs.items():
            culprits = self._selection.findings[number].ranks
            for collective in proofs:
                launches = self._proof_launches.get(collective, [])
                chosen = [launch for launch, rank in launches if rank in culprits]
                for launch in chosen or [launch for launch, _ in launches]:
                    arrow = len(self.arrows.late) + 1 + len(events) // 2
                    events += self._proof_arrow(arrow, number, self._drawn.places.get(launch))
        return events

    def _proof_arrow(self, arrow: int, number: int, kernel: Place | None) -> list[Event]:
        """Arrows lead forward in time: to a kernel that ended before the finding began, from it."""
        finding = self._drawn_findings.get(number)
        if finding is None or kernel is None:
            return []
        ends = (finding, kernel)
        if kernel.start_ns < finding.start_ns:
            ends = (kernel, finding)
        begin, end = ends
        leaves_ns = min(end.start_ns, begin.end_ns)
        return _flow("evidence", arrow, self._axis, begin, leaves_ns, end, end.start_ns)

    def _arrow_events(self) -> Iterator[EventText]:
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
                yield of_objects(events)
                events = []
        yield of_objects(events)

    def _arrow(self, number: int, begin: Place, end: Place, wait_ns: int) -> list[Event]:
        """From the start of the late kernel to the end of the wait; none if the clocks contradict it."""
        arrives_ns = max(begin.start_ns, end.start_ns + wait_ns)
        if arrives_ns > end.end_ns:
            return []
        return _flow("waited for", number, self._axis, begin, begin.start_ns, end, arrives_ns)


def _flow(name: str, number: int, axis: Axis, begin: Place, leaves_ns: int, end: Place, arrives_ns: int) -> list[Event]:
    common: Event = {"name": name, "cat": "flow", "id": number}
    return [
        common | {"ph": "s", "ts": axis.at(leaves_ns), "pid": begin.pid, "tid": begin.tid},
        common | {"ph": "f", "bp": "e", "ts": axis.at(arrives_ns), "pid": end.pid, "tid": end.tid},
    ]


def _stamps(rows: ProcessRows) -> NDArray[np.int64]:
    """When an operation was logged, else when it arrived."""
    logged = rows.column("logged_at_ns")
    return np.where(logged == NO_TIME_NS, rows.column("observed_at_ns"), logged)


MAX_POINTS: Final = 50_000
"""Points of one counter by kind; if there would be more, each stretch of time keeps its highest and its last."""

_NOT_KNOWN: Final = "not known"


def counter_events(selection: Selection, axis: Axis) -> Iterator[EventText]:
    """All counters, after the events that name their process; nothing if nothing was joined."""
    rows = selection.collectives.column("end_true_ns")
    if not np.any((rows != NO_TIME_NS) & (rows >= axis.origin_ns)):
        return
    yield of_objects(process_metadata(COMMUNICATORS_PID, "communicators", COMMUNICATORS_PID))
    yield from _by_kind(selection, axis)
    names = {
        each.index: f"busbw {selection.names[each.job, each.comm_id]} ({each.comm_id})"
        for each in selection.communicators
    }
    for part in selection.collectives.slices(_ROWS_PER_BATCH):
        measured = part[np.isfinite(part["busbw"]) & (part["end_true_ns"] >= axis.origin_ns)]
        measured = measured[np.isin(measured["communicator"], list(names))]
        whose = [names[index] for index in measured["communicator"].tolist()]
        yield _points(whose, "GB/s", axis, measured["end_true_ns"], significant(measured["busbw"] / 1e9))


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
        yield _points([name] * len(times), unit, axis, times, values[changes])


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


def _points(names: list[str], unit: str, axis: Axis, at_ns: NDArray[np.int64], values: NDArray[np.number]) -> EventText:
    times = micros(at_ns.astype(np.int64) - axis.origin_ns)
    where = f',"pid":{COMMUNICATORS_PID},"args":{{"{unit}":'
    return of_texts(
        joined(',{"name":', words(names), ',"ph":"C","ts":', times, where, numbers(values), "}}"), len(at_ns)
    )
