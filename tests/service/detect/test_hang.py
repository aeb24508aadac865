from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from service.detect.simulated_job import Job, Simulation

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.hang import PROGRESS, Hang
from ncclscope_service.rows import Finding, Severity
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

SECOND = 1_000_000_000
GROUPS = Simulation(Job()).groups
CONTEXT = Context(job="job", groups=GROUPS)


@dataclass
class Counters:
    """What the logs of eight ranks show, second by second: the others run on until they need the one that stopped."""

    stopped: dict[int, float] = field(default_factory=dict[int, float])
    """By global rank: from when on it enqueues nothing."""

    def at(self, seconds: float) -> Columns:
        made = []
        for index, group in GROUPS.items():
            if group.parallelism == "PP":
                continue
            per_second = {"TP": 40, "DP": 4}.get(group.parallelism or "", 1)
            for rank, name in enumerate(group.global_ranks):
                until, ahead = self._until(name, group.global_ranks)
                when = min(seconds, until)
                made.append((index, NO_NUMBER, NO_NUMBER, rank, int(when * per_second) + ahead, int(when * SECOND)))
        return np.array(made, dtype=PROGRESS)

    def _until(self, rank: int, members: tuple[int, ...]) -> tuple[float, int]:
        if not self.stopped:
            return float("inf"), 0
        first = min(self.stopped.values())
        if rank in self.stopped:
            return self.stopped[rank], 0
        # the peers enqueue one more, then wait; those they hold up stop elsewhere, without being ahead
        return first + 0.1, int(any(member in self.stopped for member in members))


def watch(counters: Counters, seconds: int, context: Context = CONTEXT) -> list[tuple[int, list[Finding]]]:
    detector = Hang()
    history = []
    for second in range(1, seconds + 1):
        detector.feed(counters.at(float(second)), context)
        history.append((second, detector.findings(second * SECOND)))
    return history


def test_the_rank_that_stopped_is_named_within_fifteen_seconds() -> None:
    history = watch(Counters({5: 60.0}), 90)
    first, findings = next((second, found) for second, found in history if found)
    assert 60 < first <= 75
    assert [finding.ranks for finding in findings] == [(5,)]
    assert findings[0].hosts == ("node2",)
    assert findings[0].severity is Severity.CRITICAL
    assert "rank 5 (node2) has not enqueued operation" in findings[0].summary
    assert len(history[-1][1]) == 1


def test_a_job_that_runs_or_that_ended_evenly_is_no_hang() -> None:
    assert all(not found for _, found in watch(Counters(), 60))
    all_stop = Counters(dict.fromkeys(range(8), 40.0))
    assert all(not found for _, found in watch(all_stop, 90))


def test_blame_is_not_put_on_a_rank_that_waits_elsewhere() -> None:
    tensor = next(index for index, group in GROUPS.items() if group.global_ranks == (4, 5))
    data = next(index for index, group in GROUPS.items() if group.global_ranks == (4, 6))
    detector = Hang()
    for second in range(1, 80):
        now = min(second, 60)
        counts = [
            (tensor, -1, -1, 0, now * 40 + (second > 60), now * SECOND),
            (tensor, -1, -1, 1, now * 40, now * SECOND),
            (data, -1, -1, 0, now * 4, now * SECOND),
            (data, -1, -1, 1, now * 4 + (second > 60), now * SECOND),
        ]
        detector.feed(np.array(counts, dtype=PROGRESS), CONTEXT)
    (finding,) = detector.findings(79 * SECOND)
    assert finding.ranks == (5,)
    assert finding.evidence["waiting_ranks"] == [4, 6]


def test_a_missing_send_names_its_sender() -> None:
    pipeline = next(index for index, group in GROUPS.items() if group.parallelism == "PP")
    sender, receiver = GROUPS[pipeline].global_ranks
    detector = Hang()
    for second in range(1, 80):
        now = min(second, 60)
        counts = [
            (pipeline, 0, 1, 0, now * 8, now * SECOND),
            (pipeline, 0, 1, 1, now * 8 + (second > 60), now * SECOND),
        ]
        detector.feed(np.array(counts, dtype=PROGRESS), CONTEXT)
    (finding,) = detector.findings(79 * SECOND)
    assert finding.ranks == (sender,)
    assert finding.evidence["waiting_ranks"] == [receiver]


def test_counts_that_always_differed_are_not_a_hang() -> None:
    detector = Hang()
    index = next(iter(GROUPS))
    for second in range(1, 120):
        now = min(second, 60)
        counts = [(index, -1, -1, 0, 1000 + now * 40, now * SECOND), (index, -1, -1, 1, now * 40, now * SECOND)]
        detector.feed(np.array(counts, dtype=PROGRESS), CONTEXT)
    assert detector.findings(119 * SECOND) == []


def test_ranks_of_a_host_we_do_not_hear_are_not_accused() -> None:
    context = replace(CONTEXT, silent_hosts=frozenset({"node2"}))
    assert all(not found for _, found in watch(Counters({5: 60.0}), 90, context))


def test_it_closes_when_the_job_goes_on() -> None:
    detector = Hang()
    counters = Counters({5: 60.0})
    for second in range(1, 80):
        detector.feed(counters.at(float(second)), CONTEXT)
    assert detector.findings(79 * SECOND)[0].until_ns is None
    detector.feed(Counters().at(80.0), CONTEXT)
    assert detector.findings(80 * SECOND)[0].until_ns == 80 * SECOND
