"""Every layout that a job could have on a number of GPUs: degrees, micro-batch, chunks, optimizer and recompute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ncclscope_models.job import Framework, Job, Layout, ModelError, Recompute, Training, contradictions


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What layouts are looked at."""

    gpus: int
    gpus_per_node: int
    most_tensor: int | None = None
    """Tensor parallel ranks at most; None: those of a node."""
    recomputes: tuple[Recompute, ...] = tuple(Recompute)


def divisors(number: int) -> list[int]:
    """In ascending order."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return small + [number // each for each in reversed(small) if each * each != number]


def layouts(now: Job, space: Space) -> Iterator[Job]:
    """The job in each way that its numbers allow; context parallelism and what else it is told stay.

    Sequence parallelism stays as it is, and is on where experts need it.
    Source of what divides what: Megatron-LM core_r0.13.0 `megatron/training/arguments.py:validate_args`.

    Raises:
        ModelError: Not of Megatron-LM: only its rules are known well enough.
    """
    if now.framework is not Framework.MEGATRON:
        raise ModelError(f"tune knows the layouts of megatron, and this job is of {now.framework.value}")
    return _layouts(now, space)


def _layouts(now: Job, space: Space) -> Iterator[Job]:
    shape, context = now.shape, now.layout.context
    is_cut = now.layout.is_sequence_parallel or now.layout.tensor == 1 or shape.experts is not None
    most = space.most_tensor or space.gpus_per_node
    tensors = [each for each in divisors(shape.heads) if each <= most and shape.vocabulary % each == 0]
    experts = [1] if shape.experts is None else divisors(shape.experts.experts)
    for tensor, pipeline, expert in product(tensors, divisors(shape.layers), experts):
        if space.gpus % (tensor * pipeline * context):
            continue
        data = space.gpus // (tensor * pipeline * context)
        if now.training.global_batch % data or data * context * tensor % (expert * _expert_tensor(now, tensor)):
            continue
        for chunks in divisors(shape.layers // pipeline) if pipeline > 1 else [1]:
            layout = Layout(
                tensor=tensor,
                pipeline=pipeline,
                data=data,
                context=context,
                expert=expert,
                expert_tensor=_expert_tensor(now, tensor),
                chunks=chunks,
                is_sequence_parallel=is_cut and tensor > 1,
            )
            yield from _batches(now, layout, space.recomputes)


def _expert_tensor(now: Job, tensor: int) -> int:
    """Megatron-LM takes that of the other layers unless it is told otherwise."""
    if now.shape.experts is None or now.layout.expert_tensor != now.layout.tensor:
        return now.layout.expert_tensor
    return tensor


def _batches(now: Job, layout: Layout, recomputes: Iterable[Recompute]) -> Iterator[Job]:
    """Micro-batches, with and without the distributed optimizer, and recompute."""
    optimizers = (False, True) if layout.data > 1 else (False,)
    for micro_batch in divisors(now.training.global_batch // layout.data):
        first = replace(now.training, micro_batch=micro_batch)
        if contradictions(now.shape, layout, first):
            continue
        for is_distributed, recompute in product(optimizers, recomputes):
            training: Training = replace(first, has_distributed_optimizer=is_distributed, recompute=recompute)
            yield replace(now, layout=layout, training=training)
