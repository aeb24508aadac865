"""Batches as an agent would make them, built by hand for tests of the service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ncclscope_service.columns.table import Ids
from ncclscope_service.intake.communicators import Communicators
from ncclscope_service.intake.resolver import BatchResolver, logged_operations
from ncclscope_service.nccl import bandwidth
from ncclscope_service.store.tables import Store
from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import CaptureSeen, CommunicatorEvent, CommunicatorEventKind, Source, SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES, UNKNOWN_OPERATION

BASE_NS = 1_760_000_000_000_000_123
"""A time at which jobs made here begin: not a round one, as stamps that are all round count as coarse."""
PERIOD_NS = 1_000_000
"""Between two collectives of `rank_batches`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One operation line."""

    op: str = "AllReduce"
    communicator: int = 0xA0
    line: int
    tid: int = 11
    count: int = 1024
    data_type: int = 7
    root: int = 0
    nranks: int = 2
    stream: int = 0x51
    op_count: int = 0
    logged_at_ns: int = NO_TIME_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """One TUNING line."""

    line: int
    bytes: int
    op: str | None = "AllReduce"
    tid: int = 11
    algorithm: int = 1
    protocol: int = 2
    channels: int = 8


def log_batch(
    lines: Sequence[Line],
    *,
    host: str = "node1",
    pid: int = 10,
    events: Sequence[CommunicatorEvent] = (),
    tunings: Sequence[Tuning] = (),
    begin: int = 0,
) -> Batch:
    """A batch of one process's log with a template per line."""
    templates = np.zeros(len(lines), tables.OPERATION_TEMPLATE)
    operations = np.zeros(len(lines), tables.OPERATION_ROW)
    threads: dict[int, int] = {}
    names: dict[str, int] = {host: 0}
    for index, line in enumerate(lines):
        template = templates[index]
        template["thread"] = threads.setdefault(line.tid, len(threads))
        template["op"] = OPERATION_CODES[line.op]
        template["op_name"] = names.setdefault(line.op, len(names))
        template["global_rank"] = NO_NUMBER
        for name in ("count", "data_type", "root", "nranks", "communicator", "stream"):
            template[name] = getattr(line, name)
        operations[index] = (index, line.line, line.op_count, line.logged_at_ns)
    tuning_rows = np.zeros(len(tunings), tables.TUNING_ROW)
    for index, tuning in enumerate(tunings):
        code = UNKNOWN_OPERATION if tuning.op is None else OPERATION_CODES[tuning.op]
        tuning_rows[index] = (
            threads.setdefault(tuning.tid, len(threads)), tuning.line, code, tuning.algorithm, tuning.protocol,
            tuning.channels, tuning.bytes, np.nan,
        )  # fmt: skip
    thread_rows = np.array([(0, pid, tid) for tid in threads], tables.THREAD)
    return Batch(
        source=Source(kind=SourceKind.NCCL_LOG, name=f"{host}.{pid}.log", key=f"{host}-{pid}"),
        begin=begin,
        end=begin + 100,
        strings=tuple(names),
        threads=thread_rows,
        operation_templates=templates,
        operations=operations,
        tunings=tuning_rows,
        communicators=tuple(events),
    )


def init(
    *,
    line: int,
    pointer: int = 0xA0,
    rank: int = 0,
    nranks: int = 2,
    kind: CommunicatorEventKind = CommunicatorEventKind.INIT_COMPLETE,
    host: str = "node1",
    pid: int = 10,
    comm_id: int | None = None,
    parent: int | None = None,
    split_count: int | None = None,
    color: int | None = None,
    cuda_device: int = 0,
    bus_id: int | None = None,
) -> CommunicatorEvent:
    """One Init or Destroy line."""
    return CommunicatorEvent(
        kind=kind,
        host=host,
        pid=pid,
        tid=11,
        line=line,
        pointer=pointer,
        rank=rank,
        nranks=nranks,
        comm_id=comm_id,
        parent=parent,
        split_count=split_count,
        color=color,
        cuda_device=cuda_device,
        bus_id=bus_id,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One NCCL kernel and the call that launched it."""

    start_ns: int
    end_ns: int
    launch_ns: int = NO_TIME_NS
    name: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    tid: int = 11
    stream_id: int = 7
    correlation_id: int = 0
    censored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One NVTX range; without an end of its own a mark."""

    text: str
    start_ns: int
    end_ns: int | None = None


def export_batch(
    kernels: Sequence[Kernel],
    *,
    host: str = "node1",
    pid: int = 10,
    captured_ns: tuple[int, int] | None = None,
    missing: tuple[str, ...] = (),
    marks: Sequence[Mark] = (),
    name: str = "export",
) -> Batch:
    """An export of one process, whole in one batch; `captured_ns`: from when to when it says that it recorded."""
    texts = [host, ""]
    templates = np.full(len(kernels), NO_NUMBER, tables.KERNEL_TEMPLATE)
    rows = np.zeros(len(kernels), tables.KERNEL_ROW)
    for index, kernel in enumerate(kernels):
        texts.append(kernel.name)
        template = templates[index]
        template["host"], template["pid"], template["name"] = 0, pid, len(texts) - 1
        template["device_id"], template["stream_id"] = 0, kernel.stream_id
        rows[index] = (
            index, kernel.correlation_id or index + 1, kernel.start_ns, kernel.end_ns, kernel.launch_ns,
            kernel.launch_ns, kernel.tid, NO_NUMBER, tables.KERNEL_CENSORED if kernel.censored else 0,
        )  # fmt: skip
    range_templates = np.zeros(len(marks), tables.RANGE_TEMPLATE)
    ranges = np.zeros(len(marks), tables.RANGE_ROW)
    for index, mark in enumerate(marks):
        texts.append(mark.text)
        range_templates[index] = (0, pid, 11, 1, len(texts) - 1, 0, NO_NUMBER)
        ranges[index] = (index, mark.start_ns, mark.start_ns if mark.end_ns is None else mark.end_ns)
    capture = CaptureSeen(
        host=host,
        host_is_recorded=True,
        start_ns=0 if captured_ns is None else captured_ns[0],
        end_ns=0 if captured_ns is None else captured_ns[1],
        pids=(pid,),
        product_version=None,
        schema_version=None,
        nccl_kernels=len(kernels),
        other_kernels=0,
        graph_launches=0,
        missing=missing,
    )
    return Batch(
        source=Source(kind=SourceKind.NSYS, name=f"{name}.sqlite", key=f"{host}-{pid}-{name}"),
        begin=0,
        end=1,
        is_last=True,
        strings=tuple(texts),
        kernel_templates=templates,
        kernels=rows,
        range_templates=range_templates,
        ranges=ranges,
        captures=() if captured_ns is None else (capture,),
    )


def rank_batches(
    rank: int,
    numbers: range,
    *,
    host: str = "node1",
    pid: int = 10,
    size: int = 2,
    late_ns: int = 0,
    offset_ns: int = 0,
    counts: dict[int, int] | None = None,
) -> tuple[Batch, Batch]:
    """Log and export of one rank of one communicator: AllReduce number k begins at BASE_NS + k * PERIOD_NS.

    All ranks end each of them together, 200 us after that; this one starts 20 us + `late_ns` after it. `offset_ns`
    is how far the host's clock is ahead; `counts` has the element counts that are not 1024.
    """
    begins = [BASE_NS + offset_ns + number * PERIOD_NS for number in numbers]
    lines = [
        Line(
            line=number + 2,
            nranks=size,
            op_count=number,
            logged_at_ns=begin,
            count=(counts or {}).get(number, 1024),
        )
        for number, begin in zip(numbers, begins, strict=True)
    ]
    kernels = [
        Kernel(
            launch_ns=begin + 10_000,
            start_ns=begin + 20_000 + late_ns,
            end_ns=begin + 200_000,
            correlation_id=number + 1,
        )
        for number, begin in zip(numbers, begins, strict=True)
    ]
    events = [init(line=1, rank=rank, nranks=size, comm_id=0xC0, host=host, pid=pid)] if numbers.start == 0 else []
    captured = (begins[0] - PERIOD_NS // 2, begins[-1] + PERIOD_NS // 2)
    log = log_batch(lines, host=host, pid=pid, events=events, begin=100 * numbers.start)
    return log, export_batch(kernels, host=host, pid=pid, captured_ns=captured, name=f"part{numbers.start}")


class Reading:
    """A store that is fed as the pipeline feeds it, without any of the stages after it."""

    def __init__(self) -> None:
        self.store = Store()
        self.intake = BatchResolver(self.store)
        self.communicators = Communicators(self.store)
        self._sessions = 0

    def feed(self, batch: Batch, *, job: str = "j") -> Ids:
        """Applies a batch; gives the rows of its operations. Its kernels are the last in the store."""
        self._sessions += 1
        arrived = self.intake.resolve_batch(batch, agent="a", session=str(self._sessions), job=job)
        operations = logged_operations(arrived.operations)
        self.communicators.place(operations, arrived.events, arrived.event_processes)
        templates = self.store.templates_of(operations)
        operations["process"] = templates["process"]
        operations["message_bytes"] = bandwidth.message_bytes(
            templates["op"], templates["count"], templates["data_type"], templates["nranks"]
        )
        self.store.kernels.append(arrived.kernels)
        return self.store.operations.append(operations)
