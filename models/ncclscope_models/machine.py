"""A cluster as a model sees it: how fast its GPUs compute, and how long a group on its nodes takes for a collective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ncclscope_models.textbook import wire_bytes
from ncclscope_models.transfer_curve import TransferCurve

HALF_WORK: Final = 5e5
"""Micro-batch x sequence x hidden / tensor ranks at which matrices reach half of their best rate. Of vTrain's A100 runs
4e5 to 7e5 fit; of small models up to 6e6."""


BASE_STEPS_INSIDE: Final = 11.0
"""An operation's start takes as long as so many steps of a ring inside a node: 6.6 us to 0.6 us. Source: NCCL
`src/graph/tuning.cc`, baseLat and hwLat of rings with LL over NVLink. vTrain's tables of A100 have 9 to 19."""
INSIDE_LATENCY: Final = 0.6e-6
"""Seconds of a step between two GPUs of a node, of a run that shows none. Same source: hwLat of NVLink with LL."""
BASE_STEPS_BETWEEN: Final = 0.6
"""The same between nodes: 8.4 us to 14 us, with Simple over the network. Same source."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a group lies on the nodes."""

    ranks: int
    ranks_per_node: int
    sharing: int = 1
    """Groups of its kind that cross the network cards of a node at once.

    Source: Singh et al. (AxoNN), equation 5.7.
    """

    @property
    def nodes(self) -> int:
        """Nodes that hold a rank of the group."""
        return -(-self.ranks // self.ranks_per_node)

    def latency_steps(self, op: str) -> tuple[float, float]:
        """Latencies inside a node, and between nodes, that an operation takes: its start and the steps of a ring."""
        steps = ring_steps(op, self.ranks)
        if self.nodes == 1:
            return BASE_STEPS_INSIDE + steps, 0.0
        crossing = steps * self.nodes / self.ranks
        return steps - crossing, BASE_STEPS_BETWEEN + crossing


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Nodes that are alike; bandwidths in bytes per second of transfers that wait for nobody."""

    gpus_per_node: int
    peak_flops: float
    """Of a GPU, dense, in the type of the job."""
    best_share: float
    """Share of the peak that large matrices reach."""
    half_work: float = HALF_WORK
    inside_bandwidth: float
    """Bus bandwidth of a collective inside a node."""
    node_bandwidth: float
    """Bus bandwidth of a collective over whole nodes: all that their network cards carry."""
    network_cards: int | None = None
    """Of a node; None: one for each GPU. A GPU sends by one of them."""
    inside_latency: float
    """Seconds of a step of a ring between two GPUs of a node."""
    network_latency: float
    """Seconds of a step between two nodes."""
    memory_bandwidth: float
    """Bytes per second of a GPU's memory: for what is no matrix, and the optimizer."""
    memory_efficiency: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    """Bytes that an operation reads and writes at least, and the share of `memory_bandwidth` it then reaches: the
    largest first, down to 0. Measured or from a description of the GPU; as it is here every operation reaches all."""
    writes_scores: bool = False
    """Whether attention writes its scores to memory: not with FlashAttention and other fused kernels."""
    inside: Mapping[tuple[str, int], TransferCurve] = field(default_factory=lambda: MappingProxyType({}))
    """Measured seconds of an operation by message bytes, for so many ranks in one node: taken before the formula."""
    corrections: Mapping[tuple[str, int, int], float] = field(default_factory=lambda: MappingProxyType({}))
    """By operation, ranks and nodes: how many times longer than the formula says transfers were measured to take."""

    def compute_seconds(self, flops: float, work: float) -> float:
        """Of matrices; `work` is micro-batch x sequence x hidden / tensor ranks."""
        return flops / (self.peak_flops * self.best_share * work / (work + self.half_work))

    def memory_seconds(self, accessed: float) -> float:
        """Of one operation that reads and writes so many bytes and computes nothing to speak of."""
        share = next(share for least, share in self.memory_efficiency if accessed >= least)
        return accessed / (self.memory_bandwidth * share)

    def cards_in_use(self, placed: Placement) -> float:
        """Share of a node's cards that the groups of a kind reach: those beside the GPUs that send out of the node."""
        sending = min(self.gpus_per_node, placed.sharing * placed.ranks_per_node)
        return min(1.0, sending / (self.network_cards or self.gpus_per_node))

    def collective_seconds(self, op: str, message_bytes: float, placed: Placement) -> float:
        """Transfer of one operation, ring algorithms. 0 for one rank; a Send goes to another node if the group does."""
        if placed.ranks == 1 or message_bytes == 0:
            return 0.0
        if placed.nodes == 1 and (op, placed.ranks) in self.inside:
            return float(self.inside[op, placed.ranks].seconds(message_bytes))
        wire, (inside, between) = wire_bytes(op, message_bytes, placed.ranks), placed.latency_steps(op)
        known = self.corrections.get((op, placed.ranks, placed.nodes), 1.0)
        bandwidth = self.inside_bandwidth
        if placed.nodes > 1:
            bandwidth = min(bandwidth, self.node_bandwidth * self.cards_in_use(placed) / placed.sharing)
        return known * (inside * self.inside_latency + between * self.network_latency + wire / bandwidth)


def ring_steps(op: str, ranks: int) -> int:
    """Messages that follow each other in a ring; a Send is one."""
    if op in ("Send", "Recv"):
        return 1
    return (2 if op == "AllReduce" else 1) * (ranks - 1)
