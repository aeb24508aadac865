from __future__ import annotations

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.reported import LoggedFact, Reported
from ncclscope_service.store.records import FindingKind, Severity
from ncclscope_wire import facts
from ncclscope_wire.facts import Fact

SECOND = 1_000_000_000
CONTEXT = Context(job="job")


def said(fact: Fact, rank: int | None = None, at: int = 1) -> LoggedFact:
    return LoggedFact(fact, "job.log", rank, at * SECOND)


def test_a_watchdog_names_its_collective_its_group_and_who_had_not_enqueued_it() -> None:
    detector = Reported()
    timeout = facts.TorchTimeout(line=7, rank=1, sequence=42, operation="ALLREDUCE", timeout_ms=600_000, ran_ms=600_010)
    progress = [
        facts.TorchProgress(
            line=8 + rank,
            what="failure",
            rank=rank,
            last_enqueued=enqueued,
            last_completed=41,
            group="TP",
            failed_at=42,
        )
        for rank, enqueued in ((1, 44), (2, 41))
    ]
    detector.ingest_facts([said(timeout), *map(said, progress)], CONTEXT)
    (finding,) = detector.findings(SECOND)
    assert finding.kind is FindingKind.REPORTED_FAILURE
    assert finding.severity is Severity.CRITICAL
    assert finding.summary == (
        "PyTorch's watchdog gave up on ALLREDUCE 42 of TP after 600 s; rank 2 of the group had not enqueued it "
        "(reported 3 times)"
    )
    assert finding.evidence["group_ranks_behind"] == [2]
    assert finding.evidence["where"] == ["job.log:7", "job.log:9", "job.log:10"]


def test_lines_that_say_the_same_are_one_finding_that_names_who_says_it() -> None:
    detector = Reported()
    for rank in (3, 1):
        failure = facts.CudaFailure(line=rank, host="node1", pid=rank, error="out of memory", code=2)
        detector.ingest_facts([said(failure, rank)], CONTEXT)
    (finding,) = detector.findings(SECOND)
    assert (finding.ranks, finding.hosts) == ((1, 3), ("node1",))
    assert finding.summary == "a CUDA call failed: out of memory (reported 2 times by ranks 1 and 3)"
    assert finding.evidence["out_of_memory"] is True


def test_what_healthy_jobs_print_is_no_failure() -> None:
    detector = Reported()
    detector.ingest_facts(
        [
            said(facts.LibraryMissing(line=1, library="libibverbs.so")),
            said(facts.IbEvent(line=2, event="GID table changed", severity="non-fatal", nic="mlx5_0")),
            said(facts.PortFailover(line=3, device=0, is_failed=False)),
        ],
        CONTEXT,
    )
    assert detector.findings(SECOND) == []


def test_a_report_closes_when_nothing_says_it_any_more() -> None:
    detector = Reported()
    detector.ingest_facts([said(facts.ConnectionTrouble(line=1, what="closed", peer="10.0.0.1<80>"), 0)], CONTEXT)
    assert [finding.until_ns for finding in detector.findings(2 * SECOND)] == [None]
    assert [finding.until_ns for finding in detector.findings(1000 * SECOND)] == [SECOND]


def test_reports_are_bounded() -> None:
    detector = Reported()
    detector.ingest_facts([said(facts.CudaFailure(line=k, error=f"error {k}")) for k in range(100)], CONTEXT)
    assert len(detector.findings(SECOND)) == 64
