"""Memory of a GPU in training: bytes of parameters, gradients, optimizer and activations, by framework.

What is left out has to be added by whoever asks "does it fit": NCCL's buffers (channels x 4 MiB x peers), the CUDA
context (0.5 to 1 GiB) and fragmentation (5 to 15 %).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import isqrt

from ncclscope_models.job import ELEMENT_BYTES, Framework, Job, ModelError, Recompute
from ncclscope_models.parameters import elements, layer_tensors, stage_tensors

GIB = 2**30


class Fit(StrEnum):
    """Whether a job fits; tight: within 8 % of the limit."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT = "does not"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one GPU, by what holds them."""

    parameters_and_optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.parameters_and_optimizer + self.activations + self.logits


def state_bytes_megatron(parameters: int, data: int, *, is_distributed: bool) -> float:
    """Mixed precision with FP32 gradients: 18 per parameter, or 6 + 12/d with the distributed optimizer.

    Source: Megatron-LM core_r0.13.0 `megatron/training/theoretical_memory_usage.py`.
    """
    return parameters * (6 + 12 / data if is_distributed else 18)


def state_bytes_zero(parameters: int, shards: int, stage: int, largest_gathered: int = 0) -> float:
    """ZeRO with Adam, 16 bytes per parameter: 4 + 12/d, 2 + 14/d, 16/d and the largest gathered layer.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1. Stage 0 is 16.
    """
    per_parameter = (16.0, 4 + 12 / shards, 2 + 14 / shards, 16 / shards)[stage]
    return parameters * per_parameter + (2 * largest_gathered if stage == 3 else 0)


def state_bytes_deepspeed_tuner(parameters: int, shards: int, stage: int) -> float:
    """What DeepSpeed's own autotuner reckons for FP16: 2 + 2 + 16, each cut by its stage.

    Source: DeepSpeed `deepspeed/autotuning/autotuner.py:get_instantiation_memory_required_per_gpu`.
    """
    weights, gradients, optimizer = 2.0, 2.0, 16.0
    if stage >= 1:
        optimizer /= shards
    if stage >= 2:
        gradients /= shards
    if stage >= 3:
        weights /= shards
    return parameters * (weights + gradients + optimizer)


def state_bytes_axonn(parameters: int, bucket: int | None = None) -> float:
    """20 per parameter; 4 and 16 per element of the bucket where the optimizer lies on the host.

    Source: Singh et al. (AxoNN), dissertation section 3.3.2.
    """
    return 20.0 * parameters if bucket is None else 4.0 * parameters + 16.0 * bucket


def state_bytes_samo(parameters: int, pruned: float) -> float:
    """SAMO, a share of parameters pruned: 24 (1 - p) + 2. Source: Singh et al., dissertation section 4.1."""
    return parameters * (24 * (1 - pruned) + 2)


def samo_saving(pruned: float) -> float:
    """Share of the 20 bytes per parameter that SAMO saves: (24 p - 6) / 20."""
    return 1 - state_bytes_samo(1, pruned) / state_bytes_axonn(1)


def ted_least_bytes(expert: int, other: int, experts: int, tensor: int, gpus: int) -> float:
    """Least bytes of a GPU with TED: 4 per parameter it holds, 16-bit weights and gradients, and 12 over its replicas.

    2 + 2 bytes on every holder and 12 cut by ZeRO-1 over the data-parallel ranks: experts are cut by t x E and have
    gpus / (t E) replicas, others by t and gpus / t. Source: Singh et al. (TED), equations 7.4 to 7.6.
    """
    held = expert / (tensor * experts) + other / tensor
    return 4 * held + 12 * (expert + other) / gpus


def ted_spike_bytes(base: float, tensor: int) -> float:
    """FP32 copies of a rank's expert gradients, 4 N / (3 t): untiled, in the optimizer's step. Same source."""
    return 4 * base / (3 * tensor)


def ted_tile_bytes(tile: float) -> float:
    """The same, with tiles of so many elements."""
    return 4 * tile


def layer_activation_bytes(
    *, s: int, b: int, h: int, heads: int, tensor: int, is_sequence_parallel: bool, recompute: Recompute
) -> float:
    """Activations of one layer of GPT's family and one micro-batch, 16-bit.

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), equations 1 to 6. Holds for an MLP of 4 h without gate, as many
    heads of keys as of queries, and dropout. Flash attention keeps what selective recompute keeps.
    """
    core = 5 * heads * s * s * b if recompute is Recompute.NONE else 0.0
    return _layer_bytes(s * b, h, 24 * h, core, tensor, is_sequence_parallel, recompute)


def _layer_bytes(
    tokens: int, hidden: int, cut: int, core: float, tensor: int, is_sequence_parallel: bool, recompute: Recompute
) -> float:
    """`cut` is the bytes of a token that tensor parallel ranks share, `core` those of attention's scores."""
    if recompute is Recompute.FULL:
        return 2 * tokens * hidden / (tensor if is_sequence_parallel else 1)
    whole = 10 * tokens * hidden / (tensor if is_sequence_parallel else 1)
    return whole + (tokens * cut + core) / tensor


def job_layer_activation_bytes(job: Job) -> float:
    """The same for any dense model: inputs and outputs of its matrices by their widths, and of a gate.

    With the widths of GPT's family it is Korthikanti's formula.
    """
    shape, layout, training = job.shape, job.layout, job.training
    tokens = training.micro_batch * (shape.sequence // layout.context)
    cut = 4 * (shape.query_size + shape.kv_size) + 2 * (3 if shape.is_gated else 2) * shape.ffn
    core = 5 * shape.heads * shape.sequence * tokens if training.recompute is Recompute.NONE else 0
    return _layer_bytes(tokens, shape.hidden, cut, core, layout.tensor, layout.is_sequence_parallel, training.recompute)


def micro_batches_in_flight(stage: int, pipeline: int, micro_batches: int, chunks: int = 1) -> float:
    """Micro-batches whose activations a stage holds: min(m, p - i); interleaved, first stage: p (1 + (p-1)/(p v)).

    Source: Korthikanti et al. 2022, section 4.2.3. Interleaved later stages hold less; the first one's count is given.
    """
    if chunks == 1:
        return min(micro_batches, pipeline - stage)
    return min(float(micro_batches), pipeline * (1 + (pipeline - 1) / (pipeline * chunks)))


def first_stage_activation_bytes(
    *,
    layers: int,
    pipeline: int,
    chunks: int,
    micro_batches: int,
    layer_bytes: float,
) -> float:
    """Activations of the layers of a pipeline's first stage, which holds the most."""
    return layers / pipeline * micro_batches_in_flight(0, pipeline, micro_batches, chunks) * layer_bytes


def checkpoint_spacing(layers: int) -> int:
    """Layers between checkpoints for least memory: the root of the layers. Source: AxoNN, equation 3.1."""
    return isqrt(layers)


def checkpoint_memory(layers: int, spacing: int, pipeline: int = 1) -> float:
    """M ~ G (N/(G ac)) + 1 + ac: activations held, in layers. Same source."""
    return pipeline * (layers / (pipeline * spacing)) + 1 + spacing


def job_memory(job: Job, stage: int, held: int | None = None) -> Memory:
    """Bytes on a GPU of this stage; `held`: its parameters, if the caller has them.

    Experts keep tensors that no formula here counts: with them activations are 0 (`covers_activations`).
    """
    shape, layout, training = job.shape, job.layout, job.training
    held = elements(stage_tensors(job, stage)) if held is None else held
    activations = 0.0
    if covers_activations(job):
        in_flight = micro_batches_in_flight(stage, layout.pipeline, job.micro_batches, layout.chunks)
        activations = job.layers_of_stage * in_flight * job_layer_activation_bytes(job)
    logits = 0
    if stage == layout.pipeline - 1:
        logits = 4 * training.micro_batch * shape.sequence // layout.context * shape.vocabulary // layout.tensor
    return Memory(round(_state_bytes(job, held)), round(activations), logits)


def covers_activations(job: Job) -> bool:
    """Whether the formula for activations holds for this model."""
    return job.shape.experts is None


class MemoryNeed:
    """What layouts of one model need of a GPU's memory, and whether they fit."""

    def __init__(self, limit_bytes: int | None, *, more_bytes: int = 0, keeps_scores: bool = False) -> None:
        """`limit_bytes` None: not known. `more_bytes`: beside what is computed. `keeps_scores`: attention is not fused,
        so its scores are kept for the backward pass.
        """
        self.limit_bytes = limit_bytes
        self.more_bytes = more_bytes
        self._keeps_scores = keeps_scores
        self._parameters: dict[tuple[int, ...], int] = {}

    def bytes(self, job: Job) -> int:
        """On the GPU that needs most."""
        layout, training = job.layout, job.training
        if not self._keeps_scores and training.recompute is Recompute.NONE:
            job = replace(job, training=replace(training, recompute=Recompute.SELECTIVE))
        most = 0
        for stage in {
            0,
            min(1, layout.pipeline - 1),
            layout.pipeline - 1,
        }:  # all between them are as the second, or less
            key = (stage, layout.tensor, layout.pipeline, layout.chunks, layout.expert, layout.expert_tensor)
            if key not in self._parameters:
                self._parameters[key] = elements(stage_tensors(job, stage))
            most = max(most, job_memory(job, stage, self._parameters[key]).total)
        return most + self.more_bytes

    def fit(self, job: Job) -> Fit | None:
        """None where the memory of a GPU is not known."""
        return None if self.limit_bytes is None else fit(self.bytes(job), self.limit_bytes)


def _state_bytes(job: Job, held: int) -> float:
    training, layout = job.training, job.layout
    if training.precision.value == "FP32":
        if training.has_distributed_optimizer or training.zero_stage:
            raise ModelError("memory of a cut FP32 optimizer is not known here")
        return held * 16.0
    if job.framework is Framework.MEGATRON:
        # FP16 gradients take two bytes less than the 18 of FP32 ones.
        less = 4 - ELEMENT_BYTES[training.gradient_type]
        replicas = layout.data * layout.context
        return state_bytes_megatron(held, replicas, is_distributed=training.has_distributed_optimizer) - less * held
    if job.framework is Framework.DDP:
        return state_bytes_zero(held, 1, 0)
    stage = 3 if job.framework is Framework.FSDP2 else training.zero_stage
    largest = max(elements(layer_tensors(job.shape, layout, layer)) for layer in range(job.shape.layers))
    return state_bytes_zero(held, layout.shard, stage, largest)


def fit(needed_bytes: int, limit_bytes: int) -> Fit:
    """Whether so much fits into a GPU."""
    if needed_bytes > limit_bytes:
        return Fit.DOES_NOT
    return Fit.TIGHT if needed_bytes > 0.92 * limit_bytes else Fit.FITS
