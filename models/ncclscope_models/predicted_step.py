"""How long a step should take: what a job computes and sends, on a machine, through its pipeline's schedule.

Operations come from the emission rules, each with the time of its group as it lies on the nodes; tensor and expert
parallel ones are part of a pass, those of the gradients stand behind the last. Ranks are laid out as Megatron-LM does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from ncclscope_models.emission.megatron import Step, behind_passes, chunk_buckets, in_passes
from ncclscope_models.emission.operations import Emitted, Group
from ncclscope_models.flops import step_flops
from ncclscope_models.job import Job, Recompute
from ncclscope_models.machine import Machine, Placement
from ncclscope_models.parameters import elements, stage_tensors
from ncclscope_models.schedule import StagePasses, long_schedule

_UPDATE_BYTES: Final = 38
"""Of each parameter that a rank updates, with gradients of 32 bits: 4 are read for the norm, Adam reads the gradient,
reads and writes the parameter and two moments (28), and the 16-bit copy is made (6). Source: Megatron-LM core_r0.13.0
`megatron/core/optimizer` (clip_grads.py:get_grad_norm_fp32, optimizer.py:_copy_main_params_to_model_params), Apex
`csrc/multi_tensor_adam.cu`. Clipping, which reads and writes gradients again, is left out."""
_ZEROED_BYTES: Final = 4
"""Of each parameter that a rank holds: the gradient is set to zero. Source: `param_and_grad_buffer.py:reset`."""
_FORWARD_ACCESSES: Final = 2
"""An activation is written once and read once by the next kernel."""
_BACKWARD_ACCESSES: Final = 3
"""It is read once more; its gradient is written and read."""
_NS: Final = 1e9


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """Seconds of a step, as the stage that ends last spends them: the parts sum up to it."""

    computation: float
    tensor: float
    """Tensor and expert parallel operations of all micro-batches."""
    bubble: float
    """Waiting in the pipeline, with the time of what is sent over its boundaries."""
    data: float
    """Gradients and parameters of data parallel ranks after the last pass."""
    embedding: float
    optimizer: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.computation + self.tensor + self.bubble + self.behind

    @property
    def behind(self) -> float:
        """What follows the last pass."""
        return self.data + self.embedding + self.optimizer


_GRADIENTS: Final = ("gradients", "expert gradients")
"""Rules of what overlaps with the backward pass, where gradients do."""
PARTS: Final = ("computation", "tensor", "bubble", "data", "embedding", "optimizer")
"""Parts of a predicted step."""


@dataclass(frozen=True, slots=True)
class _Behind:
    """What a stage spends after the last pass, in seconds, if nothing is hidden."""

    gradients: float
    buckets: tuple[tuple[float, ...], ...]
    """Shares of them that buckets hold, in the order in which backward passes fill them, of the last chunk first; none
    where gradients wait for the whole pass."""
    data: float
    """All else of data parallel ranks: parameters."""
    embedding: float
    optimizer: float


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a stage spends, in seconds."""

    forward: float
    backward: float
    """Of a micro-batch."""
    tensor: float
    """Of a micro-batch, both ways."""
    data: float
    embedding: float
    optimizer: float

    @property
    def behind(self) -> float:
        """After the last pass."""
        return self.data + self.embedding + self.optimizer


def calibrated(machine: Machine, job: Job, seconds: float) -> Machine:
    """The machine whose GPUs are so fast that this job's step takes so long; 1 to 1,000 % of what they were."""
    return _as_fast_as(machine, seconds, lambda faster: predict_step(job, faster).seconds)


def calibrated_by_computation(machine: Machine, job: Job, seconds: float) -> Machine:
    """The machine whose GPUs compute so long in a step of this job, on average over its ranks."""
    return _as_fast_as(machine, seconds, lambda faster: StepPredictor(faster).computation_of_a_rank(job))


def _as_fast_as(machine: Machine, seconds: float, takes: Callable[[Machine], float]) -> Machine:
    low, high = 0.01, 10.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        is_slower = takes(_faster(machine, middle)) > seconds
        low, high = (middle, high) if is_slower else (low, middle)
    return _faster(machine, (low * high) ** 0.5)


def _faster(machine: Machine, factor: float) -> Machine:
    return replace(machine, best_share=machine.best_share * factor, memory_bandwidth=machine.memory_bandwidth * factor)


def predict_step(job: Job, machine: Machine) -> PredictedStep:
    """Of one iteration that is not skipped."""
    return StepPredictor(machine).predict(job)


class StepPredictor:
    """Predicts steps of one model on one machine; what several layouts have in common is computed once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._passes: dict[Hashable, tuple[float, float, float]] = {}
        self._behind: dict[Hashable, _Behind] = {}

    def predict(self, job: Job) -> PredictedStep:
        """Through the pipeline's schedule."""
        stages, m = self._stages(job), job.micro_batches
        run = long_schedule(
            [
                StagePasses(round(forward * _NS), round(backward * _NS))
                for forward, backward in self._durations(job, stages)
            ],
            m,
            chunks=job.layout.chunks,
            boundary_ns=round(_boundary(job, self.machine) * _NS),
            is_overlapped=job.layout.chunks > 1 and job.training.overlaps_pipeline,
        )
        ends = [end / _NS + each.behind for end, each in zip(run.last_end_ns, stages, strict=True)]
        last = max(range(len(stages)), key=ends.__getitem__)
        stage = stages[last]
        return PredictedStep(
            computation=m * (stage.forward + stage.backward),
            tensor=m * stage.tensor,
            bubble=(run.last_end_ns[last] - run.busy_ns[last]) / _NS,
            data=stage.data,
            embedding=stage.embedding,
            optimizer=stage.optimizer,
        )

    def at_least(self, job: Job) -> float:
        """Seconds below which `predict` is never, up to rounding, at a hundredth of its cost.

        Each stage has to wait for the first micro-batch, do its own passes and see the last gradient back to the
        first stage; and no stage has more micro-batches under way than 1F1B allows.
        """
        stages, m, boundary = self._stages(job), job.micro_batches, _boundary(job, self.machine)
        durations, chunks = self._durations(job, stages), job.layout.chunks
        back = [0.0]
        round_trip = -2 * boundary
        for forward, backward in durations:
            round_trip += forward + backward + 2 * boundary
            back.append(back[-1] + backward + boundary)
        found = arrives = 0.0
        for place, ((forward, backward), stage) in enumerate(zip(durations, stages, strict=True)):
            ends = m * chunks * (forward + backward)
            if chunks == 1:
                rounds, rest = divmod(m - 1, len(stages) - place)
                ends = max(ends, (rounds + 1) * round_trip + rest * backward)
            found = max(found, arrives + ends + stage.behind, arrives + ends + back[place] + stages[0].behind)
            arrives += forward + boundary
            round_trip -= forward + backward + 2 * boundary
        return found

    def computation_of_a_rank(self, job: Job) -> float:
        """Mean over the ranks of the seconds that a GPU computes in a step."""
        stages = self._stages(job)
        each = [job.micro_batches * (stage.forward + stage.backward) + stage.optimizer for stage in stages]
        return sum(each) / len(each)

    def _stages(self, job: Job) -> list[_Stage]:
        found: list[_Stage] = []
        for stage in range(job.layout.pipeline):
            forward, backward, tensor = self._pass_of(job, stage)
            behind = self._behind_of(job, stage)
            data = behind.data + _exposed(job, behind, backward + tensor / 2)
            found.append(_Stage(forward, backward, tensor, data, behind.embedding, behind.optimizer))
        return found

    def _durations(self, job: Job, stages: list[_Stage]) -> list[tuple[float, float]]:
        """Forward and backward seconds of a micro-batch on a chunk, with the operations inside of the pass."""
        chunks = job.layout.chunks
        forward = 1 / 3 if job.training.recompute is Recompute.FULL else 1 / 2
        return [
            ((each.forward + each.tensor * forward) / chunks, (each.backward + each.tensor * (1 - forward)) / chunks)
            for each in stages
        ]

    def _pass_of(self, job: Job, stage: int) -> tuple[float, float, float]:
        layout, training = job.layout, job.training
        replicas = layout.data if job.shape.experts is not None else 1
        key = (_kind(job, stage), replace(layout, data=replicas), training.micro_batch, training.recompute)
        if key not in self._passes:
            forward, backward = _computation(job, stage, self.machine)
            operations = in_passes(job, stage)
            tensor = _seconds(job, self.machine, operations, (Group.TENSOR, Group.EXPERT)) / job.micro_batches
            self._passes[key] = forward, backward, tensor
        return self._passes[key]

    def _behind_of(self, job: Job, stage: int) -> _Behind:
        key = (_kind(job, stage), job.layout, job.training.has_distributed_optimizer)
        if key not in self._behind:
            operations = behind_passes(job, stage, Step())
            reduced = [each for each in operations if each.rule in _GRADIENTS]
            data = (Group.DATA, Group.EXPERT_DATA, Group.TENSOR)
            gradients = _seconds(job, self.machine, reduced, data)
            self._behind[key] = _Behind(
                gradients=gradients,
                buckets=_buckets(job, stage) if job.training.overlaps_gradients else (),
                data=_seconds(job, self.machine, operations, data) - gradients,
                embedding=_seconds(job, self.machine, operations, (Group.EMBEDDING,)),
                optimizer=_optimizer(job, stage, self.machine),
            )
        return self._behind[key]


def _buckets(job: Job, stage: int) -> tuple[tuple[float, ...], ...]:
    chunks = [
        [
            each.elements
            for are_experts in (False, True)
            for each in chunk_buckets(job, stage, chunk, are_experts=are_experts)
        ]
        for chunk in reversed(range(job.layout.chunks))
    ]
    whole = sum(map(sum, chunks))
    return tuple(tuple(each / whole for each in chunk) for chunk in chunks)


def _exposed(job: Job, behind: _Behind, backward: float) -> float:
    """Seconds of gradients after the last backward pass: buckets one after the other, each from when it is full.

    `backward`: of a micro-batch on the stage. Chunks end one after the other, each of as many micro-batches as stages;
    a bucket is full when its share of the chunk's last pass is over.
    """
    if not behind.buckets:
        return behind.gradients
    chunks, layout = len(behind.buckets), job.layout
    rounds = min(job.micro_batches, layout.pipeline) if chunks > 1 else 1
    sent = 0.0
    for number, buckets in enumerate(behind.buckets, 1):
        filled = backward * (rounds * number - 1) / chunks
        for share in buckets:
            filled += backward / chunks * share / sum(buckets)
            sent = max(sent, filled) + behind.gradients * share
    return max(0.0, sent - backward * rounds)


def _kind(job: Job, stage: int) -> Hashable:
    """What tells a stage from others of the same layout: its ends, and how many of its layers have experts."""
    experts = 0 if job.shape.experts is None else sum(map(job.shape.has_experts, _layers(job, stage)))
    return *job.stage_kind(stage), experts


def _layers(job: Job, stage: int) -> Iterator[int]:
    for chunk in range(job.layout.chunks):
        yield from job.layers_of(stage, chunk)


def _computation(job: Job, stage: int, machine: Machine) -> tuple[float, float]:
    """Forward and backward seconds of a micro-batch on a stage.

    Full recompute repeats the layers, not the head; selective recompute attention's scores. An operation's accesses are
    as many times the bytes that it leaves, and its size is what memory reaches by.
    """
    shape, layout, b = job.shape, job.layout, job.training.micro_batch
    head = 6 * b * shape.sequence * shape.hidden * shape.vocabulary
    layers = (step_flops(shape, b, is_attention_causal=False) - head) / layout.pipeline
    mine = head if stage == layout.pipeline - 1 else 0
    ranks = layout.tensor * layout.context
    work = b * shape.sequence * shape.hidden / ranks
    scores = _score_activations(job) if machine.writes_scores else ()
    activations = (*_activations(job), *scores)
    core = 4 * b * shape.sequence**2 * shape.query_size * job.layers_of_stage

    def accesses(times: int, tensors: Iterable[float]) -> float:
        return job.layers_of_stage * sum(machine.memory_seconds(times * each) for each in tensors)

    matrices = machine.compute_seconds((layers + mine) / 3 / ranks, work)
    forward = matrices + accesses(_FORWARD_ACCESSES, activations)
    backward = 2 * matrices + accesses(_BACKWARD_ACCESSES, activations)
    if job.training.recompute is Recompute.FULL:
        backward += machine.compute_seconds(layers / 3 / ranks, work) + accesses(_FORWARD_ACCESSES, activations)
    elif job.training.recompute is Recompute.SELECTIVE:
        backward += machine.compute_seconds(core / ranks, work) + accesses(_FORWARD_ACCESSES, scores)
    return forward, backward


def _activations(job: Job) -> tuple[float, ...]:
    """Bytes that each operation of a layer leaves of a micro-batch on a rank, without attention's scores.

    34 b s h for GPT's family: sum and mask of the dropout before each norm, what the norms give, queries with keys and
    values, attention's result, and the MLP before and after its function. Source: Korthikanti et al. 2022 (arXiv
    2205.05198), section 4.1. Experts count as the MLPs that a token uses.
    """
    shape, layout = job.shape, job.layout
    tokens = job.training.micro_batch * shape.sequence / layout.context
    width: float = shape.ffn
    if shape.experts is not None:
        width += (shape.experts.expert_ffn * shape.experts.top_k - width) * shape.expert_layers / shape.layers
    whole = tokens * shape.hidden / (layout.tensor if layout.is_sequence_parallel else 1)
    cut = 2 * tokens / layout.tensor
    return (
        *(3 * whole, 2 * whole) * 2,
        cut * (shape.query_size + 2 * shape.kv_size),
        cut * shape.query_size,
        cut * width * (2 if shape.is_gated else 1),
        cut * width,
    )


def _score_activations(job: Job) -> tuple[float, float]:
    """Bytes of attention's softmax, and of the dropout behind it with its mask: 5 a b s^2. Same source."""
    shape, layout = job.shape, job.layout
    tokens = job.training.micro_batch * shape.sequence / layout.context
    each = shape.heads * shape.sequence * tokens / layout.tensor
    return 2 * each, 3 * each


def _placement(job: Job, group: Group, ranks: int, machine: Machine) -> Placement:
    """Where a group lies: tensor ranks are next to each other, then context, data, pipeline."""
    layout, node = job.layout, machine.gpus_per_node
    if group in (Group.TENSOR, Group.EXPERT):
        return Placement(ranks, min(ranks, node))
    if group in (Group.DATA, Group.EXPERT_DATA):
        stride, sharing = layout.tensor, layout.tensor
    else:
        sharing = layout.ranks // layout.pipeline
        stride = sharing * ((layout.pipeline - 1) if group is Group.EMBEDDING else 1)
    return Placement(ranks, min(ranks, -(-node // stride)), sharing=min(sharing, node))


def _seconds(job: Job, machine: Machine, operations: Iterable[Emitted], groups: tuple[Group, ...]) -> float:
    """Of all operations of these groups."""
    found = 0.0
    for each in operations:
        if each.group in groups and not each.is_control and each.lines:
            placed = _placement(job, each.group, each.ranks, machine)
            found += each.lines * machine.collective_seconds(each.op, each.message_bytes / each.lines, placed)
    return found


def _boundary(job: Job, machine: Machine) -> float:
    """Seconds of what one micro-batch sends over a boundary: of those inside nodes and those between them, the mean."""
    layout, shape = job.layout, job.shape
    if layout.pipeline == 1:
        return 0.0
    sent = job.training.micro_batch * shape.sequence // layout.context * shape.hidden * 2
    sent //= layout.tensor if layout.is_sequence_parallel else 1
    placed = _placement(job, Group.PIPELINE, layout.pipeline, machine)
    between = placed.nodes - 1
    hops = ((2, layout.pipeline - 1 - between), (1, between))
    return sum(
        count * machine.collective_seconds("Send", sent, replace(placed, ranks=2, ranks_per_node=local))
        for local, count in hops
    ) / (layout.pipeline - 1)


def _optimizer(job: Job, stage: int, machine: Machine) -> float:
    held = elements(stage_tensors(job, stage))
    shards = job.layout.data if job.training.has_distributed_optimizer else 1
    return machine.memory_seconds(held * _ZEROED_BYTES + held / shards * _UPDATE_BYTES)
