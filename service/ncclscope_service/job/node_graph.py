"""NCCL's graphs of a job's nodes as values to draw: who stands where, the links, what goes over them; rings and trees.

Hosts whose graphs are equal are one kind, of which the first is drawn. Hosts that multi-node NVLink joins are one
machine, with the GPUs of all of them. The tree of PCI hangs below the CPUs, NVLinks are drawn below the GPUs. Traffic
goes the ways that NCCL would take: the best path between two GPUs, to the NVSwitch, or to the network port of a GPU.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Final, TypeAlias

from ncclscope_service.nccl.topology import Channels, Machine, Path, gpus_by_rank
from ncclscope_service.nccl.traffic import Way
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.tables import Store
from ncclscope_wire.topology import LinkKind, NodeKind, TopologyOrigin, TopologySeen

MAX_GRAPHS: Final = 4
"""Kinds of nodes that are drawn."""
MAX_PARTS: Final = 1024
"""Nodes of a graph that is drawn: one of 72 GPUs on 18 hosts has about 360."""
MAX_RANKS: Final = 32
"""Of a communicator whose rings and trees are drawn."""
MAX_NAMES: Final = 8
"""Hosts that are named where there is no more to say of them than their number."""
OUTSIDE: Final = -1
"""The place of all ranks on other machines, and of the network's switches."""

_NO_RANK: Final = 1 << 62
_BELOW: Final = frozenset({LinkKind.PCI, LinkKind.C2C, LinkKind.LOC, LinkKind.NET})
_LEAVES: Final = frozenset({NodeKind.GPU, NodeKind.NIC})

Links: TypeAlias = Counter[tuple[int, int]]
"""Bytes, or channels, by (from, to)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A GPU, switch, CPU, card or port."""

    kind: NodeKind
    name: str
    """As NCCL prints it: "GPU 0-1000", of a machine in its domain and bus id or number."""
    column: float
    row: int
    """From the CPUs down."""
    ranks: tuple[int, ...]
    """Global ranks on this GPU."""
    host: str | None
    """Of these ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLink:
    """A link between two nodes; where NCCL prints several, the widest."""

    ends: tuple[int, int]
    """Indices of its nodes."""
    kind: LinkKind
    rates: tuple[int | None, int | None]
    """Bytes per second from the first to the second and back, as NCCL takes them; None if that way was not printed."""
    bytes: tuple[int, int]
    """Sent that way, and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGraph:
    """One machine."""

    hosts: tuple[str, ...]
    """Its host; several where multi-node NVLink makes one machine of them."""
    alike: tuple[str, ...]
    """Other hosts whose graphs are equal, which are not drawn: MAX_NAMES at most."""
    alike_known: int
    nodes: tuple[GraphNode, ...]
    links: tuple[GraphLink, ...]
    ranks_without_gpu: tuple[int, ...]
    """Global ranks on these hosts of which no line says which GPU of the graph is theirs; their bytes are left out."""
    bytes_without_way: int
    """Sent between GPUs, or out of the machine, where the graph has no way for it: no port, no NVSwitch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelEdge:
    """In so many channels the first sends to the second (ring), or is its parent (tree)."""

    ends: tuple[int, int]
    """Communicator ranks."""
    channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelEdges:
    """Rings and trees of a communicator."""

    ranks: tuple[int | None, ...]
    """Global rank of each of its ranks."""
    channels: int
    rings: tuple[ChannelEdge, ...]
    trees: tuple[ChannelEdge, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatedMachine:
    """A machine to draw, and whose its GPUs are."""

    machine: Machine
    hosts: tuple[str, ...]
    alike: tuple[str, ...]
    gpus: Mapping[int, int]
    """Global rank to the node of its GPU."""
    host_of: Mapping[int, str]
    """Of these ranks."""
    without_gpu: frozenset[int]
    """Global ranks on these hosts whose GPU is not known: nobody can say which way they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatedMachines:
    """The machines of a job that can be drawn, and the hosts that cannot."""

    machines: tuple[SeatedMachine, ...]
    kinds: int
    """How many kinds of nodes there are; those beyond MAX_GRAPHS, and graphs beyond MAX_PARTS, are not drawn."""
    hosts_without: tuple[str, ...]
    """Hosts of the job of which no log has the graph."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes by global rank."""

    pairs: Links = field(default_factory=Counter)
    """From and to, one of them OUTSIDE where it is not on the machine."""
    into_nvswitch: Counter[int] = field(default_factory=Counter)
    """By global rank: bytes into a switch that reduces or multicasts."""

    def add(self, sender: int, receiver: int | None, way: Way, amount: int) -> None:
        """Adds what a rank sent to another, or (None) into a switch."""
        if way is Way.NVSWITCH:
            self.into_nvswitch[sender] += amount
        else:
            self.pairs[sender, OUTSIDE if receiver is None else receiver] += amount


def sent_by_machine(
    machines: Sequence[SeatedMachine], rows: Iterable[tuple[int, int | None, Way, int]]
) -> tuple[Sent, ...]:
    """Of what was sent, the bytes from, to and between the GPUs of each machine.

    `rows`: global ranks of sender and receiver (None: a switch; OUTSIDE: one that is on none of them), way, bytes.
    """
    machine_of = {rank: at for at, each in enumerate(machines) for rank in each.gpus}
    found = tuple(Sent() for _ in machines)
    for sender, receiver, way, amount in rows:
        ends = {sender, receiver}
        for at in {machine_of[rank] for rank in ends if rank in machine_of}:
            if not machines[at].without_gpu & ends:
                found[at].add(sender, receiver, way, amount)
    return found


def seat_machines(known: Store, job: str) -> SeatedMachines:
    """The machines of a job, that of the lowest rank first."""
    return _Seating(known, job).machines()


class _Seating:
    def __init__(self, known: Store, job: str) -> None:
        self._store, self._job = known, job
        self._bus_ids: dict[str, dict[int, int | None]] = defaultdict(dict)
        """By host and global rank."""
        for member in known.members:
            if member.global_rank is not None and known.process_job[member.process] == job:
                ranks = self._bus_ids[known.processes[member.process].host]
                if ranks.get(member.global_rank) is None:
                    ranks[member.global_rank] = member.bus_id

    def machines(self) -> SeatedMachines:
        known = self._store
        blocks = {
            host: sorted(seen, key=lambda each: (each.origin is not TopologyOrigin.LOG, -len(each.nodes)))
            for (job, host), seen in known.topologies.items()
            if job == self._job and host is not None
        }
        made: dict[object, SeatedMachine | None] = {}
        alike: dict[object, list[str]] = {}
        drawn: set[str] = set()
        for host in sorted(blocks, key=self._order):
            if host in drawn:
                continue
            first = blocks[host][0]
            content = tuple((node.kind, node.system, node.local) for node in first.nodes), first.links
            if content in made:
                alike[content].append(host)
                continue
            fits = len(first.nodes) <= MAX_PARTS and sum(map(bool, made.values())) < MAX_GRAPHS
            made[content], alike[content] = self._seated(host, blocks[host]) if fits else None, []
            drawn.update(() if (machine := made[content]) is None else machine.hosts)
        hosts = {
            process.host for process, job in zip(known.processes, known.process_job, strict=True) if job == self._job
        }
        return SeatedMachines(
            machines=tuple(
                replace(each, alike=tuple(alike[content])) for content, each in made.items() if each is not None
            ),
            kinds=len(made),
            hosts_without=tuple(sorted(hosts - blocks.keys() - drawn, key=self._order)),
        )

    def _order(self, host: str) -> tuple[int, str]:
        """By lowest rank, then by name."""
        return min(self._bus_ids.get(host, ()), default=_NO_RANK), host

    def _seated(self, host: str, candidates: Sequence[TopologySeen]) -> SeatedMachine:
        """By the first block that says whose its GPUs are, else the first without them."""
        for seen in candidates:
            gpus, host_of = self._fused(seen, host) if seen.spans_hosts else self._alone(seen, host)
            if gpus:
                break
        else:
            seen, gpus, host_of = candidates[0], {}, {}
        hosts = sorted({host, *host_of.values()}, key=self._order)
        ranks = {rank for each in hosts for rank in self._bus_ids.get(each, ())}
        return SeatedMachine(
            machine=Machine(seen), hosts=tuple(hosts), alike=(), gpus=gpus, host_of=host_of,
            without_gpu=frozenset(ranks - gpus.keys()),
        )  # fmt: skip

    def _alone(self, seen: TopologySeen, host: str) -> tuple[dict[int, int], dict[int, str]]:
        """By bus id."""
        by_bus_id = Machine(seen).gpus_by_bus_id()
        gpus = {rank: by_bus_id[bus] for rank, bus in self._bus_ids.get(host, {}).items() if bus in by_bus_id}
        return gpus, dict.fromkeys(gpus, host)

    def _fused(self, seen: TopologySeen, host: str) -> tuple[dict[int, int], dict[int, str]]:
        """By ranks of the communicator that printed the block: all its GPUs are ranks of it with their bus ids."""
        known = self._store
        for communicator in known.listed_communicators():
            members = {rank: known.members[index] for rank, index in (communicator.members or {}).items()}
            if communicator.job != self._job or len(members) < 2:
                continue
            placed = gpus_by_rank(seen, {rank: member.bus_id for rank, member in members.items()})
            hosts = {known.processes[members[rank].process].host for rank in placed or ()}
            if not placed or host not in hosts:
                continue
            gpus, host_of = dict[int, int](), dict[int, str]()
            for rank, gpu in placed.items():
                global_rank = members[rank].global_rank
                if global_rank is not None:
                    gpus[global_rank], host_of[global_rank] = gpu, known.processes[members[rank].process].host
            return gpus, host_of
        return {}, {}


def link_bytes(machine: Machine, gpus: Mapping[int, int], sent: Sent) -> tuple[Links, int]:
    """Bytes on each link, and those for which the graph has no way.

    `gpus`: of global ranks; of each pair of `sent` at least one end is one of them.
    """
    inside = list(dict.fromkeys(gpus.values()))
    ports = machine.ports_of(inside)
    switches = machine.of_kind(NodeKind.NVS)
    found: Links = Counter()
    left_out = 0

    @cache
    def between(gpu: int) -> dict[int, Path]:
        return machine.best_paths(gpu, through=inside)

    @cache
    def outwards(gpu: int) -> dict[int, Path]:
        return machine.best_paths(gpu)

    def add(way: Sequence[int], amount: int) -> None:
        nonlocal left_out
        left_out += 0 if way else amount
        for link in pairwise(way):
            found[link] += amount

    for (sender, receiver), amount in sent.pairs.items():
        if sender in gpus and receiver in gpus:
            path = between(gpus[sender]).get(gpus[receiver])
            add(() if path is None else path.nodes, amount)
        else:
            gpu = gpus[sender] if sender in gpus else gpus[receiver]
            way = outwards(gpu)[ports[gpu]].nodes if gpu in ports else ()
            add(way if sender in gpus else way[::-1], amount)
    for sender, amount in sent.into_nvswitch.items():
        paths = outwards(gpus[sender])
        add(min((paths[switch].nodes for switch in switches if switch in paths), key=len, default=()), amount)
    return found, left_out


def node_graph(seated: SeatedMachine, sent: Sent) -> NodeGraph:
    """The picture of a machine, with the bytes that were sent on its links."""
    machine, at = seated.machine, positions(seated.machine)
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, gpu in sorted(seated.gpus.items()):
        ranks[gpu].append(rank)
    nodes = tuple(
        GraphNode(
            kind=node.kind, name=machine.label(index), column=at[index][0], row=at[index][1],
            ranks=tuple(ranks[index]), host=seated.host_of[ranks[index][0]] if ranks[index] else None,
        )
        for index, node in enumerate(machine.nodes)
    )  # fmt: skip
    sent_on, left_out = link_bytes(machine, seated.gpus, sent)
    return NodeGraph(
        hosts=seated.hosts,
        alike=seated.alike[:MAX_NAMES],
        alike_known=len(seated.alike),
        nodes=nodes,
        links=tuple(_links(machine, sent_on)),
        ranks_without_gpu=tuple(sorted(seated.without_gpu)),
        bytes_without_way=left_out,
    )


def _links(machine: Machine, sent: Links) -> Iterable[GraphLink]:
    rates: dict[tuple[int, int], tuple[LinkKind, int]] = {}
    for link in machine.seen.links:
        if (link.start, link.end) not in rates or rates[link.start, link.end][1] < link.bytes_per_second:
            rates[link.start, link.end] = link.kind, link.bytes_per_second
    for start, end in sorted({(min(link), max(link)) for link in rates}):
        both = [rates.get((start, end)), rates.get((end, start))]
        kind, _ = max((each for each in both if each is not None), key=lambda each: each[1])
        there, back = (None if each is None else each[1] for each in both)
        yield GraphLink(ends=(start, end), kind=kind, rates=(there, back), bytes=(sent[start, end], sent[end, start]))


def positions(machine: Machine) -> dict[int, tuple[float, int]]:
    """Column and row of each node: a tree below the CPUs, GPUs and network cards in one row, switches below it."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for link in machine.seen.links:
        if link.kind in _BELOW:
            neighbours[link.start].append(link.end)
    roots = machine.of_kind(NodeKind.CPU) or list(range(len(machine.nodes)))[:1]
    depth = dict.fromkeys(roots, 0)
    children: dict[int, list[int]] = defaultdict(list)
    order = list(roots)
    for node in order:  # grows behind: breadth first
        for end in sorted(neighbours[node]):
            if end not in depth:
                depth[end] = depth[node] + 1
                children[node].append(end)
                order.append(end)
    inner = [row for node, row in depth.items() if machine.nodes[node].kind not in {*_LEAVES, NodeKind.NET}]
    leaf_row = max(inner, default=0) + 1
    columns: dict[int, float] = {}
    open_nodes = roots[::-1]
    while open_nodes:  # depth first: who has none below takes the next column
        node = open_nodes.pop()
        if not children[node]:
            columns[node] = float(len(columns))
        open_nodes.extend(reversed(children[node]))
    width = len(columns)
    for node in reversed(order):
        if children[node]:
            columns[node] = sum(columns[child] for child in children[node]) / len(children[node])
    found: dict[int, tuple[float, int]] = {}
    for node, row in depth.items():
        kind = machine.nodes[node].kind
        found[node] = columns[node], leaf_row if kind in _LEAVES else leaf_row + 1 if kind is NodeKind.NET else row
    switches = [node for node in range(len(machine.nodes)) if node not in depth]
    for place, node in enumerate(switches):
        found[node] = (width - 1) / 2 + (place - (len(switches) - 1) / 2) * 1.2, leaf_row + 2
    return found


def largest_with_channels(known: Store, communicators: Iterable[Communicator]) -> Communicator | None:
    """The largest of those that printed rings and have MAX_RANKS at most."""
    fitting = (
        each for each in communicators
        if each.index in known.channels and 1 < each.size <= MAX_RANKS and len(known.channels[each.index].following)
    )  # fmt: skip
    return max(fitting, key=lambda each: (each.size, -each.index), default=None)


def channel_edges(known: Store, communicator: Communicator) -> ChannelEdges:
    """Its rings and trees, as NCCL printed them."""
    channels: Channels = known.channels[communicator.index]
    members = communicator.members or {}
    rings: Links = Counter((rank, to) for rank in range(channels.size) for to in channels.next_of(rank).tolist())
    trees: Links = Counter((up, rank) for row in channels.above.tolist() for rank, up in enumerate(row) if up >= 0)
    return ChannelEdges(
        ranks=tuple(
            known.members[members[rank]].global_rank if rank in members else None for rank in range(communicator.size)
        ),
        channels=len(channels.following),
        rings=tuple(ChannelEdge(ends=ends, channels=times) for ends, times in sorted(rings.items())),
        trees=tuple(ChannelEdge(ends=ends, channels=times) for ends, times in sorted(trees.items())),
    )
