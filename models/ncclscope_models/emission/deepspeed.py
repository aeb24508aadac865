"""Operations of one rank of DeepSpeed's ZeRO, stages 1 to 3, in one iteration.

Source: DeepSpeed 0.16, file by file in `rules.RULES`. One group of parameters is assumed: an optimizer with and without
weight decay has two, and gathers twice. Read from source; no real log has been held against them yet.
"""

from __future__ import annotations

from ncclscope_models.emission.buckets import deepspeed_buckets
from ncclscope_models.emission.operations import Emitted, Group, emitted
from ncclscope_models.job import Job, ModelError
from ncclscope_models.parameters import elements, rank_tensors

REDUCE_BUCKET = 500_000_000
"""Elements; `reduce_bucket_size`."""
GATHER_BUCKET = 500_000_000
"""Elements; `allgather_bucket_size`."""
PERSISTENT = 100_000
"""Elements; parameters that are smaller stay on every rank (`stage3_param_persistence_threshold`)."""
ALIGNMENT = 2
"""Elements; flat partitions start at a multiple of it (`nccl_start_alignment_factor`)."""


def iteration(
    job: Job, *, reduce_bucket: int = REDUCE_BUCKET, gather_bucket: int = GATHER_BUCKET
) -> tuple[Emitted, ...]:
    """Every operation of a rank in one iteration.

    Stage 3 fetches parameters ahead and may join AllGathers: there the elements are exact in sum, and the number of
    lines is the largest.

    Raises:
        ModelError: stage 0, or tensor, pipeline or context parallel, for which there are no rules.
    """
    layout, stage = job.layout, job.training.zero_stage
    if layout.tensor > 1 or layout.pipeline > 1 or layout.context > 1:
        raise ModelError("DeepSpeed: there are rules for data parallel alone")
    if stage == 0:
        raise ModelError("DeepSpeed without ZeRO reduces like DDP: no rules of its own")
    sent = _stage_3(job, reduce_bucket) if stage == 3 else _stage_1_or_2(job, reduce_bucket, gather_bucket)
    group = Group.SHARD if stage == 3 else Group.DATA
    return (
        *sent,
        *emitted(group, layout.data, "AllReduce", "FP32", 1, 1, "overflow", is_control=True),
        *emitted(group, layout.data, "AllReduce", "FP32", 1, 1, "norm", is_control=True),
    )


def _stage_1_or_2(job: Job, reduce_bucket: int, gather_bucket: int) -> tuple[Emitted, ...]:
    """Gradients by AllReduce, once (stage 1) or every micro-batch (stage 2); parameters gathered in pieces."""
    ranks, training = job.layout.data, job.training
    sizes = [tensor.elements for tensor in rank_tensors(job, 0)]
    is_second = training.zero_stage == 2
    order = reversed(sizes) if is_second else iter(sizes)
    dtype = training.precision.value
    found: list[Emitted] = []
    for bucket in deepspeed_buckets(order, reduce_bucket):
        times = job.micro_batches if is_second else 1
        found += emitted(Group.DATA, ranks, "AllReduce", dtype, sum(bucket), times, "zero gradients")
    whole = -(-sum(sizes) // (ranks * ALIGNMENT)) * ALIGNMENT * ranks
    part = whole // ranks
    pieces = max(1, whole // gather_bucket)
    piece = part // pieces - part // pieces % ALIGNMENT
    last = part - piece * (pieces - 1)
    found += emitted(Group.DATA, ranks, "AllGather", dtype, piece, pieces - 1, "zero parameters")
    found += emitted(Group.DATA, ranks, "AllGather", dtype, last, 1, "zero parameters")
    return tuple(found)


def _stage_3(job: Job, reduce_bucket: int) -> tuple[Emitted, ...]:
    """Matrices gathered forward and backward, gradients of a bucket scattered, every micro-batch."""
    ranks, m, dtype = job.layout.data, job.micro_batches, job.training.precision.value
    tensors = rank_tensors(job, 0)
    found: list[Emitted] = []
    for tensor in tensors:
        if tensor.elements > PERSISTENT:
            part = -(-tensor.elements // ranks)
            found += emitted(Group.SHARD, ranks, "AllGather", dtype, part, 2 * m, "zero parameters")
    persistent = elements(tensor for tensor in tensors if tensor.elements <= PERSISTENT)
    found += emitted(Group.SHARD, ranks, "AllGather", dtype, -(-persistent // ranks), 1, "zero parameters")
    for bucket in deepspeed_buckets((tensor.elements for tensor in reversed(tensors)), reduce_bucket):
        part = sum(-(-size // ranks) for size in bucket)
        found += emitted(Group.SHARD, ranks, "ReduceScatter", dtype, part, m, "zero gradients")
    return tuple(found)
