"""Time of one collective by the algorithm's cost model: steps times latency, bytes over bandwidth.

n is the bytes of the whole array (nccl-tests' S), alpha seconds per step, B bytes per second of a link.
Sources: Thakur, Rabenseifner, Gropp 2005 (ring, recursive doubling, all-to-all); Sanders, Speck, Träff 2009 (double
tree). The hierarchical AllGather follows the description in Singh's dissertation, section 6.2: it has no equation.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Final


def ring_allreduce(n: float, ranks: int, alpha: float, bandwidth: float) -> float:
    """2 (P-1) alpha + 2 (P-1)/P n/B."""
    return 2 * ring_gather(n, ranks, alpha, bandwidth)


def ring_gather(n: float, ranks: int, alpha: float, bandwidth: float) -> float:
    """(P-1) alpha + (P-1)/P n/B: AllGather and ReduceScatter."""
    return (ranks - 1) * alpha + (ranks - 1) / ranks * n / bandwidth


def recursive_doubling(n: float, ranks: int, alpha: float, bandwidth: float) -> float:
    """ceil(log2 P) alpha + (P-1)/P n/B', whose B' is below a ring's: its messages are large and go far."""
    return ceil(log2(ranks)) * alpha + (ranks - 1) / ranks * n / bandwidth


def tree_allreduce(n: float, ranks: int, alpha: float, bandwidth: float) -> float:
    """2 log2 P alpha + 2 n/B: double tree."""
    return 2 * log2(ranks) * alpha + 2 * n / bandwidth


def alltoall(n: float, ranks: int, alpha: float, bandwidth: float) -> float:
    """(P-1) alpha + (P-1)/P n/B."""
    return ring_gather(n, ranks, alpha, bandwidth)


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoLevels:
    """Machine of nodes, as a hierarchical collective sees it."""

    alpha_flat: float
    """Seconds of a step of a ring over all ranks."""
    alpha_between: float
    """Seconds of a step between nodes."""
    alpha_inside: float
    node_bandwidth: float
    """Bytes per second that leave a node."""
    inside_bandwidth: float


def hierarchical_gather(n: float, nodes: int, per_node: int, machine: TwoLevels) -> float:
    """AllGather between nodes by recursive doubling, then inside them by a ring; the shuffle is left out."""
    between = machine.alpha_between * log2(nodes) + (nodes - 1) / nodes * n / machine.node_bandwidth
    inside = machine.alpha_inside * (per_node - 1) + (per_node - 1) / per_node * n / machine.inside_bandwidth
    return between + inside


def flat_gather(n: float, nodes: int, per_node: int, machine: TwoLevels) -> float:
    """A ring over all ranks, bound by what leaves a node."""
    return ring_gather(n, nodes * per_node, machine.alpha_flat, machine.node_bandwidth)


FRONTIER: Final = TwoLevels(
    alpha_flat=51e-6, alpha_between=180e-6, alpha_inside=180e-6, node_bandwidth=191e9, inside_bandwidth=191e9 / 1.57
)
"""Effective, fitted to six printed speed-ups of AllGather on Frontier (Singh's dissertation, figure 6.6)."""


def hierarchical_speedup(n: float, nodes: int, per_node: int, machine: TwoLevels) -> float:
    """Time of the flat ring over that of the hierarchical AllGather."""
    return flat_gather(n, nodes, per_node, machine) / hierarchical_gather(n, nodes, per_node, machine)


@dataclass(frozen=True, kw_only=True, slots=True)
class FourAxes:
    """A number for each axis of AxoNN's grid, three of tensor parallelism and one of data: its degree or bandwidth."""

    x: float
    y: float
    z: float
    data: float


def axonn_layer(m: float, k: float, n: float, grid: FourAxes, bandwidth: FourAxes, element_bytes: int = 2) -> float:
    """Seconds of a fully connected layer's five collectives: input m x k, weight k x n.

    `bandwidth` in bytes per second of each axis. Source: Singh et al. (AxoNN), equations 5.1 to 5.6; the paper leaves
    out the bytes of an element. Ring only, no latency, nothing overlapped. Every other layer swaps x and y.
    """
    x, y, z, d = grid.x, grid.y, grid.z, grid.data
    gather_z = (z - 1) * k * n / (x * y * z) / bandwidth.z
    scatter_z = (z - 1) / z * k * n / (x * y) / bandwidth.z
    reduce_y = 2 * (y - 1) / y * m * n / (z * x) / bandwidth.y
    reduce_x = 2 * (x - 1) / x * m * k / (z * y) / bandwidth.x
    reduce_data = 2 * (d - 1) / d * k * n / (x * y * z) / bandwidth.data
    return element_bytes * (gather_z + scatter_z + reduce_y + reduce_x + reduce_data)
