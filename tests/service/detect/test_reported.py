from __future__ import annotations

from dataclasses import replace
from itertools import chain

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.reported import LoggedFact, Reported
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_wire import facts
from ncclscope_wire.facts import Fact

SECOND = 1_000_000_000
CONTEXT = Context(job="job")


def said(fact: Fact, rank: int | None = None, at: int = 1) -> LoggedFact:
    return LoggedFact(fact, "job.log", rank, at * SECOND)


def findings(*logged: Fact | LoggedFact, is_stuck: bool = False) -> list[Finding]:
    detector = Reported()
    detector.ingest_facts([each if isinstance(each, LoggedFact) else said(each) for each in logged], CONTEXT)
    return detector.findings(SECOND, is_stuck=is_stuck)


def test_a_watchdog_names_its_collective_its_group_and_who_had_not_enqueued_it() -> None:
    timeout = facts.TorchTimeout(line=7, rank=1, sequence=42, operation="ALLREDUCE", timeout_ms=600_000)
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
    (finding,) = findings(timeout, *progress)
    assert finding.kind is FindingKind.REPORTED_FAILURE
    assert finding.severity is Severity.CRITICAL
    assert finding.summary == (
        "PyTorch's watchdog gave up on ALLREDUCE 42 of TP after 600 s; rank 2 of the group had not enqueued it "
        "(reported by ranks 1 and 2 of the group)"
    )
    assert finding.evidence["group_ranks_behind"] == [2]
    assert finding.evidence["where"] == ["job.log:7", "job.log:9", "job.log:10"]


def gave_up(rank: int, sequence: int, *, group: str) -> list[LoggedFact]:
    """The four lines of one time-out: as it is found, the progress of the group, as it is thrown, and `what()`."""
    work = facts.TorchTimeout(
        line=1, rank=rank, sequence=sequence, operation="BROADCAST", timeout_ms=300_000, global_rank=rank
    )
    thrown = replace(work, line=3, group_id=group)
    progress = facts.TorchProgress(
        line=2,
        what="failure",
        rank=rank,
        last_enqueued=sequence + 1,
        last_completed=sequence - 1,
        group_id=group,
        failed_at=sequence,
        global_rank=rank,
    )
    return [said(fact) for fact in (work, progress, thrown, replace(thrown, line=4, global_rank=None))]


def test_time_outs_of_several_ranks_are_one_event_that_names_who_is_furthest_behind() -> None:
    given_up = (gave_up(rank, sequence, group="0") for rank, sequence in ((4, 1211), (1, 7), (5, 1211)))
    (finding,) = findings(*chain(*given_up))
    assert finding.ranks == (1, 4, 5)
    assert finding.summary == (
        "PyTorch's watchdog gave up on BROADCAST 1211 (ranks 4 and 5) and BROADCAST 7 (rank 1) of process group 0 "
        "after 300 s; rank 1 is furthest behind (reported by ranks 1, 4 and 5)"
    )
    assert finding.evidence["group_ranks_furthest_behind"] == [1]
    assert finding.evidence["sequences"] == {"1": 7, "4": 1211, "5": 1211}


def test_time_outs_of_several_groups_are_one_event_and_copies_of_a_line_are_one_time_out() -> None:
    (finding,) = findings(*chain(*(gave_up(rank, 8, group=group) for rank, group in ((2, "7"), (3, "7"), (2, "9")))))
    assert (finding.ranks, finding.evidence["groups"], finding.evidence["lines"]) == ((2, 3), 2, 12)
    assert finding.summary == (
        "PyTorch's watchdog gave up on BROADCAST 8 of process group 7 after 300 s and on operations of 1 other group "
        "(reported by ranks 2 and 3)"
    )


def test_lines_that_say_the_same_are_one_finding_that_names_who_says_it() -> None:
    failures = (facts.CudaFailure(line=rank, host="node1", pid=rank, error="out of memory") for rank in (3, 1))
    (finding,) = findings(*(said(each, each.pid) for each in failures))
    assert (finding.ranks, finding.hosts) == ((1, 3), ("node1",))
    assert finding.summary == "a CUDA call failed: out of memory (reported 2 times by ranks 1 and 3)"
    assert finding.evidence["out_of_memory"] is True


def test_what_healthy_jobs_print_is_no_failure() -> None:
    event = facts.IbEvent(line=2, event="GID table changed", severity="non-fatal", nic="mlx5_0")
    assert findings(event, facts.PortFailover(line=3, device=0, is_failed=False)) == []


def test_a_report_closes_when_nothing_says_it_any_more() -> None:
    detector = Reported()
    detector.ingest_facts([said(facts.ConnectionTrouble(line=1, what="retries", peer="10.0.0.1<80>"), 0)], CONTEXT)
    assert [finding.until_ns for finding in detector.findings(2 * SECOND)] == [None]
    assert [finding.until_ns for finding in detector.findings(1000 * SECOND)] == [SECOND]


# What processes say while others exit


ACCEPT = "Accept failed Resource temporarily unavailable"


def exiting() -> list[LoggedFact]:
    last_words = [
        facts.ProxyTrouble(line=9, host="node1", pid=1, what="Accept failed", text=ACCEPT),
        facts.ProxyTrouble(line=10, host="node1", pid=1, what="Could not receive type from localRank"),
        facts.ProxyTrouble(line=11, host="node2", pid=2, what="Failed to execute operation", operation="Close"),
        facts.ConnectionTrouble(line=12, host="node2", pid=2, what="closed"),
        facts.CommunicatorTrouble(line=13, host="node2", pid=2, what="abort"),
        facts.OtherWarning(line=14, host="node2", pid=2, text="one went away"),
    ]
    return [said(fact)._replace(is_behind_operations=True) for fact in last_words]


def test_what_is_said_while_processes_exit_is_no_failure() -> None:
    detector = Reported()
    detector.ingest_facts(exiting(), CONTEXT)
    detector.ingest_newest_lines({("node1", 1): 8, ("node2", 2): 8})
    assert detector.findings(SECOND) == []


def test_it_is_one_where_the_process_goes_on_where_something_else_failed_and_where_the_job_stands_still() -> None:
    failure = said(facts.CudaFailure(line=3, host="node1", pid=1, error="an illegal memory access was encountered"))
    for case in ("goes on", "something failed", "stands still"):
        detector = Reported()
        detector.ingest_facts([*([failure] if case == "something failed" else []), *exiting()], CONTEXT)
        detector.ingest_newest_lines({("node1", 1): 12 if case == "goes on" else 8, ("node2", 2): 8})
        summaries = [finding.summary for finding in detector.findings(SECOND, is_stuck=case == "stands still")]
        assert f"an NCCL proxy thread failed: {ACCEPT} (reported once by host node1)" in summaries


def test_a_request_that_fails_before_the_end_is_a_failure() -> None:
    failed = facts.ProxyTrouble(line=1, host="node1", pid=1, what="Failed to execute operation", operation="Setup")
    [finding] = findings(failed)
    assert (finding.hosts, finding.evidence["processes"]) == (("node1",), 1)


# Warnings that nobody knows


def test_unknown_warnings_are_one_finding_for_each_shape() -> None:
    texts = [*(f"peer 10.0.0.{n}<4{n}> lost {n} credits at 0x7f{n}0" for n in range(6)), "link mlx5_0:1 is slow"]
    first, second = findings(
        *(facts.OtherWarning(line=n, host=f"node{n % 3}", pid=n, text=text) for n, text in enumerate(texts))
    )
    assert {finding.kind for finding in (first, second)} == {FindingKind.REPORTED_FAILURE}
    assert {finding.severity for finding in (first, second)} == {Severity.WARNING}
    lines = {finding.evidence["lines"]: finding for finding in (first, second)}
    assert lines[6].hosts == ("node0", "node1", "node2")
    assert lines[1].summary == "NCCL warned: link mlx5_0:1 is slow (reported once by host node0)"


def test_a_warning_in_front_of_the_first_operation_is_reported_at_once() -> None:
    assert len(findings(facts.OtherWarning(line=3, host="node1", pid=1, text="new"))) == 1


def test_a_failed_call_of_verbs_is_one_failure_of_all_hosts_by_its_error() -> None:
    call = facts.VerbsFailure(
        line=0, host="node0", pid=1, call="ibv_modify_qp", error="Connection timed out", nic="mlx5_0"
    )
    (finding,) = findings(call, replace(call, host="node1"))
    assert (finding.kind, finding.severity) == (FindingKind.REPORTED_FAILURE, Severity.CRITICAL)
    assert finding.summary == (
        "ibv_modify_qp failed with Connection timed out on mlx5_0 (reported 2 times by hosts node0 and node1)"
    )


def test_what_libfabric_could_not_do_is_one_failure_of_all_hosts_by_its_error() -> None:
    failures = [
        facts.OfiFailure(line=n, host=f"node{n}", pid=1, what="register memory", code=-22, error="Invalid argument")
        for n in (0, 1)
    ]
    first, second = findings(*failures, facts.OfiFailure(line=9, host="node2", what="complete a request"))
    assert {(each.kind, each.severity) for each in (first, second)} == {
        (FindingKind.REPORTED_FAILURE, Severity.CRITICAL)
    }
    assert {first.summary, second.summary} == {
        "libfabric could not register memory: Invalid argument (error -22) (reported 2 times by hosts node0 and node1)",
        "libfabric could not complete a request (reported once by host node2)",
    }


def test_what_libfabric_could_not_do_behind_the_last_operation_is_no_failure_by_itself() -> None:
    fact = facts.OfiFailure(line=9, host="node2", pid=1, what="complete a request", code=107)
    behind = said(fact)._replace(is_behind_operations=True)
    assert findings(behind) == []
    assert [each.summary for each in findings(behind, is_stuck=True)] == [
        "libfabric could not complete a request (error 107) (reported once by host node2)"
    ]


def test_a_faster_path_that_could_not_be_used_is_a_misconfiguration() -> None:
    reasons = ("SHARP coll init error: Cannot create SHArP job(-11)", "Cannot initialize CollNet")
    [finding] = findings(
        *(facts.PathNotUsed(line=1, host="node1", pid=1, path="CollNet", reason=reason) for reason in reasons)
    )
    assert (finding.kind, finding.severity) == (FindingKind.MISCONFIGURATION, Severity.WARNING)
    assert finding.summary == (
        "CollNet could not be used, and NCCL goes on with a slower path: "
        "SHARP coll init error: Cannot create SHArP job(-11) (reported 2 times by host node1)"
    )


def test_reports_are_bounded() -> None:
    assert len(findings(*(facts.CudaFailure(line=k, error=f"error {k}") for k in range(100)))) == 64
