"""Fields from the files that say how a job is trained: DeepSpeed, torchtitan, NeMo, and our own `model.toml`.

Each reader takes the parsed file; `read_parsed` recognises which one it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ncclscope_models.description import FIELDS, Completed, Description, Given
from ncclscope_models.description_sources.huggingface import read_config
from ncclscope_models.description_sources.megatron import fields_of_arguments
from ncclscope_models.job import ModelError


def read_parsed(content: Mapping[str, Any], name: str) -> Description:
    """Fields of a parsed JSON, TOML or YAML file, whichever it is.

    Raises:
        ModelError: it is none that is known.
    """
    if "model_type" in content:
        return read_config(content, name)
    if {"train_micro_batch_size_per_gpu", "train_batch_size", "zero_optimization"} & set(content):
        return read_deepspeed(content, name)
    if isinstance(content.get("parallelism"), Mapping) and isinstance(content.get("training"), Mapping):
        return read_torchtitan(content, name)
    model = content.get("model")
    if isinstance(model, Mapping) and "num_layers" in model:
        return read_nemo(content, name)
    if content and set(content) & set(FIELDS):
        return read_model_toml(content, name)
    raise ModelError(
        f"{name}: no description of a job: neither Hugging Face's config.json, nor a file of DeepSpeed, torchtitan or "
        "NeMo, nor model.toml"
    )


def read_model_toml(content: Mapping[str, Any], name: str) -> Description:
    """Our own file: a line `field = value` each, as `ncclscope model --toml` writes it."""
    return Description({field: Given(value, f"{name} ({field})") for field, value in content.items()})


def model_toml(completed: Completed) -> str:
    """A description as such a file, the source of each field as a comment."""
    lines = [f"{name} = {json.dumps(given.value)}  # {given.source}" for name, given in completed.fields.items()]
    return "\n".join(lines) + "\n"


def _section(content: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """A table of a file; an empty one where the file has none.

    Raises:
        ModelError: something else stands there.
    """
    found = content.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ModelError(f"{name} ({key}): {found!r} is no table of fields")
    return found or {}


def _whole(value: object, source: str) -> Given:
    """A whole number, which may be written with a point or as text.

    Raises:
        ModelError: it is none.
    """
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20:
        return Given(int(value), source)
    if isinstance(value, float) and value.is_integer():
        return Given(int(value), source)
    if isinstance(value, int) and not isinstance(value, bool):
        return Given(value, source)
    raise ModelError(f"{source}: {value!r} is no whole number")


def read_deepspeed(content: Mapping[str, Any], name: str) -> Description:
    """A DeepSpeed configuration; keys that are "auto" say nothing.

    Source: DeepSpeed 0.16 `runtime/config.py`.
    """
    fields = {"framework": Given("deepspeed", f"{name} (a configuration of DeepSpeed)")}
    zero = _section(content, "zero_optimization", name)

    def take(field: str, where: Mapping[str, Any], key: str) -> None:
        value = where.get(key)
        if value is not None and value != "auto":
            fields[field] = _whole(value, f"{name} ({key})")

    take("micro_batch", content, "train_micro_batch_size_per_gpu")
    take("global_batch", content, "train_batch_size")
    take("accumulation", content, "gradient_accumulation_steps")
    take("zero_stage", zero, "stage")
    fields.setdefault("zero_stage", Given(0, f"{name} (no stage)"))
    for precision, key in (("FP16", "fp16"), ("BF16", "bf16")):
        if _section(content, key, name).get("enabled") is True:
            fields["precision"] = Given(precision, f"{name} ({key}.enabled)")
    norm = content.get("gradient_clipping", "auto")
    if norm is not None and norm != "auto":
        if not isinstance(norm, int | float):
            raise ModelError(f"{name} (gradient_clipping): {norm!r} is no number")
        fields["clip_gradients"] = Given(norm > 0, f"{name} (gradient_clipping)")
    return Description(fields)


_TORCHTITAN: Final = (
    ("sequence", "training", "seq_len", None),
    ("micro_batch", "training", "local_batch_size", None),
    ("micro_batch", "training", "batch_size", None),
    ("global_batch", "training", "global_batch_size", None),
    ("tensor", "parallelism", "tensor_parallel_degree", 1),
    ("pipeline", "parallelism", "pipeline_parallel_degree", 1),
    ("context", "parallelism", "context_parallel_degree", 1),
)


def read_torchtitan(content: Mapping[str, Any], name: str) -> Description:
    """torchtitan's TOML: how a model is trained; its shape stands in torchtitan's own code, by `flavor`.

    Source: torchtitan 0.1 `config_manager.py`. A shard degree of -1 is all ranks that are left, so it says nothing.
    """
    fields = {"framework": Given("fsdp2", f"{name} (a file of torchtitan)")}
    for field, section, key, without in _TORCHTITAN:
        value = content[section].get(key, without)
        if value is not None and value != -1:
            fields.setdefault(field, _whole(value, f"{name} ({section}.{key})"))
    parallelism = content["parallelism"]
    shard, replicas = (
        _whole(
            parallelism.get(f"data_parallel_{key}_degree", default), f"{name} (parallelism.data_parallel_{key}_degree)"
        )
        for key, default in (("shard", -1), ("replicate", 1))
    )
    if int(shard.value) > 0:
        fields["shard"] = shard
        fields["data"] = Given(int(shard.value) * int(replicas.value), f"{name} (shard x replicate degree)")
    policy = parallelism.get("fsdp_reshard_after_forward", "default")
    if policy in ("always", "never"):
        fields["reshard_after_forward"] = Given(policy == "always", f"{name} (parallelism.fsdp_reshard_after_forward)")
    mixed = content["training"].get("mixed_precision_param", "bfloat16")
    names = {"bfloat16": "BF16", "float32": "FP32", "float16": "FP16"}
    fields["precision"] = Given(names.get(str(mixed), str(mixed)), f"{name} (training.mixed_precision_param)")
    reduced = content["training"].get("mixed_precision_reduce", "float32")
    fields["gradients_fp32"] = Given(reduced == "float32", f"{name} (training.mixed_precision_reduce)")
    mode = _section(content, "activation_checkpoint", name).get("mode", "none")
    fields["recompute"] = Given(str(mode), f"{name} (activation_checkpoint.mode)")
    return Description(fields)


def read_nemo(content: Mapping[str, Any], name: str) -> Description:
    """NeMo's YAML: Megatron-LM's options under `model`, devices and nodes under `trainer`."""
    model, trainer = content["model"], _section(content, "trainer", name)
    arguments = {key: (str(value), f"{name} (model.{key})") for key, value in model.items()}
    fields = fields_of_arguments(arguments, name)
    precision = str(model.get("precision", trainer.get("precision", "")))
    for half, words in (("BF16", ("bf16", "bf16-mixed")), ("FP16", ("16", "16-mixed"))):
        if precision in words:
            fields["precision"] = Given(half, f"{name} (precision)")
            # NeMo's main gradients are FP32 for BF16, as Megatron-LM forces it.
            fields["gradients_fp32"] = Given(half == "BF16", f"{name} (precision)")
    if isinstance(trainer.get("devices"), int) and isinstance(trainer.get("num_nodes"), int):
        fields["ranks"] = Given(trainer["devices"] * trainer["num_nodes"], f"{name} (trainer.devices x num_nodes)")
    if "bias" in model:
        fields["bias"] = Given(bool(model["bias"]), f"{name} (model.bias)")
    if str(model.get("activation", "")).endswith("swiglu"):
        fields["gated"] = Given(True, f"{name} (model.activation)")
    if "share_embeddings_and_output_weights" in model:
        fields["tied"] = Given(
            bool(model["share_embeddings_and_output_weights"]), f"{name} (model.share_embeddings_and_output_weights)"
        )
    if str(model.get("normalization", "")).lower() == "rmsnorm":
        fields["norm"] = Given("RMSNorm", f"{name} (model.normalization)")
    elif "normalization" in model:
        fields["norm"] = Given("LayerNorm", f"{name} (model.normalization)")
    queries = model.get("num_query_groups")
    if queries is not None:
        fields["kv_heads"] = _whole(queries, f"{name} (model.num_query_groups)")
    if str(_section(model, "optim", name).get("name", "")).startswith("distributed"):
        fields["distributed_optimizer"] = Given(True, f"{name} (model.optim.name)")
    if "activations_checkpoint_granularity" in model:
        mode = model["activations_checkpoint_granularity"] or "none"
        fields["recompute"] = Given(str(mode), f"{name} (model.activations_checkpoint_granularity)")
    return Description(fields)
