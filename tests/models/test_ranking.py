"""Layouts ranked: nothing that is possible is left out, nothing faster is missed, and what is not sure is said."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest

from ncclscope_models.calibration import Calibration, ObservedStep
from ncclscope_models.fitted_machine import FittedMachine, fitted_machine
from ncclscope_models.job import Framework, Job, Layout, ModelError, Precision, Recompute, Training, gpt
from ncclscope_models.layout_space import Space, layouts
from ncclscope_models.machine import Machine, Placement
from ncclscope_models.memory import GIB, Fit, MemoryNeed
from ncclscope_models.predicted_step import StepPredictor, predict_step
from ncclscope_models.ranking import differences, rank, widest
from ncclscope_models.transfer_estimate import GroupShape, MeasuredTransfers, TransferTimes

MACHINE = Machine(
    gpus_per_node=8,
    peak_flops=300e12,
    best_share=0.6,
    inside_bandwidth=200e9,
    node_bandwidth=100e9,
    inside_latency=5e-6,
    network_latency=20e-6,
    memory_bandwidth=2e12,
)
NOW = Job(
    shape=gpt(layers=24, hidden=4096, heads=32, sequence=2048, vocabulary=51_200),
    layout=Layout(tensor=4, pipeline=2, data=4, is_sequence_parallel=True),
    training=Training(micro_batch=1, global_batch=64, precision=Precision.BF16, are_gradients_fp32=True),
)
SPACE = Space(gpus=32, gpus_per_node=8, recomputes=(Recompute.NONE, Recompute.FULL))


def measured(op: str, placed: Placement, kind: str) -> tuple[GroupShape, list[MeasuredTransfers]]:
    """What a run on MACHINE shows of a group."""
    found: list[MeasuredTransfers] = []
    for size in (1 << 16, 1 << 20, 1 << 24, 1 << 28):
        seconds = MACHINE.collective_seconds(op, size, placed)
        found.append(MeasuredTransfers(message_bytes=size, low=seconds, typical=seconds, high=seconds, samples=50))
    return GroupShape(op, placed.ranks, placed.nodes, kind), found


TIMES = TransferTimes(
    dict(
        [
            measured("AllGather", Placement(4, 4), "TP"),
            measured("ReduceScatter", Placement(4, 4), "TP"),
            measured("AllReduce", Placement(4, 2, sharing=4), "DP"),
        ]
    )
)


def calibration(seconds: float, computed: float | None) -> Calibration:
    parts: dict[tuple[str, str | None], int] = (
        {} if computed is None else {("computation", None): round(computed * 1e9)}
    )
    return Calibration(
        job="job",
        ranks=32,
        ranks_per_node=8,
        times=TIMES,
        step=None if computed is None else ObservedStep(steps=10, mean_ns=round(seconds * 1e9), parts=parts),
        median_step_ns=round(seconds * 1e9),
    )


def fitted(now: Job = NOW) -> FittedMachine:
    computed = StepPredictor(MACHINE).computation_of_a_rank(now)
    start = replace(MACHINE, best_share=0.5, inside_bandwidth=1e9, node_bandwidth=1e9, inside_latency=0.0)
    return fitted_machine(start, now, calibration(predict_step(now, MACHINE).seconds, computed), TIMES)


def test_a_machine_is_found_again_from_what_a_run_on_it_shows() -> None:
    found = fitted()
    machine = found.machine
    assert machine.inside_bandwidth == pytest.approx(200e9, rel=0.01)
    assert machine.inside_latency == pytest.approx(5e-6, rel=0.01)
    assert machine.node_bandwidth == pytest.approx(100e9, rel=0.01)
    assert machine.network_latency == pytest.approx(20e-6, rel=0.02)
    assert found.factor == pytest.approx(1, abs=0.01)
    other = replace(NOW, layout=Layout(tensor=2, pipeline=4, data=4, is_sequence_parallel=True))
    assert found.seconds(predict_step(other, machine).seconds) == pytest.approx(
        predict_step(other, MACHINE).seconds, rel=0.02
    )


def test_without_computation_the_whole_step_says_how_fast_gpus_are() -> None:
    found = fitted_machine(MACHINE, NOW, calibration(3.0, None), TIMES)
    assert not found.is_from_parts
    assert found.seconds(predict_step(NOW, found.machine).seconds) == pytest.approx(3.0)


def test_a_run_inside_one_node_says_nothing_of_the_network() -> None:
    inside = TransferTimes({shape: each for shape, each in TIMES.measured.items() if shape.nodes == 1})
    assert fitted_machine(MACHINE, NOW, calibration(3.0, None), inside).between is None
    given = fitted_machine(MACHINE, NOW, calibration(3.0, None), inside, between_nodes=80e9).between
    assert given is not None
    assert given.measured == 0
    assert given.width > 0.3


def test_what_is_idle_stays_whatever_the_layout_is() -> None:
    computed = StepPredictor(MACHINE).computation_of_a_rank(NOW)
    predicted = predict_step(NOW, MACHINE).seconds
    observed = calibration(predicted + 0.5, computed)
    assert observed.step is not None
    step = replace(observed.step, parts={**observed.step.parts, ("idle", None): 500_000_000})
    found = fitted_machine(MACHINE, NOW, replace(observed, step=step), TIMES)
    assert found.idle == 0.5
    assert found.factor == pytest.approx(1, abs=0.01)
    other = replace(NOW, layout=replace(NOW.layout, pipeline=4, data=2))
    ranked = rank([other], NOW, found, MemoryNeed(None)).ranked[0]
    assert ranked.parts["idle"] == 0.5
    assert sum(ranked.parts.values()) == pytest.approx(ranked.seconds)


def test_half_of_what_the_parts_leave_open_is_taken_to_be_of_other_layouts() -> None:
    computed = StepPredictor(MACHINE).computation_of_a_rank(NOW)
    observed = calibration(1.21 * predict_step(NOW, MACHINE).seconds, computed)
    found = fitted_machine(MACHINE, NOW, observed, TIMES)
    assert found.factor == pytest.approx(1.21, rel=0.01)
    other = replace(NOW, layout=replace(NOW.layout, pipeline=4, data=2))
    ranking = rank([other], NOW, found, MemoryNeed(None))
    ranked, predicted = ranking.ranked[0], predict_step(other, found.machine).seconds
    assert ranked.seconds == pytest.approx(1.1 * predicted, rel=0.01)
    assert ranked.low < predicted < 1.21 * predicted < ranked.high
    assert ranked.widths["left open"] == pytest.approx(log(1.1), rel=0.05)
    assert ranking.now.seconds == pytest.approx(1.21 * predict_step(NOW, MACHINE).seconds)
    assert ranking.now.low == ranking.now.high == ranking.now.seconds


def test_of_several_stages_to_a_node_the_slow_sends_are_those_between_nodes() -> None:
    sends = [
        MeasuredTransfers(message_bytes=size, low=2e-5 + size / 200e9, typical=0.0, high=4e-5 + size / 50e9, samples=50)
        for size in (1 << 20, 1 << 24)
    ]
    found = fitted_machine(MACHINE, NOW, calibration(3.0, None), TransferTimes({GroupShape("Send", 4, 2, "PP"): sends}))
    assert found.inside is not None
    assert found.between is not None
    assert found.inside.bandwidth == pytest.approx(200e9, rel=0.01)
    assert found.between.bandwidth == pytest.approx(8 * 50e9, rel=0.01)  # all GPUs of a node send at once


def test_small_messages_say_nothing_of_bandwidth() -> None:
    small = TransferTimes(
        {shape: [each for each in found if each.message_bytes < 1 << 20] for shape, found in TIMES.measured.items()}
    )
    found = fitted_machine(MACHINE, NOW, calibration(3.0, None), small, inside_node=150e9)
    assert found.between is None
    assert found.inside is not None
    assert (found.inside.bandwidth, found.inside.measured) == (150e9, 0)


def test_other_tensor_ranks_are_less_sure() -> None:
    others = [replace(NOW, layout=Layout(tensor=each, data=32 // each, is_sequence_parallel=True)) for each in (4, 8)]
    same, other = sorted(rank(others, NOW, fitted(), MemoryNeed(None)).ranked, key=lambda each: each.job.layout.tensor)
    assert same.widths["model"] < other.widths["model"]


def test_a_calibration_without_a_step_is_refused() -> None:
    with pytest.raises(ModelError, match="has no step time"):
        fitted_machine(MACHINE, NOW, replace(calibration(1.0, None), median_step_ns=None), TIMES)


def test_layouts_are_all_that_the_numbers_allow() -> None:
    found = list(layouts(NOW, SPACE))
    keys = {(job.layout, job.training) for job in found}
    assert len(keys) == len(found) > 300
    assert all(job.layout.ranks == 32 for job in found)
    assert (NOW.layout, NOW.training) in keys
    assert max(job.layout.tensor for job in found) == 8
    assert {job.layout.pipeline for job in found} == {1, 2, 4, 8}  # 24 layers, 32 GPUs
    assert {job.layout.chunks for job in found if job.layout.pipeline == 8} == {1, 3}


def test_other_frameworks_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="this job is of fsdp2"):
        list(layouts(replace(NOW, framework=Framework.FSDP2), SPACE))


def test_no_step_is_shorter_than_its_lower_bound_and_none_much_longer() -> None:
    predictor = StepPredictor(MACHINE)
    for job in list(layouts(NOW, SPACE))[::5]:
        bound, seconds = predictor.at_least(job), predictor.predict(job).seconds
        assert 0.85 * seconds < bound < seconds * (1 + 1e-6), job


def test_the_first_of_a_ranking_are_the_fastest_of_all_that_fit() -> None:
    machine, need = fitted(), MemoryNeed(40 * GIB)
    found = rank(layouts(NOW, SPACE), NOW, machine, need, most=5)
    fits = [job for job in layouts(NOW, SPACE) if need.fit(job) is not Fit.DOES_NOT]
    assert found.considered - found.do_not_fit == len(fits) < found.considered
    steps = sorted(machine.seconds(predict_step(job, machine.machine).seconds) for job in fits)
    assert [each.seconds for each in found.ranked] == pytest.approx(steps[:5])
    assert found.now.seconds == pytest.approx(predict_step(NOW, MACHINE).seconds, rel=0.01)


def test_intervals_say_what_is_not_told_apart_and_what_would_settle_it() -> None:
    found = rank(layouts(NOW, SPACE), NOW, fitted(), MemoryNeed(None), most=10)
    best = found.ranked[0]
    assert best.low < best.seconds < best.high
    assert found.alike == sum(each.low <= best.high for each in found.ranked) >= 1
    term = widest(found.ranked)
    assert term is not None
    assert term[0] in best.widths
    # The run that calibrated has its own step.
    assert found.now.low == pytest.approx(found.now.high)
    assert sum(best.parts.values()) == pytest.approx(best.seconds)
    off = differences(best, found.now)
    assert len(off) == 3
    assert abs(off[0][1]) >= abs(off[1][1]) >= abs(off[2][1])


def test_memory_that_a_run_took_beyond_its_model_is_added_to_every_layout() -> None:
    plain, more = MemoryNeed(None), MemoryNeed(30 * GIB, more_bytes=20 * GIB)
    assert more.bytes(NOW) - plain.bytes(NOW) == 20 * GIB
    assert plain.fit(NOW) is None
    assert more.fit(NOW) is Fit.DOES_NOT
    assert MemoryNeed(None, keeps_scores=True).bytes(NOW) > plain.bytes(NOW)
