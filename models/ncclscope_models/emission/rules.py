"""Every emission rule: what it says, and the source line it was read from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ncclscope_models.job import Framework

_CORE: Final = "Megatron-LM core_r0.13.0 (73a28a1) megatron/core/"
_TRAINING: Final = "Megatron-LM core_r0.13.0 (73a28a1) megatron/training/"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule."""

    says: str
    """In a few words, as a reason in a table."""
    source: str


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "layers": Rule(
            "layers: 4 AllReduces each, or 6 AllGathers and 4 ReduceScatters with sequence parallel",
            _CORE + "tensor_parallel/layers.py, mappings.py",
        ),
        "embedding": Rule("embedding of tokens", _CORE + "models/common/embeddings/language_model_embedding.py"),
        "head": Rule("head: gradient of its input", _CORE + "tensor_parallel/layers.py:ColumnParallelLinear"),
        "cross-entropy": Rule(
            "cross-entropy: maximum, target logit, sum of exponentials", _CORE + "tensor_parallel/cross_entropy.py"
        ),
        "batch": Rule("batch from the group's first rank", _TRAINING + "utils.py:get_batch_on_this_tp_rank"),
        "boundary": Rule(
            "activations to the next stage, gradients back",
            _CORE + "pipeline_parallel/schedules.py, p2p_communication.py",
        ),
        "expert tokens": Rule(
            "tokens to their experts and back, both ways",
            _CORE + "transformer/moe/token_dispatcher.py:MoEAlltoAllTokenDispatcher",
        ),
        "expert probabilities": Rule(
            "probabilities with the tokens", _CORE + "transformer/moe/token_dispatcher.py:MoEAlltoAllTokenDispatcher"
        ),
        "expert counts": Rule("tokens per expert", _CORE + "transformer/moe/token_dispatcher.py:preprocess"),
        "expert map": Rule(
            "routing map, gathered", _CORE + "transformer/moe/token_dispatcher.py:MoEAllGatherTokenDispatcher"
        ),
        "gradients": Rule("gradients: one operation per bucket", _CORE + "distributed/param_and_grad_buffer.py"),
        "expert gradients": Rule(
            "gradients of experts, own buffers", _CORE + "distributed/distributed_data_parallel.py"
        ),
        "parameters": Rule(
            "parameters after a step that was not skipped", _CORE + "distributed/param_and_grad_buffer.py"
        ),
        "tied embedding": Rule(
            "tied embedding: gradients of first and last stage", _CORE + "distributed/finalize_model_grads.py"
        ),
        "copied parameters": Rule(
            "norms and row-parallel biases under sequence parallel", _CORE + "distributed/finalize_model_grads.py"
        ),
        "overflow": Rule("whether any gradient overflowed (FP16)", _CORE + "optimizer/optimizer.py"),
        "norm": Rule("norm of the gradients", _CORE + "optimizer/clip_grads.py:get_grad_norm_fp32"),
        "success": Rule("whether the step was taken", _TRAINING + "training.py:train_step"),
        "statistics": Rule(
            "largest norm, learning rate", _TRAINING + "utils.py:reduce_max_stat_across_model_parallel_group"
        ),
        "loss": Rule("loss and its tokens", _TRAINING + "training.py:train_step"),
        "barriers": Rule("two timer barriers per log interval", _CORE + "timers.py"),
        "rerun": Rule("rerun check", _CORE + "rerun_state_machine.py"),
        "timers": Rule("timers of all ranks: log, and tensorboard", _CORE + "timers.py:_get_elapsed_time_all_ranks"),
        "start": Rule(
            "start: 5 AllReduces, 1 AllGather, 1 Broadcast", "fitted on ten runs of core_r0.13.0, the same for all"
        ),
        "fsdp gather": Rule(
            "parameters of a module, before its computation",
            "PyTorch 2.7 torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_all_gather",
        ),
        "fsdp scatter": Rule(
            "gradients of a module",
            "PyTorch 2.7 torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_reduce",
        ),
        "hsdp reduce": Rule(
            "gradients of a shard over its replicas",
            "PyTorch 2.7 torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:foreach_reduce",
        ),
        "ddp buckets": Rule(
            "gradients: one operation per bucket", "PyTorch 2.7 torch/csrc/distributed/c10d/reducer.cpp"
        ),
        "zero gradients": Rule("gradients", "DeepSpeed 0.16 deepspeed/runtime/zero/stage_1_and_2.py, stage3.py"),
        "zero parameters": Rule("parameters", "DeepSpeed 0.16 deepspeed/runtime/zero/stage_1_and_2.py, stage3.py"),
    }
)

_KNOWN: Final[Mapping[Framework, str]] = MappingProxyType(
    {Framework.MEGATRON: "0.13", Framework.FSDP2: "2.7", Framework.DDP: "2.7", Framework.DEEPSPEED: "0.16"}
)
"""Version that the rules were read from."""

_HELD_AGAINST_LOGS: Final = frozenset({Framework.MEGATRON})
"""Frameworks whose rules gave the counts of real runs; the others' were read from source only."""


@dataclass(frozen=True, slots=True)
class Basis:
    """How far the rules of a framework can be trusted for a version."""

    sentence: str
    may_raise: bool
    """Whether a difference may become a finding: only with a known version of rules that real logs confirmed."""


def basis(framework: Framework, version: str) -> Basis:
    """What the rules rest on for this version of a framework."""
    known = _KNOWN[framework]
    found = re.search(r"\d+\.\d+", version)
    if found is None or found.group() != known:
        named = f"version {version}" if version else "version not known"
        return Basis(f"{named}: rules of {framework.value} {known} assumed", may_raise=False)
    if framework not in _HELD_AGAINST_LOGS:
        return Basis(f"rules of {framework.value} {known}, read from source, held against no real log", may_raise=False)
    return Basis(f"rules of {framework.value} {known}", may_raise=True)
