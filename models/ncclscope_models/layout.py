"""Which rank is where: coordinates of a rank, grids of processes, layers of stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

MEGATRON_ORDER = ("tensor", "context", "expert", "data", "pipeline")
"""Innermost first. Source: Megatron-LM core_r0.13.0 `parallel_state.py`, `order="tp-cp-ep-dp-pp"`."""


def coordinates(rank: int, degrees: Sequence[int]) -> tuple[int, ...]:
    """Place of a rank in a grid whose first degree is the innermost."""
    found: list[int] = []
    for degree in degrees:
        rank, place = divmod(rank, degree)
        found.append(place)
    return tuple(found)


def groups(degrees: Sequence[int], axis: int) -> list[tuple[int, ...]]:
    """Groups of ranks that differ along one axis only, by their first rank."""
    stride = prod(degrees[:axis])
    found: list[tuple[int, ...]] = []
    for first in range(prod(degrees)):
        if coordinates(first, degrees)[axis] == 0:
            found.append(tuple(first + stride * place for place in range(degrees[axis])))
    return found


def grids(gpus: int, axes: int = 4) -> Iterator[tuple[int, ...]]:
    """Every ordered choice of degrees whose product is the number of GPUs (AxoNN's x, y, z and data)."""
    if axes == 1:
        yield (gpus,)
        return
    for degree in range(1, gpus + 1):
        if gpus % degree == 0:
            for rest in grids(gpus // degree, axes - 1):
                yield (degree, *rest)


def share_of_node_bandwidth(degrees: Sequence[int], axis: int, gpus_per_node: int) -> float:
    """Share of a node's network bandwidth that a ring of this axis gets, where the ring leaves the node.

    1 / min(G_node, product of the inner degrees): so many rings of the axis leave a node at once.
    Source: Singh et al. (AxoNN), equation 5.7.
    """
    return 1 / min(gpus_per_node, prod(degrees[:axis]))


def encoders_of_stages(encoders: int, stages: int) -> tuple[int, ...]:
    """ceil((encoders + 5) / p) for each stage, less 2 on the first and 3 on the last (embedding, head, loss).

    An upper bound of each stage: it sums to the encoders only where p divides encoders + 5.
    Source: Zhang et al. 2025 (arXiv 2509.22832), figure 3.
    """
    each = -(-(encoders + 5) // stages)
    return tuple(each - (2 if i == 0 else 0) - (3 if i == stages - 1 else 0) for i in range(stages))
