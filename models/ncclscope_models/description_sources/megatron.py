"""Fields from the output of a Megatron-LM job: its dump of arguments, parameter lines and padded vocabulary.

Lines may have the rank that `srun -l` or a launcher put in front. Options that a version does not have are off in it:
a dump without `swiglu` is of a version without gated MLPs. NeMo's YAML has the same names under `model`.
Source: Megatron-LM `megatron/training/arguments.py:_print_args`, `training.py:setup_model_and_optimizer`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from ncclscope_models.description import Description, Given, ParameterCount, Value
from ncclscope_models.job import ModelError, Norm

_BEGIN: Final = re.compile(r"-{8,} arguments -{8,}")
_END: Final = re.compile(r"-{8,} end of arguments -{8,}")
_ARGUMENT: Final = re.compile(r"(?:^|\s)(\w+) \.{2,} ?(.*?)\s*$")
_PARAMETERS: Final = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank \((\d+), (\d+)\): (\d+)"
)
_PADDED: Final = re.compile(r"padded vocab \(size: (\d+)\) with \d+ dummy tokens \(new size: (\d+)\)")
_ITERATION: Final = re.compile(r"iteration +(\d+)/ *\d+ \|(.*)")
_PART: Final = re.compile(r"([^|:]+): +([-+0-9.E]+)")
_MEMORY: Final = re.compile(
    r"(?:\[Rank (\d+)\] )?\(?after (\d+) iterations\)? memory \(MB\) "
    r"\| allocated: ([0-9.]+) \| max allocated: ([0-9.]+)"
)


@dataclass(frozen=True, slots=True)
class Progress:
    """One iteration as the job itself printed it."""

    line: int
    iteration: int
    elapsed_ms: float
    tflops_per_gpu: float | None
    global_batch: int | None


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Memory of a rank as PyTorch reported it, in units of 2^20 bytes."""

    line: int
    rank: int | None
    iteration: int
    allocated_mib: float
    max_allocated_mib: float


@dataclass(frozen=True, slots=True)
class Output:
    """What a job's output says of it."""

    description: Description
    progress: tuple[Progress, ...]
    memory: tuple[MemoryLine, ...]


class _Reading:
    """What was read of an output so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_inside = False
        self.arguments: dict[str, tuple[str, str]] = {}
        """Option to its value as printed and its source."""
        self.counts: list[ParameterCount] = []
        self.padded: list[tuple[int, int, str]] = []
        self.progress: list[Progress] = []
        self.memory: list[MemoryLine] = []

    def ingest_line(self, number: int, line: str) -> None:
        source = f"{self._name}:{number}"
        if self._is_inside and (found := _ARGUMENT.search(line)):
            key, text = found.groups()
            before = self.arguments.setdefault(key, (text, source))
            if before[0] != text:
                raise ModelError(f"{before[1]} says {key} {before[0]}, and {source} says {text}")
        elif _END.search(line):
            self._is_inside = False
        elif _BEGIN.search(line):
            self._is_inside = True
            self.arguments, self.counts, self.padded = {}, [], []
        else:
            self._ingest_figure(number, line, source)

    def _ingest_figure(self, number: int, line: str, source: str) -> None:
        if found := _PARAMETERS.search(line):
            tensor, stage, amount = (int(text) for text in found.groups())
            self.counts.append(ParameterCount(tensor, stage, amount, source))
        elif found := _PADDED.search(line):
            self.padded.append((int(found[1]), int(found[2]), source))
        elif "elapsed time per iteration" in line and (found := _ITERATION.search(line)):
            self.progress += _progress(number, int(found[1]), found[2])
        elif "max allocated" in line and (found := _MEMORY.search(line)):
            rank = None if found[1] is None else int(found[1])
            self.memory.append(MemoryLine(number, rank, int(found[2]), float(found[3]), float(found[4])))


def read_output(lines: Iterable[str], name: str) -> Output:
    """Everything in a job's output; `name` is the file's, for the sources. Of several runs the last one is described.

    Raises:
        ModelError: no dump of arguments, or one that gives an option two values.
    """
    reading = _Reading(name)
    for number, line in enumerate(lines, start=1):
        reading.ingest_line(number, line)
    arguments = reading.arguments
    if not arguments:
        raise ModelError(f"{name}: no dump of arguments")
    fields = fields_of_arguments(arguments, name)
    for tokens, rows, source in reading.padded[:1]:
        fields["tokens"], fields["vocabulary"] = Given(tokens, source), Given(rows, source)
    counts = tuple(reading.counts)
    if arguments.get("is_scaling_mode", ("False", ""))[0] == "True":
        # Of a fork that runs one rank of a larger job: the degrees are other options, and counts are of its one rank.
        counts = ()
        for field, key in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"), ("ranks", "world_size")):
            text, source = arguments[f"fake_{key}"]
            fields[field] = Given(int(text), source)
    description = Description(fields, counts, _not_nccl(arguments))
    return Output(description, tuple(reading.progress), tuple(reading.memory))


def _progress(line: int, iteration: int, rest: str) -> list[Progress]:
    parts = {key.strip(): float(value) for key, value in _PART.findall(rest)}
    elapsed = parts.get("elapsed time per iteration (ms)")
    batch = parts.get("global batch size")
    if elapsed is None:
        return []
    rate = parts.get("throughput per GPU (TFLOP/s/GPU)")
    return [Progress(line, iteration, elapsed, rate, None if batch is None else int(batch))]


def _not_nccl(arguments: Mapping[str, tuple[str, str]]) -> tuple[Given, ...]:
    hidden = {
        "tp_comm_overlap": "tensor parallel traffic goes through TransformerEngine's userbuffers",
        "moe_enable_deepep": "tokens of experts go through DeepEP",
        "use_nccl_ub": "symmetric memory",
    }
    return tuple(
        Given(why, f"{arguments[key][1]} ({key})")
        for key, why in hidden.items()
        if arguments.get(key, ("False", ""))[0] == "True"
    )


def _is_true(text: str) -> bool:
    return text == "True"


def _norm(text: str) -> str:
    return (Norm.RMS if text.lower() == "rmsnorm" else Norm.LAYER).value


_Turn: TypeAlias = Callable[[str], Value]
_OPTIONS: Final[tuple[tuple[str, tuple[str, ...], _Turn, Value | None], ...]] = (
    ("layers", ("num_layers", "encoder_num_layers"), int, None),
    ("hidden", ("hidden_size",), int, None),
    ("ffn", ("ffn_hidden_size",), int, None),
    ("heads", ("num_attention_heads",), int, None),
    ("head_size", ("kv_channels",), int, None),
    ("sequence", ("seq_length", "encoder_seq_length"), int, None),
    ("gated", ("swiglu",), _is_true, False),
    ("norm", ("normalization",), _norm, Norm.LAYER.value),
    ("bias", ("add_bias_linear",), _is_true, True),
    ("tied", ("untie_embeddings_and_output_weights",), lambda text: text != "True", True),
    ("attention_sink", ("softmax_type",), lambda text: text == "learnable", False),
    ("vocabulary_divisible_by", ("make_vocab_size_divisible_by",), int, None),
    ("ranks", ("world_size",), int, None),
    ("tensor", ("tensor_model_parallel_size", "model_parallel_size"), int, None),
    ("pipeline", ("pipeline_model_parallel_size",), int, 1),
    ("data", ("data_parallel_size",), int, None),
    ("context", ("context_parallel_size",), int, 1),
    ("expert", ("expert_model_parallel_size",), int, 1),
    ("chunks", ("virtual_pipeline_model_parallel_size",), int, 1),
    ("sequence_parallel", ("sequence_parallel",), _is_true, False),
    ("micro_batch", ("micro_batch_size", "batch_size"), int, None),
    ("global_batch", ("global_batch_size",), int, None),
    ("distributed_optimizer", ("use_distributed_optimizer",), _is_true, False),
    ("overlap_gradients", ("overlap_grad_reduce",), _is_true, False),
    ("attention_mask", ("create_attention_mask_in_dataloader",), _is_true, None),
    ("clip_gradients", ("clip_grad",), lambda text: float(text) > 0, None),
    ("tensorboard_timers", ("log_timers_to_tensorboard",), _is_true, False),
    ("recompute", ("recompute_granularity",), str, "none"),
)
"""Field, options that give it (the first that is set), how its text is read, and its value where none is set."""

_EXPERT_OPTIONS: Final[tuple[tuple[str, tuple[str, ...], _Turn, Value | None], ...]] = (
    ("experts", ("num_experts",), int, None),
    ("experts_top_k", ("moe_router_topk",), int, None),
    ("expert_ffn", ("moe_ffn_hidden_size", "ffn_hidden_size"), int, None),
    ("expert_layer_frequency", ("moe_layer_freq",), int, None),
    ("dispatcher", ("moe_token_dispatcher_type",), str, None),
    ("expert_tensor", ("expert_tensor_parallel_size",), int, None),
)


class _Arguments:
    """A dump of arguments, and the fields that it gives."""

    def __init__(self, arguments: Mapping[str, tuple[str, str]], name: str) -> None:
        self._arguments, self._name = arguments, name
        self.fields = {"framework": Given("megatron", f"{name} (arguments of Megatron-LM)")}

    def text(self, option: str, without: str = "None") -> str:
        """The text of an option; `without` if it is None or the version does not have it."""
        text = self._arguments.get(option, ("None", ""))[0]
        return without if text == "None" else text

    def has(self, option: str) -> bool:
        """Whether the version has this option."""
        return option in self._arguments

    def give(self, field: str, option: str, value: Value) -> None:
        """A field that an option gives, or its absence."""
        known = self.text(option) != "None"
        source = f"{self._arguments[option][1]} ({option})" if known else f"{self._name} ({option} is not set)"
        self.fields[field] = Given(value, source)

    def take(self, field: str, options: tuple[str, ...], turn: _Turn, without: Value | None) -> None:
        """A field from the first of these options that is set."""
        option = next((option for option in options if self.text(option) != "None"), None)
        if option is None:
            if without is not None:
                self.give(field, options[0], without)
            return
        try:
            self.give(field, option, turn(self.text(option)))
        except ValueError as error:
            raise ModelError(f"{self._arguments[option][1]}: {option} is {self.text(option)!r}") from error


def fields_of_arguments(arguments: Mapping[str, tuple[str, str]], name: str) -> dict[str, Given]:
    """Fields of Megatron-LM's arguments: option to its value as printed and its source.

    Raises:
        ModelError: a value is not of its option's type.
    """
    given = _Arguments(arguments, name)
    for option in _OPTIONS:
        given.take(*option)
    hidden, heads = given.fields.get("hidden"), given.fields.get("heads")
    if hidden is not None and not given.has("ffn_hidden_size"):  # which early versions do not have
        given.give("ffn", "ffn_hidden_size", 4 * int(hidden.value))
    if given.text("checkpoint_activations") == "True":  # before recompute_granularity
        given.give("recompute", "checkpoint_activations", "full")
    if given.text("group_query_attention") == "True":
        given.take("kv_heads", ("num_query_groups",), int, None)
    elif heads is not None:
        # num_key_value_heads is of DeepSpeed's fork.
        given.take("kv_heads", ("num_key_value_heads",), int, heads.value)
    if given.has("add_qkv_bias") and "bias" in given.fields:
        has_bias = bool(given.fields["bias"].value) or given.text("add_qkv_bias") == "True"
        given.give("qkv_bias", "add_qkv_bias", has_bias)
    if given.has("overlap_p2p_comm") and int(given.fields["chunks"].value) > 1:
        # Without interleaving it is always off: that says nothing of a layout with it. Source: Megatron-LM
        # core_r0.13.0 megatron/training/arguments.py:validate_args.
        given.take("overlap_pipeline", ("overlap_p2p_comm",), _is_true, None)
    _take_positions(given)
    _take_precision(given)
    if given.text("deepspeed") == "True":
        given.give("framework", "deepspeed", "deepspeed")
        given.take("zero_stage", ("zero_stage",), int, None)
    if given.text("num_experts", "0") in ("0", "[1]"):  # the list is of DeepSpeed's fork, in which 1 is dense
        given.give("experts", "num_experts", 0)
    else:
        for option in _EXPERT_OPTIONS:
            given.take(*option)
    return given.fields


def _take_positions(given: _Arguments) -> None:
    if given.text("use_rotary_position_embeddings") == "True":
        given.give("positions_learned", "use_rotary_position_embeddings", 0)
    elif given.text("position_embedding_type", "learned_absolute") != "learned_absolute":
        given.give("positions_learned", "position_embedding_type", 0)
    else:
        given.take("positions_learned", ("max_position_embeddings",), int, None)


def _take_precision(given: _Arguments) -> None:
    is_half = [option for option in ("fp16", "bf16") if given.text(option) == "True"]
    given.give("precision", is_half[0] if is_half else "fp16", is_half[0].upper() if is_half else "FP32")
    sums = "accumulate_allreduce_grads_in_fp32"
    if given.has(sums):
        given.give("gradients_fp32", sums, not is_half or given.text(sums) == "True")
