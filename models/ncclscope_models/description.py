"""A job's description: fields with the source of each, put together from what several files and flags say.

Nothing is filled in silently. A field comes from a file, a flag, from other fields (`derived: ...`) or from a default
that is printed as `assumed: ...`; shape, batch and precision have no default. Two sources that differ are an error that
names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

from ncclscope_models.job import (
    Dispatcher,
    Experts,
    Framework,
    Job,
    Layout,
    ModelError,
    Norm,
    Precision,
    Recompute,
    Shape,
    Training,
    padded_vocabulary,
)
from ncclscope_models.parameters import stage_parameters

Value: TypeAlias = int | bool | str
_Word = TypeVar("_Word", bound=StrEnum)

FIELDS: Final[Mapping[str, tuple[type, str]]] = MappingProxyType(
    {
        "framework": (str, "megatron, fsdp2, ddp or deepspeed"),
        "version": (str, "of the framework"),
        "layers": (int, "transformer layers"),
        "hidden": (int, "width of activations"),
        "ffn": (int, "width inside the MLP"),
        "heads": (int, "attention heads"),
        "kv_heads": (int, "heads of keys and values"),
        "head_size": (int, "width of a head"),
        "sequence": (int, "tokens of a sample"),
        "positions_learned": (int, "rows of the table of learned positions, 0 without one"),
        "tokens": (int, "tokens of the tokenizer"),
        "vocabulary_divisible_by": (int, "what the padded vocabulary is a multiple of, times tensor"),
        "vocabulary": (int, "rows of the embedding, padding included"),
        "gated": (bool, "a gated MLP (SwiGLU)"),
        "norm": (str, "LayerNorm or RMSNorm"),
        "bias": (bool, "linear layers have a bias"),
        "qkv_bias": (bool, "queries, keys and values have a bias"),
        "tied": (bool, "the head uses the embedding's matrix"),
        "attention_sink": (bool, "a learned offset of each head's softmax"),
        "experts": (int, "experts of a layer, 0 in a dense model"),
        "experts_top_k": (int, "experts of a token"),
        "expert_layer_frequency": (int, "every how many layers have experts"),
        "expert_ffn": (int, "width inside an expert"),
        "dispatcher": (str, "alltoall or allgather"),
        "ranks": (int, "GPUs of the job"),
        "tensor": (int, "tensor parallel ranks"),
        "pipeline": (int, "pipeline stages"),
        "data": (int, "data parallel ranks"),
        "context": (int, "context parallel ranks"),
        "expert": (int, "expert parallel ranks"),
        "expert_tensor": (int, "ranks over which an expert is cut"),
        "chunks": (int, "model chunks of a stage"),
        "sequence_parallel": (bool, "activations are cut over tensor parallel ranks"),
        "shard": (int, "ranks over which FSDP or DeepSpeed cuts parameters"),
        "micro_batch": (int, "samples"),
        "global_batch": (int, "samples of a step"),
        "accumulation": (int, "micro-batches of a step"),
        "precision": (str, "FP32, FP16 or BF16"),
        "gradients_fp32": (bool, "gradients are reduced in 32 bits"),
        "recompute": (str, "none, selective or full"),
        "distributed_optimizer": (bool, "optimizer cut over data parallel ranks"),
        "overlap_gradients": (bool, "gradients are reduced during the backward pass"),
        "overlap_pipeline": (bool, "interleaved stages compute while they send to each other"),
        "zero_stage": (int, "DeepSpeed's stage"),
        "reshard_after_forward": (bool, "FSDP gathers parameters again for the backward pass"),
        "attention_mask": (bool, "the data loader makes an attention mask"),
        "clip_gradients": (bool, "the gradients' norm is taken"),
        "tensorboard_timers": (bool, "timers go to tensorboard too"),
    }
)
"""Every field of `model.toml`: its type, and what it is."""

_ASSUMED: Final[Mapping[str, Value]] = MappingProxyType(
    {
        "version": "",
        "attention_sink": False,
        "experts": 0,
        "context": 1,
        "expert": 1,
        "chunks": 1,
        "sequence_parallel": False,
        "gradients_fp32": False,
        "recompute": "none",
        "distributed_optimizer": False,
        "overlap_gradients": False,
        "overlap_pipeline": True,
        "zero_stage": 0,
        "reshard_after_forward": True,
        "attention_mask": False,
        "clip_gradients": True,
        "tensorboard_timers": False,
    }
)
"""Fields of the layout and of training that are off unless something says that they are on. No sizes of a model."""

_NEEDED: Final = (
    *("framework", "layers", "hidden", "ffn", "heads", "kv_heads", "sequence", "positions_learned", "vocabulary"),
    *("gated", "norm", "bias", "tied", "tensor", "pipeline", "data", "micro_batch", "global_batch", "precision"),
)


@dataclass(frozen=True, slots=True)
class Given:
    """A field's value and where it stands."""

    value: Value
    source: str

    @property
    def is_assumed(self) -> bool:
        """Whether nothing said it."""
        return self.source.startswith("assumed")


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """The parameters that a rank printed; `tensor` and `stage` are its place."""

    tensor: int
    stage: int
    parameters: int
    source: str


@dataclass(frozen=True, slots=True)
class Description:
    """What one or several sources say of a job."""

    fields: Mapping[str, Given]
    counts: tuple[ParameterCount, ...] = ()
    not_nccl: tuple[Given, ...] = ()
    """Options that move traffic out of NCCL's sight: its operations are not expected."""

    def __post_init__(self) -> None:
        for name, given in self.fields.items():
            _check(name, given)


@dataclass(frozen=True, slots=True)
class Completed:
    """A whole description, and the job that it describes."""

    job: Job
    fields: Mapping[str, Given]
    counts: tuple[ParameterCount, ...]
    not_nccl: tuple[Given, ...]

    @property
    def assumed(self) -> tuple[str, ...]:
        """Fields that nothing said."""
        return tuple(name for name, given in self.fields.items() if given.is_assumed)


def _check(name: str, given: Given) -> None:
    if name not in FIELDS:
        raise ModelError(f"{given.source}: no field {name!r}; the fields are {', '.join(FIELDS)}")
    kind = FIELDS[name][0]
    if type(given.value) is not kind:
        raise ModelError(f"{given.source}: {name} is {given.value!r}, not {_KINDS[kind]}")
    most = _MOST.get(name, _MOST_OF_ANYTHING)
    if isinstance(given.value, int) and given.value > most:
        raise ModelError(f"{given.source}: {name} is {given.value}, and {most} at most")


_MOST: Final[Mapping[str, int]] = dict.fromkeys(("layers", "experts", "pipeline", "chunks"), 65536)
_MOST_OF_ANYTHING: Final = 2**31 - 1
_KINDS: Final = {int: "a whole number", bool: "true or false", str: "a word"}


def parsed(name: str, text: str, source: str) -> Given:
    """A field of a flag, `name=text`.

    Raises:
        ModelError: no such field, or not of its type.
    """
    if name not in FIELDS:
        raise ModelError(f"{source}: no field {name!r}; the fields are {', '.join(FIELDS)}")
    kind = FIELDS[name][0]
    word = text.strip()
    value: Value = word
    if kind is bool:
        value = {"true": True, "false": False}.get(word.lower(), word)
    elif kind is int:
        digits = word.replace("_", "").replace(",", "")
        value = int(digits) if digits.isdecimal() else word
    given = Given(value, source)
    _check(name, given)
    return given


def merged(descriptions: Iterable[Description]) -> Description:
    """All of them as one; a field's source is the first that has it.

    Raises:
        ModelError: two of them differ; names all such fields with both sources.
    """
    fields: dict[str, Given] = {}
    counts: list[ParameterCount] = []
    hidden: list[Given] = []
    wrong: list[str] = []
    for description in descriptions:
        counts += description.counts
        hidden += description.not_nccl
        for name, given in description.fields.items():
            before = fields.setdefault(name, given)
            if before.value != given.value:
                wrong.append(f"{name} is {before.value} in {before.source}, and {given.value} in {given.source}")
    if wrong:
        raise ModelError("; ".join(wrong))
    return Description(fields, tuple(counts), tuple(hidden))


def completed(description: Description) -> Completed:
    """The job of a description, with derived and assumed fields, held against the parameters that ranks printed.

    Raises:
        ModelError: fields are missing, cannot be true together, or give other parameters than a rank printed.
    """
    fields = dict(description.fields)
    _derive(fields)
    missing = [name for name in _NEEDED if name not in fields]
    if fields.get("experts", Given(0, "")).value:
        missing += [name for name in ("experts_top_k", "expert_ffn", "dispatcher") if name not in fields]
    if missing:
        named = ", ".join(f"{name} ({FIELDS[name][1]})" for name in missing)
        raise ModelError(f"not known: {named}; give a file that says it, or --set name=value")
    fields = {name: fields[name] for name in FIELDS if name in fields}
    try:
        job = _job(fields)
    except ModelError as error:
        raise ModelError(f"{error}{_sources_of(str(error), fields)}") from error
    _check_ranks(job, fields)
    for count in description.counts:
        _check_count(job, count)
    return Completed(job, fields, description.counts, description.not_nccl)


def _derive(fields: dict[str, Given]) -> None:
    """Adds what follows from other fields, and what is assumed."""

    def known(*names: str) -> list[int] | None:
        values = [fields[name].value for name in names if name in fields]
        return [int(value) for value in values] if len(values) == len(names) else None

    def derive(name: str, value: Value, why: str) -> None:
        fields.setdefault(name, Given(value, f"derived: {why}"))

    for name, value in _ASSUMED.items():
        fields.setdefault(name, Given(value, "assumed: nothing says otherwise"))
    if "qkv_bias" not in fields and "bias" in fields:
        derive("qkv_bias", fields["bias"].value, "as bias")
    if sizes := known("hidden", "heads"):
        derive("head_size", sizes[0] // max(1, sizes[1]), "hidden / heads")
    if sizes := known("ranks", "tensor", "pipeline", "context"):
        derive(
            "data", max(1, sizes[0] // max(1, sizes[1] * sizes[2] * sizes[3])), "ranks / (tensor x pipeline x context)"
        )
    if sizes := known("tokens", "tensor", "vocabulary_divisible_by"):
        derive("vocabulary", padded_vocabulary(sizes[0], sizes[1], sizes[2]), "tokens, padded")
    if sizes := known("micro_batch", "data", "accumulation"):
        derive("global_batch", sizes[0] * sizes[1] * sizes[2], "micro_batch x data x accumulation")
    if (sizes := known("experts", "ffn")) and sizes[0]:
        derive("expert_ffn", sizes[1], "as ffn")
        derive("expert_layer_frequency", 1, "every layer")
    if sizes := known("tensor"):
        derive("expert_tensor", sizes[0] if fields["experts"].value else 1, "as tensor")
    if sizes := known("data"):
        is_cut = fields.get("framework", Given("", "")).value in ("fsdp2", "deepspeed")
        derive("shard", sizes[0] if is_cut else 1, "as data" if is_cut else "parameters are whole")


def _job(fields: Mapping[str, Given]) -> Job:
    def number(name: str) -> int:
        return int(fields[name].value)

    def is_on(name: str) -> bool:
        return bool(fields[name].value)

    experts = None
    if number("experts"):
        experts = Experts(
            experts=number("experts"),
            top_k=number("experts_top_k"),
            layer_frequency=number("expert_layer_frequency"),
            expert_ffn=number("expert_ffn"),
            dispatcher=_one_of(Dispatcher, "dispatcher", fields),
        )
    shape = Shape(
        layers=number("layers"),
        hidden=number("hidden"),
        ffn=number("ffn"),
        heads=number("heads"),
        kv_heads=number("kv_heads"),
        head_size=number("head_size"),
        sequence=number("sequence"),
        positions_learned=number("positions_learned"),
        vocabulary=number("vocabulary"),
        is_gated=is_on("gated"),
        norm=_one_of(Norm, "norm", fields),
        has_bias=is_on("bias"),
        has_qkv_bias=is_on("qkv_bias"),
        is_tied=is_on("tied"),
        has_attention_sink=is_on("attention_sink"),
        experts=experts,
    )
    layout = Layout(
        tensor=number("tensor"),
        pipeline=number("pipeline"),
        data=number("data"),
        context=number("context"),
        expert=number("expert"),
        expert_tensor=number("expert_tensor") if experts else 1,
        chunks=number("chunks"),
        # Of one rank there is nothing to cut: Megatron-LM switches it off.
        is_sequence_parallel=is_on("sequence_parallel") and number("tensor") > 1,
        shard=number("shard"),
    )
    training = Training(
        micro_batch=number("micro_batch"),
        global_batch=number("global_batch"),
        precision=_one_of(Precision, "precision", fields),
        are_gradients_fp32=is_on("gradients_fp32"),
        recompute=_one_of(Recompute, "recompute", fields),
        has_distributed_optimizer=is_on("distributed_optimizer"),
        overlaps_gradients=is_on("overlap_gradients"),
        overlaps_pipeline=is_on("overlap_pipeline"),
        zero_stage=number("zero_stage"),
        reshards_after_forward=is_on("reshard_after_forward"),
        makes_attention_mask=is_on("attention_mask"),
        clips_gradients=is_on("clip_gradients"),
        log_timers_to_tensorboard=is_on("tensorboard_timers"),
    )
    framework = _one_of(Framework, "framework", fields)
    return Job(shape=shape, layout=layout, training=training, framework=framework, version=str(fields["version"].value))


def _one_of(kind: type[_Word], name: str, fields: Mapping[str, Given]) -> _Word:
    given = fields[name]
    try:
        return kind(str(given.value))
    except ValueError as error:
        raise ModelError(f"{given.source}: {name} is {given.value!r}: {FIELDS[name][1]}") from error


def _sources_of(problem: str, fields: Mapping[str, Given]) -> str:
    """Where the fields stand that a sentence about them names by words."""
    words = problem.lower().replace(",", " ").split()
    named = [name for name in fields if name.split("_")[0] in words or f"{name.split('_')[0]}s" in words]
    return "".join(f"; {name} {fields[name].value} ({fields[name].source})" for name in named)


def _check_ranks(job: Job, fields: Mapping[str, Given]) -> None:
    ranks = fields.get("ranks")
    if ranks is not None and ranks.value != job.layout.ranks:
        raise ModelError(
            f"{ranks.source} says {ranks.value} ranks, but tensor x pipeline x data x context = {job.layout.ranks} "
            f"(tensor: {fields['tensor'].source}, data: {fields['data'].source})"
        )
    wanted = fields.get("accumulation")
    if wanted is not None and wanted.value != job.micro_batches:
        raise ModelError(
            f"{wanted.source} says {wanted.value} micro-batches of a step, but global batch / (data x micro batch) = "
            f"{job.micro_batches} (global_batch: {fields['global_batch'].source})"
        )


def _check_count(job: Job, count: ParameterCount) -> None:
    """Raises if a rank printed other parameters than the description gives it."""
    if count.stage >= job.layout.pipeline or count.tensor >= job.layout.tensor:
        raise ModelError(
            f"{count.source} is of tensor rank {count.tensor} and stage {count.stage}, but the description has "
            f"{job.layout.tensor} tensor ranks and {job.layout.pipeline} stages"
        )
    expected = stage_parameters(job, count.stage)
    if expected != count.parameters:
        raise ModelError(
            f"{count.source} says {count.parameters:,} parameters, but the description gives stage {count.stage} "
            f"{expected:,}"
        )
