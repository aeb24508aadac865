"""A trace of the PyTorch profiler as batches: what a log and an export together give.

A trace names what was called *and* what ran. So a call is an operation with the time at which it was noted, and the
aligner pairs it with its kernel as it pairs lines with exports. Each process group is a communicator, which all ranks
know by its name and its global ranks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, cast

import numpy as np

from ncclscope_agent.sources.dictionaries import Strings, Threads
from ncclscope_agent.sources.kineto.collectives import Group
from ncclscope_agent.sources.kineto.json_stream import number_of, text_of
from ncclscope_agent.sources.kineto.trace import Matrix, Trace, TraceLimits, gather
from ncclscope_agent.sources.nsys.kernel_names import KernelKind
from ncclscope_agent.sources.nsys.open_export import fault, look_at
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch, Columns, no_rows
from ncclscope_wire.facts import ProcessGroup, TorchCommunicator
from ncclscope_wire.records import (
    CaptureSeen,
    CommunicatorEvent,
    CommunicatorEventKind,
    Counts,
    Source,
    SourceGap,
    VersionSeen,
)
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATIONS

TRACE_END: Final = 2**31 - 1
"""End of the last batch of every trace, as of every export."""

_ENDINGS: Final = (".pt.trace.json", ".pt.trace.json.gz")
_TENSORBOARD: Final = re.compile(r"(?:.*/)?(?P<host>[^/]{1,255}?)_\d{1,10}\.\d{1,20}\.pt\.trace\.json(?:\.gz)?")
"""`{host}_{pid}.{time}.pt.trace.json`. *Source:* `torch/profiler/profiler.py:tensorboard_trace_handler`."""
_BLOCK: Final = 1 << 20
_LONGEST_GPU: Final = 64
_LONGEST_HOST: Final = 255
_VERSION: Final = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,4}")


def is_trace(name: str) -> bool:
    """Whether a file of this name is a trace: PyTorch's own ending, among other files of a folder."""
    return name.endswith(_ENDINGS)


def read_trace(
    path: Path,
    *,
    source: Source,
    host: str | None = None,
    begin: int = 0,
    limits: TraceLimits | None = None,
    logged: Mapping[int, Collection[str]] | None = None,
    with_calls: bool = True,
    is_finished: bool = True,
    on_progress: Callable[[], None] | None = None,
) -> Iterator[Batch]:
    """The batches of a trace from a position on: communicators, calls by time, kernels by start, steps, computation.

    Positions count batches; they are the same at every reading. The last batch ends at TRACE_END and carries the
    CaptureSeen. `host` is that of a trace that names none, in itself or by TensorBoard's name of the file; without it
    such a trace is its own host, named like its file: its clock is then compared with those of all others. `logged`:
    the hosts of each pid whose calls a log has; of these processes a trace gives what an export does, and no calls;
    without `with_calls`, of all. `on_progress` is called after each block.

    A trace that breaks off is read as far as it goes, with a gap. Raises SourceError before the first batch:
    "unreadable", "changed", or if it may not be finished yet (`is_finished`) and breaks off, "incomplete".
    """
    if begin >= TRACE_END:
        return
    own = limits or TraceLimits()
    sight = look_at(path)
    try:
        with path.open("rb") as stream:
            trace = gather(_blocks(stream, on_progress), own)
    except OSError as error:
        raise fault("unreadable", path, error.strerror or "") from error
    if look_at(path) != sight:
        raise fault("changed", path)
    if trace.fault is not None and not is_finished:
        raise fault("incomplete", path, trace.fault)
    yield from _Batches(trace, source, host, own, logged or {}, with_calls=with_calls).batches(begin)


def _blocks(stream: BinaryIO, on_progress: Callable[[], None] | None) -> Iterator[bytes]:
    while block := stream.read(_BLOCK):
        yield block
        if on_progress is not None:
            on_progress()


class _Batches:
    def __init__(
        self,
        trace: Trace,
        source: Source,
        host: str | None,
        limits: TraceLimits,
        logged: Mapping[int, Collection[str]],
        *,
        with_calls: bool,
    ) -> None:
        self._trace = trace
        self._source = source
        self._limits = limits
        self._strings = Strings()
        self._threads = Threads(self._strings)
        hosts = logged.get(trace.pid, ())
        only = next(iter(hosts)) if len(hosts) == 1 else None
        self._host, self._is_recorded = _host_of(trace, source.name, only or host)
        self._with_calls = with_calls and self._host not in hosts
        self._pointers = {group: int.from_bytes(_digest(group)[:6], "big") or 1 for group in trace.groups.groups()}

    def batches(self, begin: int) -> Iterator[Batch]:
        """Those from a position on; the first of them has the whole dictionaries."""
        operation_templates, operations = self._operations()
        range_templates, ranges = self._steps()
        kernel_templates, busy = self._shapes(), self._busy()
        kernels, outside = self._kernels(self._trace.kernels), self._kernels(self._trace.outside)
        empty = Batch(source=self._source, begin=0, end=0)
        parts = [
            replace(
                empty,
                communicators=tuple(self._communicators()),
                facts=tuple(self._names()),
                versions=tuple(self._versions()),
                counts=Counts(understood={"operation": len(operations), KernelKind.NCCL.value: len(kernels)}),
            ),
            *(replace(empty, operations=part) for part in self._cut(operations)),
            *(replace(empty, kernels=part) for part in self._cut(kernels)),
            *(replace(empty, outside=part) for part in self._cut(outside)),
            *(replace(empty, ranges=part) for part in self._cut(ranges)),
            *(replace(empty, busy=part) for part in self._cut(busy)),
            self._last(),
        ]
        for position, part in enumerate(parts[begin:], begin):
            end = TRACE_END if part.is_last else position + 1
            placed = replace(part, begin=position, end=end)
            yield (
                placed
                if position > begin
                else replace(
                    placed,
                    strings=self._strings.drain_new(),
                    threads=self._threads.drain_new(),
                    operation_templates=operation_templates,
                    kernel_templates=kernel_templates,
                    range_templates=range_templates,
                )
            )

    def _cut(self, rows: Columns) -> Iterator[Columns]:
        most = self._limits.batch_rows
        return (rows[at : at + most] for at in range(0, len(rows), most))

    def _rank(self) -> int | None:
        """The global rank."""
        distributed = self._trace.members.get("distributedInfo")
        return number_of(distributed.get("rank")) if isinstance(distributed, dict) else None

    def _mine(self) -> Iterator[tuple[Group, int, int]]:
        """The groups that this rank is in, with their pointers and its rank there."""
        rank = self._rank()
        for group, pointer in self._pointers.items():
            if rank in group.ranks:
                yield group, pointer, group.ranks.index(rank)

    def _communicators(self) -> Iterator[CommunicatorEvent]:
        if not self._with_calls:
            return
        device = self._trace.shapes[0][0] if self._trace.shapes else None
        for group, pointer, rank in self._mine():
            yield CommunicatorEvent(
                kind=CommunicatorEventKind.KNOWN,
                host=self._host,
                pid=self._trace.pid,
                tid=self._trace.pid,
                line=0,
                pointer=pointer,
                rank=rank,
                nranks=len(group.ranks),
                cuda_device=device,
                comm_id=int.from_bytes(_digest(group)[8:16], "big"),
            )

    def _names(self) -> Iterator[TorchCommunicator | ProcessGroup]:
        """Of groups: a log that has the calls names communicators by pointers of its own."""
        for group, pointer, rank in self._mine():
            if group.description and not self._with_calls:
                yield ProcessGroup(
                    host=self._host,
                    pid=self._trace.pid,
                    line=0,
                    description=group.description,
                    group_ranks=group.ranks,
                )
            elif group.description:
                yield TorchCommunicator(
                    host=self._host,
                    pid=self._trace.pid,
                    tid=self._trace.pid,
                    line=0,
                    communicator=pointer,
                    rank=rank,
                    global_rank=self._rank(),
                    group=group.description,
                )

    def _versions(self) -> Iterator[VersionSeen]:
        distributed = self._trace.members.get("distributedInfo")
        version = distributed.get("nccl_version") if isinstance(distributed, dict) else None
        if isinstance(version, str) and _VERSION.fullmatch(version):
            yield VersionSeen(version=version, cuda=None, line=0, host=self._host, pid=self._trace.pid)

    def _operations(self) -> tuple[Columns, Columns]:
        """OPERATION_TEMPLATE and OPERATION_ROW of all calls; a call's stream is that of its kernel."""
        if not self._with_calls:
            return no_rows(tables.OPERATION_TEMPLATE), no_rows(tables.OPERATION_ROW)
        notes, calls = self._trace.notes, self._trace.calls
        keys = np.stack((notes[:, 1], notes[:, 3], self._streams()), axis=1)
        distinct, number = np.unique(keys, axis=0, return_inverse=True)
        templates = np.zeros(len(distinct), tables.OPERATION_TEMPLATE)
        for at, (tid, call_number, stream) in enumerate(distinct.tolist()):
            call = calls[call_number]
            templates[at] = (
                *(self._threads.index(self._host, self._trace.pid, tid), NO_NUMBER, call.code),
                *(
                    self._strings.index(OPERATIONS[call.code].name),
                    call.data_type,
                    NO_NUMBER,
                    call.peer,
                    len(call.group.ranks),
                ),
                *(call.count, 0, 0, self._pointers[call.group], stream, NO_NUMBER),
            )
        rows = np.zeros(len(notes), tables.OPERATION_ROW)
        rows["template"] = number.reshape(-1)
        rows["line"] = np.arange(1, len(notes) + 1)
        rows["op_count"] = self._counts()
        rows["logged_at_ns"] = notes[:, 0] + self._trace.epoch_ns
        return templates, rows

    def _streams(self) -> Matrix:
        """The stream of each call's kernel, counted from 1; of a call without one that of its group's call before."""
        notes, kernels = self._trace.notes, self._trace.kernels
        streams = np.zeros(len(notes), np.int64)
        if not len(notes) or not len(kernels):
            return streams
        order = np.argsort(kernels[:, 4], kind="stable")
        identities = kernels[order, 4]
        at = np.minimum(np.searchsorted(identities, notes[:, 2]), len(identities) - 1)
        found = (identities[at] == notes[:, 2]) & (notes[:, 2] != NO_NUMBER)
        own = np.array([stream for _, stream, _, _ in self._trace.shapes], np.int64) + 1
        streams[found] = own[kernels[order[at[found]], 0]]
        pointers = np.array([self._pointers[call.group] for call in self._trace.calls])[notes[:, 3]]
        for pointer in np.unique(pointers).tolist():
            mine = np.flatnonzero(pointers == pointer)
            last = np.maximum.accumulate(np.where(found[mine], np.arange(len(mine)), -1))
            last[last < 0] = np.argmax(found[mine])
            streams[mine] = streams[mine[last]]
        return streams

    def _counts(self) -> Matrix:
        """What stands for opCount: the group's own number of the call if all have one, else its place, from 1 on."""
        notes = self._trace.notes
        counts = notes[:, 4].copy()
        pointers = np.array([self._pointers[call.group] for call in self._trace.calls], np.int64)
        for pointer in np.unique(pointers).tolist():
            mine = np.flatnonzero(pointers[notes[:, 3]] == pointer)
            if (counts[mine] == NO_NUMBER).any():
                counts[mine] = np.arange(1, len(mine) + 1)
        return counts

    def _shapes(self) -> Columns:
        templates = np.zeros(len(self._trace.shapes), tables.KERNEL_TEMPLATE)
        host = self._strings.index(self._host)
        for at, (device, stream, name, shape) in enumerate(self._trace.shapes):
            templates[at] = (host, self._trace.pid, device, stream, self._strings.index(name), *shape)
        return templates

    def _kernels(self, found: Matrix) -> Columns:
        """KERNEL_ROW of kernels that communicate, each with the launch of its correlation."""
        launches, epoch = self._trace.launches, self._trace.epoch_ns
        kernels = np.zeros(len(found), tables.KERNEL_ROW)
        kernels["template"], kernels["correlation_id"] = found[:, 0], found[:, 1]
        kernels["start_ns"], kernels["end_ns"] = found[:, 2] + epoch, found[:, 3] + epoch
        kernels["launch_start_ns"] = kernels["launch_end_ns"] = NO_TIME_NS
        kernels["launch_tid"] = kernels["graph_node_id"] = NO_NUMBER
        if len(launches):
            at = np.minimum(np.searchsorted(launches[:, 0], found[:, 1]), len(launches) - 1)
            known = np.flatnonzero(launches[at, 0] == found[:, 1])
            mine = launches[at[known]]
            kernels["launch_start_ns"][known], kernels["launch_end_ns"][known] = mine[:, 1] + epoch, mine[:, 2] + epoch
            kernels["launch_tid"][known] = mine[:, 3]
        return kernels

    def _steps(self) -> tuple[Columns, Columns]:
        host, domain = self._strings.index(self._host), self._strings.index("")
        templates = np.zeros(len(self._trace.steps), tables.RANGE_TEMPLATE)
        ranges = np.zeros(len(self._trace.steps), tables.RANGE_ROW)
        for at, (start, end, tid, text) in enumerate(sorted(self._trace.steps)):
            templates[at] = (host, self._trace.pid, tid, domain, self._strings.index(text), 0, NO_NUMBER)
            ranges[at] = (at, start + self._trace.epoch_ns, end + self._trace.epoch_ns)
        return templates, ranges

    def _busy(self) -> Columns:
        intervals = self._trace.busy
        busy = np.zeros(len(intervals), tables.BUSY_ROW)
        busy["host"], busy["pid"] = self._strings.index(self._host), self._trace.pid
        busy["device_id"], busy["kernels"] = intervals["device"], intervals["kernels"]
        busy["start_ns"] = intervals["start"] + self._trace.epoch_ns
        busy["end_ns"] = intervals["end"] + self._trace.epoch_ns
        return busy

    def _last(self) -> Batch:
        trace = self._trace
        understood = {
            KernelKind.COMPUTATION.value: trace.other_kernels,
            KernelKind.OUTSIDE.value: len(trace.outside),
        }
        return Batch(
            source=self._source,
            begin=0,
            end=0,
            is_last=True,
            captures=tuple(self._capture()),
            gaps=tuple(self._gaps()),
            counts=Counts(
                understood={name: number for name, number in understood.items() if number}, skipped=trace.skipped
            ),
        )

    def _capture(self) -> Iterator[CaptureSeen]:
        """What the profiler recorded, by its own span if it tells one; nothing if it recorded no process."""
        trace = self._trace
        times = [*trace.notes[:, 0].tolist(), *trace.kernels[:, 2:4].ravel().tolist(), *(trace.busy["end"].tolist())]
        if not trace.pid or not (trace.spans or times):
            return
        start = min((begin for begin, _ in trace.spans), default=min(times, default=0))
        end = max((end for _, end in trace.spans), default=0)
        yield CaptureSeen(
            host=self._host,
            host_is_recorded=self._is_recorded,
            start_ns=min(start, *times) + trace.epoch_ns if times else start + trace.epoch_ns,
            end_ns=max(end, *times) + trace.epoch_ns if times else end + trace.epoch_ns,
            pids=(trace.pid,),
            product_version=None,
            schema_version=None,
            nccl_kernels=len(trace.kernels),
            other_kernels=trace.other_kernels + len(trace.outside),
            graph_launches=trace.graph_launches,
            gpu=_gpu_of(trace),
        )

    def _gaps(self) -> Iterator[SourceGap]:
        name, trace = self._source.name, self._trace
        if trace.fault is not None:
            detail = f"{name}: the trace breaks off or is damaged ({trace.fault}); what stands before is read"
            yield SourceGap(reason="trace_torn", amount=1, unit="files", detail=detail)


def _digest(group: Group) -> bytes:
    """What tells a group from others, alike on all ranks."""
    return hashlib.blake2b(f"{group.name}:{group.ranks}".encode(), digest_size=16).digest()


def _gpu_of(trace: Trace) -> str | None:
    """CUDA's or HIP's name of the GPUs of the host; None if they differ, or the trace does not list them.

    *Source:* Kineto `libkineto/src/output_json.cpp:ChromeTraceLogger::handleTraceStart`.
    """
    listed = trace.members.get("deviceProperties")
    devices = cast(list[object], listed) if isinstance(listed, list) else []
    names = [cast(dict[str, object], each).get("name") for each in devices if isinstance(each, dict)]
    is_same = bool(names) and all(each == names[0] for each in names)
    return text_of(names[0], _LONGEST_GPU) or None if is_same else None


def _host_of(trace: Trace, file_name: str, assumed: str | None) -> tuple[str, bool]:
    """The host, and whether the trace or its file's name says it."""
    for key in ("host_name", "hostname"):
        if name := text_of(trace.members.get(key), _LONGEST_HOST):
            return name.partition(".")[0], True
    found = _TENSORBOARD.fullmatch(file_name)
    if found is not None:
        return found["host"].partition(".")[0], True
    return assumed or file_name.rpartition("/")[2].partition(".")[0], False
