from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclscope_service.clock.causality import ClockCheck
from ncclscope_service.detect.blind import Blind, HostVisibility
from ncclscope_service.detect.clock_fault import ClockFault
from ncclscope_service.detect.context import Context, Group, Ledger, by_urgency, names_of_ranks, without_explained
from ncclscope_service.store.records import Finding, FindingKind, HostClock, Severity

CONTEXT = Context(job="job")
SECOND = 1_000_000_000
FINDING = Finding(
    kind=FindingKind.LATE_RANK, severity=Severity.WARNING, job="job", comm_id=None, parallelism=None, ranks=(1,),
    hosts=(), since_ns=100, until_ns=None, confidence=0.9, summary="", evidence={},
)  # fmt: skip


@pytest.mark.parametrize(
    ("check", "trusted"),
    [
        (ClockCheck(), True),
        (ClockCheck(operations=10_000, violations=5), True),
        (ClockCheck(operations=10_000, violations=50), False),
        (ClockCheck(operations=50, violations=3), True),
        (ClockCheck(operations=10_000, violations=0, suspects=(1,)), False),
    ],
)
def test_clocks_are_trusted_until_they_contradict_causality(check: ClockCheck, trusted: bool) -> None:
    assert check.is_trusted is trusted


def test_a_clock_that_contradicts_itself_is_named_and_heals() -> None:
    detector = ClockFault()
    for at_ns in (10, 11 * SECOND):
        assert detector.findings() == []
        detector.ingest_check(ClockCheck(operations=1000, suspects=(1,)), ["node0", "node1"], CONTEXT, at_ns)
    (finding,) = detector.findings()
    assert finding.hosts == ("node1",)
    detector.ingest_check(ClockCheck(operations=1000), ["node0", "node1"], CONTEXT, 20 * SECOND)
    assert detector.findings()[0].until_ns == 20 * SECOND


def clock(*steps: int) -> HostClock:
    return HostClock(
        offset_ns=5_000_000.0, drift_ppm=0.0, at_ns=0, sigma_ns=100.0, interval_lo_ns=None, interval_hi_ns=None,
        samples=100, steps=steps, step_sizes_ns=tuple(-3_000_000 for _ in steps),
    )  # fmt: skip


def test_a_clock_that_was_set_is_told_once_and_closed() -> None:
    detector = ClockFault()
    for _ in range(2):
        detector.report_steps({"node0": clock(), "node1": clock(7 * SECOND), "node2": clock()}, CONTEXT)
    (finding,) = detector.findings()
    assert (finding.kind, finding.hosts) == (FindingKind.CLOCK_FAULT, ("node1",))
    assert finding.since_ns == finding.until_ns == 7 * SECOND - 5_000_000
    assert finding.summary.startswith("the clock of node1 was stepped by 3.0 ms;")
    assert finding.evidence["stepped_ns"] == -3_000_000
    detector.report_steps({"node0": clock(), "node1": clock(7 * SECOND, 90 * SECOND), "node2": clock()}, CONTEXT)
    assert len(detector.findings()) == 2


def contradicted(check: ClockCheck, context: Context) -> list[Finding]:
    """What is found when two looks show this."""
    detector = ClockFault()
    for at_ns in (0, 11 * SECOND):
        detector.ingest_check(check, ["node0", "node1"], context, at_ns)
    return detector.findings()


def test_collectives_that_were_joined_wrongly_are_our_blindness_and_no_fault_of_a_clock() -> None:
    (finding,) = contradicted(ClockCheck(operations=1000, misjoined=600), CONTEXT)
    assert finding.kind is FindingKind.BLIND
    assert finding.summary.startswith("60% of collectives between hosts do not end together: log lines were lost")


def test_of_lines_without_stamps_a_contradiction_is_ours_and_no_fault_of_a_clock() -> None:
    context = replace(CONTEXT, has_lines_without_stamps=True)
    (finding,) = contradicted(ClockCheck(operations=1000, suspects=(1,)), context)
    assert (finding.kind, finding.hosts) == (FindingKind.BLIND, ("node1",))
    assert "lines without stamps were matched to kernels of other steps" in finding.summary


def test_of_two_hosts_nothing_tells_whose_clock_was_set() -> None:
    detector = ClockFault()
    detector.report_steps({"node1": clock(7 * SECOND), "node0": clock()}, CONTEXT)
    (finding,) = detector.findings()
    assert finding.hosts == ("node0", "node1")
    assert finding.confidence == 0.5


GOOD = HostVisibility(host="node1", operations=100_000, covered=5000, matched=4990)


@pytest.mark.parametrize(
    ("sight", "words"),
    [
        (replace(GOOD, gaps=1), "was lost in 1 place"),
        (replace(GOOD, torn_lines=5000), "% of the operation lines of host node1 are torn"),
        (replace(GOOD, matched=2000), "only 40 % of the captured operations"),
    ],
)
def test_our_own_blindness_is_said(sight: HostVisibility, words: str) -> None:
    detector = Blind()
    for seconds in (1, 31):
        detector.ingest_visibility([sight], CONTEXT, seconds * SECOND)
    (finding,) = detector.findings()
    assert words in finding.summary
    assert finding.hosts == ("node1",)


def test_good_sight_is_quiet_and_a_gap_is_forgotten_after_five_minutes() -> None:
    detector = Blind()
    detector.ingest_visibility([GOOD], CONTEXT, SECOND)
    assert detector.findings() == []
    for seconds in (1, 400):
        detector.ingest_visibility([replace(GOOD, gaps=1)], CONTEXT, seconds * SECOND)
    assert detector.findings()[0].until_ns == 400 * SECOND


def test_what_several_hosts_lose_alike_is_one_finding_that_names_all_of_them() -> None:
    detector, other = Blind(), replace(GOOD, host="node2")
    detector.ingest_visibility([replace(GOOD, torn_lines=1000), other], CONTEXT, SECOND)
    assert detector.findings() == [], "what tears lines of one host does so on others, a little later"
    torn = [replace(GOOD, torn_lines=1000), replace(other, torn_lines=2000)]
    detector.ingest_visibility(torn, CONTEXT, 31 * SECOND)
    detector.ingest_visibility([GOOD, replace(other, torn_lines=2000)], CONTEXT, 32 * SECOND)
    (finding,) = detector.findings()
    assert (finding.hosts, finding.since_ns, finding.until_ns) == (("node1", "node2"), SECOND, None)
    assert finding.summary == "0 to 2 % of the operation lines of hosts node1 and node2 are torn: " + (
        "findings about them are less certain"
    )
    detector.ingest_visibility([GOOD, other], CONTEXT, 34 * SECOND)
    assert [each.until_ns for each in detector.findings()] == [34 * SECOND]


def test_torn_lines_of_a_job_that_is_over_are_told_at_once() -> None:
    detector = Blind()
    detector.ingest_visibility([replace(GOOD, torn_lines=1000)], replace(CONTEXT, is_over=True), SECOND)
    assert [each.hosts for each in detector.findings()] == [("node1",)]


def test_a_fault_is_one_finding_from_its_first_moment_on() -> None:
    ledger = Ledger()
    ledger.update("rank 1", FINDING)
    ledger.update("rank 1", replace(FINDING, since_ns=500, confidence=0.95))
    assert [(found.since_ns, found.confidence) for found in ledger.findings()] == [(100, 0.95)]
    ledger.close("rank 1", 900)
    ledger.update("rank 1", replace(FINDING, since_ns=1000))
    assert [(found.since_ns, found.until_ns) for found in ledger.findings()] == [(100, None)]
    ledger.close("rank 1", 2000)
    ledger.update("rank 1", replace(FINDING, since_ns=2000 + 61 * SECOND))
    assert [found.until_ns for found in ledger.findings()] == [None, 2000]


def test_the_severity_of_an_open_finding_does_not_fall() -> None:
    ledger = Ledger()
    for severity in (Severity.WARNING, Severity.CRITICAL, Severity.INFO):
        ledger.update("rank 1", replace(FINDING, severity=severity))
    assert [found.severity for found in ledger.findings()] == [Severity.CRITICAL]


def test_what_hurries_comes_first() -> None:
    closed = replace(FINDING, severity=Severity.CRITICAL, until_ns=200)
    hang = replace(FINDING, kind=FindingKind.HANG, severity=Severity.CRITICAL)
    assert by_urgency([closed, FINDING, hang]) == [hang, FINDING, closed]
    assert names_of_ranks([5]) == "rank 5"
    assert names_of_ranks([5, 7]) == "ranks 5 and 7"
    assert names_of_ranks(range(10)) == "ranks 0, 1, 2 and 7 more"


def _about(kind: FindingKind, *named: str, **more: Any) -> Finding:
    key = "slow_groups" if kind is FindingKind.SLOW_LINK else "groups"
    evidence: dict[str, object] = {key: list(named), "loss_ratio": more.pop("loss", 0.3)}
    return replace(FINDING, kind=kind, ranks=(), hosts=more.pop("hosts", ()), evidence=evidence, **more)


def test_findings_about_the_same_wires_are_one_and_the_strongest_leads() -> None:
    hosts = {"dp0": ("n1", "n2"), "pp0": ("n1", "n2"), "dp1": ("n3", "n4"), "pp1": ("n2", "n3"), "tp0": ("n1", "n1")}
    groups = {
        name: Group(comm_id=name, parallelism=None, global_ranks=(0, 1), hosts=each) for name, each in hosts.items()
    }
    link = _about(FindingKind.SLOW_LINK, "dp0", hosts=("n2",))
    drops = [_about(FindingKind.BANDWIDTH_DROP, name, loss=0.4) for name in ("pp0", "dp1", "pp1", "tp0")]
    below = _about(FindingKind.BELOW_LIMIT, "dp0", "pp0")
    (lead, *rest) = without_explained([below, *drops, link], groups)
    assert (lead.kind, lead.evidence["explains"]) == (
        FindingKind.SLOW_LINK,
        ["bandwidth_drop pp0", "bandwidth_drop pp1", "below_limit dp0", "below_limit pp0"],
    )
    assert rest == [drops[1], drops[3]], "another host, and the wires within a host"
    (lead,) = without_explained([_about(FindingKind.BANDWIDTH_DROP, "dp0", loss=0.2), drops[0], below], groups)
    assert (lead.evidence["groups"], len(lead.evidence)) == (["pp0"], 3), "the larger loss leads"
    before = replace(drops[0], until_ns=link.since_ns - 1, since_ns=0)
    assert without_explained([link, before], groups) == [link, before], "another time is another fault"


def test_a_slow_link_explains_who_is_late_since_then_but_not_a_rank_that_is_late_in_its_inner_group() -> None:
    groups = {"dp0": Group(comm_id="dp0", parallelism="DP", global_ranks=(0, 1), hosts=("n1", "n2"))}
    link = _about(FindingKind.SLOW_LINK, "dp0", hosts=("n2",))
    passed_on = replace(_about(FindingKind.LATE_RANK, "dp1"), ranks=(1,), parallelism="DP", severity=Severity.WARNING)
    (lead,) = without_explained([passed_on, link], groups)
    assert lead.evidence["explains"] == ["late_rank dp1"]
    for other in (
        replace(passed_on, parallelism="TP"),
        replace(passed_on, severity=Severity.CRITICAL),
        replace(passed_on, since_ns=link.since_ns - 1),
    ):
        assert without_explained([other, link], groups) == [link, other]
