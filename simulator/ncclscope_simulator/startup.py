"""The lines that each rank's log begins and ends with: versions, environment, communicators made and destroyed.

Source: NCCL src/init.cc ncclCommInitRankFunc, initTransportsRank, commFree; src/misc/param.cc (environment).
"""

from __future__ import annotations

from dataclasses import dataclass

from ncclscope_simulator import log_lines, topology
from ncclscope_simulator.cluster import Cluster, Worker
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.groups import Endpoint, Group

_FIRST_NS = 60_000_000
_WORLD_NS = 400_000_000
_GROUP_NS = 20_000_000
_LINE_NS = 40_000
_MOST_CHANNELS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """One line of a rank: when, by which thread, and the text after the prefix."""

    at_ns: int
    tid: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Startup:
    """The lines that all ranks print before the first step, and when they are done."""

    said: list[list[Said]]
    """For each rank."""
    ends_ns: int
    """When the last communicator is there, and training begins."""
    begins_ns: list[int]
    """For each group, when its ranks make it."""


def start_up(
    config: SimulationConfig, cluster: Cluster, groups: tuple[Group, ...], endpoints: list[dict[int, Endpoint]]
) -> Startup:
    """The lines of initialisation. Communicators are made one after the other, by all members at once."""
    begins, at = [0] * len(groups), config.start_ns + _FIRST_NS
    for group in groups:
        begins[group.index] = at
        at += _WORLD_NS if group.index == 0 else _GROUP_NS
    said: list[list[Said]] = []
    for worker in cluster.workers:
        writer = _Writer(config, worker)
        writer.greet(cluster)
        for group in groups:
            writer.at_ns = begins[group.index] + 7_000 * worker.rank
            if worker.rank in group.members:
                writer.communicator(group, endpoints[worker.rank])
            elif group.parent is not None:
                writer.say(f"Rank {worker.rank} has color with NCCL_SPLIT_NOCOLOR, not creating a new communicator")
        said.append(writer.said)
    return Startup(said=said, ends_ns=at, begins_ns=begins)


def shut_down(
    config: SimulationConfig, cluster: Cluster, endpoints: list[dict[int, Endpoint]], at_ns: int
) -> list[list[Said]]:
    """The Destroy lines of all ranks, last made first."""
    said: list[list[Said]] = []
    for worker in cluster.workers:
        writer = _Writer(config, worker)
        writer.at_ns = at_ns + 50_000 * worker.local_rank
        for endpoint in reversed(endpoints[worker.rank].values()):
            text = log_lines.destroy_text(
                config.traits,
                comm=endpoint.comm_ptr,
                rank=endpoint.comm_rank,
                ranks=endpoint.group.size,
                device=worker.local_rank,
                bus_id=worker.bus_id,
            )
            if text is not None:
                writer.say(text, tid=worker.main_tid)
        said.append(writer.said)
    return said


class _Writer:
    def __init__(self, config: SimulationConfig, worker: Worker) -> None:
        self._config, self._worker = config, worker
        self.at_ns = config.start_ns + 5_000_000 + 200_000 * worker.local_rank
        self.said: list[Said] = []

    def say(self, text: str | None, tid: int | None = None) -> None:
        if text is None:
            return
        self.said.append(Said(at_ns=self.at_ns, tid=self._worker.init_tid if tid is None else tid, text=text))
        self.at_ns += _LINE_NS

    def greet(self, cluster: Cluster) -> None:
        version, main = self._config.traits.version, self._worker.main_tid
        address = cluster.nodes[self._worker.node].address
        colon = "Bootstrap:" if version >= (2, 24, 0) else "Bootstrap :"
        self.say("NCCL_SOCKET_IFNAME set by environment to eth0", main)
        self.say(f"{colon} Using eth0:{address}<0>", main)
        if version >= (2, 13, 0):
            self.say(f"cudaDriverVersion {12040 if version < (2, 27, 0) else 12090}", main)
        self.say("NCCL_IB_TIMEOUT set by environment to 22.")
        ordered = "" if version < (2, 12, 0) else " [RO]"
        blank = " " if version < (2, 12, 0) else ""
        cards = self._config.contention.nics if self._config.contention else self._config.gpus
        devices = " ".join(f"[{card}]mlx5_{card}:1/IB" for card in range(cards))
        self.say(f"NET/IB : Using {devices}{ordered}{blank}; OOB eth0:{address}<0>")
        self.say("Using network IB")

    def communicator(self, group: Group, endpoints: dict[int, Endpoint]) -> None:
        traits, endpoint = self._config.traits, endpoints[group.index]
        if group.index == 0 or group.parent is None:
            self._version_lines(endpoint)
        parent = endpoints[group.parent].comm_ptr if group.parent is not None else None
        self.say(self._init("START", endpoint, parent))
        if parent is not None and group.color is not None:
            self.say(
                log_lines.bootstrap_split_text(
                    traits,
                    comm=endpoint.comm_ptr,
                    parent=parent,
                    rank=endpoint.comm_rank,
                    ranks=group.size,
                    color=group.color,
                    key=self._key(endpoint),
                )
            )
        self._machine(group, endpoint)
        self.say(self._init("COMPLETE", endpoint, parent))
        api = "ncclCommInitRankConfig" if group.parent is None else "ncclCommSplit"
        self.say(
            log_lines.init_timings_text(
                traits, api=api, rank=endpoint.comm_rank, ranks=group.size, seconds=0.35 if group.index == 0 else 0.02
            )
        )

    def _version_lines(self, endpoint: Endpoint) -> None:
        traits = self._config.traits
        if endpoint.comm_rank or traits.version_line != "info":
            return
        self.say(f"NCCL version {traits.text}+cuda{traits.cuda}")
        if traits.version >= (2, 29, 2):
            self.say("NCCL git version master a1b2c3d4e")

    def _init(self, event: str, endpoint: Endpoint, parent: str | None) -> str | None:
        group = endpoint.group
        return log_lines.init_text(
            self._config.traits,
            event,
            comm=endpoint.comm_ptr,
            rank=endpoint.comm_rank,
            ranks=group.size,
            device=self._worker.local_rank,
            bus_id=self._worker.bus_id,
            comm_hash=group.comm_hash,
            parent=parent,
            split_count=group.split_count,
            color=group.color,
            key=self._key(endpoint),
        )

    def _key(self, endpoint: Endpoint) -> int:
        """PyTorch splits with the rank in the parent as key."""
        return endpoint.rank

    def _machine(self, group: Group, endpoint: Endpoint) -> None:
        config, traits = self._config, self._config.traits
        channels = min(_MOST_CHANNELS, 8 if group.spans_nodes else _MOST_CHANNELS)
        node = self._worker.node
        for text in topology.system_lines(config, group, node):
            self.say(text)
        for text in topology.graph_lines(config, group, node, channels):
            self.say(text)
        local = [rank for rank in group.members if rank // config.gpus == node]
        self.say(
            log_lines.ranks_and_nodes_text(
                traits,
                comm=endpoint.comm_ptr,
                rank=endpoint.comm_rank,
                ranks=group.size,
                nodes=len(group.nodes),
                local_ranks=len(local),
                local_rank=local.index(self._worker.rank),
            )
        )
        for text in topology.ring_lines(config, group, endpoint.comm_rank, channels):
            self.say(text)
        for text in topology.transport_lines(config, group, endpoint.comm_rank):
            self.say(text)
        self.say("threadThresholds 8/8/64 | 32/8/64 | 512 | 512")
        nvls = 16 if traits.version >= (2, 18, 0) and not group.spans_nodes else 0
        self.say(log_lines.channel_count_text(traits, channels=channels, nvls=nvls, peer=max(1, channels // 8)))
