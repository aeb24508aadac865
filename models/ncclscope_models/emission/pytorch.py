"""Operations of one rank of PyTorch's FSDP2, HSDP and DDP in one iteration.

Source: PyTorch 2.7, file by file in `rules.RULES`. Only what the wrappers send: norm, loss and whatever else the
training script reduces are its own. Read from source; no real log has been held against them yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ncclscope_models.emission.buckets import ddp_buckets
from ncclscope_models.emission.operations import Emitted, Group, emitted
from ncclscope_models.job import ELEMENT_BYTES, Job, ModelError
from ncclscope_models.parameters import Tensor, rank_tensors


def wrapped_modules(job: Job) -> list[list[Tensor]]:
    """Parameters by wrapped module: the root (embedding, final norm, head) first, then every layer.

    As `fully_shard` on each layer and on the model makes them.
    """
    layers: list[list[Tensor]] = [[] for _ in range(job.shape.layers)]
    root: list[Tensor] = []
    for tensor in rank_tensors(job, 0):
        kind, _, rest = tensor.name.partition(".")
        (layers[int(rest.partition(".")[0])] if kind == "layer" else root).append(tensor)
    return [root, *layers]


def shard_elements(tensors: Sequence[Tensor], shards: int) -> int:
    """Elements of a rank's shard of a module: each parameter is cut along its first dimension, padded to equal parts.

    Source: PyTorch 2.7 `_fsdp_param.py:_init_sharded_param`.
    """
    return sum(-(-tensor.shape[0] // shards) * prod(tensor.shape[1:]) for tensor in tensors)


def fsdp_iteration(job: Job) -> tuple[Emitted, ...]:
    """FSDP2, or HSDP where `layout.shard` is smaller than `layout.data`; gradients reduced every micro-batch.

    The root keeps its parameters after its forward pass, so that they are gathered once.

    Raises:
        ModelError: tensor or pipeline parallel, for which the modules are cut differently.
    """
    layout, training = job.layout, job.training
    _only_data_parallel(job)
    shards, replicas = layout.shard, layout.data // layout.shard
    m = job.micro_batches
    found: list[Emitted] = []
    for place, module in enumerate(wrapped_modules(job)):
        count = shard_elements(module, shards)
        gathers = m * (2 if training.reshards_after_forward and place else 1)
        found += emitted(Group.SHARD, shards, "AllGather", training.precision.value, count, gathers, "fsdp gather")
        found += emitted(Group.SHARD, shards, "ReduceScatter", training.gradient_type, count, m, "fsdp scatter")
        if replicas > 1:
            found += emitted(Group.REPLICA, replicas, "AllReduce", training.gradient_type, count, m, "hsdp reduce")
    return tuple(found)


def ddp_iteration(job: Job, *, synchronises_every_micro_batch: bool = False) -> tuple[Emitted, ...]:
    """DDP from the second iteration on; gradients summed over micro-batches first (`no_sync`) unless told otherwise.

    Raises:
        ModelError: tensor or pipeline parallel.
    """
    _only_data_parallel(job)
    training, ranks = job.training, job.layout.data
    each = ELEMENT_BYTES[training.gradient_type]
    sizes = (tensor.elements * each for tensor in reversed(rank_tensors(job, 0)))
    times = job.micro_batches if synchronises_every_micro_batch else 1
    found: list[Emitted] = []
    for size in ddp_buckets(sizes):
        found += emitted(Group.DATA, ranks, "AllReduce", training.gradient_type, size // each, times, "ddp buckets")
    return tuple(found)


def _only_data_parallel(job: Job) -> None:
    layout = job.layout
    if layout.tensor > 1 or layout.pipeline > 1 or layout.context > 1:
        raise ModelError(
            f"{job.framework.value} with tensor {layout.tensor}, pipeline {layout.pipeline}, context {layout.context}: "
            "there are rules for data parallel alone"
        )
