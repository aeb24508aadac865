"""Pipelines run event by event, against the equations that hold for uniform stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_models.schedule import Pass, StagePasses, long_schedule, passes, schedule
from ncclscope_models.step_time import bubble_share, pipeline_seconds, slowest_stage_seconds

STAGES, MICRO_BATCHES, DURATIONS = st.integers(1, 6), st.integers(1, 12), st.integers(1, 50)


def test_the_worked_example_of_three_stages() -> None:
    run = schedule([StagePasses(1, 2)] * 3, 5)
    assert run.duration_ns == 21
    assert run.bubble_ns == (6, 6, 6)


@given(STAGES, MICRO_BATCHES, DURATIONS, DURATIONS)
def test_equal_stages_take_what_the_equation_says(stages: int, more: int, forward: int, backward: int) -> None:
    micro_batches = stages - 1 + more
    run = schedule([StagePasses(forward, backward)] * stages, micro_batches)
    assert run.duration_ns == pipeline_seconds(stages, micro_batches, forward, backward)
    share = bubble_share(stages, micro_batches)
    assert run.bubble_ns[0] * share.denominator == run.duration_ns * share.numerator


@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 3), DURATIONS)
def test_interleaved_chunks_divide_the_bubble(stages: int, rounds: int, chunks: int, forward: int) -> None:
    micro_batches = stages * rounds
    run = schedule([StagePasses(forward, 2 * forward)] * stages, micro_batches, chunks=chunks)
    share = bubble_share(stages, micro_batches, chunks)
    assert run.bubble_ns[0] * share.denominator == run.duration_ns * share.numerator


@given(st.lists(st.tuples(DURATIONS, DURATIONS), min_size=1, max_size=5), st.integers(5, 10))
def test_stages_that_differ_take_no_longer_than_if_all_were_as_slow_as_the_slowest(
    durations: list[tuple[int, int]], micro_batches: int
) -> None:
    run = schedule([StagePasses(*each) for each in durations], micro_batches)
    none = [0.0] * len(durations)
    bound = slowest_stage_seconds(
        micro_batches=micro_batches,
        forward=[each[0] for each in durations],
        backward=[each[1] for each in durations],
        first_sync=0.0,
        update_and_gather=none,
    )
    assert max(sum(each) * micro_batches for each in durations) <= run.duration_ns <= bound


@given(
    st.lists(st.tuples(st.integers(40, 60), st.integers(80, 120)), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_many_micro_batches_go_on_in_the_rhythm_of_the_first(
    durations: list[tuple[int, int]], rounds: int, chunks: int, boundary_ns: int
) -> None:
    stages, chunks = [StagePasses(*each) for each in durations], chunks if len(durations) > 1 else 1
    m = rounds * len(stages)
    whole, found = (run(stages, m, chunks=chunks, boundary_ns=boundary_ns) for run in (schedule, long_schedule))
    assert found.busy_ns == whole.busy_ns
    assert found.duration_ns == pytest.approx(whole.duration_ns, rel=0.01)


def test_a_boundary_delays_each_stage_behind_it() -> None:
    run = schedule([StagePasses(10, 20)] * 3, 1, boundary_ns=3)
    assert run.first_start_ns == (0, 13, 26)
    assert run.last_end_ns == (102, 79, 56)


@given(STAGES, st.integers(1, 4), st.integers(1, 3))
def test_every_stage_has_every_pass_once_and_no_backward_before_its_forward(
    stages: int, rounds: int, chunks: int
) -> None:
    for stage in range(stages):
        order = passes(stage, stages, stages * rounds, chunks)
        assert len(order) == len(set(order)) == 2 * stages * rounds * chunks
        for step in order:
            if not step.is_forward:
                assert order.index(Pass(is_forward=True, micro_batch=step.micro_batch, chunk=step.chunk)) < order.index(
                    step
                )


def test_interleaved_stages_need_a_multiple_of_micro_batches() -> None:
    with pytest.raises(ValueError, match="5 micro-batches are not a multiple of 2 interleaved stages"):
        schedule([StagePasses(1, 1)] * 2, 5, chunks=2)


def test_a_stage_that_sends_goes_on_only_when_it_is_through_unless_that_is_overlapped() -> None:
    blocked, overlapped = (
        schedule([StagePasses(10, 20)] * 2, 4, boundary_ns=3, is_overlapped=each).last_end_ns for each in (False, True)
    )
    # The last stage alternates: forward, backward, send; the first gets the last gradient behind it.
    assert blocked == (10 + 3 + 4 * 30 + 3 * 3 + 3 + 20, 10 + 3 + 4 * 30 + 3 * 3)
    assert overlapped[1] < blocked[1]
