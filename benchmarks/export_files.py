"""How fast the output files are written, and how large they are.

    python benchmarks/export_files.py [--operations 100000] [--only trace] [--out DIR]

A made-up run of 16 ranks on 4 hosts (TP inside a host, DP across): every operation has its kernel, waits and
bandwidths vary with size, rank 9 is late in the last third. Prints a table; seconds are of the processor.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service import rows
from ncclscope_service.export.directory import PERFETTO_TRACE, WRITERS, Content, Writer
from ncclscope_service.export.perfetto_trace import write_perfetto_trace
from ncclscope_service.export.selection import select
from ncclscope_service.export.totals import totals
from ncclscope_service.export.traffic_file import measure_traffic
from ncclscope_service.rows import (
    Communicator,
    Finding,
    FindingKind,
    HostClock,
    Identity,
    LimitReference,
    Match,
    Member,
    Process,
    Severity,
)
from ncclscope_service.size_class import classify
from ncclscope_service.store import KERNEL_TEMPLATE, OPERATION_TEMPLATE, RANGE, SourceState, Store
from ncclscope_wire.records import CaptureSeen, Source, SourceKind
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

RANKS: Final = 16
HOSTS: Final = 4
START_NS: Final = 1_700_000_000_000_000_000
SIZES: Final = (1 << 13, 1 << 18, 1 << 21, 1 << 23, 1 << 25, 1 << 28)
SHAPES: Final = (("TP", "AllReduce"), ("TP", "AllGather"), ("TP", "ReduceScatter"), ("DP", "AllReduce"))
LATE_RANK: Final = 9


def made_up_run(operations: int) -> Store:
    """The run of this module's docstring, with about that many operations."""
    store = Store()
    rng = np.random.default_rng(1)
    _processes(store)
    for communicator in store.communicators:
        _operations(store, communicator, max(1, operations // (RANKS * 2)), rng)
    _around(store)
    return store


def _processes(store: Store) -> None:
    for rank in range(RANKS):
        store.processes.append(Process(host=f"node{rank // 4}", pid=4000 + rank))
        store.process_job.append("pretraining")
        store.process_version[rank] = "2.28.3"
        name = f"logs/node{rank // 4}.{4000 + rank}.log"
        store.sources.append(SourceState(Source(kind=SourceKind.NCCL_LOG, name=name, key=name), agent="a"))
    for host in range(HOSTS):
        name = f"nsys/node{host}.sqlite"
        store.sources.append(SourceState(Source(kind=SourceKind.NSYS, name=name, key=name), agent="a"))
        store.clocks[f"node{host}"] = HostClock(
            offset_ns=host * 2.1e6,
            drift_ppm=host * 1.7,
            at_ns=START_NS,
            sigma_ns=340.0 + host,
            interval_lo_ns=host * 2.1e6 - 900,
            interval_hi_ns=host * 2.1e6 + 1200,
            samples=5120,
        )
    for group in range(4):
        _communicator(store, f"0x7be1{group}a09c2d", "TP", [4 * group + place for place in range(4)])
    for group in range(4):
        _communicator(store, f"0x1c44{group}f7e801", "DP", [group + 4 * place for place in range(4)])


def _communicator(store: Store, comm_id: str, parallelism: str, ranks: list[int]) -> None:
    index = len(store.communicators)
    members = {place: len(store.members) + place for place in range(len(ranks))}
    store.communicators.append(
        Communicator(
            index=index,
            job="pretraining",
            comm_id=comm_id,
            size=len(ranks),
            identity=Identity.COMM_ID,
            parallelism=parallelism,
            parallelism_confidence=1.0,
            members=members,
        )
    )
    for place, rank in enumerate(ranks):
        store.members.append(
            Member(
                index=members[place],
                communicator=index,
                process=rank,
                pointer=0x55550000 + index,
                epoch=0,
                rank=place,
                cuda_device=rank % 4,
                bus_id=None,
                global_rank=rank,
                local_rank=rank % 4,
            )
        )


def _operations(store: Store, communicator: Communicator, count: int, rng: np.random.Generator) -> None:
    """The communicator's collectives: one table of arrivals by rank, from which all times follow."""
    shapes = [op for kind, op in SHAPES if kind == communicator.parallelism]
    sizes = np.array(SIZES[1:] if communicator.parallelism == "DP" else SIZES[:5])[np.arange(count) % 5]
    op = np.arange(count) % len(shapes)
    limit = 235e9 if communicator.parallelism == "TP" else 24e9
    transfer = (sizes / limit * 1e9 / rng.normal(0.82, 0.04, count).clip(0.5, 0.95) + 9000).astype(np.int64)
    late = rng.exponential(20_000, (communicator.size, count)).astype(np.int64)
    for place, member in (communicator.members or {}).items():
        if store.members[member].global_rank == LATE_RANK:
            late[place, 2 * count // 3 :] += 2_500_000
    begin = START_NS + np.cumsum(transfer + 6_000_000) + communicator.index * 40_000
    arrival = begin + late
    last, end = arrival.max(axis=0), arrival.max(axis=0) + transfer
    for place, member in (communicator.members or {}).items():
        timing = (arrival[place], end, last - arrival[place], transfer)
        _rank_operations(
            store, store.members[member], [shapes[index] for index in range(len(shapes))], op, sizes, timing
        )
    found = np.zeros(count, dtype=rows.COLLECTIVE)
    found["communicator"], found["coll_seq"] = communicator.index, np.arange(count)
    found["op"] = np.array([OPERATION_CODES[name] for name in shapes])[op]
    found["message_bytes"], found["size_class"] = sizes, classify(sizes)
    found["first_start_true_ns"], found["end_true_ns"], found["transfer_ns"] = arrival.min(axis=0), end, transfer
    found["last_rank"], found["busbw"] = arrival.argmax(axis=0), sizes / (transfer / 1e9)
    store.collectives.append(found)
    series = np.zeros(1, dtype=rows.SERIES)
    series["communicator"], series["limit"], series["baseline"] = communicator.index, limit, limit * 0.9
    series["op"], series["size_class"] = found["op"][0], found["size_class"][0]
    store.series.append(series)


def _rank_operations(
    store: Store,
    member: Member,
    shapes: list[str],
    op: NDArray[np.int64],
    sizes: NDArray[np.int64],
    timing: tuple[NDArray[np.int64], ...],
) -> None:
    start, end, wait, transfer = timing
    count = len(op)
    templates = np.array([_operation_template(store, member, name) for name in shapes])
    ahead = int(store.clocks[store.processes[member.process].host].offset_ns)
    kernels = np.zeros(count, dtype=rows.KERNEL)
    kernels["source"], kernels["process"] = RANKS + member.process // 4, member.process
    kernels["template"] = _kernel_template(store, member, 20 + member.communicator)
    kernels["correlation_id"] = np.arange(count) * 7 + member.index
    kernels["start_ns"], kernels["end_ns"] = start + ahead, end + ahead
    kernels["launch_start_ns"], kernels["launch_end_ns"] = start + ahead - 12_000, start + ahead - 5_000
    kernels["launch"] = member.index * count + np.arange(count)
    ids = store.kernels.append(kernels)
    found = np.zeros(count, dtype=rows.OPERATION)
    found["source"], found["process"], found["member"] = member.process, member.process, member.index
    found["template"], found["line"], found["op_count"] = templates[op], np.arange(count) + 40, np.arange(count)
    found["seq"] = found["coll_seq"] = np.arange(count)
    found["pair_seq"], found["iteration"] = NO_NUMBER, np.arange(count) // 20
    found["message_bytes"], found["algorithm"], found["protocol"], found["channels"] = sizes, 1, 2, 16
    found["logged_at_ns"] = found["observed_at_ns"] = NO_TIME_NS
    found["match"], found["launch"], found["kernel"], found["confidence"] = Match.MATCHED, kernels["launch"], ids, 1.0
    found["match"][::97], found["launch"][::97], found["kernel"][::97] = Match.UNMATCHED, NO_NUMBER, NO_NUMBER
    found["start_ns"], found["end_ns"] = kernels["start_ns"], kernels["end_ns"]
    found["start_true_ns"], found["end_true_ns"], found["clock_uncertainty_ns"] = start, end, 400
    found["ranks_seen"], found["wait_ns"], found["transfer_ns"] = 4, wait, transfer
    found["algbw"] = found["busbw"] = sizes / (transfer / 1e9)
    found["busbw_apparent"], found["limit"] = sizes / ((end - start) / 1e9), 235e9 if member.communicator < 4 else 24e9
    found["limit_reference"] = LimitReference.TOPOLOGY
    store.operations.append(found)


def _operation_template(store: Store, member: Member, op: str) -> int:
    row = np.zeros(1, dtype=OPERATION_TEMPLATE)
    row["process"], row["tid"], row["op"] = member.process, 5000 + member.process, OPERATION_CODES[op]
    row["op_name"], row["data_type"], row["nranks"] = store.strings.index_of(op), 9, 4
    row["count"], row["communicator"], row["stream"] = 1 << 20, member.pointer, 0x7F1234567000
    row["send_buffer"], row["recv_buffer"], row["global_rank"] = 0x7F0000000000, 0x7F0000000000, NO_NUMBER
    return int(store.operation_templates.append(row)[0])


def _kernel_template(store: Store, member: Member, stream: int) -> int:
    row = np.ones(1, dtype=KERNEL_TEMPLATE)
    row["process"], row["stream_id"], row["device_id"] = member.process, stream, member.process % 4
    row["name"] = store.strings.index_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL")
    row["grid_x"], row["block_x"], row["registers"], row["dynamic_shared_bytes"] = 16, 544, 96, 82240
    return int(store.kernel_templates.append(row)[0])


def _around(store: Store) -> None:
    end_ns = int(store.operations.rows["end_true_ns"].max())
    since_ns = START_NS + 2 * (end_ns - START_NS) // 3
    store.clock_reference, store.clock_violation_ratio = "node0", 0.0004
    store.findings.append(
        Finding(
            kind=FindingKind.LATE_RANK,
            severity=Severity.WARNING,
            job="pretraining",
            comm_id="0x7be12a09c2d",
            parallelism="TP",
            ranks=(LATE_RANK,),
            hosts=("node2",),
            since_ns=since_ns,
            until_ns=None,
            confidence=0.97,
            summary=f"Rank {LATE_RANK} on node2 arrives 2.5 ms after the other ranks of its TP and DP groups.",
            evidence={"blame_ns": 2_500_000, "collectives": ["0x7be12a09c2d:2091", "0x7be12a09c2d:2092"]},
        )
    )
    store.understood.update({"operation": len(store.operations), "init": 64, "tuning": len(store.operations) // 4})
    store.skipped.update({"not_nccl": 311, "torn": 2})
    for host in range(HOSTS):
        capture = CaptureSeen(
            host=f"node{host}",
            host_is_recorded=True,
            start_ns=START_NS,
            end_ns=end_ns,
            pids=tuple(4000 + rank for rank in range(4 * host, 4 * host + 4)),
            product_version="2026.1.1",
            schema_version="3.25.0",
            nccl_kernels=len(store.kernels) // HOSTS,
            other_kernels=0,
            graph_launches=0,
        )
        store.captures.append((RANKS + host, capture))
    step_ns = 120_000_000
    for rank in range(RANKS):
        begins = np.arange(START_NS, end_ns, step_ns)
        ranges = np.zeros(len(begins), dtype=RANGE)
        ranges["process"], ranges["tid"] = rank, 5000 + rank
        ranges["domain"], ranges["text"] = store.strings.index_of(""), store.strings.index_of("iteration")
        ranges["start_ns"], ranges["end_ns"] = begins, begins + step_ns
        store.ranges.append(ranges)


def measure(operations: int, out: Path, only: str) -> None:
    """Writes every file once and prints how much processor time each took."""
    store = made_up_run(operations)
    writers = {name: write for name, write in _writers().items() if only in name}
    count = len(store.operations)
    begin = time.process_time()
    selection = select(store)
    content = Content(selection, totals(selection), measure_traffic(selection))
    print(f"{count:,} operations, {len(store.kernels):,} kernels; sums {time.process_time() - begin:.2f} s")
    print(f"{'file':<24}{'seconds':>9}{'operations/s':>15}{'MB':>9}{'B/operation':>13}{'peak RSS MB':>13}")
    for name, write in writers.items():
        begin = time.process_time()
        result = write(content, out / name)
        seconds = time.process_time() - begin
        size = (out / name).stat().st_size
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name:<24}{seconds:>9.2f}{count / seconds:>15,.0f}{size / 1e6:>9.2f}{size / count:>13.1f}{peak:>13.0f}")
        if name.startswith("trace."):
            print(f"  {result} {getattr(result, 'events', 0) / seconds:,.0f} events/s")


def _writers() -> dict[str, Writer]:
    """Of every file; of the Perfetto trace where the package for it is there."""
    if importlib.util.find_spec("perfetto") is None:
        return WRITERS
    return WRITERS | {PERFETTO_TRACE: lambda content, path: write_perfetto_trace(content.selection, path)}


def main() -> None:
    """Reads the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--out", type=Path, help="keep the files here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        measure(arguments.operations, out, arguments.only)


if __name__ == "__main__":
    main()
