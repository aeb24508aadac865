"""How frameworks cut gradients into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from ncclscope_models.parameters import Tensor

LEAST_BUCKET = 40_000_000
ELEMENTS_PER_RANK = 1_000_000
HIGH_BUSBW = 2**16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced by one operation."""

    elements: int
    """Gaps between parameters included, the padding at the end not."""
    padded: int
    """Elements of the operation's whole array."""


def megatron_buckets(
    tensors: Sequence[Tensor],
    ranks: int,
    *,
    bucket_size: int | None,
    is_distributed: bool,
    pads_for_bandwidth: bool = False,
) -> list[Bucket]:
    """Buckets of one buffer, last parameters first; `bucket_size` None makes one of all.

    With the distributed optimizer a parameter starts at a multiple of 64 elements, a bucket ends at a multiple of
    lcm(ranks, 128) (and 2^16 with `pads_for_bandwidth`), and a shared embedding has a bucket of its own.
    Source: Megatron-LM core_r0.13.0 `megatron/core/distributed/param_and_grad_buffer.py:_ParamAndGradBuffer`.
    """
    found: list[Bucket] = []
    bucket_start = end = 0
    is_open = False

    def close() -> int:
        nonlocal bucket_start, is_open
        multiple = lcm(ranks, 128, HIGH_BUSBW) if pads_for_bandwidth else lcm(ranks, 128)
        padded_end = _up(end, multiple) if is_distributed else end
        found.append(Bucket(end - bucket_start, padded_end - bucket_start))
        bucket_start, is_open = padded_end, False
        return padded_end

    for tensor in reversed(tensors):
        start = _up(end, 64) if is_distributed else end
        stands_alone = tensor.is_shared_embedding and is_distributed
        if stands_alone and is_open:
            end = start
            start = close()
        end, is_open = start + tensor.elements, True
        if stands_alone or (bucket_size is not None and end - bucket_start >= bucket_size):
            end = close()
    if is_open:
        close()
    return found


def megatron_bucket_size(ranks: int, *, overlaps: bool, is_first_chunk_of_first_stage: bool) -> int | None:
    """max(40e6, 1e6 x ranks) elements where gradients are reduced while they are computed, on the first stage only.

    Source: Megatron-LM core_r0.13.0 `megatron/core/distributed/distributed_data_parallel.py` (size and stage) and
    `megatron/training/training.py:get_model` (first chunk).
    """
    if not overlaps or not is_first_chunk_of_first_stage:
        return None
    return max(LEAST_BUCKET, ELEMENTS_PER_RANK * ranks)


def ddp_buckets(
    gradient_bytes: Iterable[int], *, first_bytes: int = 1024 * 1024, cap_bytes: int = 25 * 1024 * 1024
) -> list[int]:
    """Bytes of PyTorch DDP's buckets, gradients in the order in which they become ready (about reversed registration).

    A bucket closes as soon as it has reached its limit: 1 MiB for the first, 25 MiB for the others. From the second
    iteration on: the first has one bucket of all, unless unused parameters are looked for.
    Source: PyTorch 2.7 `torch/csrc/distributed/c10d/reducer.cpp:compute_bucket_assignment_by_size`,
    `reducer.hpp:kDefaultFirstBucketBytes`, `torch/nn/parallel/distributed.py` (bucket_cap_mb).
    """
    found: list[int] = []
    held, limit = 0, first_bytes
    for size in gradient_bytes:
        held += size
        if held >= limit:
            found.append(held)
            held, limit = 0, cap_bytes
    if held:
        found.append(held)
    return found


def deepspeed_buckets(sizes: Iterable[int], bucket_elements: int) -> list[list[int]]:
    """Elements of the parameters of each of DeepSpeed's reduce buckets, in the order in which they are reduced.

    A bucket is reduced before the parameter that would make it larger than `reduce_bucket_size`; a parameter that is
    larger alone goes alone.
    Source: DeepSpeed 0.16 `runtime/zero/stage_1_and_2.py:reduce_independent_p_g_buckets_and_remove_grads`.
    """
    found: list[list[int]] = []
    for size in sizes:
        if found and sum(found[-1]) + size <= bucket_elements:
            found[-1].append(size)
        else:
            found.append([size])
    return found


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
