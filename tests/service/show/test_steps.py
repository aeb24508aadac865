"""The history of step times in a bounded number of buckets, and what of it is now and before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from service.detect.test_sight_and_clock import FINDING

from ncclscope_service.job.step_times import STEP
from ncclscope_service.show.steps import step_time, steps_view
from ncclscope_service.store.records import Finding, FindingKind
from ncclscope_service.store.step_history import MAX_BUCKETS, StepHistory
from ncclscope_wire.batch import Columns

_STEP_NS = 400_000_000


def _steps(amount: int, *, first: int = 0, duration_ns: int = _STEP_NS) -> Columns:
    steps = np.zeros(amount, STEP)
    steps["iteration"] = np.arange(first, first + amount)
    steps["started_ns"] = 10**18 + steps["iteration"] * _STEP_NS
    steps["duration_ns"] = duration_ns
    return steps


def _finding(kind: FindingKind, *, since_step: int) -> Finding:
    return replace(FINDING, kind=kind, since_ns=10**18 + since_step * _STEP_NS)


@given(st.lists(st.integers(0, 700), max_size=8), st.integers(0, 2**32 - 1))
def test_buckets_are_few_and_hold_every_step_however_they_come(amounts: list[int], seed: int) -> None:
    history, first = StepHistory(), 0
    durations: list[int] = np.random.default_rng(seed).integers(1, 1000, sum(amounts)).tolist()
    for amount in amounts:
        steps = _steps(amount, first=first)
        steps["duration_ns"] = durations[first : first + amount]
        history.add(steps)
        first += amount
    rows, size = history.rows(), history.steps_per_bucket
    assert len(rows) <= MAX_BUCKETS
    parts = [durations[at : at + size] for at in range(0, first, size)]
    assert rows["steps"].tolist() == [len(part) for part in parts]
    assert rows["duration_ns"].tolist() == [sum(part) for part in parts]
    assert rows["longest_ns"].tolist() == [max(part) for part in parts]
    assert rows["iteration"].tolist() == list(range(0, first, size))


def test_a_step_without_a_duration_is_left_out() -> None:
    history = StepHistory()
    history.add(_steps(3, duration_ns=0))
    assert step_time(history, []) is None
    assert steps_view(history).started_ns == ()


def test_now_is_against_before_the_first_open_finding_that_costs_time() -> None:
    history = StepHistory()
    history.add(_steps(100))
    history.add(_steps(50, first=100, duration_ns=_STEP_NS + 9_000_000))
    late = _finding(FindingKind.LATE_RANK, since_step=100)
    view = step_time(history, [late, _finding(FindingKind.MISCONFIGURATION, since_step=0)])
    assert view is not None
    assert (view.steps, view.since_ns) == (150, 10**18)
    assert (view.now_ns, view.before_ns) == (_STEP_NS + 9_000_000, _STEP_NS)
    assert view.slower_since_ns == late.since_ns


def test_steps_that_were_not_steady_are_compared_with_nothing() -> None:
    """As at the start of a job: "429 % slower" was said of a demo whose first steps were short."""
    history = StepHistory()
    steps = _steps(60)
    steps["duration_ns"][:6] = 74_000_000
    history.add(steps)
    assert steps_before(history, since_step=10) is None
    assert steps_before(history, since_step=30) == _STEP_NS


def steps_before(history: StepHistory, *, since_step: int) -> int | None:
    view = step_time(history, [_finding(FindingKind.LATE_RANK, since_step=since_step)])
    assert view is not None
    return view.before_ns


@pytest.mark.parametrize("since_step", [0, 2, 149])
def test_with_few_steps_on_one_side_nothing_is_compared(since_step: int) -> None:
    history = StepHistory()
    history.add(_steps(150))
    view = step_time(history, [_finding(FindingKind.SLOW_LINK, since_step=since_step)])
    assert view is not None
    assert view.now_ns == _STEP_NS
    assert (view.before_ns, view.slower_since_ns) == (None, None)
