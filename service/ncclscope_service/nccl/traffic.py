"""Bytes that a call of a rank sends, and to whom, by operation and algorithm.

Payload only: the flags of the LL protocols (twice the bytes for LL, 128/120 for LL128) and headers come on top. Rings
and trees are those that NCCL printed for the communicator, shared equally by its channels; if it printed none, the
order of communicator ranks, which NCCL's own search may permute.

*Source:* NCCL `src/device/all_reduce.h`, `all_gather.h`, `reduce_scatter.h`, `broadcast.h`, `reduce.h` (who sends what
in which step), `src/graph/trees.cc` (the two trees), `src/enqueue.cc` (AlltoAll, Gather and Scatter are sends); the
factors agree with nccl-tests `doc/PERFORMANCE.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.nccl.topology import Channels

Ranks = NDArray[np.int64]
"""Communicator ranks."""


class Way(IntEnum):
    """How bytes leave a GPU."""

    PEER = 0
    """To another rank."""
    NVSWITCH = 1
    """Into the NVSwitch of the node, which reduces or multicasts: there is no one receiver."""
    NETWORK = 2
    """Into the network's switches, which reduce (SHARP): there is no one receiver."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that one rank's calls send to each of some receivers."""

    receivers: Ranks
    """Communicator ranks; empty if a switch receives."""
    bytes: float
    """To each receiver, or into the switch."""
    way: Way = Way.PEER
    is_assumed: bool = False
    """Nobody said which algorithm ran, or it is none that this module knows: a ring was taken."""
    is_order_assumed: bool = False
    """NCCL printed no rings or trees of this rank: the order of ranks was taken."""


@dataclass(frozen=True)
class Seats:
    """The node of each rank of one communicator, and their rings and trees."""

    nodes: tuple[int, ...]
    """A number of the node of each rank, by communicator rank; -1 if it is not known."""
    channels: Channels | None = None
    """The rings and trees that were printed."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.nodes)

    @property
    def are_known(self) -> bool:
        """Whether the node of every rank is known: only then trees and switches can be placed."""
        return min(self.nodes, default=-1) >= 0

    @cached_property
    def locals(self) -> dict[int, list[int]]:
        """The ranks of each node, in order of rank; nodes in order of their first rank."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return found

    def ring_receivers(self, rank: int) -> tuple[Ranks, NDArray[np.float64]] | None:
        """To whom a rank sends in the rings, and what share of it; None if they were not printed."""
        if self.size == 2:
            return np.array([1 - rank], np.int64), np.ones(1)
        return None if self.channels is None else _shares(self.channels.next_of(rank))

    def tree_receivers(self, rank: int) -> tuple[Ranks, NDArray[np.float64]] | None:
        """With whom a rank exchanges in the trees, and what share of the whole; None if they were not printed."""
        if self.channels is None or not len(self.channels.following):
            return None
        neighbours, channels = self.channels.neighbours_of(rank)
        receivers, times = np.unique(neighbours, return_counts=True)
        return (receivers.astype(np.int64), times / channels) if channels else None

    @cached_property
    def tree_neighbours(self) -> list[dict[int, list[int]]]:
        """Of each of the two trees over the nodes: the nodes that a node sends to, up and down."""
        order = list(self.locals)
        return [
            _neighbours([double_tree_parent(len(order), place, tree) for place in range(len(order))], order)
            for tree in (0, 1)
        ]


def _shares(receivers: NDArray[np.int32]) -> tuple[Ranks, NDArray[np.float64]] | None:
    different, times = np.unique(receivers, return_counts=True)
    return (different.astype(np.int64), times / len(receivers)) if len(receivers) else None


def double_tree_parent(nodes: int, node: int, tree: int) -> int | None:
    """The parent of a node in the first (0) or second (1) of NCCL's two binary trees; None for the root.

    The second is the first mirrored if the nodes are even in number, else shifted by one: leaves of one are inner
    nodes of the other. *Source:* NCCL `src/graph/trees.cc` ncclGetBtree, ncclGetDtree.
    """
    if tree == 0:
        return _binary_parent(nodes, node)
    if nodes % 2:
        parent = _binary_parent(nodes, (node - 1) % nodes)
        return None if parent is None else (parent + 1) % nodes
    parent = _binary_parent(nodes, nodes - 1 - node)
    return None if parent is None else nodes - 1 - parent


def _binary_parent(nodes: int, node: int) -> int | None:
    if node == 0:
        return None
    low = node & -node
    up = (node ^ low) | (low << 1)
    return up if up < nodes else node ^ low


def _neighbours(parents: list[int | None], order: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {node: [] for node in order}
    for place, parent in enumerate(parents):
        if parent is not None:
            found[order[place]].append(order[parent])
            found[order[parent]].append(order[place])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one rank that are alike but for their size."""

    op: str
    algorithm: str | None
    """As NCCL names it, RING, TREE, ...; None if nothing says."""
    rank: int
    """The caller, in its communicator."""
    peer: int | None
    """The root of rooted operations, the other side of Send and PutSignal; None for all others."""
    bytes: int
    """The message sizes S of nccl-tests, summed."""


def flows(calls: Calls, seats: Seats) -> Iterator[Flow]:
    """Bytes that these calls send, by receiver; nothing for receiving calls, unknown operations and a single rank.

    With n ranks: AllReduce over a ring 2(n-1)/n S to the next rank; AllGather and ReduceScatter (n-1)/n S; Broadcast
    and Reduce S along the chain from or to the root; AlltoAll S/n to each other rank; Gather and Scatter S/n to or from
    the root; Send and PutSignal S to the peer. AllReduce over the two trees: half of S each, up to the parent and down
    to the children, the ranks of a node in a chain. NVLS, NVLSTree and CollNet: into the switches, see `_switched`.
    """
    if seats.size < 2 or not 0 <= calls.rank < seats.size or calls.bytes <= 0:
        return
    if calls.op in _PAIRED:
        yield from _paired(calls, seats)
    elif calls.op in _RING_SHARES:
        yield from _reducing(calls, seats)


_PAIRED: Final = frozenset({"Send", "PutSignal", "AlltoAll", "Gather", "Scatter", "Broadcast", "Reduce"})
_RING_SHARES: Final = {"AllReduce": 2, "AllGather": 1, "ReduceScatter": 1}
"""How often a ring carries (n-1)/n of S over each of its links."""


def _paired(calls: Calls, seats: Seats) -> Iterator[Flow]:
    """Operations whose ways NCCL has one of only."""
    rank, peer, size = calls.rank, calls.peer, seats.size
    if calls.op == "AlltoAll":
        yield Flow(_others(size, rank), calls.bytes / size)
        return
    if peer is None or not 0 <= peer < size:
        return
    if calls.op in {"Send", "PutSignal"}:
        if peer != rank:
            yield _to(peer, calls.bytes)
    elif calls.op == "Broadcast":
        yield from (flow for flow in _along_rings(calls, seats, calls.bytes) if flow.receivers[0] != peer)
    elif calls.op == "Scatter":
        if rank == peer:
            yield Flow(_others(size, rank), calls.bytes / size)
    elif rank != peer and calls.op == "Reduce":
        yield from _along_rings(calls, seats, calls.bytes)
    elif rank != peer:
        yield _to(peer, calls.bytes / size)


def _along_rings(calls: Calls, seats: Seats, amount: float, *, is_assumed: bool = False) -> Iterator[Flow]:
    """Flows along the rings: to the next rank of each, its share."""
    printed = seats.ring_receivers(calls.rank)
    if printed is None:
        yield _to((calls.rank + 1) % seats.size, amount, is_assumed=is_assumed, is_order_assumed=True)
        return
    for receiver, share in zip(*(column.tolist() for column in printed), strict=True):
        yield _to(receiver, amount * share, is_assumed=is_assumed)


def _to(receiver: int, amount: float, *, is_assumed: bool = False, is_order_assumed: bool = False) -> Flow:
    receivers = np.array([receiver], dtype=np.int64)
    return Flow(receivers, amount, is_assumed=is_assumed, is_order_assumed=is_order_assumed)


def _others(size: int, rank: int) -> Ranks:
    return np.array([other for other in range(size) if other != rank], dtype=np.int64)


def _reducing(calls: Calls, seats: Seats) -> Iterator[Flow]:
    algorithm = calls.algorithm
    printed = seats.tree_receivers(calls.rank)
    if algorithm == "TREE" and calls.op == "AllReduce" and printed is not None:
        for receiver, share in zip(*(column.tolist() for column in printed), strict=True):
            yield _to(receiver, calls.bytes * share)
    elif algorithm == "TREE" and calls.op == "AllReduce" and seats.are_known:
        yield from _tree(calls, seats)
    elif algorithm in _SWITCHED and seats.are_known and (calls.op == "AllReduce" or _is_inside(calls, seats)):
        yield from _switched(calls, seats)
    else:
        share = _RING_SHARES[calls.op] * (seats.size - 1) / seats.size
        yield from _along_rings(calls, seats, share * calls.bytes, is_assumed=algorithm != "RING")


def _tree(calls: Calls, seats: Seats) -> Iterator[Flow]:
    """Both halves along the chain of the node; its first rank sends one half over each tree."""
    yield from _chain(calls, seats)
    node = seats.nodes[calls.rank]
    if seats.locals[node][0] == calls.rank:
        for neighbours in seats.tree_neighbours:
            for other in neighbours[node]:
                yield _to(seats.locals[other][0], calls.bytes / 2, is_order_assumed=True)


def _chain(calls: Calls, seats: Seats) -> Iterator[Flow]:
    """All of S up and down the chain of a node's ranks."""
    mine = seats.locals[seats.nodes[calls.rank]]
    place = mine.index(calls.rank)
    for neighbour in (place - 1, place + 1):
        if 0 <= neighbour < len(mine):
            yield _to(mine[neighbour], calls.bytes, is_order_assumed=True)


_SWITCHED: Final = frozenset({"NVLS", "NVLS_TREE", "COLLNET_DIRECT", "COLLNET_CHAIN"})


def _is_inside(calls: Calls, seats: Seats) -> bool:
    return calls.algorithm == "NVLS" and len(seats.locals) == 1


def _switched(calls: Calls, seats: Seats) -> Iterator[Flow]:
    """Into the switches. L ranks of the node share the work.

    NVLS: the switch reads all of S of every GPU to reduce it, and each GPU multicasts its share S/L. Between nodes NVLS
    and CollNet send a share (the chain's first rank: all) into the network's switches; NVLSTree sends it over the two
    trees to the ranks of the same place in other nodes.
    """
    mine = seats.locals[seats.nodes[calls.rank]]
    share = calls.bytes / len(mine)
    if calls.algorithm in {"NVLS", "NVLS_TREE"}:
        reads = 0 if calls.op == "AllGather" else calls.bytes
        multicasts = 0 if calls.op == "ReduceScatter" else share
        yield Flow(np.empty(0, dtype=np.int64), reads + multicasts, Way.NVSWITCH)
    elif calls.algorithm == "COLLNET_DIRECT":
        others = np.array([rank for rank in mine if rank != calls.rank], dtype=np.int64)
        if len(others):
            yield Flow(others, 2 * share)
    else:
        yield from _chain(calls, seats)
        share = float(calls.bytes) if mine[0] == calls.rank else 0.0
    if len(seats.locals) < 2 or not share:
        return
    if calls.algorithm == "NVLS_TREE":
        place = mine.index(calls.rank)
        for neighbours in seats.tree_neighbours:
            for other in neighbours[seats.nodes[calls.rank]]:
                ranks = seats.locals[other]
                yield _to(ranks[place % len(ranks)], share / 2, is_order_assumed=True)
    else:
        yield Flow(np.empty(0, dtype=np.int64), share, Way.NETWORK)


NOWHERE: Final = -1
"""The receiver if a switch receives."""

_PENDING_ENTRIES: Final = 1 << 20


@dataclass(slots=True)
class TrafficSums:
    """Bytes by (kind, sender, receiver, way); memory follows the pairs that occur, not places squared."""

    places: int
    """How many senders and receivers there are: numbers from 0."""
    _keys: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    _bytes: list[NDArray[np.float64]] = field(default_factory=list[NDArray[np.float64]])
    _assumed: list[NDArray[np.float64]] = field(default_factory=list[NDArray[np.float64]])
    _order_assumed: list[NDArray[np.float64]] = field(default_factory=list[NDArray[np.float64]])
    _pending: int = 0

    def add(self, kind: int, sender: int, receivers: NDArray[np.int64], flow: Flow) -> None:
        """Adds a flow; `receivers` are places (NOWHERE, once, for a switch), not communicator ranks."""
        if len(receivers) > 64:  # AlltoAll over many: one entry per place, however many ranks sit there
            receivers, times = np.unique(receivers, return_counts=True)
        else:
            times = np.ones(len(receivers), dtype=np.int64)
        amounts = flow.bytes * times.astype(np.float64)
        self._keys.append(((kind * self.places + sender) * (self.places + 1) + receivers + 1) * len(Way) + flow.way)
        self._bytes.append(amounts)
        self._assumed.append(amounts if flow.is_assumed else np.zeros(len(amounts)))
        self._order_assumed.append(amounts if flow.is_order_assumed else np.zeros(len(amounts)))
        self._pending += len(receivers)
        if self._pending > _PENDING_ENTRIES:
            self._consolidate()

    def rows(self) -> Iterator[tuple[int, int, int, Way, int, int, int]]:
        """(kind, sender, receiver or NOWHERE, way, bytes, of these with assumed algorithm, with assumed order)."""
        self._consolidate()
        if not self._keys:
            return
        keys, ways = np.divmod(self._keys[0], len(Way))
        keys, receivers = np.divmod(keys, self.places + 1)
        kinds, senders = np.divmod(keys, self.places)
        sums = (np.rint(each[0]) for each in (self._bytes, self._assumed, self._order_assumed))
        columns = (kinds, senders, receivers - 1, ways, *sums)
        for kind, sender, receiver, way, *amounts in zip(*(c.tolist() for c in columns), strict=True):
            amount, assumed, order_assumed = (int(each) for each in amounts)
            yield kind, sender, receiver, Way(way), amount, assumed, order_assumed

    def _consolidate(self) -> None:
        if not self._keys:
            return
        keys, places = np.unique(np.concatenate(self._keys), return_inverse=True)
        self._bytes = [_summed(self._bytes, places, len(keys))]
        self._assumed = [_summed(self._assumed, places, len(keys))]
        self._order_assumed = [_summed(self._order_assumed, places, len(keys))]
        self._keys, self._pending = [keys], 0


def _summed(parts: list[NDArray[np.float64]], places: NDArray[np.intp], groups: int) -> NDArray[np.float64]:
    sums = np.zeros(groups, dtype=np.float64)
    np.add.at(sums, places, np.concatenate(parts))
    return sums
