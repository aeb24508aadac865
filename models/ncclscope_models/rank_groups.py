"""The ranks of every group of a job: which communicators a rank is expected to have, and who is in them.

Source: Megatron-LM core_r0.13.0 `megatron/core/parallel_state.py:RankGenerator` (orders, expert ranks apart from the
others); PyTorch 2.7 `torch/distributed/device_mesh.py` (replicas outside, shards inside).
"""

from __future__ import annotations

from enum import StrEnum
from math import prod
from typing import Final

import numpy as np

from ncclscope_models.emission.operations import Group
from ncclscope_models.job import Framework, Layout
from ncclscope_models.layout import coordinates


class Order(StrEnum):
    """Which dimension has neighbouring ranks, innermost first."""

    DATA_FIRST = "tp-cp-ep-dp-pp"
    PIPELINE_FIRST = "tp-cp-ep-pp-dp"
    """Megatron-LM's `--use-tp-pp-dp-mapping`."""


_TENSOR, _CONTEXT = 0, 1
"""Axes of the grid of ranks; those of data and pipeline depend on the order."""
_PARTS: Final = {
    Group.TENSOR: "t",
    Group.PIPELINE: "p",
    Group.DATA: "cd",
    Group.MODEL: "tp",
    Group.WORLD: "tcdp",
    Group.OPTIMIZER: "tcdp",
}
_EXPERT_PARTS: Final = {Group.EXPERT: "e", Group.EXPERT_DATA: "d", Group.EXPERT_MODEL: "tep"}


def stage_of(layout: Layout, rank: int, order: Order) -> int:
    """The pipeline stage of a rank."""
    degrees, axes = _grid(layout, order)
    return coordinates(rank, degrees)[axes["p"]]


def groups_of(layout: Layout, framework: Framework, rank: int, order: Order) -> dict[Group, tuple[int, ...]]:
    """Ranks of each group that a rank belongs to, those of one rank included, in order of rank."""
    if framework is not Framework.MEGATRON:
        mesh, names = (layout.shard, layout.data // layout.shard), {"s": 0, "r": 1}
        parts = {Group.SHARD: "s", Group.REPLICA: "r", Group.DATA: "sr", Group.WORLD: "sr"}
        return {group: _together(rank, mesh, names, own) for group, own in parts.items()}
    degrees, axes = _grid(layout, order)
    found = {group: _together(rank, degrees, axes, parts) for group, parts in _PARTS.items()}
    stages = found[Group.PIPELINE]
    if rank in (stages[0], stages[-1]):
        found[Group.EMBEDDING] = (stages[0], stages[-1])
    degrees, axes = _expert_grid(layout, order)
    found.update({group: _together(rank, degrees, axes, parts) for group, parts in _EXPERT_PARTS.items()})
    return found


def _grid(layout: Layout, order: Order) -> tuple[tuple[int, ...], dict[str, int]]:
    """Degrees, innermost first, and the axis of each dimension."""
    outer = (layout.data, layout.pipeline) if order is Order.DATA_FIRST else (layout.pipeline, layout.data)
    data, pipeline = (2, 3) if order is Order.DATA_FIRST else (3, 2)
    return (layout.tensor, layout.context, *outer), {"t": _TENSOR, "c": _CONTEXT, "d": data, "p": pipeline}


def _expert_grid(layout: Layout, order: Order) -> tuple[tuple[int, ...], dict[str, int]]:
    """The same ranks as experts lie on them: expert tensor, expert, expert data, pipeline."""
    if order is Order.DATA_FIRST:
        degrees = (layout.expert_tensor, layout.expert, layout.expert_data, layout.pipeline)
        return degrees, {"t": 0, "e": 1, "d": 2, "p": 3}
    degrees = (layout.expert_tensor, layout.expert, layout.pipeline, layout.expert_data)
    return degrees, {"t": 0, "e": 1, "p": 2, "d": 3}


def _together(rank: int, degrees: tuple[int, ...], axes: dict[str, int], parts: str) -> tuple[int, ...]:
    """Ranks that differ from this one along some dimensions only, in order of rank."""
    own = coordinates(rank, degrees)
    found = np.zeros(1, np.int64)
    for axis in sorted((axes[part] for part in parts), reverse=True):
        stride = prod(degrees[:axis])
        found = (found[:, None] + stride * (np.arange(degrees[axis]) - own[axis])).ravel()
    return tuple((found + rank).tolist())
