"""The load that the benchmark makes is what a job would send, and a service under it loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.load.__main__ import main
from benchmarks.load.recorded import RecordedJob, record
from benchmarks.load.streams import HostFollower, Phase, Schedule
from benchmarks.load.watch import Look, delays_s
from numpy.typing import NDArray

from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import Match
from ncclscope_simulator import SimulationConfig

_BEGIN_NS = 1_780_000_000_000_000_000
_SECOND = 1_000_000_000


@pytest.fixture(scope="module")
def job() -> RecordedJob:
    return record(SimulationConfig(nccl="2.28.3", nodes=2, gpus=2, tp=2, pp=1, dp=2, split=False, layers=1))


def _followers(job: RecordedJob, schedule: Schedule) -> list[HostFollower]:
    return [
        HostFollower(
            host, job.period_ns, schedule, offset_ns=number * 10_000_000, stretches=2, period=2,
            end_ns=_BEGIN_NS + 10**15,
        )
        for number, host in enumerate(job.hosts)
    ]  # fmt: skip


def test_times_of_a_job_follow_the_speed_of_its_phases_and_back() -> None:
    schedule = Schedule(_BEGIN_NS, [Phase(name="a", seconds=10, speed=1.0), Phase(name="b", seconds=10, speed=2.0)])
    jobs = np.array([0, 5, 10, 20, 30, 40]) * _SECOND
    walls = schedule.wall_ns(jobs) - _BEGIN_NS
    assert (walls / _SECOND).tolist() == [0, 5, 10, 15, 20, 25]
    assert [schedule.job_ns(_BEGIN_NS + wall) for wall in walls.tolist()] == jobs.tolist()
    assert schedule.job_ns(_BEGIN_NS - 1) < 0


def test_a_stretch_that_is_repeated_is_aligned_and_joined_like_a_job(job: RecordedJob) -> None:
    schedule = Schedule(_BEGIN_NS, [Phase(name="load", seconds=60, speed=1.0)])
    followers, pipeline = _followers(job, schedule), Pipeline()
    for follower in followers:
        follower.reset({})
    now_ns = _BEGIN_NS
    while now_ns < _BEGIN_NS + 7 * job.period_ns:
        now_ns += _SECOND // 2
        for number, follower in enumerate(followers):
            for batch in follower.poll(now_ns + number * 10_000_000):
                pipeline.ingest_batch(batch, agent=str(number), session="s", job="j")
        pipeline.process_backlog(now_ns)
    rows = pipeline.store.operations.rows
    assert len(rows) == sum(follower.operations for follower in followers)
    assert np.count_nonzero(rows["match"] == Match.MATCHED) > 0.5 * len(rows)
    assert np.count_nonzero(rows["match"] == Match.UNMATCHED) < 0.01 * len(rows)  # at the ends of captures
    assert len(pipeline.store.collectives) > 100
    assert pipeline.store.findings == []


@pytest.mark.slow
def test_a_service_that_is_offered_more_than_usual_counts_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--hosts", "2", "--rate", "500", "--seconds", "6", "--overload", "4", "--overload-seconds", "3"]
    assert main([*asked, "--after-seconds", "4", "--small-steps"]) == 0
    table = capsys.readouterr().out
    assert "| 4 times |" in table
    assert "| all | 0 |" in table


def _look(answered_s: float, counted: int, took_s: float = 0.25) -> Look:
    return Look(
        at_ns=round(answered_s * 1e9), operations=counted, by_communicator={7: counted}, series=0,
        metrics_seconds=took_s, page_seconds=None, cpu_seconds=0.0, resident_mib=0.0, load_average=0.0,
    )  # fmt: skip


def _each_second(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return numbers * 10**9


def test_a_line_became_visible_between_the_look_that_did_not_count_it_and_the_one_that_did() -> None:
    looks = [_look(1.0, 1), _look(2.0, 1), _look(3.0, 3), _look(4.0, 4)]
    most, least = delays_s(looks, 7, _each_second, 0, 10**10)
    assert most.tolist() == [1.0, 2.0, 1.0, 1.0]
    assert least.tolist() == [0.0, 0.75, 0.0, 0.0]


def test_only_lines_that_were_due_in_the_time_asked_for_and_are_counted_at_last_are_told_of() -> None:
    looks = [_look(1.0, 1), _look(9.0, 3)]
    most, _ = delays_s(looks, 7, _each_second, 10**9, 10**10)
    assert most.tolist() == [8.0, 7.0]
    assert delays_s(looks, 8, _each_second, 0, 10**10)[0].tolist() == []
