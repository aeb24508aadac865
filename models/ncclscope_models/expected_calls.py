"""Calls of one rank in one step with the ranks of their group and their peer: what an expected traffic matrix is of."""

from __future__ import annotations

from dataclasses import dataclass

from ncclscope_models.emission.megatron import Step, sends_by_stage
from ncclscope_models.emission.operations import Group
from ncclscope_models.emission.step import expected_operations
from ncclscope_models.job import Job
from ncclscope_models.rank_groups import Order, groups_of, stage_of

_ROOTED = frozenset({"Broadcast", "Reduce"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCalls:
    """Like calls of a rank in a step."""

    ranks: tuple[int, ...]
    """Global ranks of the communicator, in its order."""
    op: str
    peer: int | None
    """Global rank that gets a Send, or that is the root; None for all others."""
    message_bytes: int
    """Of each: S of nccl-tests; what is not known in advance counts 0."""
    lines: int
    is_routed: bool = False
    """An all-to-all of which only the sum is known, not who gets how much."""


def expected_calls(job: Job, rank: int, order: Order) -> list[ExpectedCalls]:
    """What a rank calls in a usual step, without Recvs and groups of one rank, which move nothing.

    Raises:
        ModelError: the job's framework has no rules for its layout.
    """
    groups = groups_of(job.layout, job.framework, rank, order)
    stage = stage_of(job.layout, rank, order)
    found: list[ExpectedCalls] = []
    for operation in expected_operations(job, stage, Step()):
        if operation.ranks == 1 or operation.op == "Recv" or not operation.lines:
            continue
        ranks = groups[operation.group]
        size = operation.message_bytes // operation.lines
        if operation.group is Group.PIPELINE and operation.op == "Send":
            found += [
                ExpectedCalls(ranks=ranks, op="Send", peer=ranks[receiver], message_bytes=size, lines=lines)
                for receiver, lines in sends_by_stage(job, stage).items()
            ]
            continue
        found.append(
            ExpectedCalls(
                ranks=ranks, op=operation.op, peer=ranks[0] if operation.op in _ROOTED else None, message_bytes=size,
                lines=operation.lines, is_routed=operation.op == "AlltoAll",
            )
        )  # fmt: skip
    return found
