"""Descriptions of jobs: fields with sources, contradictions as errors, and six real jobs to the parameter."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from strange_values import with_strange_values

from ncclscope.model import agreeing_rates
from ncclscope_models.description import Completed, Description, Given, completed, merged, parsed
from ncclscope_models.description_sources.files import model_toml, read_parsed
from ncclscope_models.description_sources.megatron import read_output
from ncclscope_models.job import Framework, ModelError, Precision, Recompute
from ncclscope_models.parameters import stage_parameters, whole_model

DUMP = """\
using world size: 8, data-parallel size: 2
------------------------ arguments ------------------------
  bf16 ............................................ True
  accumulate_allreduce_grads_in_fp32 .............. True
  add_bias_linear ................................. True
  data_parallel_size .............................. 2
  ffn_hidden_size ................................. 2048
  global_batch_size ............................... 64
  group_query_attention ........................... False
  hidden_size ..................................... 512
  kv_channels ..................................... 64
  make_vocab_size_divisible_by .................... 128
  max_position_embeddings ......................... 1024
  micro_batch_size ................................ 4
  num_attention_heads ............................. 8
  num_experts ..................................... None
  num_layers ...................................... 4
  pipeline_model_parallel_size .................... 2
  position_embedding_type ......................... learned_absolute
  recompute_granularity ........................... selective
  seq_length ...................................... 1024
  sequence_parallel ............................... True
  tensor_model_parallel_size ...................... 2
  tp_comm_overlap ................................. True
  untie_embeddings_and_output_weights ............. False
  use_distributed_optimizer ....................... True
  world_size ...................................... 8
-------------------- end of arguments ---------------------
 > padded vocab (size: 50257) with 175 dummy tokens (new size: 50432)
 > number of parameters on (tensor, pipeline) model parallel rank (1, 0): {count}
 iteration       10/   100 | consumed samples: 640 | elapsed time per iteration (ms): 1000.0 | global batch size: 64 |
[Rank 0] (after 10 iterations) memory (MB) | allocated: 10.5 | max allocated: 20.25 | reserved: 1 |
"""
COUNT = (
    2 * (3 * 512 * 512 // 2 + 512 * 512 // 2 + 2 * 512 * 2048 // 2 + 3 * 512 // 2 + 2048 // 2 + 6 * 512)
    + (50432 // 2 + 1024) * 512
)
"""By hand: two layers (matrices and biases of columns in halves; two biases of rows and two norms whole), embedding."""


def _lines(text: str, prefix: str = "") -> list[str]:
    return [f"{prefix}{line}" for line in text.splitlines()]


def _job(text: str = DUMP.format(count=COUNT)) -> Completed:
    return completed(read_output(_lines(text), "train.log").description)


def test_a_dump_of_arguments_describes_the_job_and_names_its_lines() -> None:
    found = _job()
    assert found.job.layout.data == 2
    assert found.job.micro_batches == 8
    assert found.job.training.precision is Precision.BF16
    assert found.job.training.recompute is Recompute.SELECTIVE
    assert found.job.shape.vocabulary == 50432
    assert found.fields["hidden"] == Given(512, "train.log:10 (hidden_size)")
    assert found.fields["gated"].source == "train.log (swiglu is not set)"
    assert stage_parameters(found.job, 0) == COUNT
    assert [given.source for given in found.not_nccl] == ["train.log:24 (tp_comm_overlap)"]
    assert "layers" not in found.assumed


@pytest.mark.parametrize(
    ("chunks", "printed", "overlaps", "source"),
    [
        (2, "False", False, "train.log:18 (overlap_p2p_comm)"),
        (2, "True", True, "train.log:18 (overlap_p2p_comm)"),
        (2, None, True, "assumed"),
        (None, "False", True, "assumed"),
    ],
)
def test_sends_beside_computation_are_read_of_interleaved_stages_alone(
    chunks: int | None, printed: str | None, overlaps: bool, source: str
) -> None:
    """Without interleaving Megatron-LM prints False, whatever was asked for."""
    lines = [] if printed is None else [f"  overlap_p2p_comm ................................ {printed}\n"]
    lines += [] if chunks is None else [f"  virtual_pipeline_model_parallel_size ............ {chunks}\n"]
    found = _job(DUMP.format(count=COUNT).replace("  pipeline_model", f"{''.join(lines)}  pipeline_model"))
    assert found.job.training.overlaps_pipeline == overlaps
    assert found.fields["overlap_pipeline"].source.startswith(source)


@pytest.mark.parametrize("prefix", [" 0: ", "12: ", "localhost: "])
def test_lines_may_have_the_rank_of_a_launcher_in_front(prefix: str) -> None:
    output = read_output(_lines(DUMP.format(count=COUNT), prefix), "train.log")
    assert completed(output.description).job == _job().job
    assert output.progress[0].elapsed_ms == 1000.0
    assert output.memory[0].max_allocated_mib == 20.25


def test_of_several_runs_in_one_file_the_last_is_described() -> None:
    first = DUMP.format(count=COUNT).replace("... 64", "... 32")
    assert completed(read_output(_lines(first + DUMP.format(count=COUNT)), "x").description).job == _job().job


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        (f": {COUNT}", ": 16593409", "train.log:30 says 16,593,409 parameters"),
        ("world_size ...................................... 8", "world_size ................ 16", "says 16 ranks"),
        (
            "num_layers ...................................... 4",
            "num_layers ................ 5",
            "5 layers do not divide",
        ),
        ("num_layers ...................................... 4", "num_layers ................ x", "num_layers is 'x'"),
        ("  hidden_size ..................................... 512\n", "", "not known: hidden"),
    ],
)
def test_a_contradiction_names_the_places(before: str, after: str, named: str) -> None:
    text = DUMP.format(count=COUNT)
    assert before in text
    with pytest.raises(ModelError, match=named):
        _job(text.replace(before, after))


def test_two_files_that_differ_are_an_error_with_both_places() -> None:
    output = read_output(_lines(DUMP.format(count=COUNT)), "train.log").description
    given = Description({"layers": parsed("layers", "8", "--set layers=8")})
    with pytest.raises(ModelError, match=r"layers is 8 in --set layers=8, and 4 in train.log:17"):
        merged([given, output])
    assert completed(replace(output, fields={**output.fields, "version": Given("0.13", "test")})).job.version == "0.13"


@pytest.mark.parametrize("text", ["many", "-3", ""])
def test_a_flag_of_the_wrong_type_is_an_error(text: str) -> None:
    with pytest.raises(ModelError, match="not a whole number"):
        parsed("layers", text, "--set")


def test_a_flag_without_such_a_field_is_an_error() -> None:
    with pytest.raises(ModelError, match="no field 'layer'"):
        parsed("layer", "3", "--set")


_GIVEN: dict[str, int | bool | str] = {
    "framework": "megatron", "tensor": 1, "pipeline": 1, "data": 4, "micro_batch": 1, "global_batch": 8,
    "precision": "BF16", "sequence": 4096,
}  # fmt: skip
TRAINING = {name: Given(value, "test") for name, value in _GIVEN.items()}


LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def test_a_config_of_hugging_face_gives_the_parameters_of_the_published_model() -> None:
    shape = read_parsed(LLAMA_8B, "config.json")
    vocabulary = Description({"vocabulary": Given(128256, "test")})
    job = completed(merged([shape, vocabulary, Description(TRAINING)])).job
    assert whole_model(job.shape) == 8_030_261_248  # of Llama 3 8B, as its card has it


def test_a_family_that_is_not_known_is_refused() -> None:
    with pytest.raises(ModelError, match="model_type 'mamba' is none of"):
        read_parsed({"model_type": "mamba"}, "config.json")


_DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3}, "gradient_clipping": 1.0,
}  # fmt: skip
_TITAN: dict[str, Any] = {
    "training": {"seq_len": 2048, "local_batch_size": 2, "global_batch_size": 64},
    "parallelism": {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2},
}
_NEMO: dict[str, Any] = {
    "trainer": {"devices": 8, "num_nodes": 2, "precision": "bf16"},
    "model": {"num_layers": 4, "hidden_size": 64, "tensor_model_parallel_size": 2, "optim": {"name": "distributed"}},
}
_GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("content", "beside"),
    [
        (LLAMA_8B, list(TRAINING)),
        (_GPT2, list(TRAINING)),
        (_DEEPSPEED, ["tensor", "pipeline", "data", "sequence"]),
        (_TITAN, []),
        (_NEMO, []),
    ],
)
def test_a_value_of_any_kind_is_taken_or_refused(content: dict[str, Any], beside: list[str]) -> None:
    """And no number makes more layers or experts than can be counted."""
    given = Description({"vocabulary": Given(128256, "test"), **{name: TRAINING[name] for name in beside}})
    shapes = [] if "model_type" in content else [read_parsed(LLAMA_8B, "config.json")]
    taken = 0
    for changed in (content, *with_strange_values(content)):
        if isinstance(changed, dict):
            with suppress(ModelError):
                job = completed(merged([*shapes, given, read_parsed(changed, "file")])).job
                taken += whole_model(job.shape) > 0
    assert taken or content is _NEMO  # of the shape that it has itself, fields are missing


def test_batch_and_accumulation_of_deepspeed_have_to_fit() -> None:
    shape = read_parsed(LLAMA_8B, "config.json")
    rest = {name: given for name, given in TRAINING.items() if name in ("tensor", "pipeline", "data", "sequence")}
    rest["vocabulary"] = Given(128256, "test")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }  # fmt: skip
    job = completed(merged([shape, Description(rest), read_parsed(config, "ds.json")])).job
    assert (job.framework, job.training.global_batch, job.layout.shard) == (Framework.DEEPSPEED, 32, 4)
    wrong = read_parsed({**config, "train_batch_size": 64}, "ds.json")
    with pytest.raises(ModelError, match="4 micro-batches of a step"):
        completed(merged([shape, Description(rest), wrong]))


def test_torchtitan_and_nemo_give_degrees_and_batch() -> None:
    titan = read_parsed(
        {
            "training": {"seq_len": 2048, "local_batch_size": 2, "global_batch_size": 64},
            "parallelism": {"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2},
        },
        "job.toml",
    ).fields
    assert {name: titan[name].value for name in ("shard", "data", "micro_batch", "tensor")} == {
        "shard": 4, "data": 8, "micro_batch": 2, "tensor": 1,
    }  # fmt: skip
    nemo = read_parsed(
        {
            "trainer": {"devices": 8, "num_nodes": 2, "precision": "bf16"},
            "model": {"num_layers": 4, "hidden_size": 64, "tensor_model_parallel_size": 2, "activation": "fast-swiglu"},
        },
        "job.yaml",
    ).fields
    assert {name: nemo[name].value for name in ("ranks", "layers", "tensor", "gated", "gradients_fp32")} == {
        "ranks": 16, "layers": 4, "tensor": 2, "gated": True, "gradients_fp32": True,
    }  # fmt: skip


def test_the_written_description_reads_as_the_same_job() -> None:
    import tomllib  # noqa: PLC0415

    found = _job()
    again = completed(read_parsed(tomllib.loads(model_toml(found)), "model.toml"))
    assert again.job == found.job


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelError, match="no description of a job"):
        read_parsed({"scripts": {}}, "package.json")


REAL = (
    ("elena-alps-megatron/2340723.out", {617_941_248}),
    ("bigscience-jeanzay-megatron-v100/meg_gpt2_perf_n16-1999618.out", {917_757_952, 805_560_320, 909_385_728}),
    ("fwyc0573-megatron/sim_log_8world_8gpus_8pp_1tp_13model.log", {1_841_239_040, 1_573_196_800, 1_830_763_520}),
    ("stark-sim-megatron-v100/dual16_tp4pp1dp4_20260325.log", {1_904_025_088}),
)


@pytest.mark.corpus
@pytest.mark.parametrize(("log", "counts"), REAL, ids=[log for log, _ in REAL])
def test_a_real_log_gives_the_parameters_that_its_ranks_printed(corpus: Path, log: str, counts: set[int]) -> None:
    with (corpus / "nccl_logs" / log).open(errors="replace") as lines:
        output = read_output(lines, log)
    job = completed(output.description).job  # which holds every printed count against the description
    assert {stage_parameters(job, stage) for stage in range(job.layout.pipeline)} == counts


@pytest.mark.corpus
def test_every_throughput_that_a_real_job_printed_is_ours(corpus: Path) -> None:
    with (corpus / "nccl_logs" / "elena-alps-megatron" / "2340723.out").open(errors="replace") as lines:
        output = read_output(lines, "2340723.out")
    assert agreeing_rates(output, completed(output.description)) == (1549, 1549)


@pytest.mark.corpus
def test_a_real_log_that_contradicts_itself_is_refused(corpus: Path) -> None:
    log = corpus / "nccl_logs" / "fwyc0573-megatron" / "realistic_log_1nodes_6gpus_3pp_2tp_tinymodel.log"
    with log.open(errors="replace") as lines:
        output = read_output(lines, log.name)
    with pytest.raises(ModelError, match=r"4 layers do not divide over 3 stages.*:195 \(num_layers\)"):
        completed(output.description)
    one_each = replace(output.description, fields={**output.description.fields, "layers": Given(3, "parameter lines")})
    # With one layer on each stage every printed count fits.
    assert completed(one_each).job.layers_of_stage == 1
