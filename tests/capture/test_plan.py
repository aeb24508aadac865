"""When to record: never more than the budget, and all nodes at the same time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_capture.cycle import Budget, Outcome, Plan


def test_the_share_of_time_is_the_budget_over_the_overhead() -> None:
    budget = Budget(0.01, 0.1, 10)
    assert budget.duty == pytest.approx(0.1)
    assert budget.period_seconds == pytest.approx(100)
    assert Budget(0.2, 0.1, 10).duty == 1, "a budget above the overhead is no reason to record twice"


def test_two_nodes_that_begin_at_different_times_record_at_the_same_time() -> None:
    budget = Budget(0.01, 0.1, 10)
    first, second = Plan(budget, now=1003.0), Plan(budget, now=1041.5)
    assert first.next_start(1003.0) == second.next_start(1041.5) == 1100.0


def test_a_recording_that_took_long_to_stop_is_made_up_for() -> None:
    plan = Plan(Budget(0.01, 0.1, 10), now=1000.0)
    assert plan.next_start(1000.0) == 1000.0
    plan.recorded(Outcome.FINISHED, seconds=25.0, now=1025.0)
    assert plan.next_start(1025.0) == 1300.0


@given(
    budget=st.builds(Budget, st.floats(0.001, 0.1), st.floats(0.01, 0.5), st.floats(1, 60)),
    extras=st.lists(st.floats(0, 20), min_size=1, max_size=30),
    begin=st.floats(0, 2e9),
)
def test_the_share_never_passes_the_duty_by_more_than_the_last_recording(
    budget: Budget, extras: list[float], begin: float
) -> None:
    plan, now, spent = Plan(budget, now=begin), begin, 0.0
    for extra in extras:
        now = plan.next_start(now)
        # What was recorded before this start was paid for before it, but for the first period.
        assert spent <= budget.duty * (now - begin) + 1e-3
        seconds = budget.chunk_seconds + extra
        now, spent = now + seconds, spent + seconds
        plan.recorded(Outcome.FINISHED, seconds=seconds, now=now)


def test_nsys_that_fails_is_tried_later_and_later_and_at_last_no_more() -> None:
    plan = Plan(Budget(0.5, 0.5, 1), now=0.0)
    now, pauses = 0.0, list[float]()
    while not plan.has_given_up:
        plan.recorded(Outcome.FAILED, seconds=0.0, now=now)
        pauses.append(plan.next_start(now) - now)
        now = plan.next_start(now)
    assert pauses == [30, 60, 120, 240, 480, 600]


def test_one_success_forgets_the_failures_and_a_full_disk_is_none() -> None:
    plan = Plan(Budget(0.5, 0.5, 1), now=0.0)
    for _ in range(5):
        plan.recorded(Outcome.FAILED, seconds=0.0, now=0.0)
    plan.recorded(Outcome.SKIPPED, seconds=0.0, now=0.0)
    plan.recorded(Outcome.FINISHED, seconds=1.0, now=0.0)
    plan.recorded(Outcome.FAILED, seconds=0.0, now=0.0)
    assert not plan.has_given_up
