"""Operations of one rank of Megatron-LM core r0.13 in one iteration.

Source: Megatron-LM core_r0.13.0 (73a28a1), file by file in `rules.RULES`. These rules give, to the operation, the ten
count tables of a thesis that ran this commit (`benchmarks/models`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ncclscope_models.emission.buckets import Bucket, megatron_bucket_size, megatron_buckets
from ncclscope_models.emission.megatron_experts import expert_operations
from ncclscope_models.emission.operations import Emitted, Group, emitted
from ncclscope_models.job import Job, Precision, Recompute
from ncclscope_models.parameters import elements, rank_tensors, stage_tensors


@dataclass(frozen=True, slots=True)
class Step:
    """What kind of iteration it was."""

    is_skipped: bool = False
    """FP16 overflow: no norm of the gradients, no update, and no gathering of parameters after it."""
    is_logged: bool = True
    """An iteration whose figures are printed (`--log-interval`)."""


def iteration(job: Job, stage: int, step: Step) -> tuple[Emitted, ...]:
    """Every operation of a rank of this pipeline stage in one iteration, one-rank communicators included."""
    return (
        *in_passes(job, stage),
        *_boundaries(job, stage),
        *behind_passes(job, stage, step),
        *_control(job, stage, step),
    )


def behind_passes(job: Job, stage: int, step: Step) -> tuple[Emitted, ...]:
    """Gradients, and parameters of the distributed optimizer."""
    return (*_gradients(job, stage), *_parameters(job, stage, step), *_shared_gradients(job, stage))


def not_covered(job: Job) -> tuple[str, ...]:
    """What this job does that no rule here describes; what it sends for it stays unexplained."""
    found: list[str] = []
    if job.layout.context > 1:
        found.append("context parallel attention")
    if job.shape.experts is not None and job.layout.tensor > 1:
        found.append("experts with tensor parallel")
    if job.layout.tensor > job.shape.kv_heads:
        found.append("more tensor ranks than heads of keys and values")
    return tuple(found)


def start(job: Job, stage: int) -> tuple[Emitted, ...]:
    """Operations before the first iteration. The control ones are fitted, not derived: 5, 1 and 1 on every rank."""
    world = job.layout.ranks
    return (
        *emitted(Group.WORLD, world, "AllReduce", "FP32", None, 5, "start", is_control=True),
        *emitted(Group.WORLD, world, "AllGather", "FP32", None, 1, "start", is_control=True),
        *emitted(Group.WORLD, world, "Broadcast", "FP32", None, 1, "start", is_control=True),
        *_tied_embedding(job, stage, job.training.precision.value),
    )


def in_passes(job: Job, stage: int) -> tuple[Emitted, ...]:
    """Tensor-parallel operations and experts, forward and backward, of all micro-batches."""
    shape, layout, training = job.shape, job.layout, job.training
    is_first, is_last = job.stage_kind(stage)
    m, t = job.micro_batches, layout.tensor
    tokens = training.micro_batch * shape.sequence // layout.context
    dtype = training.precision.value
    whole = tokens * shape.hidden
    again = training.recompute is Recompute.FULL
    layers = job.layers_of_stage
    tensor = Group.TENSOR
    found: list[Emitted] = []

    if t > 1 and layout.is_sequence_parallel:
        part = whole // t
        # Forward 2 AllGathers and 2 ReduceScatters; backward the same mirrored, and the input once more for the weight.
        found += emitted(tensor, t, "AllGather", dtype, part, m * layers * (8 if again else 6), "layers")
        found += emitted(tensor, t, "ReduceScatter", dtype, part, m * layers * (6 if again else 4), "layers")
        if is_first:
            if shape.positions_learned:  # scattered only after the positions are added
                found += emitted(tensor, t, "AllReduce", dtype, whole, m, "embedding")
            else:
                found += emitted(tensor, t, "ReduceScatter", dtype, part, m, "embedding")
            found += emitted(tensor, t, "AllGather", dtype, part, m, "embedding")
        if is_last:
            found += emitted(tensor, t, "AllGather", dtype, part, 2 * m, "head")
            found += emitted(tensor, t, "ReduceScatter", dtype, part, m, "head")
    elif t > 1:
        found += emitted(tensor, t, "AllReduce", dtype, whole, m * layers * (6 if again else 4), "layers")
        found += emitted(tensor, t, "AllReduce", dtype, whole, m if is_first else 0, "embedding")
        found += emitted(tensor, t, "AllReduce", dtype, whole, m if is_last else 0, "head")
    if is_last:
        found += emitted(tensor, t, "AllReduce", "FP32", tokens, 3 * m, "cross-entropy")
    return (*found, *_batch(job, stage), *expert_operations(job, stage))


def _batch(job: Job, stage: int) -> tuple[Emitted, ...]:
    """The batch, from the group's first rank: what first and last stage need of it, once for every model chunk."""
    shape, layout, training = job.shape, job.layout, job.training
    is_first, is_last = job.stage_kind(stage)
    if not is_first and not is_last:
        return ()
    tokens = training.micro_batch * shape.sequence // layout.context
    times = job.micro_batches * layout.chunks
    integers = (2 if is_first else 0) + (1 if is_last else 0)  # tokens and positions; labels
    found = list(emitted(Group.TENSOR, layout.tensor, "Broadcast", "INT64", tokens, integers * times, "batch"))
    found += emitted(Group.TENSOR, layout.tensor, "Broadcast", "FP32", tokens, times if is_last else 0, "batch")
    if training.makes_attention_mask:
        mask = training.micro_batch * shape.sequence**2 // layout.context
        found += emitted(Group.TENSOR, layout.tensor, "Broadcast", "BOOL", mask, times, "batch")
    return tuple(found)


def _boundaries(job: Job, stage: int) -> tuple[Emitted, ...]:
    """Sends and Recvs of a stage. Interleaved stages form a ring, and each of its Sends and Recvs is a kernel."""
    layout, m = job.layout, job.micro_batches
    p, v = layout.pipeline, layout.chunks
    if p == 1:
        return ()
    tokens = job.training.micro_batch * job.shape.sequence // layout.context
    count = tokens * job.shape.hidden // (layout.tensor if layout.is_sequence_parallel else 1)
    each_way = sends_by_stage(job, stage).total()
    kernels = 2 * each_way if v > 1 else _kernels_1f1b(p, stage, m)
    dtype = job.training.precision.value
    return (
        *emitted(Group.PIPELINE, p, "Send", dtype, count, each_way, "boundary", kernels=kernels),
        *emitted(Group.PIPELINE, p, "Recv", dtype, count, each_way, "boundary", kernels=0),
    )


def sends_by_stage(job: Job, stage: int) -> Counter[int]:
    """Sends of a stage in an iteration, by the stage that gets them.

    Forward to the next chunk, and backward to the one before: all chunks but the last, all but the first.
    """
    p, v = job.layout.pipeline, job.layout.chunks
    found: Counter[int] = Counter()
    if p > 1:
        found[(stage + 1) % p] += job.micro_batches * (v - (stage == p - 1))
        found[(stage - 1) % p] += job.micro_batches * (v - (stage == 0))
    return +found


def _kernels_1f1b(p: int, stage: int, m: int) -> int:
    """Kernels of Sends and Recvs of 1F1B: in the steady part one group holds a Send and a Recv."""
    warm_up = min(p - 1 - stage, m)
    if stage == 0:
        return m + warm_up
    if stage == p - 1:
        return m + 1
    steady = m - warm_up
    # Alone in warm-up and cool-down; steady: a Recv first, then a pair each way, the last Send back alone.
    return 4 * warm_up + (2 * steady + 1 if steady else 0)


def gradient_buckets(job: Job, stage: int, *, are_experts: bool) -> list[Bucket]:
    """Buckets of gradients of a rank, chunk after chunk."""
    chunks = range(job.layout.chunks)
    return [each for chunk in chunks for each in chunk_buckets(job, stage, chunk, are_experts=are_experts)]


def chunk_buckets(job: Job, stage: int, chunk: int, *, are_experts: bool) -> list[Bucket]:
    """Buckets of gradients of one chunk of a rank, in the order in which the backward pass fills them."""
    layout, training = job.layout, job.training
    size = megatron_bucket_size(
        layout.data * layout.context,
        overlaps=training.overlaps_gradients,
        is_first_chunk_of_first_stage=stage == 0 and chunk == 0,
    )
    return megatron_buckets(
        [tensor for tensor in rank_tensors(job, stage, chunk) if tensor.is_expert is are_experts],
        layout.expert_data if are_experts else layout.data * layout.context,
        bucket_size=size,
        is_distributed=training.has_distributed_optimizer,
    )


def _gradients(job: Job, stage: int) -> tuple[Emitted, ...]:
    found: list[Emitted] = []
    for are_experts in (False, True):
        group, ranks, rule = _data_group(job, are_experts=are_experts)
        for bucket in gradient_buckets(job, stage, are_experts=are_experts):
            dtype = job.training.gradient_type
            if job.training.has_distributed_optimizer:
                found += emitted(group, ranks, "ReduceScatter", dtype, bucket.padded // ranks, 1, rule)
            else:
                found += emitted(group, ranks, "AllReduce", dtype, bucket.padded, 1, rule)
    return tuple(found)


def _parameters(job: Job, stage: int, step: Step) -> tuple[Emitted, ...]:
    """Parameters gathered by the distributed optimizer."""
    if not job.training.has_distributed_optimizer or step.is_skipped:
        return ()
    found: list[Emitted] = []
    for are_experts in (False, True):
        group, ranks, _ = _data_group(job, are_experts=are_experts)
        for bucket in gradient_buckets(job, stage, are_experts=are_experts):
            found += emitted(
                group, ranks, "AllGather", job.training.precision.value, bucket.padded // ranks, 1, "parameters"
            )
    return tuple(found)


def _data_group(job: Job, *, are_experts: bool) -> tuple[Group, int, str]:
    if are_experts:
        return Group.EXPERT_DATA, job.layout.expert_data, "expert gradients"
    return Group.DATA, job.layout.data * job.layout.context, "gradients"


def _shared_gradients(job: Job, stage: int) -> tuple[Emitted, ...]:
    """Gradients of what more than one stage or tensor-parallel rank holds whole."""
    layout = job.layout
    found = list(_tied_embedding(job, stage, job.training.gradient_type))
    if layout.is_sequence_parallel:
        copied = elements(tensor for tensor in stage_tensors(job, stage) if tensor.is_copied_over_tensor)
        dtype = job.training.gradient_type
        found += emitted(Group.TENSOR, layout.tensor, "AllReduce", dtype, copied, 1, "copied parameters")
    return tuple(found)


def _tied_embedding(job: Job, stage: int, dtype: str) -> tuple[Emitted, ...]:
    layout = job.layout
    if not job.shape.is_tied or layout.pipeline == 1 or not any(job.stage_kind(stage)):
        return ()
    count = job.shape.vocabulary // layout.tensor * job.shape.hidden
    return emitted(Group.EMBEDDING, 2, "AllReduce", dtype, count, 1, "tied embedding")


def _control(job: Job, stage: int, step: Step) -> tuple[Emitted, ...]:
    """Synchronisation and statistics: an element or two each."""
    layout, training = job.layout, job.training
    is_last = job.stage_kind(stage)[1]
    model = layout.tensor * layout.pipeline
    found: list[Emitted] = []

    def one(group: Group, ranks: int, lines: int, rule: str, count: int = 1) -> None:
        found.extend(emitted(group, ranks, "AllReduce", "FP32", count, lines, rule, is_control=True))

    statistics = [(Group.OPTIMIZER, layout.ranks) if training.has_distributed_optimizer else (Group.MODEL, model)]
    if job.shape.experts is not None and not training.has_distributed_optimizer:
        statistics.append((Group.EXPERT_MODEL, layout.expert * layout.expert_tensor * layout.pipeline))
    for group, ranks in statistics:
        one(group, ranks, 1 if training.precision is Precision.FP16 else 0, "overflow")
        one(group, ranks, 1 if training.clips_gradients and not step.is_skipped else 0, "norm")
    one(Group.MODEL, model, 1, "success")
    one(Group.MODEL, model, 2, "statistics")
    one(Group.DATA, layout.data * layout.context, 1 if is_last else 0, "loss", 2)
    one(Group.WORLD, layout.ranks, 2 if step.is_logged else 0, "barriers")
    one(Group.WORLD, layout.ranks, 1, "rerun")
    tables = (1 + training.log_timers_to_tensorboard) if step.is_logged else 0
    found += emitted(Group.WORLD, layout.ranks, "AllGather", "FP32", None, tables, "timers", is_control=True)
    return tuple(found)
