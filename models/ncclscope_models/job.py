"""A training job as numbers: the model's shape, its layout on ranks, its batch and its types.

Every field has to be given: what a description leaves open is decided in `description.py`, with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ELEMENT_BYTES: Final = {
    "FP32": 4,
    "BF16": 2,
    "FP16": 2,
    "FP8": 1,
    "INT64": 8,
    "INT32": 4,
    "INT8": 1,
    "BOOL": 1,
    "UINT8": 1,
}
"""Bytes of one element, by type."""


class ModelError(ValueError):
    """A job that cannot be, or of which too little is known; the message names the fields and their sources."""


class Norm(StrEnum):
    """Normalization: a weight and a bias, or a weight alone."""

    LAYER = "LayerNorm"
    RMS = "RMSNorm"


class Positions(StrEnum):
    """How a model knows positions: a learned table is a parameter, the others are not."""

    LEARNED = "learned"
    ROPE = "rope"
    NONE = "none"


class Precision(StrEnum):
    """Type of parameters and activations."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"


class Recompute(StrEnum):
    """What is computed again in the backward pass: nothing, the attention core, or whole layers."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Dispatcher(StrEnum):
    """How tokens reach their experts (Megatron-LM's `--moe-token-dispatcher-type`)."""

    ALLTOALL = "alltoall"
    ALLGATHER = "allgather"


class Framework(StrEnum):
    """Whose emission rules apply."""

    MEGATRON = "megatron"
    FSDP2 = "fsdp2"
    DDP = "ddp"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The expert layers of a mixture of experts."""

    experts: int
    """Of a layer, over all ranks."""
    top_k: int
    """Experts of a token."""
    layer_frequency: int
    """Layer i has experts where i % frequency == 0."""
    expert_ffn: int
    dispatcher: Dispatcher

    def __post_init__(self) -> None:
        if min(self.experts, self.top_k, self.layer_frequency, self.expert_ffn) < 1 or self.top_k > self.experts:
            raise ModelError(f"experts {self.experts}, top-k {self.top_k}, frequency {self.layer_frequency}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder-only transformer."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    """Heads of keys and values: fewer than `heads` with grouped queries."""
    head_size: int
    sequence: int
    """Tokens of a sample."""
    positions_learned: int
    """Rows of the table of learned positions; 0 without one."""
    vocabulary: int
    """Rows of the embedding, padding included."""
    is_gated: bool
    """SwiGLU and its kin: three matrices in the MLP."""
    norm: Norm
    has_bias: bool
    """Of every linear layer."""
    has_qkv_bias: bool
    is_tied: bool
    """The head uses the embedding's matrix."""
    has_attention_sink: bool
    """A learned offset of each head's softmax (Megatron-LM's `--softmax-type learnable`)."""
    experts: Experts | None

    def __post_init__(self) -> None:
        counts = (self.layers, self.hidden, self.ffn, self.heads, self.kv_heads, self.head_size)
        if min(*counts, self.sequence, self.vocabulary) < 1 or self.positions_learned < 0:
            raise ModelError(f"a size of the model is below 1: {self}")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} heads cannot share {self.kv_heads} heads of keys and values")

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of the keys of all heads; that of the values too."""
        return self.kv_heads * self.head_size

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this index is a mixture of experts."""
        return self.experts is not None and layer % self.experts.layer_frequency == 0

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return sum(self.has_experts(layer) for layer in range(self.layers))


def gpt(*, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int) -> Shape:
    """A model of the family of GPT-2 and GPT-3: MLP of 4 h, LayerNorm, biases, learned positions, tied embedding."""
    return Shape(
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        sequence=sequence,
        positions_learned=sequence,
        vocabulary=vocabulary,
        is_gated=False,
        norm=Norm.LAYER,
        has_bias=True,
        has_qkv_bias=True,
        is_tied=True,
        has_attention_sink=False,
        experts=None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism. Ranks = tensor x context x pipeline x data; expert ranks lie inside the others."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    """Ranks over which each expert is cut; Megatron-LM takes `tensor` unless it is told otherwise."""
    chunks: int = 1
    """Model chunks of a stage (virtual pipeline); 1 without interleaving."""
    is_sequence_parallel: bool = False
    shard: int = 1
    """Ranks over which FSDP or DeepSpeed cuts parameters; `data` is all replicas, so replicas of a shard are
    data / shard."""

    def __post_init__(self) -> None:
        degrees = (self.tensor, self.pipeline, self.data, self.context, self.expert, self.expert_tensor, self.chunks)
        if min(*degrees, self.shard) < 1:
            raise ModelError(f"a degree is below 1: {self}")
        stage_ranks = self.data * self.context * self.tensor
        if stage_ranks % (self.expert * self.expert_tensor):
            raise ModelError(
                f"expert parallel {self.expert} x {self.expert_tensor} does not divide tensor x context x data "
                f"= {stage_ranks}"
            )
        if self.chunks > 1 and self.pipeline == 1:
            raise ModelError(f"{self.chunks} model chunks need a pipeline")
        if self.is_sequence_parallel and self.tensor == 1:
            raise ModelError("sequence parallel needs tensor parallel")
        if self.data % self.shard:
            raise ModelError(f"shards of {self.shard} ranks do not divide {self.data} data-parallel ranks")

    @property
    def ranks(self) -> int:
        """GPUs of the job."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.data * self.context * self.tensor // (self.expert * self.expert_tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Batch, types and what the framework was told."""

    micro_batch: int
    """Samples."""
    global_batch: int
    """Samples of a step, of all ranks."""
    precision: Precision
    are_gradients_fp32: bool
    """Whether gradients are reduced in 32 bits (forced by Megatron-LM for BF16)."""
    recompute: Recompute = Recompute.NONE
    has_distributed_optimizer: bool = False
    overlaps_gradients: bool = False
    overlaps_pipeline: bool = True
    """Interleaved stages compute while they send to each other (Megatron-LM's default)."""
    zero_stage: int = 0
    """DeepSpeed's stage, 0 to 3."""
    reshards_after_forward: bool = True
    """FSDP: parameters are gathered again for the backward pass."""
    makes_attention_mask: bool = False
    """The data loader makes an attention mask (Megatron-LM's default), and its group gets it by Broadcast."""
    clips_gradients: bool = True
    log_timers_to_tensorboard: bool = False

    def __post_init__(self) -> None:
        if min(self.micro_batch, self.global_batch) < 1:
            raise ModelError(f"micro batch {self.micro_batch}, global batch {self.global_batch}")
        if not 0 <= self.zero_stage <= 3:
            raise ModelError(f"ZeRO stage {self.zero_stage}")

    @property
    def gradient_type(self) -> str:
        """Type in which gradients are reduced."""
        return "FP32" if self.are_gradients_fp32 else self.precision.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job whose traffic, memory and work can be computed."""

    shape: Shape
    layout: Layout
    training: Training
    framework: Framework = Framework.MEGATRON
    version: str = ""
    """Of the framework, as its description names it; "" where it does not."""

    def __post_init__(self) -> None:
        for problem in contradictions(self.shape, self.layout, self.training):
            raise ModelError(problem)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each rank: derived, never an input."""
        return self.training.global_batch // (self.layout.data * self.training.micro_batch)

    @property
    def layers_of_stage(self) -> int:
        """Layers of each pipeline stage, all its chunks together."""
        return self.shape.layers // self.layout.pipeline

    def layers_of(self, stage: int, chunk: int = 0) -> range:
        """Indices of the layers of a chunk of a stage; interleaved chunks go round the stages."""
        each = self.layers_of_stage // self.layout.chunks
        first = (chunk * self.layout.pipeline + stage) * each
        return range(first, first + each)

    def stage_kind(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage is the first, and whether it is the last."""
        return stage == 0, stage == self.layout.pipeline - 1


def contradictions(shape: Shape, layout: Layout, training: Training) -> list[str]:
    """What cannot be true together, one sentence each; empty where all fits."""
    found: list[str] = []
    degree = layout.data * training.micro_batch
    if training.global_batch % degree:
        found.append(
            f"global batch {training.global_batch} is not a multiple of data parallel {layout.data} x micro batch "
            f"{training.micro_batch}"
        )
    if shape.heads % layout.tensor:
        found.append(f"{shape.heads} heads do not divide over tensor parallel {layout.tensor}")
    if shape.kv_heads % layout.tensor and layout.tensor % shape.kv_heads:
        found.append(f"{shape.kv_heads} heads of keys and values against tensor parallel {layout.tensor}")
    if shape.vocabulary % layout.tensor:
        found.append(f"vocabulary {shape.vocabulary} does not divide over tensor parallel {layout.tensor}")
    if shape.layers % (layout.pipeline * layout.chunks):
        found.append(
            f"{shape.layers} layers do not divide over {layout.pipeline} stages of {layout.chunks} model chunks"
        )
    if layout.expert > 1 and (shape.experts is None or shape.experts.experts % layout.expert):
        found.append(f"expert parallel {layout.expert} needs a number of experts that it divides")
    if shape.experts is not None and layout.tensor > 1 and not layout.is_sequence_parallel:
        found.append("experts with tensor parallel need sequence parallel")
    micro_batches = training.global_batch // degree
    if layout.chunks > 1 and micro_batches % layout.pipeline:
        found.append(f"{micro_batches} micro-batches are not a multiple of {layout.pipeline} interleaved stages")
    return found


def padded_vocabulary(tokens: int, tensor: int, divisible_by: int = 128) -> int:
    """Rows of Megatron-LM's embedding: tokens rounded up to a multiple of divisible_by x tensor.

    Source: Megatron-LM core_r0.13.0 `megatron/training/tokenizer/tokenizer.py:_vocab_size_with_padding`.

    Raises:
        ModelError: one of these is below 1.
    """
    multiple = divisible_by * tensor
    if multiple < 1:
        raise ModelError(f"a vocabulary that is a multiple of {divisible_by} x tensor {tensor}")
    return -(-tokens // multiple) * multiple
