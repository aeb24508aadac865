"""A small run with everything in it, as the pipeline would leave it in the store.

Two hosts with two ranks each; TP inside a host, DP between ranks 0 and 2; node2's clock is 50 ms ahead.
"""

from __future__ import annotations

import numpy as np

from ncclscope_service.store import rows
from ncclscope_service.store.records import (
    Communicator,
    Finding,
    FindingKind,
    HostClock,
    Identity,
    JobClocks,
    Member,
    Process,
    Severity,
    SourceState,
)
from ncclscope_service.store.rows import KERNEL_TEMPLATE, OPERATION_TEMPLATE, RANGE, LimitReference, Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CaptureSeen, Source, SourceGap, SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

START_NS = 1_700_000_000_000_000_000
MS = 1_000_000
NODE2_AHEAD_NS = 50 * MS

ALL_REDUCE_NAME = "ncclDevKernel_AllReduce_Sum_f16_RING_LL"
SEND_RECV_NAME = "ncclDevKernel_SendRecv"

TP0, TP1, DP0 = 0, 1, 2
"""Communicators."""


class Builder:
    """Fills a store row by row; what is not said is not known."""

    def __init__(self) -> None:
        self.store = Store()
        self.launches = 0

    def process(self, host: str, pid: int, *, job: str = "job", version: str | None = "2.28.3") -> int:
        index = len(self.store.processes)
        self.store.processes.append(Process(host=host, pid=pid))
        self.store.process_job.append(job)
        if version is not None:
            self.store.process_version[index] = version
        return index

    def source(self, name: str, kind: SourceKind) -> int:
        state = SourceState(Source(kind=kind, name=name, key=name), agent="agent", is_complete=True)
        self.store.sources.append(state)
        return len(self.store.sources) - 1

    def communicator(self, comm_id: str, size: int, parallelism: str | None, *, job: str = "job") -> int:
        index = len(self.store.communicators)
        self.store.communicators.append(
            Communicator(
                index=index,
                job=job,
                comm_id=comm_id,
                size=size,
                identity=Identity.COMM_ID,
                parallelism=parallelism,
                parallelism_confidence=0.9,
                members={},
            )
        )
        return index

    def member(self, communicator: int, process: int, rank: int, global_rank: int, local_rank: int) -> int:
        index = len(self.store.members)
        self.store.members.append(
            Member(
                index=index,
                communicator=communicator,
                process=process,
                pointer=0x5588_0000_0000 + index,
                epoch=0,
                rank=rank,
                cuda_device=local_rank,
                bus_id=None,
                global_rank=global_rank,
                local_rank=local_rank,
            )
        )
        members = self.store.communicators[communicator].members
        assert members is not None
        members[rank] = index
        return index

    def operation_template(self, process: int, op: str, **values: int) -> int:
        row = np.zeros(1, dtype=OPERATION_TEMPLATE)
        row["process"], row["tid"], row["device"] = process, 4000 + process, 0
        row["op"] = OPERATION_CODES.get(op, 255)
        row["op_name"] = self.store.strings.index_of(op)
        row["data_type"], row["count"], row["nranks"], row["global_rank"] = 6, 1 << 20, 2, NO_NUMBER
        row["send_buffer"], row["recv_buffer"] = 0x7F00_0000_0000, 0x7F10_0000_0000
        row["communicator"], row["stream"] = 0xABC0 + process, 0xDEF0
        for name, value in values.items():
            row[name] = value
        return int(self.store.operation_templates.append(row)[0])

    def kernel_template(self, process: int, name: str, stream: int) -> int:
        row = np.full(1, 1, dtype=np.int8).astype(KERNEL_TEMPLATE)
        row["process"], row["device_id"], row["stream_id"] = process, 0, stream
        row["name"] = self.store.strings.index_of(name)
        row["grid_x"], row["block_x"], row["registers"] = 2, 544, 96
        row["static_shared_bytes"], row["dynamic_shared_bytes"] = 7104, NO_NUMBER
        return int(self.store.kernel_templates.append(row)[0])

    def operation(self, template: int, member: int, **values: float) -> int:
        row = unknown_operation()
        row["template"], row["member"] = template, member
        row["process"] = self.store.operation_templates.rows["process"][template]
        for name, value in values.items():
            row[name] = value
        return int(self.store.operations.append(row)[0])

    def kernel(self, template: int, source: int, start_ns: int, end_ns: int, **values: int) -> int:
        row = np.zeros(1, dtype=rows.KERNEL)
        row["template"], row["source"] = template, source
        row["process"] = self.store.kernel_templates.rows["process"][template]
        row["start_ns"], row["end_ns"] = start_ns, end_ns
        row["launch_start_ns"], row["launch_end_ns"] = start_ns - 9000, start_ns - 4000
        row["correlation_id"] = 1000 + len(self.store.kernels)
        row["launch_tid"] = row["graph_node_id"] = row["launch"] = row["replay"] = NO_NUMBER
        for name, value in values.items():
            row[name] = value
        return int(self.store.kernels.append(row)[0])

    def range(self, process: int, tid: int, text: str, start_ns: int, end_ns: int) -> None:
        strings = self.store.strings
        row = (process, tid, strings.index_of(""), strings.index_of(text), start_ns, end_ns)
        self.store.ranges.append(np.array([row], dtype=RANGE))

    def new_launch(self) -> int:
        self.launches += 1
        return self.launches - 1


def unknown_operation() -> Columns:
    """One operation of which nothing is known."""
    row = np.zeros(1, dtype=rows.OPERATION)
    for name in row.dtype.names or ():
        kind = row.dtype[name]
        if name.endswith("_ns"):
            row[name] = NO_TIME_NS
        elif kind.kind == "f":
            row[name] = np.nan
        elif kind.kind == "i":
            row[name] = NO_NUMBER
    return row


def small_run() -> Store:
    """The run of this module's docstring."""
    build = Builder()
    _processes_and_communicators(build)
    _all_reduces(build)
    _grouped_pair(build)
    _odd_ones(build)
    _around(build)
    return build.store


def logs_only_run(*, with_stamps: bool) -> Store:
    """Two ranks that log three AllReduces each, and no export."""
    build = Builder()
    log = build.source("rank.log", SourceKind.NCCL_LOG)
    build.communicator("0xa1", 2, None)
    for rank in (0, 1):
        process = build.process("node1", 10 + rank)
        member = build.member(0, process, rank, rank, rank)
        template = build.operation_template(process, "AllReduce")
        for k in range(3):
            build.operation(
                template,
                member,
                source=log,
                line=k + 1,
                seq=k,
                coll_seq=k,
                message_bytes=1 << 21,
                logged_at_ns=START_NS + k * MS if with_stamps else NO_TIME_NS,
                match=Match.NOT_COVERED,
            )
    return build.store


def _processes_and_communicators(build: Builder) -> None:
    for rank in range(4):
        build.process(f"node{rank // 2 + 1}", 100 + rank)
        build.source(f"logs/rank{rank}.log", SourceKind.NCCL_LOG)
    for node in (1, 2):
        build.source(f"nsys/node{node}.sqlite", SourceKind.NSYS)
    for communicator, (comm_id, parallelism) in enumerate((("0xa1", "TP"), ("0xa2", "TP"), ("0xd0", "DP"))):
        build.communicator(comm_id, 2, parallelism)
        for rank, process in enumerate(((0, 1), (2, 3), (0, 2))[communicator]):
            build.member(communicator, process, rank, process, process % 2)


def _member_of(build: Builder, communicator: int, rank: int) -> Member:
    members = build.store.communicators[communicator].members
    assert members is not None
    return build.store.members[members[rank]]


def host_time(build: Builder, process: int, true_ns: int) -> int:
    """What the process's host clock shows at a reference time."""
    return true_ns + (NODE2_AHEAD_NS if build.store.processes[process].host == "node2" else 0)


def _all_reduces(build: Builder) -> None:
    """Six on each communicator; the second rank is late by 300 µs each time, so the first waits."""
    for communicator in (TP0, TP1, DP0):
        for rank in (0, 1):
            member = _member_of(build, communicator, rank)
            operation = build.operation_template(member.process, "AllReduce", reduction=0)
            kernel = build.kernel_template(member.process, ALL_REDUCE_NAME, 31 + communicator)
            for k in range(6):
                _all_reduce(build, member, operation, kernel, k)


def _all_reduce(build: Builder, member: Member, operation: int, kernel: int, k: int) -> None:
    begin, transfer, late = START_NS + 2 * MS * (k + 1) + member.communicator * 10_000, MS // 2, 300_000
    start = begin + (late if member.rank == 1 else 0)
    end = begin + late + transfer
    size = 1 << 21
    launch = build.new_launch()
    kernel_id = build.kernel(
        kernel,
        4 + member.process // 2,
        host_time(build, member.process, start),
        host_time(build, member.process, end),
        launch=launch,
        replay=0,
    )
    build.operation(
        operation,
        member.index,
        source=member.process,
        line=10 + k,
        op_count=k,
        seq=k,
        coll_seq=k,
        message_bytes=size,
        iteration=k // 2,
        algorithm=1,
        protocol=2,
        channels=2,
        match=Match.MATCHED,
        launch=launch,
        kernel=kernel_id,
        confidence=1.0,
        start_ns=host_time(build, member.process, start),
        end_ns=host_time(build, member.process, end),
        start_true_ns=start,
        end_true_ns=end,
        clock_uncertainty_ns=500,
        ranks_seen=2,
        wait_ns=end - start - transfer,
        transfer_ns=transfer,
        algbw=size / (transfer / 1e9),
        busbw=size / (transfer / 1e9),
        busbw_apparent=size / ((end - start) / 1e9),
        limit=12.5e9,
        limit_reference=LimitReference.TOPOLOGY,
        finished=True,
    )


def _grouped_pair(build: Builder) -> None:
    """Ranks 0 and 2 send to each other in one group: two operations, one kernel each."""
    for rank in (0, 1):
        member = _member_of(build, DP0, rank)
        start = START_NS + 20 * MS
        launch = build.new_launch()
        template = build.kernel_template(member.process, SEND_RECV_NAME, 40)
        host_start = host_time(build, member.process, start)
        kernel = build.kernel(template, 4 + member.process // 2, host_start, host_start + MS, launch=launch, replay=0)
        for place, op in enumerate(("Send", "Recv")):
            build.operation(
                build.operation_template(member.process, op, root=1 - rank),
                member.index,
                source=member.process,
                line=30 + place,
                op_count=6,
                seq=6 + place,
                pair_seq=0,
                message_bytes=1 << 20,
                match=Match.MATCHED,
                launch=launch,
                kernel=kernel,
                confidence=0.75,
                start_ns=host_start,
                end_ns=host_start + MS,
                start_true_ns=start,
                end_true_ns=start + MS,
                ranks_seen=2,
            )


def _odd_ones(build: Builder) -> None:
    """Of rank 0: one of each other verdict, one that nobody knows, a kernel without an operation, a cut one."""
    member = _member_of(build, TP0, 0)
    verdicts = (Match.UNMATCHED, Match.NOT_COVERED, Match.NO_KERNEL, Match.PENDING)
    template = build.operation_template(0, "Broadcast", root=1, data_type=9)
    for place, match in enumerate(verdicts):
        stamp = START_NS + place * MS if match is not Match.PENDING else NO_TIME_NS
        build.operation(template, member.index, source=0, line=50 + place, match=match, logged_at_ns=stamp)
    unknown = build.operation_template(0, "FutureOp", data_type=99, tid=0)
    build.operation(unknown, NO_NUMBER, source=0, line=60, match=Match.NOT_COVERED)
    kernels = build.kernel_template(0, ALL_REDUCE_NAME, 31)
    build.kernel(kernels, 4, START_NS + 30 * MS, START_NS + 31 * MS)
    launch = build.new_launch()
    cut = build.kernel(kernels, 4, START_NS + 32 * MS, START_NS + 33 * MS, launch=launch, replay=0, censored=1)
    build.operation(
        build.operation_template(0, "AllReduce", reduction=7, data_type=9),
        member.index,
        source=0,
        line=61,
        match=Match.MATCHED,
        launch=launch,
        kernel=cut,
        start_ns=START_NS + 32 * MS,
        end_ns=START_NS + 33 * MS,
        censored=True,
        coll_seq=9,
        message_bytes=0,
    )


def _around(build: Builder) -> None:
    """Clocks, findings, NVTX, captures, counts, joined collectives and series."""
    store = build.store
    for process in range(4):
        for step in range(3):
            begin = host_time(build, process, START_NS + (2 + 4 * step) * MS)
            build.range(process, 7, f"iteration {step}", begin, begin + 4 * MS)
            build.range(process, 7, "forward", begin, begin + 2 * MS)
        build.range(process, 8, "data loader", START_NS, START_NS + 9 * MS)
    clocks = {"node1": _clock(0.0, START_NS), "node2": _clock(float(NODE2_AHEAD_NS), START_NS)}
    store.clocks["job"] = JobClocks(reference="node1", hosts=clocks, violation_ratio=0.0)
    for node in (1, 2):
        store.captures.append((3 + node, _capture(f"node{node}", START_NS + (node - 1) * NODE2_AHEAD_NS)))
    store.findings += [_finding(FindingKind.LATE_RANK, None), _finding(FindingKind.SLOW_LINK, START_NS + 15 * MS)]
    store.understood.update({"operation": len(store.operations), "init": 12, "other_nccl": 40})
    store.alignment_checked["demo"], store.alignment_disagreements["demo"] = 40, 2
    store.skipped.update({"torn": 2, "not_nccl": 7})
    store.gaps[0].append(SourceGap(reason="truncated", amount=80, unit="bytes", detail="logs/rank0.log was cut"))
    _joined(store)


def _joined(store: Store) -> None:
    for communicator in (TP0, TP1, DP0):
        for k in range(6):
            row = np.zeros(1, dtype=rows.COLLECTIVE)
            row["communicator"], row["coll_seq"], row["busbw"], row["last_rank"] = communicator, k, 4.2e9, 1
            row["end_true_ns"] = START_NS + 2 * MS * (k + 1) + 800_000
            store.collectives.append(row)
        series = np.zeros(1, dtype=rows.SERIES)
        series["communicator"], series["size_class"], series["limit"] = communicator, 3, 12.5e9
        series["busbw"], series["baseline"] = 4.2e9, 5e9
        store.series.append(series)


def _clock(offset_ns: float, at_ns: int) -> HostClock:
    return HostClock(
        offset_ns=offset_ns,
        drift_ppm=0.0,
        at_ns=at_ns,
        sigma_ns=210.0,
        interval_lo_ns=offset_ns - 800.0,
        interval_hi_ns=offset_ns + 800.0,
        samples=18,
    )


def _capture(host: str, start_ns: int) -> CaptureSeen:
    return CaptureSeen(
        host=host,
        host_is_recorded=True,
        start_ns=start_ns,
        end_ns=start_ns + 33 * MS,
        pids=(100, 101) if host == "node1" else (102, 103),
        product_version="2026.1.1",
        schema_version="3.25.0",
        nccl_kernels=20,
        other_kernels=500,
        graph_launches=0,
    )


def _finding(kind: FindingKind, until_ns: int | None) -> Finding:
    return Finding(
        kind=kind,
        severity=Severity.WARNING,
        job="job",
        comm_id="0xd0",
        parallelism="DP",
        ranks=(2,),
        hosts=("node2",),
        since_ns=START_NS + 4 * MS,
        until_ns=until_ns,
        confidence=0.95,
        summary="Rank 2 arrives 300 µs late at <DP> & others wait.",
        evidence={"blame_ns": 300_000, "collectives": ["0xd0:1", "0xd0:2"]},
    )
