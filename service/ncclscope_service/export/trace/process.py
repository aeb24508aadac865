"""The trace events of one process: its kernels, their parallelism, its NVTX phases, its log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.export.json_files import shown_times
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.export.tables.kernels_file import kernel_operation
from ncclscope_service.export.tables.process_rows import ProcessRows
from ncclscope_service.export.trace.arguments import (
    MAX_COLLECTIVES,
    MAX_LISTED,
    Arguments,
    descriptions,
    kernel_arguments,
    listed_collectives,
    operation_arguments,
)
from ncclscope_service.export.trace.launches import WAIT_SHOWN_NS, Launches
from ncclscope_service.export.trace.tracks import Axis, Event, ProcessTracks, Track
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

_ROWS_PER_BATCH: Final = 1 << 13

_NVTX: Final = Track(0, "NVTX")
_LOG: Final = Track(2000, "logged, no kernel")
_UNTIMED: Final = Track(2001, "logged, time not known")
_NOT_KNOWN: Final = "not known"


_MEASURED: Final = frozenset(
    {"algbw_GB_per_s", "busbw_GB_per_s", "busbw_apparent_GB_per_s", "bus_factor", "wait_us"}
    | {"transfer_us", "ranks_seen", "iteration"}
)
"""Arguments of a captured operation that hold for its first replay only."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the kernel of a launch was drawn."""

    pid: int
    tid: int
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class ProcessTrace:
    """Draws one process after the other on a shared axis."""

    store: Store
    axis: Axis
    launches: Launches
    wanted: frozenset[int]
    """Launches whose places the arrows need."""
    places: dict[int, Place] = field(default_factory=dict[int, Place])
    _templates: list[Arguments] = field(default_factory=list[Arguments])
    _operations: list[str | None] = field(default_factory=list[str | None])
    _replay_measures: dict[tuple[int, int], Arguments] = field(default_factory=dict[tuple[int, int], Arguments])
    """Of further replays of captured launches, by launch and start."""

    def __post_init__(self) -> None:
        self._templates = kernel_arguments(self.store)
        self._operations = [
            kernel_operation(self.store.strings[int(name)]) for name in self.store.kernel_templates.rows["name"]
        ]

        rows = self.store.replays.rows
        rows = rows[(rows["replay"] > 0) & (rows["transfer_ns"] >= 0)]
        columns = (rows[name].tolist() for name in ("captured_launch", "start_ns", "wait_ns", "transfer_ns", "busbw"))
        for launch, start, wait, transfer, busbw in zip(*columns, strict=True):
            measures: Arguments = {"transfer_us": transfer / 1000, "busbw_GB_per_s": round(busbw / 1e9, 4)}
            if wait >= 0:
                measures["wait_us"] = wait / 1000
            self._replay_measures[launch, start] = measures

    def kernels(self, tracks: ProcessTracks, kernels: ProcessRows) -> Iterator[list[Event]]:
        """The process's kernels with their waits, and the same times by parallelism; batches in order of start."""
        for chosen in _batches(np.argsort(kernels.column("start_ns"), kind="stable")):
            yield self._kernel_batch(tracks, kernels.take(chosen))

    def ranges(self, tracks: ProcessTracks, ranges: ProcessRows) -> Iterator[list[Event]]:
        """The NVTX ranges of the process's representative thread: the one that has most."""
        tids = ranges.column("tid")
        ours = ranges.where(tids == _most_frequent(tids))
        starts = shown_times(self.store, ours.column("process"), ours.column("start_ns"))
        ends = shown_times(self.store, ours.column("process"), ours.column("end_ns"))
        lengths = np.where(ours.column("end_ns") == NO_TIME_NS, 0, np.maximum(ends - starts, 0))
        for chosen in _batches(np.lexsort([-lengths, starts])):
            columns = (ours.take(chosen)["text"].tolist(), starts[chosen].tolist(), lengths[chosen].tolist())
            events = [
                self._range(tracks, self.store.strings[text], start, start + length)
                for text, start, length in zip(*columns, strict=True)
            ]
            yield tracks.announcements() + events

    def logged(self, tracks: ProcessTracks, operations: ProcessRows, at_ns: NDArray[np.int64]) -> Iterator[list[Event]]:
        """Operations without a kernel, at the times given, as instants."""
        return self._instants(tracks, _LOG, operations, at_ns, {})

    def untimed(
        self, tracks: ProcessTracks, operations: ProcessRows, at_ns: NDArray[np.int64]
    ) -> Iterator[list[Event]]:
        """Operations of which no time is known, at those of the operations logged before them."""
        return self._instants(tracks, _UNTIMED, operations, at_ns, {"time": "not known"})

    def _instants(
        self, tracks: ProcessTracks, track: Track, operations: ProcessRows, at_ns: NDArray[np.int64], more: Arguments
    ) -> Iterator[list[Event]]:
        for chosen in _batches(np.argsort(at_ns, kind="stable")):
            arguments = operation_arguments(OperationView(self.store, operations.take(chosen)))
            events: list[Event] = []
            for at, args in zip(at_ns[chosen].tolist(), arguments, strict=True):
                tid = tracks.place(track, at, at)
                name = str(args.get("op", _NOT_KNOWN))
                events.append(self.axis.instant(name, tracks.pid, tid, at) | {"args": args | more})
            yield tracks.announcements() + events

    def _range(self, tracks: ProcessTracks, text: str, start_ns: int, end_ns: int) -> Event:
        tid = tracks.place(_NVTX, start_ns, end_ns, nests=True)
        if end_ns == start_ns:
            return self.axis.instant(text, tracks.pid, tid, start_ns)
        return self.axis.slice(text, tracks.pid, tid, start_ns, end_ns)

    def _kernel_batch(self, tracks: ProcessTracks, kernels: Columns) -> list[Event]:
        starts = shown_times(self.store, kernels["process"], kernels["start_ns"]).tolist()
        ends = shown_times(self.store, kernels["process"], kernels["end_ns"]).tolist()
        streams = self.store.kernel_templates_of(kernels)["stream_id"].tolist()
        arguments = self._arguments(kernels)
        events: list[Event] = []
        columns = (starts, ends, streams, kernels["template"].tolist(), kernels["launch"].tolist(), arguments)
        for start, end, stream, template, launch, args in zip(*columns, strict=True):
            end_ns = max(start, end)
            tid = tracks.place(Track(20 + stream % 1000, f"NCCL kernels, stream {stream}"), start, end_ns)
            events += self._kernel_slices(tracks.pid, tid, start, end_ns, args, self._operations[template])
            if launch in self.wanted:
                self.places.setdefault(launch, Place(tracks.pid, tid, start, end_ns))
            if "op" in args:
                events.append(self._parallelism_slice(tracks, start, end_ns, args))
        return tracks.announcements() + events

    def _kernel_slices(
        self, pid: int, tid: int, start_ns: int, end_ns: int, args: Arguments, kernel_op: str | None
    ) -> list[Event]:
        if "op" not in args:
            name = f"{kernel_op or 'NCCL kernel'} (no operation)"
            return [self.axis.slice(name, pid, tid, start_ns, end_ns) | {"cname": "grey", "args": args}]
        kernel = self.axis.slice(_name(args), pid, tid, start_ns, end_ns) | {"args": args}
        waited = args.get("wait_us")
        wait_ns = round(waited * 1000) if isinstance(waited, float) else 0
        if not WAIT_SHOWN_NS <= wait_ns <= end_ns - start_ns:
            return [kernel]
        wait = self.axis.slice("wait", pid, tid, start_ns, start_ns + wait_ns) | {"cname": "bad"}
        transfer = self.axis.slice("transfer", pid, tid, start_ns + wait_ns, end_ns) | {"cname": "good"}
        return [kernel, wait, transfer]

    def _parallelism_slice(self, tracks: ProcessTracks, start_ns: int, end_ns: int, args: Arguments) -> Event:
        kind = str(args.get("parallelism", _NOT_KNOWN))
        tid = tracks.place(Track(10, f"parallelism {kind}"), start_ns, end_ns)
        label = kind if "parallelism" in args else str(args.get("comm_id", _NOT_KNOWN))
        return self.axis.slice(f"{label} {_name(args)}", tracks.pid, tid, start_ns, end_ns)

    def _arguments(self, kernels: Columns) -> list[Arguments]:
        """By kernel: what its template says, and what the first operation of its launch says."""
        places = self.launches.find(kernels["launch"])
        has_operation = np.nonzero(places >= 0)[0]
        view = OperationView(self.store, self.launches.first(places[has_operation]))
        of_operation = dict(zip(has_operation.tolist(), operation_arguments(view), strict=True))
        arguments = [
            self._templates[template]
            | {"correlation_id": correlation}
            | of_operation.get(row, {"match": "no operation"})
            for row, (template, correlation) in enumerate(
                zip(kernels["template"].tolist(), kernels["correlation_id"].tolist(), strict=True)
            )
        ]
        counts = self.launches.counts(places[has_operation])
        for row in has_operation[counts > 1].tolist():
            arguments[row] |= self._group(int(places[row]))
        for row in np.nonzero(kernels["censored"])[0].tolist():
            arguments[row]["censored"] = True
        for row in np.nonzero(kernels["replay"] > 0)[0].tolist():
            own = self._replay_measures.get((int(kernels["launch"][row]), int(kernels["start_ns"][row])), {})
            kept = {name: value for name, value in arguments[row].items() if not _is_measured(name)}
            arguments[row] = kept | own | {"replay": int(kernels["replay"][row])}
        return arguments

    def _group(self, place: int) -> Arguments:
        """Arguments of a launch that several operations share."""
        view = OperationView(self.store, self.launches.members(place, MAX_COLLECTIVES))
        listed = descriptions(view)
        group: Arguments = {
            "operations": int(self.launches.counts(np.array([place]))[0]),
            "operation_list": listed[:MAX_LISTED],
            "ops": "+".join(dict.fromkeys(text.split(" ", maxsplit=1)[0] for text in listed)),
        }
        collectives = listed_collectives(view)
        return group | {"collective_ids": collectives} if len(collectives) > 1 else group


def _is_measured(name: str) -> bool:
    return name in _MEASURED or name.startswith("efficiency_")


def _name(args: Arguments) -> str:
    name = str(args.get("ops", args["op"]))
    return f"{name} x{args['operations']}" if "operations" in args else name


def _most_frequent(values: NDArray[np.int64]) -> int:
    distinct, counts = np.unique(values, return_counts=True)
    return int(distinct[np.argmax(counts)])


def _batches(order: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    for begin in range(0, len(order), _ROWS_PER_BATCH):
        yield order[begin : begin + _ROWS_PER_BATCH]
