"""Every entry of the list of published numbers, computed from its inputs.

The list lies beside the corpus (`facts/models_numbers.json`). Printed, observed, derived and real figures must come out
within the entry's tolerance; of inconsistent ones the way of the source is followed to its figure, and the right one
stands beside it; of measured ones what follows from a formula is computed, and the others name why they are left.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import pytest
from benchmarks.models import thesis

from ncclscope_models import collective_time, flops, memory, textbook
from ncclscope_models import layout as grid
from ncclscope_models import step_time as step
from ncclscope_models.emission.operations import kernels_by_op, lines_by_op
from ncclscope_models.job import (
    Dispatcher,
    Job,
    Layout,
    ModelError,
    Norm,
    Precision,
    Recompute,
    Shape,
    Training,
    gpt,
    padded_vocabulary,
)
from ncclscope_models.parameters import (
    elements,
    gpt_formula,
    layer_tensors,
    layer_weights,
    moe_from_base,
    rank_tensors,
    stage_parameters,
    whole_model,
)

Values = Mapping[str, Any]
"""Inputs or outputs of an entry, as JSON has them."""
Answer = Callable[[Values], dict[str, Any]]

_CORPUS = os.environ.get("NCCLSCOPE_CORPUS")
_SHARED = Path(_CORPUS).parent if _CORPUS else Path(__file__).resolve().parents[3] / "shared"
_LIST = _SHARED / "facts" / "models_numbers.json"
ENTRIES: Final[list[dict[str, Any]]] = json.loads(_LIST.read_text())["entries"] if _LIST.is_file() else []

NOT_COMPUTED: Final = {
    "001-microbatch": "ordering test of a curve of utilization over micro-batch size, whose inputs are not printed",
    "001-tp-pp": "ordering test of measured step times: needs utilization by layout, which is not printed",
    "001-accuracy": "error and shares measured by others",
    "001-fabric": "measured bandwidths: inputs of the time of a collective, no formula gives them",
    "002-tab4.2": "measured percentages of peak of four frameworks",
    "002-sec3-gain": "measured seconds of two phases",
    "002-fig5.2": "ranking against measured times, which are not printed",
    "002-blas": "measured seconds of a matrix library",
    "002-pccl-perlmutter": "measured speed-ups; parameters were fitted to Frontier's only",
    "003-shares": "a rule of thumb, kept as a yardstick",
    "004-errors": "errors of a predictor measured by others",
    "004-shares": "measured shares of a step",
    "004-protocol": "how the source measured: belongs to the benchmark of step times",
}
"""Entries from which nothing can be computed, by the beginning of their name, and why."""


def _entry(name: str) -> Values:
    return next(entry for entry in ENTRIES if entry["id"] == name)


def _thesis_run(name: str) -> Job:
    return next(run.job for run in thesis.RUNS if run.name == name)


def _matches(job: Job, inputs: Values) -> Job:
    """The job of the thesis, after checking that it is the entry's."""
    layout, shape = job.layout, job.shape
    ours = {
        "l": shape.layers, "h": shape.hidden, "s": shape.sequence, "b": job.training.micro_batch,
        "global_batch": job.training.global_batch, "d": layout.data, "p": layout.pipeline, "t": layout.tensor,
        "v": layout.chunks, "m": job.micro_batches, "sp": layout.is_sequence_parallel, "ep": layout.expert,
        "moe_layers": shape.expert_layers, "iterations": thesis.ITERATIONS, "V_padded": shape.vocabulary,
        "P_per_rank": stage_parameters(job, 0), "V": thesis.TOKENS,
    }  # fmt: skip
    for name, value in inputs.items():
        assert ours.get(name, value) == value, name
    return job


def _counts(name: str) -> Answer:
    return lambda inputs: dict(thesis.kernels(_matches(_thesis_run(name), inputs)))


def _volumes(name: str) -> Answer:
    def answer(inputs: Values) -> dict[str, Any]:
        job = _matches(_thesis_run(name), inputs)
        ranks = thesis.rank_gib(job)
        return {**thesis.logged_gib(job), "mean_per_rank": sum(ranks) / len(ranks)}

    return answer


def _edges(inputs: Values) -> dict[str, Any]:
    ranks = thesis.rank_gib(_matches(_thesis_run("PP 4"), inputs))
    return {"edge": ranks[0], "mid": ranks[1], "mean": sum(ranks) / len(ranks)}


def _table_4_1(inputs: Values) -> dict[str, Any]:
    ranks = thesis.by_rank(_matches(thesis.TABLE_4_1, inputs))
    second, fourth = kernels_by_op(ranks[1]), kernels_by_op(ranks[3])
    # Gradients on a data group of one rank; on the last stage the loss too (rank 4, printed: 3,946 lines).
    assert lines_by_op(ranks[1])["AllReduce"] == second["AllReduce"] + 10
    assert lines_by_op(ranks[3])["AllReduce"] == fourth["AllReduce"] + 20 == 3946
    return {
        "rank2_AllReduce": second["AllReduce"],
        "rank4_AllReduce": fourth["AllReduce"],
        "Broadcast": second["Broadcast"],
        "Send": lines_by_op(ranks[1])["Send"],
        "SendRecv": second["SendRecv"],
    }


def _table_4_2(inputs: Values) -> dict[str, Any]:
    operations = thesis.by_rank(_matches(thesis.TABLE_4_2, inputs))[1]
    found = kernels_by_op(operations)
    return {
        **found,
        "AllReduce_kernels": found["AllReduce"],
        "AllReduce_lines": lines_by_op(operations)["AllReduce"],
    }


def _thesis_typo(inputs: Values) -> dict[str, Any]:
    l, h, s, v = inputs["l"], inputs["h"], inputs["s"], inputs["V"]  # noqa: E741
    assert gpt_formula(layers=l, hidden=h, vocabulary=v, sequence=s) == 76_694_016
    return {"P": 12 * l * h**2 * (1 + 1 / (12 * h) + (v + s) / (12 * l * h * h))}


def _dense_parameters(inputs: Values) -> dict[str, Any]:
    vocabulary = padded_vocabulary(inputs["V"], 1)
    assert vocabulary == inputs["V_padded"]
    shape = gpt(layers=inputs["l"], hidden=inputs["h"], heads=8, sequence=inputs["s"], vocabulary=vocabulary)
    return {"P": whole_model(shape)}


def _dp_theory(inputs: Values) -> dict[str, Any]:
    sent = textbook.data_parallel(inputs["P"], inputs["d"], inputs["beta"])
    return {"MB_per_iteration": sent / 1e6, "GB_10_iterations": sent * inputs["iterations"] / 1e9}


def _pp_theory(inputs: Values) -> dict[str, Any]:
    one = inputs["b"] * inputs["s"] * inputs["h"] * inputs["beta"]
    boundary = textbook.pipeline_boundary(
        b=inputs["b"], s=inputs["s"], h=inputs["h"], micro_batches=inputs["m"], element_bytes=inputs["beta"]
    )
    theory = thesis.theory_gb()
    assert theory["PP=4 (edge)"] == boundary * inputs["iterations"] / 1e9
    return {
        "MB_per_microbatch": one / 1e6,
        "MB_per_iteration_and_boundary": boundary / 1e6,
        "GB_edge": theory["PP=4 (edge)"],
        "GB_mid": theory["PP=4 (mid)"],
    }


def _tp_theory(inputs: Values) -> dict[str, Any]:
    def sent(micro_batches: int) -> float:
        return textbook.tensor_parallel(
            b=inputs["b"],
            s=inputs["s"],
            h=inputs["h"],
            layers=inputs["l"],
            tensor=inputs["t"],
            micro_batches=micro_batches,
            element_bytes=inputs["beta"],
            is_recomputed=False,
        )

    right = inputs["global_batch"] // inputs["b"]  # one data-parallel rank
    assert sent(right) * inputs["iterations"] / 1e9 == pytest.approx(32.21, abs=0.005)
    return {"MB_per_microbatch": sent(1) / 1e6, "GB_10_iterations": sent(inputs["m"]) * inputs["iterations"] / 1e9}


def _ep_theory(inputs: Values) -> dict[str, Any]:
    tokens = inputs["B"] * inputs["s"]
    layer = textbook.expert_parallel(
        tokens=tokens, h=inputs["h"], top_k=inputs["k"], expert=inputs["ep"], layers=1, element_bytes=inputs["beta"]
    )
    assert _thesis_run("EP 4, all-to-all").shape.expert_layers == 2 * inputs["moe_layers"]
    per_rank = layer * inputs["moe_layers"] / inputs["ep"]
    rest = textbook.data_parallel(50.4e6, 4, inputs["beta"]) * 12 / 16
    return {"MB_cluster_layer": layer / 1e6, "GB_10_iterations": (per_rank + rest) * inputs["iterations"] / 1e9}


def _billions(inputs: Values) -> dict[str, Any]:
    found = gpt_formula(layers=inputs["l"], hidden=inputs["h"], vocabulary=inputs["V"], sequence=inputs["s"])
    return {"N_billion": found / 1e9}


def _typos(_: Values) -> dict[str, Any]:
    with pytest.raises(ModelError):
        Layout(tensor=0, pipeline=2, data=2)
    assert 1793 % 32
    assert 1792 // 32 == 56 not in (64, 59)
    return {}


def _uniform_step(inputs: Values) -> dict[str, Any]:
    found = step.uniform_step(
        parameters=inputs["N"],
        layers=inputs["l"],
        h=inputs["h"],
        s=inputs["s"],
        b=inputs["b"],
        micro_batches=inputs["m"],
        pipeline=inputs["p"],
        tensor=inputs["t"],
        data=inputs["d"],
        tensor_bytes_per_s=inputs["C_TP"],
        pipeline_bytes_per_s=inputs["C_PP"],
        data_bytes_per_s=inputs["C_DP"],
        utilization=inputs["mu"],
        peak_flops=inputs["F"],
    )
    work = step.micro_batch_flops(
        parameters=inputs["N"], pipeline=inputs["p"], tensor=inputs["t"], b=inputs["b"], s=inputs["s"]
    )
    return {
        "flops_mb": work,
        "T_comp": found.computation,
        "T_TP": found.tensor,
        "T_PP": found.pipeline,
        "T_DP": found.data,
        "T_bubble": found.bubble,
        "T_iter": found.total,
    }


def _tensor_share(inputs: Values) -> dict[str, Any]:
    model = _entry("001-tab2-39B")["inputs"]
    p, t, d = inputs["p"], inputs["t"], inputs["d"]
    b, s, h = 1, model["s"], model["h"]
    m = inputs["global_batch"] // (d * b)
    parameters = gpt_formula(layers=model["l"], hidden=h, vocabulary=model["V"], sequence=s)
    tensor = textbook.tensor_parallel(
        b=b, s=s, h=h, layers=model["l"] / p, tensor=t, micro_batches=m, element_bytes=2, is_recomputed=True
    )
    data = textbook.data_parallel(parameters, d, 2, t, p)

    def share(cut: int) -> float:
        boundary = textbook.pipeline_boundary(b=b, s=s, h=h, micro_batches=m, element_bytes=2, tensor=cut)
        return textbook.share_of_tensor_parallel(tensor, boundary, data)

    assert share(1) < 0.99, "as equation 3 is printed, without scatter-gather"
    return {"tp_share_min": share(t)}


def _alltoall_pair(_: Values) -> dict[str, Any]:
    tokens, h, k, e, beta = 4096, 512, 2, 4, 2
    handed_out = k * tokens * h * beta
    printed = handed_out / 1  # 2 x 2 g s h / e, tokens = g s / e of a rank: self included, and called "per pair"
    assert textbook.alltoall_wire(handed_out, e) == printed * (e - 1) / e
    return {}


def _days(inputs: Values) -> dict[str, Any]:
    b, p = 2, inputs["p"]

    def rounds(d: int) -> float:
        return float(inputs["global_batch"] // (d * b) + p - 1)

    assert inputs["global_batch"] % 60
    return {"days_d8": round(123 * rounds(8) / rounds(4))}


def _cost(inputs: Values) -> dict[str, Any]:
    few, many = (d * 8 * 8 for d in inputs["d"])  # replicas of 8 x 8 GPUs
    days = _entry("001-dp-scaling")["outputs"]
    usd = inputs["gpu_hour_usd"]
    extra = step.rent_usd(many, days["days_d64"], usd) - step.rent_usd(few, days["days_d60"], usd)
    assert extra == 73_728, "the source says 40,000"
    return {"buy_extra_usd": (many - few) * inputs["gpu_usd"]}


def _products(_: Values) -> dict[str, Any]:
    rows = _entry("002-tab3.1")["outputs"]["rows"]
    gpus = {12: 48, 24: 96, 50: 192, 100: 384}
    assert all(prod(degree or 1 for degree in row[3:]) == gpus[row[0]] for row in rows)
    return {}


def _percent_of_peak(inputs: Values) -> dict[str, Any]:
    each = flops.throughput_per_gpu(inputs["pflops"] * 1e15, 1, inputs["gpus"])
    return {
        "advertised_percent": 100 * each / (inputs["peak_advertised_tflops"] * 1e12),
        "empirical_percent": 100 * each / (inputs["peak_empirical_tflops"] * 1e12),
    }


def _weak_scaling(_: Values) -> dict[str, Any]:
    def percent(machine: str, gpus: int) -> float:
        return float(_entry(f"002-tab5.2-{machine}-{gpus}")["outputs"]["advertised_percent"])

    def efficiency(machine: str, few: int, many: int) -> float:
        return 100 * step.scaling_efficiency(few * percent(machine, few), few, many * percent(machine, many), many)

    frontier = {f"frontier_{gpus}": efficiency("Frontier", 512, gpus) for gpus in (8192, 16384, 32768)}
    return {**frontier, "alps_6144": efficiency("Alps", 1024, 6144)}


def _time_to_solution(_: Values) -> dict[str, Any]:
    month = 30.44
    assert step.strong_scaling_efficiency(50 * month, 128, 25.5, 8192) == pytest.approx(0.93, abs=0.005)
    assert step.strong_scaling_efficiency(14 * 12, 512, 15, 8192) == pytest.approx(0.70, abs=0.005)
    return {}


def _node_share(inputs: Values) -> dict[str, Any]:
    node = inputs["G_node"]
    one_ring = grid.share_of_node_bandwidth((8,), 0, node)
    return {"share": [one_ring, grid.share_of_node_bandwidth(inputs["G"], 1, node)]}


def _tiling(inputs: Values) -> dict[str, Any]:
    tile = memory.ted_tile_bytes(inputs["tile"]) / 1e9
    assert tile < 0.01 * 1, "the source says 1 GB"
    return {"4_ts_GB": tile, "saved_percent": 100 * (40 - 31.3) / 40, "peak_GB": 31.3}


def _ted(inputs: Values) -> dict[str, Any]:
    base = round(inputs["NP_base"])
    expert, other = moe_from_base(base, inputs["E"])
    least = memory.ted_least_bytes(expert, other, inputs["E"], inputs["G_tensor"], inputs["G"])
    spike = memory.ted_spike_bytes(base, inputs["G_tensor"])
    return {
        "NP_exp": expert,
        "NP_nonexp": other,
        "M_gpu_min_GB": least / 1e9,
        "fp32_grad_spike_GB": spike / 1e9,
    }


def _cac(_: Values) -> dict[str, Any]:
    full = textbook.ted_collectives(is_recomputed=True, keeps_communication=False)
    kept = textbook.ted_collectives(is_recomputed=True, keeps_communication=True)
    return {"collectives_full_recompute": full, "with_cac": kept, "saved": 1 - kept / full}


def _pccl(inputs: Values) -> dict[str, Any]:
    printed = _entry("002-pccl-heatmap")["outputs"]

    def speedup(ranks: int, mib: int) -> float:
        nodes = ranks // inputs["M"]
        return collective_time.hierarchical_speedup(mib * 2**20, nodes, inputs["M"], collective_time.FRONTIER)

    for ranks, mib in ((32, 1024), (2048, 1024), (2048, 512)):
        assert speedup(ranks, mib) == pytest.approx(printed[f"{ranks}_{mib}MB"][0], rel=0.05)
    for mib in (16, 32, 64):
        assert speedup(2048, mib) > 0.95 * printed["2048_16_32_64MB_min"]
    return {}


def _naive(inputs: Values) -> dict[str, Any]:
    sent = textbook.allreduce_wire(inputs["P"] * inputs["beta"], inputs["gpus"])
    return {"TB": sent / 1e12, "s": sent / inputs["B"]}


def _mapping(inputs: Values) -> dict[str, Any]:
    places = grid.coordinates(inputs["rank"], (inputs["t"], inputs["p"], inputs["d"]))
    return dict(zip(("tp_rank", "pp_rank", "dp_rank"), places, strict=True))


def _message(inputs: Values) -> dict[str, Any]:
    size = inputs["B"] * inputs["S"] * inputs["H"] * 2
    nvlink = 450e9
    return {"MB": size / 1e6, "ms": size / nvlink * 1e3, "ms_80_layers": 80 * 2 * size / nvlink * 1e3}


def _budget(inputs: Values) -> dict[str, Any]:
    t, p, d, m, layers = (inputs[name] for name in ("t", "p", "d", "m", "layers"))
    message = 4 * 2048 * 8192 * 2
    operations = layers // p * 4 * m
    assert operations * message / 1e9 == pytest.approx(85.9, abs=0.05)
    assert operations * textbook.allreduce_wire(message, t) / 1e9 == pytest.approx(150, abs=0.5)
    assert 2 * m * message / 1e9 == pytest.approx(4.3, abs=0.05)
    assert textbook.data_parallel(1e12, d, 2, t, p) / 1e9 == pytest.approx(46.9, abs=0.05)
    assert layer_weights(layers=layers, hidden=8192) == pytest.approx(64e9, rel=0.01)
    return {
        "tp_GB": layers * 2 * message / 1e9,
        "pp_GB": 2 * m * (p - 1) * message / 1e9,
        "dp_GB": 1e12 * 2 / (t * p) / 1e9,
    }


def _gradient_shard(_: Values) -> dict[str, Any]:
    size = 1e12 * 2 / 256
    return {"GB": size / 1e9, "ms": size / 25e9 * 1e3}


def _llama(_: Values) -> dict[str, Any]:
    work = flops.approximate_flops(405_000_000_000, 16_000_000, is_recomputed=False)
    seconds = work / (16384 * flops.PEAK_FLOPS["H100 SXM"] * 0.38)
    assert seconds == pytest.approx(6, abs=0.5)
    assert seconds > 0.8
    return {}


def _stages(inputs: Values) -> dict[str, Any]:
    found = {str(n): list(grid.encoders_of_stages(n, inputs["p"])) for n in inputs["encoders"]}
    assert sum(found["44"]) != 44
    assert sum(found["27"]) == 27
    return {**found, "44_sum": sum(found["44"])}


def _runtime(inputs: Values) -> dict[str, Any]:
    p = inputs["p"]
    seconds = step.slowest_stage_seconds(
        micro_batches=inputs["m"],
        forward=[inputs["fwd"]] * p,
        backward=[inputs["bwd"]] * p,
        first_sync=inputs["grad_sync"],
        update_and_gather=[inputs["update"]] * p,
    )
    return {"runtime": seconds}


def _job(shape: Shape, layout: Layout) -> Job:
    training = Training(micro_batch=1, global_batch=layout.data, precision=Precision.FP16, are_gradients_fp32=False)
    return Job(shape=shape, layout=layout, training=training)


def _stage_counts(inputs: Values) -> dict[str, Any]:
    t, p, h = inputs["t"], inputs["p"], inputs["h"]
    layers = inputs.get("l", p * inputs.get("layers_per_stage", 0))
    shape = gpt(layers=layers, hidden=h, heads=h // 64, sequence=inputs["s"], vocabulary=inputs["V_padded"])
    job = _job(shape, Layout(tensor=t, pipeline=p))
    counts = [stage_parameters(job, stage) for stage in range(p)]
    assert set(counts[1:-1]) == {counts[1]}
    return {"stage0": counts[0], "mid": counts[1], "last": counts[-1]}


def _llama_shape(inputs: Values) -> Shape:
    return Shape(
        layers=inputs["l"],
        hidden=inputs["h"],
        ffn=inputs["ffn"],
        heads=inputs["heads"],
        kv_heads=inputs["kv_heads"],
        head_size=inputs["h"] // inputs["heads"],
        sequence=8192,
        positions_learned=0,
        vocabulary=inputs["V_padded"],
        is_gated=inputs["gated"],
        norm=Norm.RMS,
        has_bias=inputs["bias"],
        has_qkv_bias=False,
        is_tied=inputs["tied"],
        has_attention_sink=False,
        experts=None,
    )


def _alps(inputs: Values) -> dict[str, Any]:
    return {"rank": stage_parameters(_job(_llama_shape(inputs), Layout(tensor=inputs["t"])), 0)}


def _alps_flops(inputs: Values) -> dict[str, Any]:
    shape = _llama_shape(_entry("real-alps-params")["inputs"])
    assert shape.sequence == inputs["s"]
    assert shape.kv_size == inputs["kv_ratio"] * shape.query_size
    work = flops.step_flops(shape, inputs["B"])
    return {
        f"tflops_at_{ms}_ms": flops.throughput_per_gpu(work, ms / 1e3, inputs["gpus"]) / 1e12 for ms in (1344.7, 1356.1)
    }


def _published_memory(inputs: Values) -> dict[str, Any]:
    t, p = inputs["t"], inputs["p"]
    held = layer_weights(layers=inputs["l"], hidden=inputs["h"]) / (t * p)
    assert inputs["bytes_per_parameter"] == 18

    def activations(recompute: Recompute, *, is_sequence_parallel: bool) -> float:
        each = memory.layer_activation_bytes(
            s=inputs["s"],
            b=inputs["b"],
            h=inputs["h"],
            heads=inputs["heads"],
            tensor=t,
            is_sequence_parallel=is_sequence_parallel,
            recompute=recompute,
        )
        return memory.first_stage_activation_bytes(
            layers=inputs["l"], pipeline=p, chunks=inputs["v"], micro_batches=10**6, layer_bytes=each
        )

    return {
        "params_and_optimizer_GiB": memory.state_bytes_megatron(round(held), 1, is_distributed=False) / 2**30,
        "act_none_GiB": activations(Recompute.NONE, is_sequence_parallel=False) / 2**30,
        "act_seq_selective_GiB": activations(Recompute.SELECTIVE, is_sequence_parallel=True) / 2**30,
    }


def _mfu(inputs: Values) -> dict[str, Any]:
    shape = gpt(
        layers=inputs["l"],
        hidden=inputs["h"],
        heads=inputs["heads"],
        sequence=inputs["s"],
        vocabulary=inputs["V"],
    )
    seconds = _entry(f"time-korthikanti-{_SIZES[inputs['h']]}")["outputs"]["seq_selective_s"]
    work = flops.step_flops(shape, inputs["B"], is_attention_causal=False)
    share = flops.utilization(work, seconds, inputs["gpus"], flops.PEAK_FLOPS["A100"])
    return {"mfu_selective_percent": 100 * share}


_SIZES: Final = {6144: "22B", 12288: "175B", 20480: "530B", 25600: "1T"}

ANSWERS: Final[dict[str, Answer]] = {
    "000-eq5.2": _thesis_typo,
    "000-P-dense": _dense_parameters,
    "000-tab5.1-dp": _dp_theory,
    "000-tab5.1-pp": _pp_theory,
    "000-tab5.1-tp": _tp_theory,
    "000-tab5.1-ep": _ep_theory,
    "000-fig5.5": _volumes("DP 4"),
    "000-fig5.9": _volumes("DP 4, distributed optimizer"),
    "000-fig5.12": _volumes("PP 4"),
    "000-fig5.28": _edges,
    "000-fig5.16": _volumes("PP 4, 2 chunks"),
    "000-fig5.18": _volumes("TP 4"),
    "000-fig5.20": _volumes("TP 4, sequence parallel"),
    "000-fig5.24": _volumes("EP 4, all-to-all"),
    "000-fig5.26": _volumes("EP 4, AllGather"),
    "000-fig5.4": _counts("DP 4"),
    "000-fig5.7": _counts("DP 4, distributed optimizer"),
    "000-fig5.11": _counts("PP 4"),
    "000-fig5.15": _counts("PP 4, 2 chunks"),
    "000-fig5.17": _counts("TP 4"),
    "000-fig5.19": _counts("TP 4, sequence parallel"),
    "000-fig5.23": _counts("EP 4, all-to-all"),
    "000-fig5.25": _counts("EP 4, AllGather"),
    "000-tab4.2": _table_4_2,
    "000-tab4.1": _table_4_1,
    "001-tab2-typos": _typos,
    "001-tab2": _billions,
    "001-eq7": lambda inputs: {"R_bubble": float(step.bubble_share(inputs["p"], inputs["m"]))},
    "001-worked": _uniform_step,
    "001-fig5-share": _tensor_share,
    "001-eq10": _alltoall_pair,
    "001-dp-scaling": _days,
    "001-cost": _cost,
    "002-sec3-memory": lambda inputs: {"GB": memory.state_bytes_axonn(inputs["phi"]) / 1e9},
    "002-eq3.1": lambda inputs: {"best_ac": memory.checkpoint_spacing(inputs["N"])},
    "002-samo": lambda inputs: {"saved": memory.samo_saving(inputs["pruned"])},
    "002-gpt3": lambda inputs: {"TB": memory.state_bytes_axonn(inputs["phi"]) / 1e12},
    "002-fig4.3": lambda inputs: {"bubble": step.axonn_bubble(inputs["G_inter"], inputs["t_f"], inputs["t_b"])},
    "002-tab3.1": _products,
    "002-tab5.1": lambda inputs: {"N_billion": layer_weights(layers=inputs["l"], hidden=inputs["h"]) / 1e9},
    "002-tab5.2": _percent_of_peak,
    "002-weak": _weak_scaling,
    "002-time-to": _time_to_solution,
    "002-4d": lambda inputs: {str(gpus): len(list(grid.grids(gpus))) for gpus in inputs["gpus"]},
    "002-eq5.7": _node_share,
    "002-ted-tiling": _tiling,
    "002-eq7": _ted,
    "002-ted-cac": _cac,
    "002-ted-measured": lambda _: {"allreduce_saved": round(_cac({})["saved"], 2)},
    "002-pccl-heatmap": _pccl,
    "003-naive": _naive,
    "003-mapping": _mapping,
    "003-tp-size": _message,
    "003-budget": _budget,
    "003-bubble": lambda inputs: {"fraction": float(step.bubble_share(inputs["p"], inputs["m"]))},
    "003-dp": _gradient_shard,
    "003-llama": _llama,
    "004-vocab": lambda inputs: {"padded": [padded_vocabulary(inputs["v"], t) for t in inputs["mp"]]},
    "004-stages": _stages,
    "004-eq7": _runtime,
    "real-alps-params": _alps,
    "real-alps-flops": _alps_flops,
    "real-": _stage_counts,
    "mem-": _published_memory,
    "time-": _mfu,
}
"""What computes an entry, by the beginning of its name; the longest beginning counts."""


def _of(name: str, table: Mapping[str, Any]) -> Any:
    beginnings = [beginning for beginning in table if name.startswith(beginning)]
    return table[max(beginnings, key=len)] if beginnings else None


def _parameters() -> list[Any]:
    if not ENTRIES:
        reason = f"needs the list of published numbers, and {_LIST} is not a file"
        return [pytest.param({}, marks=pytest.mark.skip(reason=reason), id="no list")]
    return [pytest.param(entry, id=entry["id"]) for entry in ENTRIES]


@pytest.mark.corpus
@pytest.mark.parametrize("entry", _parameters())
def test_a_published_number_follows_from_its_inputs(entry: Values) -> None:
    name = entry["id"]
    answer, reason = _of(name, ANSWERS), _of(name, NOT_COMPUTED)
    assert (answer is None) != (reason is None), f"{name} needs either a computation or a reason"
    if answer is None:
        assert entry["kind"] in ("measured", "printed")
        pytest.skip(f"{name}: {reason}")
    found = answer(entry["inputs"])
    outputs, reference = entry["outputs"], entry.get("reference", {})
    if entry["kind"] not in ("measured", "inconsistent"):
        assert set(outputs) <= set(found)
    tolerances = entry.get("tolerance_abs", {})
    for key in set(outputs) & set(found):
        assert found[key] == pytest.approx(outputs[key], rel=1e-9, abs=tolerances.get(key, tolerances.get("*", 0))), key
    for key in set(reference) & set(found):
        assert found[key] == pytest.approx(reference[key], rel=1e-5, abs=1e-6), key


def test_every_computation_and_every_reason_has_an_entry() -> None:
    if not ENTRIES:
        pytest.skip("needs the list of published numbers")
    names = [entry["id"] for entry in ENTRIES]
    for beginning in (*ANSWERS, *NOT_COMPUTED):
        assert any(name.startswith(beginning) for name in names), beginning


def test_the_thesis_prints_what_the_list_quotes() -> None:
    """The figures that `benchmarks/models/thesis.py` prints are those of the list, number for number."""
    if not ENTRIES:
        pytest.skip("needs the list of published numbers")
    for run in thesis.RUNS:
        for figure, printed in (run.counts, run.volumes):
            outputs = _entry(f"000-fig{figure}")["outputs"]
            shared = set(outputs) & set(printed)
            assert shared
            assert {key: printed[key] for key in shared} == {key: outputs[key] for key in shared}, figure


def test_a_hidden_size_of_an_expert_is_its_own() -> None:
    job = thesis.mixture(Dispatcher.ALLTOALL)
    dense, mixed = (elements(layer_tensors(job.shape, job.layout, layer)) for layer in (1, 0))
    assert mixed == dense + 4 * 512  # the router: one of four experts is here, as wide as the MLP of a dense layer
    assert sum(tensor.is_expert for tensor in rank_tensors(job, 0)) == 2 * 8
    assert re.match(r"layer\.0\.mlp\.router", next(t.name for t in rank_tensors(job, 0) if "router" in t.name))
