"""The load that the benchmark makes is what a job would send, and a service under it loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.load.__main__ import main
from benchmarks.load.recorded import RecordedJob, record
from benchmarks.load.streams import HostFollower, Phase, Schedule

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
