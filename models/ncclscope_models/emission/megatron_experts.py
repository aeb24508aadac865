"""Operations of Megatron-LM's expert layers, by token dispatcher.

How many tokens go to each peer is decided by the router: only the sum that a rank hands out is known, k b s tokens.
Source: Megatron-LM core_r0.13.0 (73a28a1) `megatron/core/transformer/moe/token_dispatcher.py`. Without tensor parallel
inside the layer.
"""

from __future__ import annotations

from ncclscope_models.emission.operations import Emitted, Group, emitted
from ncclscope_models.job import Dispatcher, Job, Recompute


def expert_operations(job: Job, stage: int) -> tuple[Emitted, ...]:
    """Operations of the expert layers of a stage, all micro-batches; none where experts are not cut over ranks."""
    experts, ranks = job.shape.experts, job.layout.expert
    if experts is None or ranks == 1:
        return ()
    layers = sum(
        job.shape.has_experts(layer) for chunk in range(job.layout.chunks) for layer in job.layers_of(stage, chunk)
    )
    times = job.micro_batches * layers
    forwards = 2 if job.training.recompute is Recompute.FULL else 1
    tokens = job.training.micro_batch * job.shape.sequence // job.layout.context
    hidden = tokens * job.shape.hidden
    dtype = job.training.precision.value
    group = Group.EXPERT
    if experts.dispatcher is Dispatcher.ALLTOALL:
        # Forward: tokens out, probabilities out, tokens back; backward the same mirrored.
        k, both = experts.top_k, times * (forwards + 1)
        return (
            *emitted(group, ranks, "AlltoAll", dtype, k * hidden, 2 * both, "expert tokens"),
            *emitted(group, ranks, "AlltoAll", dtype, k * tokens, both, "expert probabilities"),
            *emitted(group, ranks, "AllGather", "INT64", experts.experts, times * forwards, "expert counts"),
        )
    routed = tokens * experts.experts
    # Forward: map, probabilities and hidden states gathered, results scattered; backward mirrored, without the map.
    return (
        *emitted(group, ranks, "AllGather", "BOOL", routed, times * forwards, "expert map"),
        *emitted(group, ranks, "AllGather", dtype, routed, times * forwards, "expert probabilities"),
        *emitted(group, ranks, "AllGather", dtype, hidden, times * (forwards + 1), "expert tokens"),
        *emitted(group, ranks, "ReduceScatter", dtype, routed, times, "expert probabilities"),
        *emitted(group, ranks, "ReduceScatter", dtype, hidden, times * (forwards + 1), "expert tokens"),
    )
