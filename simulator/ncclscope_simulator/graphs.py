"""CUDA graphs: what is captured of a step, and the launches that replay it.

Source: NCCL src/enqueue.cc (lines are printed and plans are made at capture, nothing is launched), src/proxy.cc
ncclProxyStart (a captured plan counts when a host node starts its proxy work, at each replay), CUPTI (all kernels
of a graph launch carry its correlation id; a node's id holds the graph's in its upper half).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

GRAPH_LAUNCH_API = "cudaGraphLaunch_v10000"
INSTANTIATE_NS = 3_000_000
"""Between the end of a capture and the first launch: cudaGraphInstantiate."""
LAUNCH_NS = 25_000
"""Host time of one graph launch."""
REPLAY_GAP_NS = 4_000
"""From the end of the launch call to the first node."""


class Stage(Enum):
    """How a launch, or a whole step, comes about."""

    EAGER = auto()
    """Enqueued launch by launch."""
    CAPTURED = auto()
    """Called while the stream is captured: lines are printed, nothing runs. Of a step: that, and then a replay."""
    REPLAYED = auto()
    """Run by a graph launch: no call, no line."""


@dataclass(kw_only=True, slots=True, eq=False)
class GraphLaunch:
    """One cudaGraphLaunch of one rank. Times in ns on the reference clock."""

    rank: int
    graph: int
    """Number of the graph in its process; captured again it gets another."""
    replay: int
    """How often it was launched before."""
    api_start_ns: int
    api_end_ns: int
    correlation_id: int = 0

    @property
    def ready_ns(self) -> int:
        """When its first node can run."""
        return self.api_end_ns + REPLAY_GAP_NS


@dataclass(frozen=True, slots=True)
class Node:
    """A kernel's place in its graph."""

    graph: int
    index: int

    @property
    def id(self) -> int:
        """The id that CUPTI gives it: graph and index in one number."""
        return self.graph << 32 | self.index


def segments(issues: list[int], amount: int) -> list[tuple[int, int]]:
    """Cuts actions into `amount` graphs: (first, last + 1) of each, by the indices of the actions that communicate."""
    if not issues:
        return []
    amount = min(amount, len(issues))
    firsts = [issues[len(issues) * nth // amount] for nth in range(amount)]
    firsts[0] = 0
    return list(zip(firsts, [*firsts[1:], issues[-1] + 1], strict=True))
