"""How long a step should take: what a job computes and sends, on a machine, through its pipeline's schedule.

Operations come from the emission rules, each with the time of its group as it lies on the nodes; tensor and expert
parallel ones are part of a pass, those of the gradients stand behind the last. Ranks are laid out as Megatron-LM does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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
_FORWARD_ACCESSES: Final = 2
"""An activation is written once and read once by the next kernel."""
_BACKWARD_ACCESSES: Final = 3
"""It is read once more; its gradient is written and read."""
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


def calibrated(machine: Machine, job: Job, seconds: float) -> Machine:
    """The machine whose GPUs are so fast that this job's step takes so long; 1 to 1,000 % of what they were."""
    low, high = 0.01, 10.0

    def faster(factor: float) -> Machine:
        return replace(
            machine,
            best_share=machine.best_share * factor,
            memory_bandwidth=machine.memory_bandwidth * factor,
        )

    for _ in range(40):
        middle = (low + high) / 2
        is_slower = predict_step(job, faster(middle)).seconds > seconds
        low, high = (middle, high) if is_slower else (low, middle)
    return faster((low + high) / 2)


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
    accessed = _layer_bytes(job, machine) * job.layers_of_stage / machine.memory_bandwidth
    forward = machine.compute_seconds((layers + mine) / 3 / ranks, work) + _FORWARD_ACCESSES * accessed
    backward = 2 * machine.compute_seconds((layers + mine) / 3 / ranks, work) + _BACKWARD_ACCESSES * accessed
    if job.training.recompute is Recompute.FULL:
        backward += machine.compute_seconds(layers / 3 / ranks, work) + _FORWARD_ACCESSES * accessed
    return forward, backward


def _layer_bytes(job: Job, machine: Machine) -> float:
    """Bytes of the activations of a layer and micro-batch: norms, inputs and dropout, matrices, and attention's scores.

    34 b s h + 5 a b s^2 for GPT's family. Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1. Experts
    count as the MLPs that a token uses.
    """
    shape, layout = job.shape, job.layout
    tokens = job.training.micro_batch * shape.sequence / layout.context
    widths: float = shape.ffn * (3 if shape.is_gated else 2)
    if shape.experts is not None:
        mixed = shape.experts.expert_ffn * shape.experts.top_k * (3 if shape.is_gated else 2)
        widths += (mixed - widths) * shape.expert_layers / shape.layers
    whole = 10 * shape.hidden / (layout.tensor if layout.is_sequence_parallel else 1)
    cut = 2 * (2 * shape.query_size + 2 * shape.kv_size + widths)
    scores = 5 * shape.heads * shape.sequence if machine.writes_scores else 0
    return tokens * (whole + (cut + scores) / layout.tensor)


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
