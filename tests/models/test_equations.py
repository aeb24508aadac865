"""Equations of papers as special cases of each other: what must hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_models import collective_time, textbook
from ncclscope_models.collective_time import FourAxes, TwoLevels, axonn_layer, hierarchical_gather, hierarchical_speedup
from ncclscope_models.schedule import StagePasses, schedule
from ncclscope_models.step_time import (
    axonn_bubble,
    bubble_share,
    pipeline_seconds,
    slowest_stage_seconds,
    uniform_step,
)

ALONE = FourAxes(x=1, y=1, z=1, data=1)
DEGREES = st.sampled_from([2, 4, 8, 32])
SIZES = st.sampled_from([256, 1024, 4096])
MACHINE = TwoLevels(
    alpha_flat=10e-6, alpha_between=10e-6, alpha_inside=10e-6, node_bandwidth=50e9, inside_bandwidth=200e9
)


@given(ranks=st.integers(2, 64), size=st.floats(1e3, 1e10))
def test_recursive_doubling_would_always_win_if_far_messages_were_as_fast(ranks: int, size: float) -> None:
    ring = collective_time.ring_gather(size, ranks, 1e-5, 1e11)
    assert collective_time.recursive_doubling(size, ranks, 1e-5, 1e11) <= ring
    assert collective_time.recursive_doubling(size, ranks, 0.0, 0.5e11) > collective_time.ring_gather(
        size, ranks, 0.0, 1e11
    )


@given(ranks=st.integers(4, 1024))
def test_a_tree_is_faster_for_small_messages_and_a_ring_for_large_ones(ranks: int) -> None:
    assert collective_time.tree_allreduce(8, ranks, 1e-5, 1e11) < collective_time.ring_allreduce(8, ranks, 1e-5, 1e11)
    large = 1e15
    assert collective_time.tree_allreduce(large, ranks, 1e-5, 1e11) > collective_time.ring_allreduce(
        large, ranks, 1e-5, 1e11
    )


@given(nodes=st.sampled_from([2, 8, 256]), per_node=st.sampled_from([4, 8]))
def test_a_hierarchical_gather_wins_latency_and_over_many_nodes_loses_bandwidth(nodes: int, per_node: int) -> None:
    small, ranks = hierarchical_speedup(1e-9, nodes, per_node, MACHINE), nodes * per_node
    steps = nodes.bit_length() - 1 + per_node - 1
    assert small == pytest.approx((ranks - 1) / steps)
    large = 1 / hierarchical_speedup(1e18, nodes, per_node, MACHINE)
    most = 1 + MACHINE.node_bandwidth / MACHINE.inside_bandwidth
    assert large < most
    assert large > 1 or nodes < 256  # over few nodes it sends less between them
    assert hierarchical_gather(1e18, 1, per_node, MACHINE) == pytest.approx(
        collective_time.ring_gather(1e18, per_node, 10e-6, 200e9)
    )


@given(tensor=DEGREES, tokens=SIZES, hidden=SIZES)
def test_axonn_with_one_axis_of_tensor_parallelism_is_megatron(tensor: int, tokens: int, hidden: int) -> None:
    column = axonn_layer(tokens, hidden, 4 * hidden, replace(ALONE, x=tensor), ALONE)
    row = axonn_layer(tokens, 4 * hidden, hidden, replace(ALONE, y=tensor), ALONE)  # x and y are swapped in every other
    megatron = textbook.tensor_parallel(
        b=1, s=tokens, h=hidden, layers=0.5, tensor=tensor, micro_batches=1, element_bytes=2, is_recomputed=False
    )
    assert column + row == pytest.approx(megatron)  # an MLP: half of a layer's four AllReduces


@given(shards=DEGREES, replicas=DEGREES, k=SIZES, n=SIZES)
def test_axonn_with_z_is_fsdp_and_with_data_beside_it_hsdp(shards: int, replicas: int, k: int, n: int) -> None:
    sharded = axonn_layer(1024, k, n, replace(ALONE, z=shards), ALONE)
    assert sharded == pytest.approx(textbook.fully_sharded(k * n, shards, 2, 1, reshards_after_forward=False))
    both = axonn_layer(1024, k, n, replace(ALONE, z=shards, data=replicas), ALONE)
    assert both - sharded == pytest.approx(textbook.data_parallel(k * n / shards, replicas, 2))


def test_z_and_data_tie_exactly_so_that_memory_has_to_choose() -> None:
    z, data = (axonn_layer(1024, 4096, 4096, each, ALONE) for each in (replace(ALONE, z=32), replace(ALONE, data=32)))
    assert z == pytest.approx(data)


@given(inter=st.integers(1, 64), forward=st.floats(0.1, 10), backward=st.floats(0.1, 10))
def test_axonns_bubble_and_messages_grow_with_the_pipeline(inter: int, forward: float, backward: float) -> None:
    assert axonn_bubble(inter, forward, backward) < axonn_bubble(inter + 1, forward, backward) < forward + backward
    # The whole model's passes over the stages, and what 1F1B says of them.
    each = (forward / (inter + 1), backward / (inter + 1))
    waits = pipeline_seconds(inter + 1, 8, *each) - 8 * sum(each)
    assert axonn_bubble(inter + 1, forward, backward) == pytest.approx(waits)


@given(pipeline=st.integers(1, 16), more=st.integers(0, 32), tensor=st.sampled_from([1, 2, 8]))
def test_equations_2_to_9_are_1f1b_with_equal_stages(pipeline: int, more: int, tensor: int) -> None:
    m = pipeline + more
    step = uniform_step(
        parameters=10**9, layers=48, h=1024, s=2048, b=1, micro_batches=m, pipeline=pipeline, tensor=tensor, data=4,
        tensor_bytes_per_s=1e11, pipeline_bytes_per_s=float("inf"), data_bytes_per_s=1e10, utilization=0.5,
        peak_flops=1e15,
    )  # fmt: skip
    each = (step.computation + step.tensor) / m
    before_data = step.total - step.data
    assert before_data == pytest.approx(pipeline_seconds(pipeline, m, each / 3, 2 * each / 3))
    assert step.bubble / before_data == pytest.approx(float(bubble_share(pipeline, m)))  # equation 7
    # 4 and 6 AllReduces of a layer, once and with full recompute.
    assert step.tensor * 1e11 == pytest.approx(
        m * (48 / pipeline) * 6 * textbook.allreduce_wire(2 * 2048 * 1024, tensor)
    )


@given(
    durations=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=6),
    micro_batches=st.integers(1, 12),
)
def test_the_slowest_stage_bounds_a_step(durations: list[tuple[int, int]], micro_batches: int) -> None:
    run = schedule([StagePasses(*each) for each in durations], micro_batches)
    bound = slowest_stage_seconds(
        micro_batches=micro_batches,
        forward=[each for each, _ in durations],
        backward=[each for _, each in durations],
        first_sync=0,
        update_and_gather=[0],
    )
    assert run.duration_ns <= bound
    if len(set(durations)) == 1:
        assert run.duration_ns == bound
