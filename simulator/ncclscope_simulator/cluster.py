"""The machines: names, addresses, bus ids and clocks of the nodes, processes and threads on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from ncclscope_simulator.config import SimulationConfig

_BUS_IDS = (0x1B000, 0x43000, 0x52000, 0x61000, 0x9D000, 0xC3000, 0xD1000, 0xDF000)
_BILLION = 10**9


@dataclass(slots=True)
class HostClock:
    """A node's clock against the reference clock (node 0's).

    host = at + x + x * d / (1 - d), x = true - at + offset; inverse: true = host - offset - d * (host - at).
    """

    at_ns: int
    offset_ns: int
    """Host clock minus reference clock, when the host clock reads `at_ns`."""
    drift_ppb: int
    """Drift in parts per 10^9; positive: the host runs fast."""
    steps: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(reference time, forward step in ns)."""

    def host_ns(self, true_ns: int) -> int:
        """The reading of the host's clock at a time of the reference clock."""
        x = true_ns - self.at_ns + self.offset_ns
        read = self.at_ns + x + x * self.drift_ppb // (_BILLION - self.drift_ppb)
        return read + sum(step for since, step in self.steps if true_ns >= since)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One machine."""

    host: str
    address: str
    clock: HostClock
    processes: tuple[Process, ...]
    boot_ns: int
    """Host time at which the machine booted: base of nsys's own system clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One training process: one rank, or all ranks of its node."""

    node: int
    host: str
    pid: int
    ranks: tuple[int, ...]
    log_name: str
    """Log file, relative to the folder that is written: one for each process, unless a fault shares it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One rank: where it runs and with which threads."""

    rank: int
    node: int
    local_rank: int
    process: Process
    main_tid: int
    """The thread that calls forward, pipeline and optimiser."""
    autograd_tid: int
    """The thread on which PyTorch's autograd calls backward."""
    init_tid: int
    """The thread on which communicators are made. Source: NCCL src/group.cc ncclAsyncLaunch."""
    bus_id: int

    def calling_tid(self, *, autograd: bool) -> int:
        """The thread that calls NCCL or CUDA: autograd's or the main one."""
        return self.autograd_tid if autograd else self.main_tid


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """All nodes and ranks of a job."""

    nodes: tuple[Node, ...]
    workers: tuple[Worker, ...]


def stable_hash(*parts: object) -> int:
    """A 64-bit number that depends on the parts alone, and never on the process that asks."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def bus_id(local_rank: int) -> int:
    """Bus id as NCCL prints it: bus << 12 | device << 4 | function."""
    return _BUS_IDS[local_rank % len(_BUS_IDS)] + (local_rank // len(_BUS_IDS)) * 0x1000


def build_cluster(config: SimulationConfig) -> Cluster:
    """Nodes, processes and ranks of a job; equal for equal seeds."""
    random = np.random.default_rng([config.seed, 0xC105])
    shared_log = bool(config.of_kind("torn_lines"))
    nodes: list[Node] = []
    workers: list[Worker] = []
    for index in range(config.nodes):
        host = f"node{index:02d}"
        ranks = range(index * config.gpus, (index + 1) * config.gpus)
        first_pid = 20_000 + int(random.integers(0, 20_000))
        owned = [tuple(ranks)] if config.process_per_node else [(rank,) for rank in ranks]
        processes = tuple(_process(index, host, first_pid + 2 * k, own, shared_log) for k, own in enumerate(owned))
        for process in processes:
            workers.extend(_worker(config, process, rank) for rank in process.ranks)
        nodes.append(
            Node(
                host=host,
                address=f"10.0.{index // 250}.{index % 250 + 11}",
                clock=_clock(config, index, random),
                processes=processes,
                boot_ns=config.start_ns - (3600 + int(random.integers(0, 86_400))) * _BILLION,
            )
        )
    return Cluster(nodes=tuple(nodes), workers=tuple(sorted(workers, key=lambda worker: worker.rank)))


def _process(node: int, host: str, pid: int, ranks: tuple[int, ...], shared_log: bool) -> Process:
    name = f"logs/nccl.{host}.log" if shared_log else f"logs/nccl.{host}.{pid}.log"
    return Process(node=node, host=host, pid=pid, ranks=ranks, log_name=name)


def _worker(config: SimulationConfig, process: Process, rank: int) -> Worker:
    place = process.ranks.index(rank)
    first_tid = process.pid if place == 0 else process.pid + 4_000 + 8 * place
    return Worker(
        rank=rank,
        node=process.node,
        local_rank=rank % config.gpus,
        process=process,
        main_tid=first_tid,
        autograd_tid=process.pid + 1_001 + 8 * place,
        init_tid=process.pid + 301 + 8 * place,
        bus_id=bus_id(rank % config.gpus),
    )


def _clock(config: SimulationConfig, index: int, random: np.random.Generator) -> HostClock:
    offset = int(random.uniform(-1.0, 1.0) * config.clock_offset_ms * 1e6)
    drift = int(random.uniform(-1.0, 1.0) * config.clock_drift_ppm * 1e3)
    return HostClock(at_ns=config.start_ns, offset_ns=offset if index else 0, drift_ppb=drift if index else 0)
