from __future__ import annotations

import numpy as np

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.progress import PROGRESS
from ncclscope_service.detect.stopped_logging import StoppedLogging
from ncclscope_service.store.records import Finding
from ncclscope_wire.batch import Columns

SECOND = 1_000_000_000
CONTEXT = Context(
    job="job",
    groups={0: Group(comm_id="0xa", parallelism="DP", global_ranks=(4, 5, 6), hosts=("node0", "node1", "node2"))},
)


def counts(second: int, stopped: dict[int, int]) -> Columns:
    ends = [min(second, stopped.get(rank, second)) for rank in range(3)]
    return np.array([(0, -1, -1, rank, 20 * end, end * SECOND) for rank, end in enumerate(ends)], PROGRESS)


def watch(seconds: int, stopped: dict[int, int], *, is_stuck: bool = False) -> list[Finding]:
    detector = StoppedLogging()
    for second in range(1, seconds):
        detector.ingest_progress(counts(second, stopped), CONTEXT)
        detector.findings(second * SECOND, is_stuck=is_stuck)
    return detector.findings(seconds * SECOND, is_stuck=is_stuck)


def test_a_rank_whose_log_stops_while_the_others_go_on_is_named() -> None:
    (finding,) = watch(120, {1: 60})
    assert (finding.ranks, finding.hosts) == ((5,), ("node1",))
    assert "its log is lost" in finding.summary


def test_a_job_that_says_nothing_more_is_told_after_five_minutes() -> None:
    assert watch(300, dict.fromkeys(range(3), 60)) == []
    (finding,) = watch(400, dict.fromkeys(range(3), 60))
    assert finding.ranks == ()
    assert finding.since_ns == 60 * SECOND


def test_a_hang_explains_the_silence() -> None:
    assert watch(400, dict.fromkeys(range(3), 60), is_stuck=True) == []


def test_a_job_that_logs_is_quiet() -> None:
    assert watch(400, {}) == []
