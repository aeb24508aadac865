"""What would be faster than transfers that wait for latency and not for bytes: by measured sizes, or by cost models.

How much of a transfer does not come from its bytes is read from the slope of its measured curve. Cost models split the
same time into steps and bytes of a ring; they may be off by two, either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import Final

from ncclscope_models.transfer_estimate import GroupShape, TransferTimes

LATENCY_BOUND: Final = 0.5
"""Share of a transfer's time that does not come from its bytes, above which it is bound by latency."""
_LEAST_BYTES: Final = 1024
"""What is smaller is control, which nobody would change."""
_LEAST_GAIN: Final = 0.1
_TOGETHER: Final = (8, 4, 2)
_IN_BUCKETS: Final = ("", "DP")
"""Kinds of parallelism whose messages are as large as a setting says."""
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
    found = [*_fused(times, shape, message_bytes), *_other_algorithms(shape, now.typical, share, algorithm)]
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
