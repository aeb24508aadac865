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
    inside_latency: float
    """Seconds of a step of a ring between two GPUs of a node."""
    network_latency: float
    """Seconds of a step between two nodes."""
    memory_bandwidth: float
    """Bytes per second of a GPU's memory: for what is no matrix, and the optimizer."""
    writes_scores: bool = False
    """Whether attention writes its scores to memory: not with FlashAttention and other fused kernels."""
    inside: Mapping[tuple[str, int], TransferCurve] = field(default_factory=lambda: MappingProxyType({}))
    """Measured seconds of an operation by message bytes, for so many ranks in one node: taken before the formula."""
    corrections: Mapping[tuple[str, int, int], float] = field(default_factory=lambda: MappingProxyType({}))
    """By operation, ranks and nodes: how many times longer than the formula says transfers were measured to take."""
    hidden_gradients: float = 0.0
    """Share of the time of gradients' operations that the backward pass hides."""

    def compute_seconds(self, flops: float, work: float) -> float:
        """Of matrices; `work` is micro-batch x sequence x hidden / tensor ranks."""
        return flops / (self.peak_flops * self.best_share * work / (work + self.half_work))

    def collective_seconds(self, op: str, message_bytes: float, placed: Placement) -> float:
        """Transfer of one operation, ring algorithms. 0 for one rank; a Send goes to another node if the group does."""
        if placed.ranks == 1 or message_bytes == 0:
            return 0.0
        if placed.nodes == 1 and (op, placed.ranks) in self.inside:
            return float(self.inside[op, placed.ranks].seconds(message_bytes))
        wire, steps = wire_bytes(op, message_bytes, placed.ranks), ring_steps(op, placed.ranks)
        known = self.corrections.get((op, placed.ranks, placed.nodes), 1.0)
        if placed.nodes == 1:
            return known * (steps * self.inside_latency + wire / self.inside_bandwidth)
        share = placed.nodes / placed.ranks  # of the ring's steps that leave a node
        step = share * self.network_latency + (1 - share) * self.inside_latency
        return known * (steps * step + wire / min(self.inside_bandwidth, self.node_bandwidth / placed.sharing))


def ring_steps(op: str, ranks: int) -> int:
    """Messages that follow each other in a ring; a Send is one."""
    if op in ("Send", "Recv"):
        return 1
    return (2 if op == "AllReduce" else 1) * (ranks - 1)
