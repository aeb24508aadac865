"""Fields from a Hugging Face `config.json`: the shape of a model, nothing of how it is trained.

A key that a family does not write has the value that its class gives it, which is cited; a family that is not here is
an error, since its shape would be a guess.
Source: transformers 4.46 `models/*/configuration_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ncclscope_models.description import Description, Given, Value
from ncclscope_models.job import ModelError

_LLAMA: Final[Mapping[str, Value]] = {"gated": True, "norm": "RMSNorm", "bias": False, "positions_learned": 0}
_FAMILIES: Final[Mapping[str, Mapping[str, Value]]] = {
    "llama": {**_LLAMA, "qkv_bias": False, "tied": False},
    "mistral": {**_LLAMA, "qkv_bias": False, "tied": False},
    "mixtral": {**_LLAMA, "qkv_bias": False, "tied": False, "expert_layer_frequency": 1},
    "qwen2": {**_LLAMA, "qkv_bias": True, "tied": False},
    "gpt2": {"gated": False, "norm": "LayerNorm", "bias": True, "qkv_bias": True, "tied": True},
    "gpt_neox": {
        "gated": False,
        "norm": "LayerNorm",
        "bias": True,
        "qkv_bias": True,
        "tied": False,
        "positions_learned": 0,
    },
}
"""What the class of a family fixes, or takes where `config.json` is silent."""

_KEYS: Final = (
    ("layers", ("num_hidden_layers", "n_layer")),
    ("hidden", ("hidden_size", "n_embd")),
    ("ffn", ("intermediate_size", "n_inner")),
    ("heads", ("num_attention_heads", "n_head")),
    ("kv_heads", ("num_key_value_heads",)),
    ("head_size", ("head_dim",)),
    ("tokens", ("vocab_size",)),
    ("tied", ("tie_word_embeddings",)),
    ("qkv_bias", ("attention_bias",)),
    ("experts", ("num_local_experts",)),
    ("experts_top_k", ("num_experts_per_tok",)),
)


def read_config(config: Mapping[str, Any], name: str) -> Description:
    """Fields of a `config.json`. The sequence of training is not in it: `max_position_embeddings` is a limit.

    Raises:
        ModelError: a family that is not known here.
    """
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        raise ModelError(f"{name}: model_type {family!r} is none of {', '.join(_FAMILIES)}: give its fields by --set")
    fields = {field: Given(value, f"{name} (model_type {family})") for field, value in _FAMILIES[family].items()}
    for field, keys in _KEYS:
        for key in keys:
            value = config.get(key)
            if value is not None:
                fields[field] = Given(value, f"{name} ({key})")
                break
    hidden = fields["hidden"].value if "hidden" in fields else None
    if "ffn" not in fields and family == "gpt2" and isinstance(hidden, int):
        fields["ffn"] = Given(4 * hidden, f"{name} (n_inner is not set: 4 x n_embd)")
    if family == "gpt2":
        rows = config.get("n_positions", 1024)
        fields["positions_learned"] = Given(rows, f"{name} (n_positions)")
    if "kv_heads" not in fields and "heads" in fields:
        fields["kv_heads"] = Given(fields["heads"].value, f"{name} (num_key_value_heads is not set)")
    if "experts" in fields and "ffn" in fields:
        fields["expert_ffn"] = Given(fields["ffn"].value, f"{name} (intermediate_size)")
    elif "experts" not in fields:
        fields["experts"] = Given(0, f"{name} (num_local_experts is not set)")
    return Description(fields)
