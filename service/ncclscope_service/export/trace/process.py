"""The trace events of one process: its kernels, their parallelism, its NVTX phases, its log."""

# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
# (pyarrow carries no types, and pyarrow.compute makes its functions as it is imported)
from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ncclscope_service.columns.group_by import group_by
from ncclscope_service.export.json_files import shown_times
from ncclscope_service.export.selection import ProcessRows
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.export.tables.kernels_file import kernel_operation
from ncclscope_service.export.tables.operations_file import operation_column
from ncclscope_service.export.trace.arguments import (
    MAX_COLLECTIVES,
    MAX_LISTED,
    Arguments,
    descriptions,
    kernel_arguments,
    listed_collectives,
    operation_arguments,
)
from ncclscope_service.export.trace.event_text import (
    Axis,
    EventText,
    PlacedSlices,
    ProcessTracks,
    Track,
    at_rows,
    constant,
    fields,
    instants,
    joined,
    numbers,
    of_texts,
    slices,
    words,
)
from ncclscope_service.export.trace.launches import WAIT_SHOWN_NS, Launches
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS

_ROWS_PER_BATCH: Final = 1 << 13

_NVTX: Final = Track(0, "NVTX")
_LOG: Final = Track(2000, "logged, no kernel")
_UNTIMED: Final = Track(2001, "logged, time not known")
_NOT_KNOWN: Final = "not known"


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
    wanted: Set[int]
    """Launches whose places the arrows need."""
    places: dict[int, Place] = field(default_factory=dict[int, Place])
    _templates: pa.Array = field(init=False)
    _kernel_names: pa.Array = field(init=False)
    """By kernel template: its arguments as JSON, and what a kernel without an operation is called."""
    _replay_measures: dict[tuple[int, int], tuple[int, Arguments]] = field(
        default_factory=dict[tuple[int, int], tuple[int, Arguments]]
    )
    """Wait and arguments of further replays of captured launches, by launch and start."""

    def __post_init__(self) -> None:
        self._templates = kernel_arguments(self.store)
        operations = [
            kernel_operation(self.store.strings[int(name)]) for name in self.store.kernel_templates.rows["name"]
        ]
        self._kernel_names = words([f"{operation or 'NCCL kernel'} (no operation)" for operation in operations])

        rows = self.store.replays.rows
        known = (rows["replay"] > 0) & (rows["transfer_ns"] >= 0)
        names = ("captured_launch", "start_ns", "wait_ns", "transfer_ns", "busbw")
        columns = (rows[name][known].tolist() for name in names)
        for launch, start, wait, transfer, busbw in zip(*columns, strict=True):
            measures: Arguments = {"transfer_us": transfer / 1000, "busbw_GB_per_s": round(busbw / 1e9, 4)}
            if wait >= 0:
                measures["wait_us"] = wait / 1000
            self._replay_measures[launch, start] = wait, measures

    def kernels(self, tracks: ProcessTracks, kernels: ProcessRows) -> Iterator[EventText]:
        """The process's kernels with their waits, and the same times by parallelism; batches in order of start."""
        for chosen in _batches(np.argsort(kernels.column("start_ns"), kind="stable")):
            yield self._kernel_batch(tracks, kernels.take(chosen))

    def ranges(self, tracks: ProcessTracks, ranges: ProcessRows) -> Iterator[EventText]:
        """The NVTX ranges of the process's representative thread: the one that has most."""
        tids = ranges.column("tid")
        ours = ranges.where(tids == _most_frequent(tids))
        starts = shown_times(self.store, ours.column("process"), ours.column("start_ns"))
        ends = shown_times(self.store, ours.column("process"), ours.column("end_ns"))
        lengths = np.where(ours.column("end_ns") == NO_TIME_NS, 0, np.maximum(ends - starts, 0))
        for chosen in _batches(np.lexsort([-lengths, starts])):
            names = words([self.store.strings[text] for text in ours.column("text")[chosen].tolist()])
            begins, spans = starts[chosen], lengths[chosen]
            placed = PlacedSlices(_NVTX, np.arange(len(chosen)), begins, begins + spans)
            (tid,) = tracks.place([placed], nests=True)
            where = (names, tracks.pid, tid, begins)
            texts = pc.if_else(
                pa.array(spans > 0),
                joined(*slices(self.axis, *where, begins + spans), "}"),
                joined(*instants(self.axis, *where), "}"),
            )
            yield of_texts(texts, len(chosen), tracks.announcements())

    def logged(self, tracks: ProcessTracks, operations: ProcessRows, at_ns: NDArray[np.int64]) -> Iterator[EventText]:
        """Operations without a kernel, at the times given, as instants."""
        return self._instants(tracks, _LOG, operations, at_ns, {})

    def untimed(self, tracks: ProcessTracks, operations: ProcessRows, at_ns: NDArray[np.int64]) -> Iterator[EventText]:
        """Operations of which no time is known, at those of the operations logged before them."""
        return self._instants(tracks, _UNTIMED, operations, at_ns, {"time": "not known"})

    def _instants(
        self, tracks: ProcessTracks, track: Track, operations: ProcessRows, at_ns: NDArray[np.int64], more: Arguments
    ) -> Iterator[EventText]:
        for chosen in _batches(np.argsort(at_ns, kind="stable")):
            view = OperationView(self.store, operations.take(chosen))
            times = at_ns[chosen]
            (tid,) = tracks.place([PlacedSlices(track, np.arange(len(chosen)), times, times)])
            names = words([str(op or _NOT_KNOWN) for op in operation_column(view, "op").objects()])
            arguments = pc.utf8_slice_codeunits(joined(operation_arguments(view), fields(more)), 1)
            events = instants(self.axis, names, tracks.pid, tid, times)
            yield of_texts(joined(*events, ',"args":{', arguments, "}}"), len(chosen), tracks.announcements())

    def _kernel_batch(self, tracks: ProcessTracks, kernels: Columns) -> EventText:
        starts = shown_times(self.store, kernels["process"], kernels["start_ns"])
        ends = np.maximum(starts, shown_times(self.store, kernels["process"], kernels["end_ns"]))
        ran = self._operations_of(kernels)
        tid, parallel_tid = self._place_kernels(tracks, kernels, ran, starts, ends)
        for row, launch in enumerate(kernels["launch"].tolist()):
            if launch in self.wanted:
                self.places.setdefault(launch, Place(tracks.pid, int(tid[row]), int(starts[row]), int(ends[row])))
        pid, amount = tracks.pid, len(kernels)
        unnamed = self._kernel_names.take(pa.array(kernels["template"].astype(np.int64)))
        kernel = (
            *slices(
                self.axis, pc.coalesce(at_rows(words(ran.names), ran.rows, amount), unnamed), pid, tid, starts, ends
            ),
            pc.if_else(pa.array(ran.has_name), constant(""), constant(',"cname":"grey"')),
            ',"args":{',
            self._templates.take(pa.array(kernels["template"].astype(np.int64))),
            ',"correlation_id":',
            numbers(kernels["correlation_id"]),
            ran.arguments,
            "}}",
        )
        waits = np.flatnonzero(ran.has_name & (ran.wait_ns >= WAIT_SHOWN_NS) & (ran.wait_ns <= ends - starts))
        until = starts[waits] + ran.wait_ns[waits]
        wait = slices(self.axis, words(["wait"] * len(waits)), pid, tid[waits], starts[waits], until)
        transfer = slices(self.axis, words(["transfer"] * len(waits)), pid, tid[waits], until, ends[waits])
        named = ran.rows
        labels = words([f"{label} {name}" for label, name in zip(ran.labels, ran.names, strict=True)])
        parallel = slices(self.axis, labels, pid, parallel_tid, starts[named], ends[named])
        texts = joined(
            *kernel,
            at_rows(joined(*wait, ',"cname":"bad"}', *transfer, ',"cname":"good"}'), waits, amount),
            at_rows(joined(*parallel, "}"), named, amount),
        )
        return of_texts(texts, amount + 2 * len(waits) + len(named), tracks.announcements())

    def _place_kernels(
        self,
        tracks: ProcessTracks,
        kernels: Columns,
        ran: _Operations,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The thread of each kernel, and of its slice by parallelism for those with a name."""
        streams = self.store.kernel_templates_of(kernels)["stream_id"]
        kinds = list(dict.fromkeys(ran.kinds))
        kind_of = np.array([kinds.index(kind) for kind in ran.kinds], np.int64)
        by_stream = [(f"NCCL kernels, stream {stream}", 20 + stream % 1000, at) for stream, at in group_by(streams)]
        by_kind = [(f"parallelism {kinds[kind]}", 10, at) for kind, at in group_by(kind_of)]
        rows = [*(at for _, _, at in by_stream), *(ran.rows[at] for _, _, at in by_kind)]
        tracked = zip((*by_stream, *by_kind), rows, strict=True)
        placed = [PlacedSlices(Track(sort, name), at, starts[at], ends[at]) for (name, sort, _), at in tracked]
        found = tracks.place(placed)
        tids = np.zeros((2, len(kernels)), np.int64)
        for number, (at, tid) in enumerate(zip(rows, found, strict=True)):
            tids[int(number >= len(by_stream)), at] = tid
        return tids[0], tids[1][ran.rows]

    def _operations_of(self, kernels: Columns) -> _Operations:
        """The first operation of each kernel's launch, and the sums over all of its operations."""
        places = self.launches.find(kernels["launch"])
        found = np.flatnonzero(places >= 0)
        view = OperationView(self.store, self.launches.first(places[found]))
        own, kinds, ids = (operation_column(view, name).objects() for name in ("op", "parallelism", "comm_id"))
        names = [None if name is None else str(name) for name in own]
        is_replay = kernels["replay"] > 0
        wait_ns = np.full(len(kernels), NO_TIME_NS)
        wait_ns[found] = np.where(is_replay[found], NO_TIME_NS, view.rows["wait_ns"])
        more: dict[int, Arguments] = {}
        shared = np.flatnonzero(self.launches.counts(places[found]) > 1)
        for at, group in zip(shared.tolist(), self._groups(places[found[shared]]), strict=True):
            more[int(found[at])] = group
            if names[at] is not None:
                names[at] = f"{group['ops']} x{group['operations']}"
        for row in np.flatnonzero(kernels["censored"]).tolist():
            more.setdefault(row, {})["censored"] = True
        for row in np.flatnonzero(is_replay).tolist():
            own_wait, measures = self._replay_measures.get(
                (int(kernels["launch"][row]), int(kernels["start_ns"][row])), (NO_TIME_NS, {})
            )
            wait_ns[row] = own_wait
            more.setdefault(row, {}).update(measures, replay=int(kernels["replay"][row]))
        amount, extra = len(kernels), sorted(more)
        said = at_rows(operation_arguments(view, is_replay[found]), found, amount)
        named = [at for at, name in enumerate(names) if name is not None]
        has_name = np.zeros(amount, np.bool_)
        has_name[found[named]] = True
        return _Operations(
            rows=found[named],
            has_name=has_name,
            names=[str(names[at]) for at in named],
            kinds=[str(kinds[at] or _NOT_KNOWN) for at in named],
            labels=[str(kinds[at] or ids[at] or _NOT_KNOWN) for at in named],
            arguments=joined(
                pc.coalesce(said, constant(',"match":"no operation"')),
                at_rows(pa.array([fields(more[row]) for row in extra], pa.string()), np.array(extra, np.intp), amount),
            ),
            wait_ns=wait_ns,
        )

    def _groups(self, places: NDArray[np.intp]) -> Iterator[Arguments]:
        """Arguments of launches that several operations share."""
        rows, counts = self.launches.members(places, MAX_COLLECTIVES)
        view = OperationView(self.store, rows)
        listed, ids = descriptions(view), listed_collectives(view)
        ends = np.cumsum(np.minimum(counts, MAX_COLLECTIVES)).tolist()
        for begin, end, count in zip([0, *ends], ends, counts.tolist(), strict=False):
            group: Arguments = {
                "operations": count,
                "operation_list": listed[begin : min(end, begin + MAX_LISTED)],
                "ops": "+".join(dict.fromkeys(text.split(" ", maxsplit=1)[0] for text in listed[begin:end])),
            }
            collectives = [text for text in ids[begin:end] if text is not None]
            yield group | {"collective_ids": collectives} if len(collectives) > 1 else group


@dataclass(frozen=True, slots=True)
class _Operations:
    """The operations that a batch of kernels ran."""

    rows: NDArray[np.intp]
    """The kernels whose operation has a name; of each of them: """
    names: list[str]
    kinds: list[str]
    labels: list[str]
    has_name: NDArray[np.bool_]
    """By kernel."""
    arguments: pa.Array
    """By kernel, as JSON."""
    wait_ns: NDArray[np.int64]
    """By kernel; NO_TIME_NS if it is not known."""


def _most_frequent(values: NDArray[np.int64]) -> int:
    distinct, counts = np.unique(values, return_counts=True)
    return int(distinct[np.argmax(counts)])


def _batches(order: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    for begin in range(0, len(order), _ROWS_PER_BATCH):
        yield order[begin : begin + _ROWS_PER_BATCH]
