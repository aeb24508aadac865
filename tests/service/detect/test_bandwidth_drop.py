from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from service.detect.simulated_job import ORIGIN_NS, Job, Simulation

from ncclscope_service.detect.bandwidth import BandwidthDrop
from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.slow_link import (
    Leaning,
    SlowGroup,
    hosts_that_explain,
    locate_slow_groups,
    slow_link_finding,
)
from ncclscope_service.detect.statistics import STEADY, DriftWatch, DropWatch
from ncclscope_service.store.records import Finding, FindingKind


def run(job: Job, seconds: float, seed: int = 0) -> list[tuple[float, list[Finding]]]:
    simulation, detector = Simulation(job, seed), BandwidthDrop()
    history = []
    for collectives in simulation.seconds(seconds):
        detector.ingest_collectives(collectives, simulation.context)
        history.append(((simulation.now_ns - ORIGIN_NS) / 1e9, detector.findings()))
    return history


@pytest.mark.parametrize(
    "share", [pytest.param(0.2, marks=pytest.mark.slow), 0.4, pytest.param(0.6, marks=pytest.mark.slow)]
)
def test_a_link_slow_from_the_start_is_found_by_its_siblings(share: float) -> None:
    # two ranks of each data-parallel group per host: groups on hosts 0 and 1, 2 and 3, and so on
    job = Job(tensor=2, data=4, pipeline=4, gpus_per_host=4, slow_host=3, slow_share=share)
    history = run(job, 40)
    found = [(seconds, finding) for seconds, findings in history for finding in findings]
    assert found[0][0] <= 40
    assert {finding.kind for _, finding in found} == {FindingKind.SLOW_LINK}
    assert all("node3" in finding.hosts and len(finding.hosts) <= 2 for _, finding in found)


def test_a_drop_in_mid_run_is_found_and_heals() -> None:
    job = Job(slow_host=1, slow_share=0.4, fault_from_step=200, fault_to_step=300)
    history = run(job, 140)
    first = next(seconds for seconds, findings in history if findings)
    assert 60 < first < 90
    assert all(finding.until_ns is not None for finding in history[-1][1])


def test_all_groups_dropping_at_once_are_one_finding() -> None:
    job = Job(tensor=4, data=4, pipeline=1, gpus_per_host=4, slow_host=1, slow_share=0.4, fault_from_step=200)
    final = run(job, 100)[-1][1]
    assert [finding.kind for finding in final] == [FindingKind.BANDWIDTH_DROP]
    assert final[0].ranks == ()
    assert final[0].comm_id is None
    assert "4 DP groups lost" in final[0].summary
    assert "(baseline: only" in final[0].summary


def test_a_healthy_job_has_no_slow_links() -> None:
    assert [finding.summary for _, found in run(Job(), 60) for finding in found] == []


@pytest.mark.slow
@pytest.mark.parametrize("job", [Job(), Job(data=4, gpus_per_host=4, imbalance_ns=20e6, busbw_cv=0.05)])
def test_healthy_jobs_have_no_slow_links(job: Job) -> None:
    for seed in range(2):
        assert [finding.summary for _, found in run(job, 150, seed) for finding in found] == []


def test_the_baseline_is_not_learnt_from_the_fault() -> None:
    random = np.random.default_rng(3)
    watch = DropWatch(STEADY)
    for window in range(400):
        watch.ingest_window(window, float(random.normal(0, 0.03)))
    for window in range(400, 3000):
        watch.ingest_window(window, float(np.log(0.7) + random.normal(0, 0.03)))
    assert watch.drop is not None
    assert watch.drop.baseline == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize(
    ("slow", "healthy", "culprits"),
    [
        (["ab", "bc"], ["cd"], "b"),
        (["ab"], ["cd"], "ab"),
        (["ab", "ab"], ["ac"], "b"),
        (["ab", "cd"], ["ac"], "bd"),
        (["ab"], ["ac", "bc"], ""),
        ([], ["ab"], ""),
    ],
)
def test_slow_groups_meet_at_the_culprit(slow: list[str], healthy: list[str], culprits: str) -> None:
    assert hosts_that_explain([frozenset(s) for s in slow], [frozenset(h) for h in healthy]) == frozenset(culprits)


def test_a_drift_over_hours_is_told_and_noise_is_not() -> None:
    random = np.random.default_rng(5)
    drifting, steady = DriftWatch(), DriftWatch()
    for window in range(4000):
        lost = 0.15 * max(0, window - 400) / 3600
        drifting.ingest_window(window, float(random.normal(0, 0.05)) - lost)
        steady.ingest_window(window, float(random.normal(0, 0.05)))
    assert steady.drift is None
    assert drifting.drift is not None
    assert 0.05 < drifting.drift.share < 0.16


def group(name: str, parallelism: str, ranks: tuple[int, ...]) -> Group:
    return Group(
        comm_id=name, parallelism=parallelism, global_ranks=ranks, hosts=tuple(f"node{rank // 2}" for rank in ranks)
    )


LOST = SlowGroup(
    loss=0.2, level=np.log(32e9), reference=np.log(40e9), reference_is_siblings=True, since_ns=1, confidence=0.9
)


def test_a_card_that_some_ranks_of_a_host_share_is_located_by_them() -> None:
    groups = {
        0: group("dp0", "DP", (0, 2)), 1: group("dp1", "DP", (1, 3)), 2: group("dp2", "DP", (4, 6)),
        3: group("pp0", "PP", (2, 6)), 4: group("pp1", "PP", (0, 4)), 5: group("pp2", "PP", (3, 7)),
    }  # fmt: skip
    context = Context(job="job", groups=groups)
    slow: dict[int, SlowGroup] = dict.fromkeys((0, 3), replace(LOST, reference_is_siblings=False))
    (located,) = locate_slow_groups(slow, frozenset({1, 2, 4, 5}), context)
    assert (located.ranks, located.hosts) == ((2,), frozenset({"node1"}))
    finding = slow_link_finding(located, slow, context)
    assert (finding.ranks, finding.hosts) == ((2,), ("node1",))
    assert finding.summary.endswith("check the NIC, cable and switch port of rank 2")


@pytest.mark.parametrize(("behind", "hosts"), [(0.21, [{"node1"}]), (0.11, [])])
def test_groups_that_are_not_slow_for_certain_tell_which_of_two_hosts_it_is(
    behind: float, hosts: list[set[str]]
) -> None:
    """The link between two hosts is slow; groups over either of them lack about as much and nothing, or half of it."""
    groups = {
        0: group("pp0", "PP", (2, 6)), 1: group("pp1", "PP", (0, 4)),
        2: group("dp0", "DP", (0, 2)), 3: group("dp1", "DP", (4, 6)),
    }  # fmt: skip
    leanings = {2: Leaning(behind=behind, error=0.07), 3: Leaning(behind=0.2 - behind, error=0.07)}
    context = Context(job="job", groups=groups)
    located = locate_slow_groups({0: LOST}, frozenset({1}), context, leanings)
    assert [one.hosts for one in located] == hosts
    for one in located:
        assert slow_link_finding(one, {0: LOST}, context).confidence == pytest.approx(0.9 * 0.98, abs=0.02)


def test_two_hosts_are_named_where_no_group_can_tell_them_apart() -> None:
    groups = {0: group("pp0", "PP", (0, 2)), 1: group("dp0", "DP", (4, 6))}
    (located,) = locate_slow_groups({0: LOST}, frozenset({1}), Context(job="job", groups=groups))
    assert located.hosts == {"node0", "node1"}
    assert slow_link_finding(located, {0: LOST}, Context(job="job", groups=groups)).confidence == 0.45
