"""A job of thousands of ranks as the service's store would hold it: for counting and timing what is made of it.

The layout is Megatron-LM's of a mixture of experts: TP 8 within a node, PP 8, DP 64, EP 8, the embeddings tied across
the pipeline. Every group has done what such a group does; all is known of it, the limits and baselines included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.rollup.recent_sums import RecentSums
from ncclscope_service.show.health import AgentView
from ncclscope_service.store.records import Communicator, HostClock, Identity, JobClocks, Member, Process
from ncclscope_service.store.rows import (
    COLLECTIVE,
    KERNEL,
    KERNEL_TEMPLATE,
    OPERATION_TEMPLATE,
    SERIES,
    Match,
    empty_operations,
)
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, OPERATION_CODES

NOW_NS: Final = 1_763_726_400_000_000_000
JOB: Final = "large"
_PER_NODE: Final = 8
_TP: Final = 8
_PP: Final = 8

_TRAFFIC: Final[dict[str, tuple[tuple[str, int], ...]]] = {
    "WORLD": (("AllReduce", 0),),
    "TP": (("AllGather", 4), ("ReduceScatter", 4), ("AllReduce", 0)),
    "DP": (("ReduceScatter", 5), ("AllGather", 5), ("AllReduce", 0)),
    "EP": (("AlltoAll", 4),),
    "PP": (("Send", 4), ("Recv", 4)),
    "EMBEDDING": (("AllReduce", 5),),
}
"""Operations and size classes of each kind of group."""


@dataclass(frozen=True, slots=True)
class LargeJob:
    """The store, and the agents beside it."""

    store: Store
    agents: tuple[AgentView, ...]


def large_job(ranks: int = 4_096) -> LargeJob:
    """A job of so many ranks, a multiple of 512, or 64."""
    store = Store()
    nodes = ranks // _PER_NODE
    for rank in range(ranks):
        store.processes.append(Process(host=f"node{rank // _PER_NODE:04d}", pid=1000 + rank))
        store.process_job.append(JOB)
    for kind, groups in _groups(ranks).items():
        for group in groups:
            _add_group(store, kind, group)
    clocks: dict[str, HostClock] = {}
    for node in range(nodes):
        clocks[f"node{node:04d}"] = HostClock(
            offset_ns=1e4 * node,
            drift_ppm=3.0,
            at_ns=NOW_NS,
            sigma_ns=700.0,
            interval_lo_ns=None,
            interval_hi_ns=None,
            samples=10_000,
        )
    store.clocks[JOB] = JobClocks(reference="node0000", hosts=clocks, violation_ratio=0.0)
    agents = [
        AgentView(
            name=f"node{node:04d}", host=f"node{node:04d}", job=JOB, connected=True, last_contact_ns=NOW_NS,
            lag_seconds=0.1, lines_total=10**6, bytes_read_total=10**8, cpu_seconds=12.5, rss_bytes=60_000_000,
            queued_batches=0,
        )
        for node in range(nodes)
    ]  # fmt: skip
    return LargeJob(store, tuple(agents))


def busy_window(store: Store, operations: int) -> tuple[RecentSums, float]:
    """Fills a store with so many operations of its members in turn, and adds them up as they come.

    A tenth of them has kernels and waits. Gives the sums, and the CPU seconds that adding up took. A portion is what
    comes between two ticks at 64,000 operations/s.
    """
    sums, seconds, amount = RecentSums(store), 0.0, 32_000
    store.operation_templates.append(np.zeros(1, OPERATION_TEMPLATE))
    store.kernel_templates.append(np.zeros(1, KERNEL_TEMPLATE))
    members = np.resize(np.array([[each.index, each.process] for each in store.members]), (operations, 2))
    times = NOW_NS - np.linspace(operations * 15_625, 0, operations).astype(np.int64)
    for begin in range(0, operations, amount):
        at = slice(begin, min(begin + amount, operations))
        rows = empty_operations(at.stop - begin)
        rows["member"], rows["process"] = members[at].T
        rows["template"], rows["message_bytes"], rows["iteration"] = 0, 1 << 20, begin // amount
        rows["logged_at_ns"] = rows["observed_at_ns"] = times[at]
        matched = np.arange(begin, at.stop) % (10 * amount) < amount
        _match(store, rows, matched, times[at])
        ids = store.operations.append(rows)
        began = time.process_time()
        sums.touch(ids[matched])
        sums.finish(ids[matched])
        sums.process_window(NOW_NS)
        seconds += time.process_time() - began
    return sums, seconds


def _match(store: Store, rows: Columns, matched: NDArray[np.bool_], times: NDArray[np.int64]) -> None:
    amount = int(matched.sum())
    kernels = np.zeros(amount, KERNEL)
    kernels["process"], kernels["graph_node_id"] = rows["process"][matched], NO_NUMBER
    kernels["launch_start_ns"] = kernels["start_ns"] = times[matched]
    kernels["end_ns"] = times[matched] + 100_000
    rows["match"] = np.where(matched, Match.MATCHED, Match.PENDING)
    rows["kernel"][matched] = rows["launch"][matched] = store.kernels.append(kernels)
    for name, column in (("start_ns", "start_ns"), ("start_true_ns", "start_ns"), ("end_ns", "end_ns")):
        rows[name][matched] = kernels[column]
    rows["wait_ns"][matched] = 20_000


def _groups(ranks: int) -> dict[str, list[list[int]]]:
    """The global ranks of every group, by kind; TP varies fastest, PP slowest. Fewer than 512 have no experts."""
    places = np.arange(ranks).reshape(_PP, ranks // (_PP * _TP), _TP)
    experts = places.reshape(_PP, -1, 8, _TP) if ranks >= 512 else places[:0].reshape(0, 1, 8, _TP)
    return {
        "WORLD": [list(range(ranks))],
        "TP": places.reshape(-1, _TP).tolist(),
        "DP": places.transpose(0, 2, 1).reshape(_PP * _TP, -1).tolist(),
        "EP": experts.transpose(0, 1, 3, 2).reshape(-1, 8).tolist(),
        "PP": places.transpose(1, 2, 0).reshape(-1, _PP).tolist(),
        "EMBEDDING": places[[0, -1]].transpose(1, 2, 0).reshape(-1, 2).tolist(),
    }


def _add_group(store: Store, kind: str, ranks: Sequence[int]) -> None:
    index = len(store.communicators)
    members: dict[int, int] = {}
    for rank, global_rank in enumerate(ranks):
        members[rank] = len(store.members)
        store.members.append(
            Member(
                index=len(store.members), communicator=index, process=global_rank, pointer=index, epoch=0, rank=rank,
                cuda_device=global_rank % _PER_NODE, bus_id=None, global_rank=global_rank,
                local_rank=global_rank % _PER_NODE,
            )
        )  # fmt: skip
    store.communicators.append(
        Communicator(
            index=index, job=JOB, comm_id=f"0x{index:016x}", size=len(ranks), identity=Identity.COMM_ID,
            parallelism=kind, parallelism_confidence=1.0, members=members,
        )
    )  # fmt: skip
    for op, size_class in _TRAFFIC[kind]:
        store.series.append(_series(index, op, size_class))
        if op not in {"Send", "Recv"}:
            store.collectives.append(_collectives(index, op, size_class, len(ranks)))


def _series(index: int, op: str, size_class: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    row = np.zeros(1, SERIES)
    row["communicator"], row["op"], row["size_class"] = index, OPERATION_CODES[op], size_class
    random = np.random.default_rng(index)
    for name in SERIES.names or ():
        if name not in {"communicator", "op", "size_class"}:
            row[name] = random.uniform(1e6, 1e12)
    return row


def _collectives(index: int, op: str, size_class: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    rows = np.zeros(4, COLLECTIVE)
    rows["communicator"], rows["op"], rows["size_class"] = index, OPERATION_CODES[op], size_class
    rows["coll_seq"], rows["ranks_seen"] = np.arange(4), size
    rows["end_true_ns"] = NOW_NS - np.arange(1, 5) * 1_000_000_000
    rows["transfer_ns"], rows["spread_ns"] = 2_000_000, 300_000
    rows["wait_ns"], rows["busy_ns"] = 100_000 * size, 2_100_000 * size
    rows["busbw"] = 4e10
    return rows
