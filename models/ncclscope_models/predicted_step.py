"""How long a step should take: what a job computes and sends, on a machine, through its pipeline's schedule.

Operations come from the emission rules, each with the time of its group as it lies on the nodes; tensor and expert
parallel ones are part of a pass, those of the gradients stand behind the last. Ranks are laid out as Megatron-LM does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ncclscope_models.emission.megatron import Step, iteration
from ncclscope_models.emission.operations import Emitted, Group
from ncclscope_models.flops import step_flops
from ncclscope_models.job import Job, Recompute
from ncclscope_models.machine import Machine, Placement
from ncclscope_models.parameters import elements, stage_tensors
from ncclscope_models.schedule import StagePasses, schedule

_OPTIMIZER_BYTES: Final = 28
"""Adam in mixed precision reads and writes about so much memory per parameter: 2 x 12 of state, gradient, weight."""
_BEHIND: Final = (Group.DATA, Group.EXPERT_DATA, Group.EMBEDDING)
"""Groups of what follows the last pass."""
_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """Seconds of a step, and what the slowest stage spends on each part; without the bubble they need not sum up."""

    seconds: float
    computation: float
    tensor: float
    """Tensor and expert parallel operations of all micro-batches."""
    bubble: float
    behind: float
    """Gradients, tied embedding, parameters and the optimizer after the last pass."""


def predict_step(job: Job, machine: Machine) -> PredictedStep:
    """Of one iteration that is not skipped. Gradients are not overlapped with the backward pass."""
    stages, m, chunks = job.layout.pipeline, job.micro_batches, job.layout.chunks
    computed = [_computation(job, stage, machine) for stage in range(stages)]
    operations = [iteration(job, stage, Step()) for stage in range(stages)]
    tensor = [_seconds(job, machine, each, (Group.TENSOR, Group.EXPERT)) / m for each in operations]
    again = job.training.recompute is Recompute.FULL
    durations = [
        StagePasses(
            round((forward + parallel * (1 / 3 if again else 1 / 2)) / chunks * _NS),
            round((backward + parallel * (2 / 3 if again else 1 / 2)) / chunks * _NS),
        )
        for (forward, backward), parallel in zip(computed, tensor, strict=True)
    ]
    boundary = _boundary(job, machine)
    run = schedule(durations, m, chunks=chunks, boundary_ns=round(boundary * _NS))
    behind = [
        _seconds(job, machine, each, _BEHIND) + _optimizer(job, stage, machine) for stage, each in enumerate(operations)
    ]
    ends = [end / _NS + more for end, more in zip(run.last_end_ns, behind, strict=True)]
    slowest = max(range(stages), key=lambda stage: run.busy_ns[stage])
    return PredictedStep(
        seconds=max(ends),
        computation=m * sum(computed[slowest]),
        tensor=m * tensor[slowest],
        bubble=run.bubble_ns[slowest] / _NS,
        behind=max(ends) - run.duration_ns / _NS,
    )


def _computation(job: Job, stage: int, machine: Machine) -> tuple[float, float]:
    """Forward and backward seconds of a micro-batch on a stage; full recompute repeats the layers, not the head."""
    shape, layout, b = job.shape, job.layout, job.training.micro_batch
    head = 6 * b * shape.sequence * shape.hidden * shape.vocabulary
    layers = (step_flops(shape, b, is_attention_causal=False) - head) / layout.pipeline
    mine = head if stage == layout.pipeline - 1 else 0
    ranks = layout.tensor * layout.context
    work = b * shape.sequence * shape.hidden / ranks
    forward = machine.compute_seconds((layers + mine) / 3 / ranks, work)
    repeated = machine.compute_seconds(layers / 3 / ranks, work) if job.training.recompute is Recompute.FULL else 0.0
    return forward, 2 * forward + repeated


def _placement(job: Job, group: Group, ranks: int, machine: Machine) -> Placement:
    """Where a group lies: tensor ranks are next to each other, then context, data, pipeline."""
    layout, node = job.layout, machine.gpus_per_node
    if group in (Group.TENSOR, Group.EXPERT):
        return Placement(ranks, min(ranks, node))
    stride = layout.tensor if group in (Group.DATA, Group.EXPERT_DATA) else layout.ranks // layout.pipeline
    return Placement(ranks, max(1, min(ranks, node // stride)), sharing=min(stride, node))


def _seconds(job: Job, machine: Machine, operations: Iterable[Emitted], groups: tuple[Group, ...]) -> float:
    """Of all operations of these groups."""
    found = 0.0
    for each in operations:
        if each.group in groups and not each.is_control and each.lines:
            placed = _placement(job, each.group, each.ranks, machine)
            found += each.lines * machine.collective_seconds(each.op, each.message_bytes / each.lines, placed)
    return found


def _boundary(job: Job, machine: Machine) -> float:
    """Seconds of what one micro-batch sends over a boundary."""
    layout, shape = job.layout, job.shape
    if layout.pipeline == 1:
        return 0.0
    sent = job.training.micro_batch * shape.sequence // layout.context * shape.hidden * 2
    sent //= layout.tensor if layout.is_sequence_parallel else 1
    return machine.collective_seconds("Send", sent, _placement(job, Group.PIPELINE, layout.pipeline, machine))


def _optimizer(job: Job, stage: int, machine: Machine) -> float:
    held = elements(stage_tensors(job, stage))
    shards = job.layout.data if job.training.has_distributed_optimizer else 1
    return held / shards * _OPTIMIZER_BYTES / machine.memory_bandwidth
