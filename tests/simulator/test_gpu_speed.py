"""A GPU whose speed is given: computation follows the model and its layout."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from simulator.jobs import Simulate

from ncclscope_simulator import Contention, GpuSpeed, MegatronModel, SimulationConfig, parse_gpu_speed
from ncclscope_simulator.actions import Action
from ncclscope_simulator.cluster import build_cluster
from ncclscope_simulator.groups import build_endpoints, build_groups
from ncclscope_simulator.program import build_programs
from ncclscope_simulator.step_times import step_durations

A100 = GpuSpeed(tflops=312, memory=2000)
MODEL = MegatronModel(vocabulary=8192)
JOB = SimulationConfig(
    nodes=2, gpus=2, tp=1, pp=1, dp=4, layers=4, microbatches=4, hidden=1024, sequence=512, capture="none",
    compute_cv=0.0, bandwidth_cv=0.0, megatron=MODEL, gpu_speed=A100, iterations=4,
)  # fmt: skip


def program(config: SimulationConfig, rank: int = 0) -> list[Action]:
    """What a rank does in a step."""
    groups = build_groups(config)
    return build_programs(config, groups, build_endpoints(config, build_cluster(config), groups))[rank]


def computed_ns(config: SimulationConfig, rank: int = 0) -> int:
    """What a rank computes in a step."""
    return sum(action.duration_ns for action in program(config, rank))


def test_a_large_matrix_reaches_most_of_the_peak_and_a_small_one_little() -> None:
    for size, least, most in ((8192, 0.8, 1.0), (256, 0.0, 0.1)):
        assert least < 2 * size**3 / A100.matrix_ns(size, size, size) / (A100.tflops * 1e3) < most


def test_one_tile_more_than_the_processors_hold_takes_a_second_wave() -> None:
    full = 128 * A100.processors
    assert A100.matrix_ns(full + 1, 256, 4096) == 2 * A100.matrix_ns(full, 256, 4096)


def test_computation_follows_the_layout() -> None:
    large = replace(JOB, hidden=4096, sequence=2048)
    whole = computed_ns(large)
    halves = computed_ns(replace(large, tp=2, dp=2))
    assert 0.5 < halves / whole < 0.7
    fewer = computed_ns(replace(large, microbatches=2, megatron=replace(MODEL, micro_batch=2)))
    assert 0.9 < fewer / whole < 1.0  # larger matrices, as many tokens
    again = computed_ns(replace(large, megatron=replace(MODEL, full_recompute=True)))
    assert 1.2 < again / whole < 1.34


def test_the_last_stage_has_the_head_and_a_distributed_optimizer_less_to_do() -> None:
    staged = replace(JOB, pp=2, dp=2, layers=2)
    assert computed_ns(staged, rank=3) > 1.05 * computed_ns(staged, rank=0)
    assert computed_ns(replace(JOB, zero1=True)) < computed_ns(JOB)


def test_experts_compute_what_their_tokens_need() -> None:
    mixed = replace(JOB, ep=4, megatron=replace(MODEL, experts=4, expert_ffn=4096))
    one, two = (
        computed_ns(replace(mixed, hidden=2048, sequence=2048, megatron=replace(MODEL, experts=4, top_k=top_k)))
        for top_k in (1, 2)
    )
    assert two > 1.3 * one


def test_steps_take_as_long_as_those_of_the_written_job(simulate: Simulate) -> None:
    given = {name: getattr(JOB, name) for name in ("nodes", "gpus", "layers", "microbatches", "hidden", "sequence")}
    given |= {"tp": 2, "pp": 2, "dp": 1, "megatron": MODEL, "gpu_speed": A100, "capture": "none", "iterations": 4}
    given["step_seconds"] = JOB.step_seconds  # a fiftieth of it passes between steps
    given["contention"] = Contention(1, 0.2)
    steps = json.loads((simulate(**given) / "truth" / "job.json").read_text())["iterations"]
    begins = [step["begin_ns"] for step in steps]
    written = [after - before for before, after in pairwise(begins)]
    assert step_durations(SimulationConfig(**given), 3)[1:] == written[1:]


def test_a_bucket_is_reduced_once_its_layers_are_through_the_backward_pass() -> None:
    model = replace(MODEL, overlap=True)
    actions = program(replace(JOB, megatron=model, hidden=2048, layers=6))
    reduced = [at for at, each in enumerate(actions) if each.launch is not None and not each.blocking]
    computed = [sum(each.duration_ns > 0 for each in actions[:at]) for at in reduced]
    total = sum(each.duration_ns > 0 for each in actions) - 1  # but for the optimizer
    assert [total - each for each in computed] == [10, 8, 6, 4, 2, 0, 0]  # two blocks a layer


def test_overlapped_gradients_are_hidden_and_slow_the_computation_beside_them() -> None:
    model = replace(MODEL, overlap=True)
    job = replace(JOB, megatron=model, hidden=2048, sequence=8192, layers=6)  # a bucket of 40e6 elements a layer
    exposed, hidden, slowed = (
        step_durations(each, 2)[1]
        for each in (
            replace(job, megatron=replace(model, overlap=False)),
            job,
            replace(job, contention=Contention(2, 0.5)),
        )
    )
    assert hidden < slowed < exposed


@pytest.mark.parametrize(
    "text", ["", "tflops=312", "tflops=0,memory=1", "tflops=1,memory=inf", "tflops=1,memory=2,x=3"]
)
def test_what_is_no_gpu_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="gpu_speed"):
        parse_gpu_speed(text)


def test_a_gpu_is_read() -> None:
    assert parse_gpu_speed("tflops=989,memory=3350,processors=132") == GpuSpeed(tflops=989, memory=3350, processors=132)


def test_without_megatron_there_is_nothing_to_compute() -> None:
    with pytest.raises(ValueError, match="gpu_speed needs emission megatron"):
        SimulationConfig(gpu_speed=A100)
