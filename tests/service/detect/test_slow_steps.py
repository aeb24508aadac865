"""Steps that became longer, against the job's own past."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from service.detect.test_sight_and_clock import FINDING

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.slow_steps import SlowSteps
from ncclscope_service.job.step_times import STEP
from ncclscope_service.store.records import Finding, Severity
from ncclscope_wire.batch import Columns

_STEP_NS = 400_000_000


def steps(durations_ns: NDArray[np.float64], *, operations: float = 80.0, first: int = 0) -> Columns:
    made = np.zeros(len(durations_ns), STEP)
    made["iteration"] = first + np.arange(len(made))
    made["duration_ns"] = durations_ns
    made["started_ns"] = 1_000_000_000 + first * _STEP_NS + np.cumsum(made["duration_ns"]) - made["duration_ns"]
    made["operations"], made["bytes"] = operations, 1e9
    return made


def noisy(amount: int, share: float = 0.0, *, spread: float = 0.01) -> NDArray[np.float64]:
    random = np.random.default_rng(7)
    durations: NDArray[np.float64] = _STEP_NS * (1 + share) * np.exp(spread * random.standard_normal(amount))
    return durations


def judged(*given: Columns, others: tuple[Finding, ...] = (), is_over: bool = False) -> list[Finding]:
    detector = SlowSteps()
    for each in given:
        detector.ingest_steps(each, Context(job="job", is_over=is_over))
    return detector.findings(others)


def test_steps_that_take_a_tenth_longer_are_found_with_the_step_they_began_at() -> None:
    slow = steps(np.concatenate([noisy(100), noisy(120, 0.10)]))
    (found,) = judged(slow)
    assert (found.severity, found.until_ns) == (Severity.WARNING, None)
    first = found.evidence["first_step"]
    assert isinstance(first, int)
    assert abs(first - 100) <= 2
    assert "10." in found.summary or "9." in found.summary
    assert "are what they were" in found.summary


def test_a_fifth_is_critical_but_not_if_the_step_has_more_to_do() -> None:
    before, after = noisy(100), noisy(120, 0.25)
    (found,) = judged(steps(before), steps(after, first=100))
    assert found.severity is Severity.CRITICAL
    (found,) = judged(steps(before), steps(after, first=100, operations=100.0))
    assert found.severity is Severity.WARNING
    assert "+25.0% operations" in found.summary


def test_equal_steps_with_checkpoints_in_between_are_no_finding() -> None:
    durations = noisy(600, spread=0.03)
    durations[::50] *= 20
    assert not judged(steps(durations), is_over=True)


def test_what_is_explained_by_another_finding_is_not_said_again() -> None:
    slow = steps(np.concatenate([noisy(100), noisy(120, 0.10)]))
    begin = int(slow["started_ns"][100])
    late = replace(FINDING, since_ns=begin + 20_000_000_000)
    assert not judged(slow, others=(late,))
    assert judged(slow, others=(replace(late, since_ns=0, until_ns=begin - 10_000_000_000),))


def test_others_have_time_to_explain_unless_the_job_is_over() -> None:
    short = steps(np.concatenate([noisy(100), noisy(30, 0.15)]))
    assert not judged(short)
    assert judged(short, is_over=True)


def test_steps_that_recover_close_the_finding() -> None:
    slow = steps(np.concatenate([noisy(100), noisy(120, 0.10), noisy(100)]))
    (found,) = judged(slow)
    assert found.until_ns is not None
    assert abs(found.until_ns - int(slow["started_ns"][220])) < 12 * _STEP_NS


def test_a_job_that_stays_slower_for_longer_than_steps_are_remembered_is_still_compared_with_what_it_was() -> None:
    early = judged(steps(np.concatenate([noisy(100), noisy(120, 0.10)])))
    late = judged(steps(np.concatenate([noisy(100), noisy(3_000, 0.10)])))
    for name in ("step_before_ns", "first_step", "bytes_per_step_before"):
        assert late[0].evidence[name] == early[0].evidence[name]
    assert late[0].evidence["steps"] == 720
