"""Textbook volumes: bytes that one GPU sends per iteration, one formula per kind of parallelism.

They are not what a framework sends (`emission/` is), and no alarm may rest on them: they leave out embedding, head,
loss and batch, and take one type for all. Ring algorithms; `wire` bytes are what the rank sends, not the message.
Here because papers and design documents calculate with them.
"""

from __future__ import annotations


def allreduce_wire(message_bytes: float, ranks: int) -> float:
    """2 (n-1)/n of the array: ring."""
    return 2 * (ranks - 1) / ranks * message_bytes


def gather_wire(message_bytes: float, ranks: int) -> float:
    """(n-1)/n of the whole array: ring AllGather, ring ReduceScatter."""
    return (ranks - 1) / ranks * message_bytes


def alltoall_wire(message_bytes: float, ranks: int) -> float:
    """(n-1)/n of what a rank hands out: its own share stays on the GPU."""
    return (ranks - 1) / ranks * message_bytes


def wire_bytes(op: str, message_bytes: float, ranks: int) -> float:
    """What a rank sends for an operation, in a ring where it has one."""
    if op == "AllReduce":
        return allreduce_wire(message_bytes, ranks)
    if op in ("Send", "Recv"):
        return message_bytes
    return gather_wire(message_bytes, ranks)


def data_parallel(parameters: float, data: int, gradient_bytes: int, tensor: int = 1, pipeline: int = 1) -> float:
    """AllReduce of gradients, once per iteration. Source: Narayanan et al. 2021."""
    return allreduce_wire(parameters / (tensor * pipeline) * gradient_bytes, data)


def zero_1(parameters: float, data: int, gradient_bytes: int, weight_bytes: int) -> float:
    """ReduceScatter of gradients and AllGather of parameters: as much as `data_parallel` where the types are equal.

    Source: Rajbhandari et al. 2020, section 7.
    """
    return gather_wire(parameters * gradient_bytes, data) + gather_wire(parameters * weight_bytes, data)


def zero_2(parameters: float, data: int, gradient_bytes: int, weight_bytes: int, micro_batches: int) -> float:
    """As ZeRO-1, with the gradients of every micro-batch scattered at once. Same source."""
    return micro_batches * gather_wire(parameters * gradient_bytes, data) + gather_wire(parameters * weight_bytes, data)


def fully_sharded(
    parameters: float, shards: int, element_bytes: int, micro_batches: int, *, reshards_after_forward: bool = True
) -> float:
    """ZeRO-3 and FSDP: per micro-batch parameters gathered twice (once without reshard), gradients scattered once."""
    passes = 3 if reshards_after_forward else 2
    return passes * micro_batches * gather_wire(parameters * element_bytes, shards)


def hybrid_sharded(
    parameters: float,
    shards: int,
    replicas: int,
    element_bytes: int,
    micro_batches: int,
    *,
    synchronised_backwards: int = 1,
) -> float:
    """HSDP: as FSDP inside a shard group, and an AllReduce of the shard over its replicas."""
    inside = fully_sharded(parameters, shards, element_bytes, micro_batches)
    return inside + synchronised_backwards * allreduce_wire(parameters / shards * element_bytes, replicas)


def tensor_parallel(
    *, b: int, s: int, h: int, layers: float, tensor: int, micro_batches: int, element_bytes: int, is_recomputed: bool
) -> float:
    """4 AllReduces of b s h per layer and micro-batch, 6 with full recompute. `layers` of this stage.

    Source: Shoeybi et al. 2019; sequence parallel sends as many bytes.
    """
    return micro_batches * layers * (6 if is_recomputed else 4) * allreduce_wire(b * s * h * element_bytes, tensor)


def pipeline_boundary(
    *, b: int, s: int, h: int, micro_batches: int, element_bytes: int, tensor: int = 1, chunks: int = 1
) -> float:
    """Activations forward and their gradients back over one boundary: 2 m b s h, / t with scatter-gather, x v.

    Of a boundary, both ends together: each end sends half of it. Source: Narayanan et al. 2021, section 4.1.
    """
    return 2 * micro_batches * chunks * b * s * h * element_bytes / tensor


def expert_parallel(
    *, tokens: int, h: int, top_k: int, expert: int, layers: int, element_bytes: int, is_recomputed: bool = False
) -> float:
    """Dispatch and combine, both ways: 4 all-to-alls of k tokens x h per expert layer, 6 with recompute.

    `tokens` of this rank per iteration.
    """
    return layers * (6 if is_recomputed else 4) * alltoall_wire(top_k * tokens * h * element_bytes, expert)


def ted_collectives(*, is_recomputed: bool, keeps_communication: bool) -> int:
    """All-to-alls, and as many AllReduces, per expert layer and micro-batch of TED.

    Forward and backward have 2 of each; full recompute does the forward ones again; communication-aware
    checkpointing (CAC) keeps what they gave. Source: Singh et al. (TED), section 7.3.2.
    """
    return 6 if is_recomputed and not keeps_communication else 4


def share_of_tensor_parallel(tensor: float, pipeline: float, data: float) -> float:
    """Share of tensor parallelism in the bytes of a rank."""
    return tensor / (tensor + pipeline + data)
