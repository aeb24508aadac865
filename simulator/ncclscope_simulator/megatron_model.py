"""The model of a job that communicates as Megatron-LM does: its settings, its parameters, and their buckets.

Read from Megatron-LM core_r0.13.0 (73a28a1), apart from the emission rules that it checks: megatron/core/models/gpt/
gpt_model.py, transformer/attention.py, mlp.py, moe/; distributed/param_and_grad_buffer.py,
distributed_data_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import ceil, lcm


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronModel:
    """Settings of Megatron-LM for a model and its training, beyond the sizes that every simulated job has."""

    micro_batch: int = 1
    """Samples."""
    vocabulary: int = 32_768
    """Padded."""
    ffn: int = 0
    """0: four times the hidden size."""
    kv: int = 0
    """Width of the keys of all heads; 0: the hidden size."""
    gated: bool = False
    rms: bool = False
    """RMSNorm in place of LayerNorm."""
    bias: bool = True
    tied: bool = True
    learned: bool = True
    """A table of positions as parameters; else rotary ones."""
    fp16: bool = False
    """In place of BF16, whose gradients are reduced in 32 bits."""
    full_recompute: bool = False
    overlap: bool = False
    """`--overlap-grad-reduce`."""
    mask: bool = False
    """The loader makes an attention mask."""
    clip: bool = True
    skipped: bool = False
    """Every step overflows, with FP16."""
    tensorboard: bool = False
    experts: int = 0
    """Of a layer; 0: a dense model."""
    top_k: int = 2
    every: int = 1
    """Every how many layers have experts (`--moe-layer-freq`)."""
    expert_ffn: int = 0
    """0: as ffn."""
    uneven: bool = False
    """Some experts get more tokens than others, in each layer and microbatch other ones."""


def parse_model(text: str) -> MegatronModel:
    """Settings `key=value,...`; a word alone switches on. Raises ValueError for what is none."""
    kinds = {field.name: type(field.default) for field in fields(MegatronModel)}
    given: dict[str, int | bool] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in kinds:
            raise ValueError(f"emission: no setting {key!r}; there are {', '.join(kinds)}")
        if kinds[key] is bool:
            if value not in {"", "0", "1"}:
                raise ValueError(f"emission: {key} is on or off (1 or 0), not {value!r}")
            given[key] = value != "0"
        elif value.isdecimal():
            given[key] = int(value)
        else:
            raise ValueError(f"emission: {key} needs a number, not {value!r}")
    return MegatronModel(**given)  # type: ignore[arg-type]  # each is of its field's type


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a rank."""

    elements: int
    expert: bool = False
    whole: bool = False
    """On every tensor-parallel rank, which sums its gradients under sequence parallelism."""
    shared: bool = False
    """The embedding's matrix of a tied model with several stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A chunk of layers of a rank."""

    first: bool
    """It has the embedding."""
    last: bool
    """It has the head."""
    layers: range
    """Of the whole model."""


def parameters(model: MegatronModel, hidden: int, sequence: int, tp: int, ep: int, place: Place) -> list[Parameter]:
    """Parameters of a chunk in the order in which the modules register them."""
    embedding = Parameter(model.vocabulary // tp * hidden, shared=model.tied and not (place.first and place.last))
    found: list[Parameter] = []
    if place.first:
        found.append(embedding)
        found += [Parameter(sequence * hidden)] if model.learned else []
    for layer in place.layers:
        found += _layer(model, hidden, tp, ep, mixture=bool(model.experts) and layer % model.every == 0)
    if place.last:
        found += _norm(model, hidden)
        if not (model.tied and place.first):
            found.append(embedding)
    return found


def _layer(model: MegatronModel, hidden: int, tp: int, ep: int, *, mixture: bool) -> Iterator[Parameter]:
    ffn, kv = model.ffn or 4 * hidden, model.kv or hidden
    yield from _matrix(model, hidden, hidden // tp, row=True)
    yield from _norm(model, hidden)
    yield from _matrix(model, (hidden + 2 * kv) // tp, hidden)
    yield from _norm(model, hidden)
    fold = 2 if model.gated else 1
    if not mixture:
        yield from _matrix(model, fold * ffn // tp, hidden)
        yield from _matrix(model, hidden, ffn // tp, row=True)
        return
    yield Parameter(model.experts * hidden, whole=True)
    width = model.expert_ffn or ffn
    for _ in range(model.experts // ep):
        for one in (*_matrix(model, fold * width, hidden), *_matrix(model, hidden, width)):
            yield Parameter(one.elements, expert=True)


def _matrix(model: MegatronModel, rows: int, columns: int, *, row: bool = False) -> list[Parameter]:
    bias = [Parameter(rows, whole=row)] if model.bias else []
    return [Parameter(rows * columns), *bias]


def _norm(model: MegatronModel, hidden: int) -> list[Parameter]:
    return [Parameter(hidden, whole=True)] * (1 if model.rms else 2)


def buckets(own: list[Parameter], ranks: int, *, limit: int | None, distributed: bool) -> list[int]:
    """Elements that each bucket of a buffer reduces, the last parameters first.

    Source: param_and_grad_buffer.py _ParamAndGradBuffer.__init__: with the distributed optimizer parameters start at
    multiples of 64, buckets end at multiples of lcm(ranks, 128), and a shared embedding has its own.
    """
    sizes: list[int] = []
    start = at = 0

    def end(here: int) -> int:
        stop = ceil(here / lcm(ranks, 128)) * lcm(ranks, 128) if distributed else here
        sizes.append(stop - start)
        return stop

    for parameter in reversed(own):
        begin = ceil(at / 64) * 64 if distributed else at
        alone = parameter.shared and distributed
        if alone and begin > start:
            start = begin = end(at)
        at = begin + parameter.elements
        if alone or (limit is not None and at - start >= limit):
            start = at = end(at)
    if at > start:
        end(at)
    return sizes


def bucket_limit(ranks: int) -> int:
    """Elements at which a bucket closes. Source: distributed_data_parallel.py, `--overlap-grad-reduce`."""
    return max(40_000_000, 1_000_000 * ranks)
