"""Batches as an agent would make them, built by hand for tests of the service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ncclscope_wire import tables
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind, Source, SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES


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


def log_batch(
    lines: Sequence[Line],
    *,
    host: str = "node1",
    pid: int = 10,
    events: Sequence[CommunicatorEvent] = (),
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
    thread_rows = np.array([(0, pid, tid) for tid in threads], tables.THREAD)
    return Batch(
        source=Source(kind=SourceKind.NCCL_LOG, name=f"{host}.{pid}.log", key=f"{host}-{pid}"),
        begin=begin,
        end=begin + 100,
        strings=tuple(names),
        threads=thread_rows,
        operation_templates=templates,
        operations=operations,
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
