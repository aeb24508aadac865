"""Parameters of a rank, tensor by tensor, in the order in which Megatron-LM core registers them.

Source: Megatron-LM core_r0.13.0 (73a28a1), `megatron/core/models/gpt/gpt_model.py`, `transformer/attention.py`,
`transformer/moe/`; order and names as in the lists of buckets that real runs print. Of a rank: cut by tensor and expert
parallelism, but not by a distributed optimizer, FSDP or ZeRO, which cut what is listed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ncclscope_models.job import Job, Layout, Norm, Shape


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter of a rank."""

    name: str
    shape: tuple[int, ...]
    is_expert: bool = False
    """Reduced over the ranks that hold the same experts."""
    is_copied_over_tensor: bool = False
    """Whole on every rank of a tensor-parallel group, which sums its gradients where sequences are cut."""
    is_shared_embedding: bool = False

    @property
    def elements(self) -> int:
        """Number of parameters."""
        return prod(self.shape)


def elements(tensors: Iterable[Tensor]) -> int:
    """Parameters of all tensors."""
    return sum(tensor.elements for tensor in tensors)


def rank_tensors(job: Job, stage: int, chunk: int = 0) -> tuple[Tensor, ...]:
    """Tensors of one chunk of a pipeline stage, on any of its tensor-parallel ranks."""
    shape, layout = job.shape, job.layout
    is_first = stage == 0 and chunk == 0
    is_last = stage == layout.pipeline - 1 and chunk == layout.chunks - 1
    found: list[Tensor] = []
    if is_first:
        rows = shape.vocabulary // layout.tensor
        is_shared = shape.is_tied and layout.pipeline > 1
        found.append(Tensor("embedding.word", (rows, shape.hidden), is_shared_embedding=is_shared))
        if shape.positions_learned:
            found.append(Tensor("embedding.position", (shape.positions_learned, shape.hidden)))
    for layer in job.layers_of(stage, chunk):
        found += layer_tensors(shape, layout, layer)
    if is_last:
        found += _norm(shape, "final_norm")
        # A tied head on the rank of the embedding is the same parameter.
        if not shape.is_tied or layout.pipeline > 1:
            rows = shape.vocabulary // layout.tensor
            found.append(Tensor("head", (rows, shape.hidden), is_shared_embedding=shape.is_tied))
    return tuple(found)


def stage_tensors(job: Job, stage: int) -> tuple[Tensor, ...]:
    """Tensors of all chunks of a stage."""
    return tuple(tensor for chunk in range(job.layout.chunks) for tensor in rank_tensors(job, stage, chunk))


def stage_parameters(job: Job, stage: int) -> int:
    """Parameters of a rank of this stage: what Megatron-LM prints as "number of parameters on ... rank"."""
    return elements(stage_tensors(job, stage))


def layer_tensors(shape: Shape, layout: Layout, layer: int) -> tuple[Tensor, ...]:
    """Tensors of a transformer layer on one rank."""
    return _layer_tensors(shape, layout.tensor, layout.expert, layout.expert_tensor, layer)


@lru_cache(maxsize=4096)
def _layer_tensors(shape: Shape, tensor: int, expert: int, expert_tensor: int, layer: int) -> tuple[Tensor, ...]:
    """Asked again for every stage and layout of a job."""
    name = f"layer.{layer}"
    t = tensor
    # With more tensor ranks than heads of keys and values each rank holds a copy of one.
    kv = max(shape.kv_size // t, shape.head_size)
    qkv = shape.query_size // t + 2 * kv
    found: list[Tensor] = []
    if shape.has_attention_sink:
        found.append(Tensor(f"{name}.attention.sink", (shape.heads // t,)))
    found += _linear(f"{name}.attention.projection", shape.hidden, shape.query_size // t, shape.has_bias, is_row=True)
    found += _norm(shape, f"{name}.attention.norm")
    found += _linear(f"{name}.attention.qkv", qkv, shape.hidden, shape.has_qkv_bias)
    if shape.has_experts(layer):
        found += _norm(shape, f"{name}.mlp.norm")
        found += _experts(shape, expert, expert_tensor, name)
        return tuple(found)
    found += _norm(shape, f"{name}.mlp.norm")
    wide = (2 if shape.is_gated else 1) * shape.ffn // t
    found += _linear(f"{name}.mlp.up", wide, shape.hidden, shape.has_bias)
    found += _linear(f"{name}.mlp.down", shape.hidden, shape.ffn // t, shape.has_bias, is_row=True)
    return tuple(found)


def _experts(shape: Shape, expert: int, expert_tensor: int, name: str) -> Iterator[Tensor]:
    """Router and the rank's own experts."""
    experts = shape.experts
    assert experts is not None
    own = experts.experts // expert
    ffn = experts.expert_ffn // expert_tensor
    wide = (2 if shape.is_gated else 1) * ffn
    yield Tensor(f"{name}.mlp.router", (experts.experts, shape.hidden), is_copied_over_tensor=True)
    for number in range(own):
        for tensor in _linear(f"{name}.mlp.expert.{number}.up", wide, shape.hidden, shape.has_bias):
            yield Tensor(tensor.name, tensor.shape, is_expert=True)
        for tensor in _linear(f"{name}.mlp.expert.{number}.down", shape.hidden, ffn, shape.has_bias):
            yield Tensor(tensor.name, tensor.shape, is_expert=True)


def _linear(name: str, rows: int, columns: int, has_bias: bool, *, is_row: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (rows, columns))
    if has_bias:
        yield Tensor(f"{name}.bias", (rows,), is_copied_over_tensor=is_row)


def _norm(shape: Shape, name: str) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (shape.hidden,), is_copied_over_tensor=True)
    if shape.norm is Norm.LAYER:
        yield Tensor(f"{name}.bias", (shape.hidden,), is_copied_over_tensor=True)


def whole_model(shape: Shape) -> int:
    """Parameters of the model, a tied head counted once, experts all."""
    alone = Layout()
    layers = sum(elements(layer_tensors(shape, alone, layer)) for layer in range(shape.layers))
    tables = shape.vocabulary * (1 if shape.is_tied else 2) + shape.positions_learned
    return layers + tables * shape.hidden + elements(_norm(shape, "final_norm"))


def gpt_formula(*, layers: int, hidden: int, vocabulary: int, sequence: int) -> int:
    """Parameters by the closed formula 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h)), without the final norm.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), equation 2; GPT's family as `job.gpt` builds it.
    """
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence) * hidden


def layer_weights(*, layers: int, hidden: int) -> int:
    """12 l h^2: the matrices of the layers alone, without embedding, biases and norms."""
    return 12 * layers * hidden**2


def moe_from_base(base: int, experts: int) -> tuple[int, int]:
    """(expert, other) parameters of a model that has `base` without experts, every second layer a mixture.

    A third of a transformer's weights are the MLPs of every second layer. Source: Singh et al. (TED), equations 7.2
    and 7.3 of the dissertation: base x E / 3 and 2/3 base.
    """
    return base * experts // 3, 2 * base // 3
