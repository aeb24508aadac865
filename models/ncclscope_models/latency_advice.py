"""What would be faster than transfers that wait for latency and not for bytes: by measured sizes, or by cost models.

How much of a transfer does not come from its bytes is read from the slope of its measured curve. Cost models split the
same time into steps and bytes of a ring; they may be off by two, either way. What several operations take together is
the sum of theirs, and so are the ends of the interval, as if all were off alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from ncclscope_models.transfer_estimate import Estimate, GroupShape, TransferTimes

LATENCY_BOUND: Final = 0.5
"""Share of a transfer's time that does not come from its bytes, above which it is bound by latency."""
_LEAST_BYTES: Final = 1024
"""What is smaller is control, which nobody would change."""
_LEAST_GAIN: Final = 0.1
_TOGETHER: Final = (8, 4, 2)
_IN_BUCKETS: Final = ("", "DP")
"""Kinds of parallelism whose messages are as large as a setting says."""
_ON_SOME: Final = ("EMBEDDING", "PP")
"""Kinds of parallelism whose groups may have less than all GPUs of a node."""
_MODEL_IS_OFF_BY: Final = 2.0
_HALVES: Final = {"AllReduce": 2, "AllGather": 1, "ReduceScatter": 1}
"""How many times a ring goes round, in its P - 1 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """What could be done instead of so many transfers; seconds, four of five between `low` and `high`."""

    what: str
    replaces: int
    low: float
    typical: float
    high: float
    by: str
    """The model that says it."""
    attempt: str
    """What would try it."""


def alternatives(
    times: TransferTimes, shape: GroupShape, message_bytes: int, algorithm: str | None = None
) -> list[Alternative]:
    """What would be faster by a tenth or more; none of a transfer that is not bound by latency.

    `algorithm`: NCCL's name of what ran; None: not known.
    """
    share, now = times.latency_share(shape, message_bytes), times.estimate(shape, message_bytes)
    if share is None or now is None or share <= LATENCY_BOUND or message_bytes < _LEAST_BYTES:
        return []
    found = [
        *_fused(times, shape, message_bytes),
        *_by_nodes(times, shape, message_bytes),
        *_other_algorithms(shape, now.typical, share, algorithm),
    ]
    return [each for each in found if each.typical <= (1 - _LEAST_GAIN) * each.replaces * now.typical]


def _fused(times: TransferTimes, shape: GroupShape, message_bytes: int) -> Iterator[Alternative]:
    if shape.parallelism not in _IN_BUCKETS or shape.op not in _HALVES:
        return
    for together in _TOGETHER:
        one = times.estimate(shape, together * message_bytes)
        if one is not None:
            yield Alternative(
                what=f"{together} of them as one",
                replaces=together,
                low=one.low,
                typical=one.typical,
                high=one.high,
                by="measured sizes",
                attempt=f"buckets {together} times as large",
            )
            return


def _by_nodes(times: TransferTimes, shape: GroupShape, message_bytes: int) -> Iterator[Alternative]:
    """An AllReduce in three steps: ReduceScatter in each node, AllReduce of the parts between nodes, AllGather in each.

    Where all three were measured. Each rank of a node sends its part at once, as groups of one rank per node do that
    fill theirs. Source: the decomposition of Cho et al. 2019, "BlueConnect".
    """
    per_node, left_over = divmod(shape.ranks, shape.nodes)
    if shape.op != "AllReduce" or shape.nodes == 1 or per_node == 1 or left_over or message_bytes % per_node:
        return
    steps = [
        _slowest(times, "ReduceScatter", per_node, 1, message_bytes),
        _slowest(times, "AllReduce", shape.nodes, shape.nodes, message_bytes // per_node),
        _slowest(times, "AllGather", per_node, 1, message_bytes),
    ]
    known = [each for each in steps if each is not None]
    if len(known) == len(steps):
        yield Alternative(
            what="ReduceScatter in each node, AllReduce between nodes, AllGather in each",
            replaces=1,
            low=sum(each.low for each in known),
            typical=sum(each.typical for each in known),
            high=sum(each.high for each in known),
            by="measured sizes",
            attempt=f"groups of the {per_node} ranks of a node, and of one rank of each node",
        )


def _slowest(times: TransferTimes, op: str, ranks: int, nodes: int, message_bytes: int) -> Estimate | None:
    """Of the kinds of parallelism that have such groups on all GPUs of a node."""
    found = [
        times.estimate(shape, message_bytes)
        for shape in times.measured
        if (shape.op, shape.ranks, shape.nodes) == (op, ranks, nodes) and shape.parallelism not in _ON_SOME
    ]
    return max((each for each in found if each is not None), key=lambda each: each.typical, default=None)


def _other_algorithms(shape: GroupShape, now: float, share: float, algorithm: str | None) -> Iterator[Alternative]:
    """Of what ran as a ring, or might have."""
    p, rounds = shape.ranks, _HALVES.get(shape.op)
    if rounds is None or p < 3 or algorithm not in (None, "RING"):
        return
    step, of_bytes = share * now / (rounds * (p - 1)), (1 - share) * now
    if shape.op == "AllReduce":
        yield _modelled("a tree", 2 * log2(p) * step + of_bytes * p / (p - 1), "NCCL_ALGO=Tree")
    elif shape.nodes == p:  # PAT is for one rank per node
        yield _modelled("PAT", ceil(log2(p)) * step + of_bytes, "NCCL_PAT_ENABLE=1 (NCCL 2.23 and newer)")


def _modelled(what: str, seconds: float, attempt: str) -> Alternative:
    return Alternative(
        what=what,
        replaces=1,
        low=seconds / _MODEL_IS_OFF_BY,
        typical=seconds,
        high=seconds * _MODEL_IS_OFF_BY,
        by="the cost model of the algorithms",
        attempt=attempt,
    )
