"""The machine as a graph with the narrowest cuts of its groups, and the rings and trees of communicators.

A ring of NCCL enters and leaves every part of its group once, and NCCL runs as many rings side by side as the
links carry. So the bus bandwidth of a group is at most the narrowest *cut*: over all ways to part its GPUs in
two, the sum of the links from one side to the other. Only the links on the best paths between these GPUs
count, because NCCL uses no others: two GPUs with NVLink between them do not send over PCI as well. For two
GPUs the cut is the narrowest link of their path; for four GPUs with an NVLink between any two it is three
NVLinks, which is also what NCCL's search for rings finds there.

Towards other nodes each GPU uses the nearest of the node's network ports, one port for each GPU; the ports of a
group's GPUs add up, and if other groups run at once they share them.

*Source:* NCCL `src/graph/paths.cc` (ncclTopoSetPaths: fewest hops, no way through a GPU but one NVLink hop, none
through a network card), `src/graph/topo.cc:ncclTopoGetLocal, ncclTopoGetLocalNet`, `src/graph/search.cc`.

NCCL prints the rings and trees of a communicator: every rank its own neighbours (`Ring 00 : 3 -> 0 -> 1`,
`Trees [0] 1/-1/-1->0->-1`), rank 0 the whole order of each ring, of which NCCL may leave out the end.

*Source:* NCCL `src/init.cc:initTransportsRank`, `src/graph/connect.cc`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_wire.facts import Fact, RingNeighbours, RingOrder, TreeNeighbours
from ncclscope_wire.terms import NO_NUMBER
from ncclscope_wire.topology import LinkKind, NodeKind, TopologyNode, TopologySeen

_MAX_CHANNELS: Final = 64
"""NCCL's MAXCHANNELS."""
_MAX_RANKS: Final = 1 << 14
_BELOW: Final = 3
"""NCCL_MAX_TREE_ARITY - 1."""


def _no_channels() -> NDArray[np.int32]:
    return np.empty((0, 0), np.int32)


@dataclass(slots=True, eq=False)
class Channels:
    """Who sends to whom on each channel of one communicator, by rank in it; NO_NUMBER if not printed."""

    size: int
    following: NDArray[np.int32] = field(default_factory=_no_channels)
    """Channels x ranks: the next in the ring."""
    above: NDArray[np.int32] = field(default_factory=_no_channels)
    """Channels x ranks: the parent in the tree; NO_NUMBER for its root as well."""
    below: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0, _BELOW), np.int32))
    """Channels x ranks x 3: the children in the tree."""
    in_tree: NDArray[np.bool_] = field(default_factory=lambda: np.empty((0, 0), np.bool_))
    """Channels x ranks: whether the rank's place in the tree was printed."""

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same rings and trees."""
        if not isinstance(other, Channels):
            return NotImplemented
        same = zip(*((each.following, each.above, each.below, each.in_tree) for each in (self, other)), strict=True)
        return self.size == other.size and all(np.array_equal(one, two) for one, two in same)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def next_of(self, rank: int) -> NDArray[np.int32]:
        """The next rank in each ring of which it is known."""
        found = self.following[:, rank]
        return found[found >= 0]

    def neighbours_of(self, rank: int) -> tuple[NDArray[np.int32], int]:
        """Whom a rank exchanges with in its trees, once for each channel, and over how many channels."""
        known = self.in_tree[:, rank]
        found = np.concatenate([self.above[known, rank], self.below[known, rank].ravel()])
        return found[found >= 0], int(known.sum())

    def add_fact(self, fact: Fact) -> None:
        """Takes a line; one that cannot be of this communicator is left aside."""
        if isinstance(fact, RingNeighbours):
            if self._reserve(fact.channel) and self._is_rank(fact.rank) and self._is_rank(fact.next):
                self.following[fact.channel, fact.rank] = fact.next
        elif isinstance(fact, RingOrder):
            order = np.asarray(fact.ranks, np.int64)
            is_whole = len(order) == self.size and (np.sort(order) == np.arange(self.size)).all()
            if is_whole and not fact.is_cut and self._reserve(fact.channel):
                self.following[fact.channel, order] = np.roll(order, -1)
        elif isinstance(fact, TreeNeighbours) and not fact.is_nvls:
            for node in fact.nodes:
                if self._reserve(node.channel) and self._is_rank(node.rank) and len(node.down) <= _BELOW:
                    self.above[node.channel, node.rank] = node.up if self._is_rank(node.up) else NO_NUMBER
                    down = [rank if self._is_rank(rank) else NO_NUMBER for rank in node.down]
                    self.below[node.channel, node.rank] = down + [NO_NUMBER] * (_BELOW - len(down))
                    self.in_tree[node.channel, node.rank] = True

    def merge(self, others: Channels) -> None:
        """Takes what ranks of the same communicator printed that were not known to be its own before."""
        if len(others.following) and others.size == self.size and self._reserve(len(others.following) - 1):
            mine = slice(len(others.following))
            self.following[mine] = np.where(others.following >= 0, others.following, self.following[mine])
            self.above[mine] = np.where(others.in_tree, others.above, self.above[mine])
            self.below[mine] = np.where(others.in_tree[:, :, None], others.below, self.below[mine])
            self.in_tree[mine] |= others.in_tree

    def _is_rank(self, rank: int) -> bool:
        return 0 <= rank < self.size

    def _reserve(self, channel: int) -> bool:
        """Makes room for a channel; False if there are none of that number."""
        if not 0 <= channel < _MAX_CHANNELS or self.size > _MAX_RANKS:
            return False
        more = channel + 1 - len(self.following)
        if more > 0:
            unknown = np.full((more, self.size), NO_NUMBER, np.int32)
            self.following = np.concatenate([self.following.reshape(-1, self.size), unknown])
            self.above = np.concatenate([self.above.reshape(-1, self.size), unknown])
            children = np.full((more, self.size, _BELOW), NO_NUMBER, np.int32)
            self.below = np.concatenate([self.below.reshape(-1, self.size, _BELOW), children])
            self.in_tree = np.concatenate([self.in_tree.reshape(-1, self.size), np.zeros((more, self.size), np.bool_)])
        return True


_WORLD: Final = -1
"""Stands for everything outside the node, in the graph of flows."""
_UNBOUNDED: Final = 10**18
_MOST_CUTS: Final = 4096
"""Results that one machine remembers."""

_BUS_ID_BITS: Final = (1 << 40) - 1
"""Above them 2.30 says which of several ranks on a GPU it is."""
_CARDS: Final = frozenset({NodeKind.NIC, NodeKind.NET, NodeKind.GIN, NodeKind.RMA})
_TYPES: Final = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET")
_LINK_TYPES: Final = {
    LinkKind.LOC: "LOC",
    LinkKind.NVL: "NVL",
    LinkKind.C2C: "C2C",
    LinkKind.PCI: "PIX",
    LinkKind.SYS: "SYS",
    LinkKind.NET: "LOC",  # the port itself adds no distance
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The narrowest cut of a group of GPUs."""

    bytes_per_second: float
    """Per direction; comparable with busbw."""
    name: str
    """The narrow links, for a person: "NVL 80.0 GB/s between GPU 0-1000 and GPU 0-25000"."""
    is_alike: bool = False
    """Whether it is as narrow on several hosts: the named one is no more to blame than the others."""

    @property
    def told(self) -> str:
        """How a sentence calls it, without accusing one of several hosts that are alike."""
        if not self.is_alike:
            return self.name
        is_card = any(f"{kind.value} " in self.name for kind in _CARDS)
        return "the network cards of its hosts" if is_card else "the links inside its hosts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The way NCCL takes between two nodes."""

    nodes: tuple[int, ...]
    """Node indices from the start to the end, both included."""
    bytes_per_second: int
    """Of its narrowest link."""
    type: str
    """NCCL's word for its worst part: NVL, PIX, PHB, SYS, ..."""


@dataclass(slots=True)
class Machine:
    """One system block as a graph.

    Usually one host; all hosts of an NVLink domain if NCCL has fused them (MNNVL).
    """

    seen: TopologySeen
    _links: dict[int, dict[int, tuple[LinkKind, int]]] = field(init=False)
    """The widest link from a node to each neighbour."""
    _cuts: dict[tuple[object, ...], Bottleneck | None] = field(init=False)
    """Cuts that were found before: many hosts are alike, and share one machine."""

    def __post_init__(self) -> None:
        self._links = defaultdict(dict)
        self._cuts = {}
        for link in self.seen.links:
            known = self._links[link.start].get(link.end)
            if known is None or known[1] < link.bytes_per_second:
                self._links[link.start][link.end] = (link.kind, link.bytes_per_second)

    @property
    def nodes(self) -> tuple[TopologyNode, ...]:
        """The nodes; indices of this module point here."""
        return self.seen.nodes

    def of_kind(self, kind: NodeKind) -> list[int]:
        """The nodes of a kind, in the order of the block."""
        return [index for index, node in enumerate(self.nodes) if node.kind is kind]

    def bus_id(self, gpu: int) -> int:
        """The bus id of a GPU, as Init lines have it."""
        return _bus_id_of(self.nodes[gpu])

    def gpus_by_bus_id(self) -> dict[int, int]:
        """The GPU of each bus id; those that several GPUs have are left out."""
        times = Counter(map(self.bus_id, self.of_kind(NodeKind.GPU)))
        return {self.bus_id(gpu): gpu for gpu in self.of_kind(NodeKind.GPU) if times[self.bus_id(gpu)] == 1}

    def best_paths(self, start: int, through: Iterable[int] = ()) -> dict[int, Path]:
        """The best path from a node to every node that it reaches: fewest hops, then the widest.

        `through` are the GPUs that may pass data on, as NCCL lets GPUs of the same communicator do for a GPU two
        NVLinks away.
        """
        relays = set(through)
        best = {start: Path(nodes=(start,), bytes_per_second=_UNBOUNDED, type="LOC")}
        border = [start]
        while border:
            found: dict[int, Path] = {}
            for node in border:
                path = best[node]
                for neighbour, (kind, rate) in self._links.get(node, {}).items():
                    if neighbour in best or not self._passes(path, node, neighbour, kind, relays):
                        continue
                    width = min(path.bytes_per_second, rate)
                    if neighbour not in found or width > found[neighbour].bytes_per_second:
                        found[neighbour] = Path(
                            nodes=(*path.nodes, neighbour),
                            bytes_per_second=width,
                            type=self._type(path, node, neighbour, kind),
                        )
            best.update(found)
            border = list(found)
        return best

    def _passes(self, path: Path, node: int, neighbour: int, kind: LinkKind, relays: set[int]) -> bool:
        """Whether NCCL would go on from a node to its neighbour."""
        here, there = self.nodes[node].kind, self.nodes[neighbour].kind
        if len(path.nodes) == 1:
            return True
        came_by = self._links[path.nodes[-2]][node][0]
        if here is NodeKind.GPU or (here is NodeKind.DEV and LinkKind.LOC not in (came_by, kind)):
            return there is here and came_by is kind is LinkKind.NVL and self._relays(path, node, relays)
        if here is NodeKind.NET:
            return False
        return here not in _CARDS or there in _CARDS or self.nodes[path.nodes[0]].kind in _CARDS

    def _relays(self, path: Path, node: int, relays: set[int]) -> bool:
        """Whether a GPU (or the DEV node of one) may pass data on: one of this group, and the only one on the way."""
        nvlinks = sum(self._links[start][end][0] is LinkKind.NVL for start, end in pairwise(path.nodes))
        local = {end for end, (kind, _) in self._links[node].items() if kind is LinkKind.LOC}
        return nvlinks == 1 and not relays.isdisjoint({node, *local})

    def _type(self, path: Path, node: int, neighbour: int, kind: LinkKind) -> str:
        here, there = self.nodes[node].kind, self.nodes[neighbour].kind
        own = _LINK_TYPES[kind]
        if kind is LinkKind.PCI and NodeKind.CPU in (here, there):
            own = "PHB"
        elif kind is LinkKind.PCI and here is NodeKind.PCI and there is NodeKind.PCI:
            own = "PXB"
        elif kind is LinkKind.NVL and here in (NodeKind.GPU, NodeKind.DEV) and path.type == "NVL":
            own = "NVB"
        return max(path.type, own, key=_TYPES.index)

    def ports_of(self, gpus: Sequence[int], devices: Mapping[int, int] | None = None) -> dict[int, int]:
        """The network port (NET node) that each of these GPUs uses; GPUs that reach none are left out.

        The widest path wins, then the nearest port. Among equals NCCL deals the ports out by the GPU's number on
        its node: `devices` gives it, else it is the GPU's place among the block's.
        """
        every_gpu = sorted(self.of_kind(NodeKind.GPU), key=lambda index: self.nodes[index].local)
        ports: dict[int, int] = {}
        for gpu in gpus:
            paths = self.best_paths(gpu)
            reached = [port for port in self.of_kind(NodeKind.NET) if port in paths]
            if not reached:
                continue
            rank = {port: (-paths[port].bytes_per_second, _TYPES.index(paths[port].type)) for port in reached}
            nearest = [port for port in reached if rank[port] == min(rank.values())]
            device = every_gpu.index(gpu) if devices is None else devices.get(gpu, every_gpu.index(gpu))
            ports[gpu] = nearest[_dealt(device, len(nearest))]
        return ports

    def bottleneck(self, gpus: Sequence[int]) -> Bottleneck | None:
        """The narrowest cut among GPUs of this machine; None for fewer than two, or if they are not connected."""
        return None if len(gpus) < 2 else self._remembered(gpus, {}, {})

    def bottleneck_outwards(
        self,
        gpus: Sequence[int],
        ports: Mapping[int, int],
        sharing: Mapping[int, int] | None = None,
    ) -> Bottleneck | None:
        """The narrowest cut among these GPUs and everything outside; None if one of them has no port.

        `ports` gives each GPU's port (`ports_of`), `sharing` how many groups use a port at once.
        """
        if not gpus or any(gpu not in ports for gpu in gpus):
            return None
        return self._remembered(gpus, {gpu: ports[gpu] for gpu in gpus}, sharing or {})

    def _remembered(
        self, gpus: Sequence[int], ports: Mapping[int, int], sharing: Mapping[int, int]
    ) -> Bottleneck | None:
        key = (tuple(sorted(gpus)), tuple(sorted(ports.items())), tuple(sorted(sharing.items())))
        if key not in self._cuts:
            if len(self._cuts) >= _MOST_CUTS:
                self._cuts.clear()
            self._cuts[key] = self._narrowest(sorted(gpus), ports, sharing)
        return self._cuts[key]

    def _narrowest(
        self, gpus: Sequence[int], ports: Mapping[int, int], sharing: Mapping[int, int]
    ) -> Bottleneck | None:
        capacities = self._capacities(gpus, ports, sharing)
        if capacities is None:
            return None
        # From the world's side first: if several cuts are as narrow, the one at the network cards is named.
        ends = [_WORLD, *gpus] if ports else list(gpus)
        cuts = [
            _minimum_cut(capacities, start, end)
            for other in ends[1:]
            for start, end in ((ends[0], other), (other, ends[0]))
        ]
        value, links = min(cuts, key=lambda cut: (cut[0], len(cut[1])))
        if not 0 < value < _UNBOUNDED:
            return None
        shares = max((self._share(start, end, sharing) for start, end in links), default=1)
        return Bottleneck(bytes_per_second=float(value), name=self._name(links, shares))

    def _capacities(
        self, gpus: Sequence[int], ports: Mapping[int, int], sharing: Mapping[int, int]
    ) -> dict[int, dict[int, int]] | None:
        """Links on the best paths of this group, and what each carries; None if two GPUs are not connected."""
        used: set[tuple[int, int]] = set()
        for gpu in gpus:
            paths = self.best_paths(gpu, through=gpus)
            ends = [other for other in gpus if other != gpu]
            if any(end not in paths for end in ends):
                return None
            for end in ends:
                used.update(pairwise(paths[end].nodes))
            if ports:
                way = self.best_paths(gpu)[ports[gpu]].nodes
                used.update(pairwise(way))
                used.update(pairwise(reversed(way)))
        capacities: dict[int, dict[int, int]] = defaultdict(dict)
        for start, end in used:
            link = self._links.get(start, {}).get(end)
            if link is not None:
                capacities[start][end] = link[1] // self._share(start, end, sharing)
        for port in set(ports.values()):
            capacities[port][_WORLD] = capacities[_WORLD][port] = _UNBOUNDED
        return capacities

    def _share(self, start: int, end: int, sharing: Mapping[int, int]) -> int:
        """Among how many groups a link is divided: the links of a network card are, all others are the group's."""
        most = 1
        for node in (start, end):
            if self.nodes[node].kind is NodeKind.NET:
                most = max(most, sharing.get(node, 1))
            elif self.nodes[node].kind is NodeKind.NIC:
                behind = [port for port in self._links.get(node, {}) if self.nodes[port].kind is NodeKind.NET]
                most = max([most, *(sharing.get(port, 1) for port in behind)])
        return most

    def _name(self, links: Sequence[tuple[int, int]], shares: int) -> str:
        kinds = Counter((kind.value, rate) for kind, rate in (self._links[start][end] for start, end in links))
        what = " + ".join(
            f"{kind} {rate / 1e9:.1f} GB/s" if count == 1 else f"{count} x {kind} {rate / 1e9:.1f} GB/s"
            for (kind, rate), count in kinds.items()
        )
        shared = f", shared by {shares} groups" if shares > 1 else ""
        return f"{what} {self._place(links)}{shared}"

    def _place(self, links: Sequence[tuple[int, int]]) -> str:
        cards = sorted({node for link in links for node in link if self.nodes[node].kind in _CARDS})
        nics = [node for node in cards if self.nodes[node].kind is NodeKind.NIC]
        if cards:
            return f"of {_list(self.label(node) for node in nics or cards)}"
        common = set.intersection(*(set(link) for link in links))
        if len(links) > 1 and common:
            return f"of {self.label(min(common))}"
        sides = [sorted(set(side), key=self._order) for side in zip(*links, strict=True)]
        one, other = sorted(sides, key=lambda side: self._order(side[0]))
        return f"between {_list(map(self.label, one))} and {_list(map(self.label, other))}"

    def _order(self, node: int) -> tuple[bool, int]:
        """GPUs first, as people ask for them; else as in the block."""
        return self.nodes[node].kind is not NodeKind.GPU, node

    def label(self, node: int) -> str:
        """A node as people know it: "GPU 0-1000"."""
        of = self.nodes[node]
        return f"{of.kind.value} {of.system:x}-{of.local:x}"


def _bus_id_of(gpu: TopologyNode) -> int:
    return gpu.local & _BUS_ID_BITS


def gpus_by_rank(seen: TopologySeen, bus_ids: Mapping[int, int | None]) -> dict[int, int] | None:
    """The GPU of each rank of a block over several hosts, which bus ids do not tell apart.

    `bus_ids`: of a communicator's ranks. None unless it is this communicator's own block: every GPU in it is a rank
    with that bus id.
    """
    placed: dict[int, int] = {}
    for index, node in enumerate(seen.nodes):
        if node.kind is not NodeKind.GPU:
            continue
        if node.rank is None or bus_ids.get(node.rank) != _bus_id_of(node):
            return None
        placed[node.rank] = index
    return placed


def _list(words: Iterable[str]) -> str:
    listed = list(words)
    return ", ".join(listed) if len(listed) <= 4 else f"{', '.join(listed[:3])} and {len(listed) - 3} more"


def _dealt(device: int, ports: int) -> int:
    """Which of equally near ports a GPU gets. *Source:* NCCL `src/graph/topo.cc:ncclTopoGetLocalNet`."""
    if ports & (ports - 1) == 0:
        device = _mirrored(device, ports)
    return device % ports


def _mirrored(number: int, power: int) -> int:
    """The number with its bits below a power of two turned round, so that neighbours get distant ports."""
    bits = power.bit_length() - 1
    return sum(1 << (bits - 1 - bit) for bit in range(bits) if number >> bit & 1)


def _minimum_cut(
    capacities: Mapping[int, Mapping[int, int]], start: int, end: int
) -> tuple[int, list[tuple[int, int]]]:
    """The largest flow from start to end, and the full links that bound it. Augments shortest paths (Edmonds-Karp)."""
    left: dict[int, dict[int, int]] = defaultdict(dict)
    for node, neighbours in capacities.items():
        for neighbour, capacity in neighbours.items():
            left[node][neighbour] = left[node].get(neighbour, 0) + capacity
            left[neighbour].setdefault(node, 0)
    flow = 0
    while True:
        came_from = _reached(left, start)
        if end not in came_from:
            break
        way = [end]
        while way[-1] != start:
            way.append(came_from[way[-1]])
        steps = [(before, after) for after, before in pairwise(way)]
        width = min(left[before][after] for before, after in steps)
        for before, after in steps:
            left[before][after] -= width
            left[after][before] += width
        flow += width
    inside = came_from.keys()
    full = [(node, other) for node in inside for other in capacities.get(node, {}) if other not in inside]
    return flow, full


def _reached(left: Mapping[int, Mapping[int, int]], start: int) -> dict[int, int]:
    """The nodes that can still be reached, and from which node each was."""
    came_from = {start: start}
    border = deque([start])
    while border:
        node = border.popleft()
        for neighbour, capacity in left[node].items():
            if capacity > 0 and neighbour not in came_from:
                came_from[neighbour] = node
                border.append(neighbour)
    return came_from
