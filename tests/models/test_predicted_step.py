"""Steps foretold: parts by hand, and the order of real runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.models import collective_times, step_times, vtrain

from ncclscope_models.emission.megatron import gradient_buckets
from ncclscope_models.job import Job, Layout, Precision, Recompute, Training, gpt
from ncclscope_models.machine import BASE_STEPS_BETWEEN, BASE_STEPS_INSIDE, Machine, Placement
from ncclscope_models.memory import layer_activation_bytes
from ncclscope_models.predicted_step import calibrated, predict_step
from ncclscope_models.transfer_curve import transfer_curve

MACHINE = Machine(
    gpus_per_node=8,
    peak_flops=100e12,
    best_share=0.5,
    half_work=0.0,
    inside_bandwidth=200e9,
    node_bandwidth=100e9,
    inside_latency=0.0,
    network_latency=0.0,
    memory_bandwidth=float("inf"),
)


def job(layout: Layout, *, micro_batch: int = 1, recompute: Recompute = Recompute.NONE) -> Job:
    return Job(
        shape=gpt(layers=8, hidden=1024, heads=16, sequence=1024, vocabulary=51_200),
        layout=layout,
        training=Training(
            micro_batch=micro_batch,
            global_batch=32,
            precision=Precision.FP16,
            are_gradients_fp32=False,
            recompute=recompute,
        ),
    )


def test_a_collective_inside_a_node_takes_its_wire_bytes_over_the_bandwidth() -> None:
    assert MACHINE.collective_seconds("AllReduce", 1e9, Placement(4, 4)) == pytest.approx(1.5e9 / 200e9)
    assert MACHINE.collective_seconds("AllGather", 1e9, Placement(4, 4)) == pytest.approx(0.75e9 / 200e9)
    assert MACHINE.collective_seconds("AllReduce", 1e9, Placement(1, 1)) == 0


def test_groups_that_leave_a_node_together_share_its_network() -> None:
    one_card = replace(MACHINE, network_cards=1)
    alone = one_card.collective_seconds("AllReduce", 1e9, Placement(4, 1))
    assert alone == pytest.approx(1.5e9 / 100e9)
    assert one_card.collective_seconds("AllReduce", 1e9, Placement(4, 1, sharing=8)) == pytest.approx(8 * alone)


def test_a_gpu_leaves_its_node_by_one_network_card() -> None:
    alone, two, all_eight = (
        MACHINE.collective_seconds("AllReduce", 1e9, Placement(2 * local, local, sharing=sharing))
        for local, sharing in ((1, 1), (1, 2), (1, 8))
    )
    assert alone == two == all_eight == pytest.approx(1e9 / (100e9 / 8))  # each has a card of its own
    in_one_group = MACHINE.collective_seconds("AllReduce", 1e9, Placement(16, 8))
    assert in_one_group == pytest.approx(2 * 15 / 16 * 1e9 / 100e9)
    four_cards = replace(MACHINE, network_cards=4)
    assert four_cards.collective_seconds("AllReduce", 1e9, Placement(2, 1, sharing=2)) == pytest.approx(1e9 / 25e9)
    assert four_cards.collective_seconds("AllReduce", 1e9, Placement(2, 1, sharing=8)) == pytest.approx(2e9 / 25e9)


def test_latency_counts_the_start_and_the_steps_that_leave_a_node_apart() -> None:
    slow = replace(MACHINE, inside_latency=1e-6, network_latency=10e-6)
    steps = 15 * (10 * 2 + 14) / 16 + 10 * BASE_STEPS_BETWEEN
    assert slow.collective_seconds("AllGather", 1.0, Placement(16, 8)) == pytest.approx(steps * 1e-6, rel=1e-5)
    inside = slow.collective_seconds("AllReduce", 1.0, Placement(8, 8))
    assert inside == pytest.approx((BASE_STEPS_INSIDE + 14) * 1e-6, rel=1e-5)


def test_what_was_measured_inside_a_node_comes_before_the_formula() -> None:
    curve = transfer_curve([1e6, 2e6, 4e6, 8e6], [1.0, 2.0, 4.0, 8.0])
    measured = replace(MACHINE, inside={("AllReduce", 4): curve})
    assert measured.collective_seconds("AllReduce", 3e6, Placement(4, 4)) == pytest.approx(3.0)
    assert measured.collective_seconds("AllReduce", 3e6, Placement(4, 1)) < 1


def test_one_gpu_computes_and_waits_for_nobody() -> None:
    found = predict_step(job(Layout()), MACHINE)
    assert found.tensor == found.bubble == found.behind == 0
    assert found.seconds == pytest.approx(found.computation)
    again = predict_step(job(Layout(), recompute=Recompute.FULL), MACHINE)
    assert 1.2 < again.seconds / found.seconds < 4 / 3  # the head is not computed twice


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=4), Layout(tensor=4, is_sequence_parallel=True)])
def test_what_is_no_matrix_takes_the_bytes_of_the_activations_five_times(layout: Layout) -> None:
    machine = replace(MACHINE, peak_flops=float("inf"), memory_bandwidth=1e12, writes_scores=True)
    asked = job(layout)
    each = layer_activation_bytes(
        s=1024, b=1, h=1024, heads=16, tensor=layout.tensor,
        is_sequence_parallel=layout.is_sequence_parallel, recompute=Recompute.NONE,
    )  # fmt: skip
    found = predict_step(asked, machine)
    assert found.computation == pytest.approx(asked.micro_batches * 8 * 5 * each / 1e12, rel=1e-6)


def test_small_operations_reach_less_of_the_memory() -> None:
    machine = replace(MACHINE, memory_bandwidth=1e12, memory_efficiency=((100e6, 0.9), (1e6, 0.6), (0.0, 0.3)))
    found = [machine.memory_seconds(size) * 1e12 / size for size in (200e6, 100e6, 99e6, 10.0)]
    assert found == pytest.approx([1 / 0.9, 1 / 0.9, 1 / 0.6, 1 / 0.3])
    assert machine.memory_seconds(0.0) == 0


def test_what_memory_reaches_counts_by_operation_and_not_by_layer() -> None:
    whole = replace(MACHINE, peak_flops=float("inf"), memory_bandwidth=1e12, writes_scores=True)
    # Of a micro-batch every operation of this model leaves less than 100 MB, and all of a layer more.
    small = replace(whole, memory_efficiency=((200e6, 1.0), (0.0, 0.5)))
    asked = job(Layout())
    assert predict_step(asked, small).computation == pytest.approx(2 * predict_step(asked, whole).computation)


def test_a_pipeline_waits_its_bubble_and_data_ranks_send_their_gradients_behind_the_last_pass() -> None:
    piped = predict_step(job(Layout(pipeline=4)), MACHINE)
    assert piped.bubble > 0
    assert piped.seconds > 1.3 * predict_step(job(Layout()), MACHINE).seconds / 4  # and the last stage has the head
    spread = predict_step(job(Layout(data=4)), MACHINE)
    assert spread.bubble == 0
    assert spread.behind > 0
    assert spread.computation == pytest.approx(predict_step(job(Layout()), MACHINE).computation / 4)


def test_the_tied_embedding_is_summed_between_the_nodes_of_first_and_last_stage() -> None:
    rows = 2 * 51_200 * 1024 * 2  # bytes of FP16, wire of an AllReduce of two ranks
    near, far = (predict_step(job(Layout(pipeline=4, data=each)), MACHINE).embedding for each in (2, 4))
    assert near == pytest.approx(rows / 2 / 200e9)  # ranks 0 and 6, of a node
    assert far == pytest.approx(rows / 2 / (100e9 / 8))  # each by the card beside it


def test_a_pipeline_inside_a_node_and_one_between_nodes_wait_for_their_own_links() -> None:
    slow = replace(MACHINE, inside_latency=1e-3, network_latency=1.0)
    inside, mixed, between = (
        predict_step(job(Layout(pipeline=4, data=data)), replace(slow, gpus_per_node=node)).bubble
        for data, node in ((1, 4), (1, 2), (1, 1))
    )
    assert 10 * inside < mixed < between / 2


def test_gradients_of_all_buckets_but_the_last_hide_behind_the_last_backward_pass() -> None:
    wide = replace(job(Layout(data=4)), shape=gpt(layers=8, hidden=2048, heads=16, sequence=1024, vocabulary=51_200))
    hides = replace(wide, training=replace(wide.training, overlaps_gradients=True))
    exposed, hidden = (predict_step(each, MACHINE) for each in (wide, hides))
    assert exposed.data / 20 < hidden.data < exposed.data / 2
    assert hidden.seconds == pytest.approx(exposed.seconds - exposed.data + hidden.data)
    slow = predict_step(hides, replace(MACHINE, peak_flops=MACHINE.peak_flops / 100))
    *_, last = sizes = [each.elements for each in gradient_buckets(hides, 0, are_experts=False)]
    assert slow.data == pytest.approx(exposed.data * last / sum(sizes))  # the last has the embedding: it is the largest
    assert last == max(sizes)
    one_stage = predict_step(replace(hides, layout=Layout(pipeline=2, data=4)), MACHINE)
    assert one_stage.data > 0  # the last stage has one bucket, which nothing hides


def test_selective_recompute_makes_the_scores_again() -> None:
    machine = replace(MACHINE, memory_bandwidth=1e12, writes_scores=True)
    none, selective, full = (predict_step(job(Layout(), recompute=each), machine).seconds for each in Recompute)
    assert none < selective < full


def test_larger_micro_batches_compute_faster_where_work_per_matrix_counts() -> None:
    machine = replace(MACHINE, half_work=5e5)
    small, large = (predict_step(job(Layout(), micro_batch=each), machine) for each in (1, 8))
    assert small.computation > 1.2 * large.computation


def test_real_runs_are_put_in_order_from_data_sheets_alone(corpora: list[Path]) -> None:
    folder = corpora[1] / "measured_runs"
    machine = vtrain.a100(folder)
    taus: list[float] = []
    for runs in vtrain.multi_node(folder).values():
        seconds = [run.seconds for run in runs]
        ours = [predict_step(run.job, machine).seconds for run in runs]
        taus.append(step_times.kendall_tau(ours, seconds))
        first = np.argsort(ours)[:5]
        assert min(seconds[at] for at in first) <= 1.05 * min(seconds)
    assert np.mean(taus) >= 0.66


def test_a_calibrated_machine_gives_the_step_that_calibrated_it(corpora: list[Path]) -> None:
    folder = corpora[1] / "measured_runs"
    run = next(iter(vtrain.multi_node(folder).values()))[0]
    machine = calibrated(vtrain.a100(folder), run.job, run.seconds)
    assert predict_step(run.job, machine).seconds == pytest.approx(run.seconds)


def test_a_size_of_real_curves_is_foretold_from_the_others(corpus: Path) -> None:
    curves = collective_times.nccl_tests_curves(corpus / "nccl_tests")
    assert len(curves) > 60
    errors = np.array([pair for each in curves for pair in collective_times.leave_one_out(*each)])
    assert np.quantile(errors[:, 0], 0.5) <= 0.015
    assert np.quantile(errors[:, 0], 0.9) <= 0.13
