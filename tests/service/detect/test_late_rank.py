from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from service.detect.simulated_job import ORIGIN_NS, Job, Simulation

from ncclscope_service.detect.context import SharedGpu
from ncclscope_service.detect.late_rank import LateRank
from ncclscope_service.detect.late_rank_case import severity_of_cost
from ncclscope_service.detect.settings import LateRankSettings
from ncclscope_service.detect.statistics import firmness, margins_over_others
from ncclscope_service.store.records import Finding, Severity
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import OPERATION_CODES


def run(job: Job, seconds: float, seed: int = 0) -> tuple[Simulation, LateRank, list[tuple[float, list[Finding]]]]:
    simulation, detector = Simulation(job, seed), LateRank()
    history = []
    for collectives in simulation.seconds(seconds):
        detector.ingest_collectives(collectives, simulation.context)
        history.append(((simulation.now_ns - ORIGIN_NS) / 1e9, detector.findings()))
    return simulation, detector, history


def test_a_margin_is_firm_when_it_is_large_against_how_much_it_changes() -> None:
    random = np.random.default_rng(0)
    steady, jitter = random.normal(5e6, 0.5e6, 16), random.normal(0.0, 5e6, (200, 16))
    assert firmness(steady) > 10
    assert max(firmness(each) for each in jitter) < 5
    assert margins_over_others(np.array([[3.0], [1.0], [2.0]])).tolist() == [[1.0], [-2.0], [-1.0]]


@pytest.mark.parametrize(
    "late_ns", [1e6, pytest.param(2e6, marks=pytest.mark.slow), pytest.param(5e6, marks=pytest.mark.slow)]
)
def test_a_late_rank_is_named_within_twenty_seconds_and_nobody_else(late_ns: float) -> None:
    for seed in range(3):
        _, _, history = run(Job(late_rank=5, late_ns=late_ns), 30, seed)
        named = [(seconds, found) for seconds, found in history if found]
        assert named[0][0] <= 20
        assert {finding.ranks for _, found in named for finding in found} == {(5,)}
        assert {finding.hosts for _, found in named for finding in found} == {("node2",)}


@pytest.mark.parametrize(("late_ns", "steps"), [(40e6, 10), (4e6, 20)])
@pytest.mark.parametrize("step_ns", [0.25e9, 1e9])
def test_a_clear_case_is_named_within_ten_to_twenty_steps_of_any_length(
    late_ns: float, steps: int, step_ns: float
) -> None:
    job = Job(late_rank=5, late_ns=late_ns * step_ns / 0.25e9, step_ns=step_ns)
    simulation, _, history = run(job, 50 * step_ns * 1e-9)
    seconds, found = next((seconds, found) for seconds, found in history if found)
    assert {finding.ranks for finding in found} == {(5,)}
    assert simulation.context.step_ns
    assert seconds * 1e9 <= steps * simulation.context.step_ns


def test_a_rank_that_shares_its_gpu_is_not_called_late_and_the_others_are_excused_as_ever() -> None:
    def named(sharing: tuple[int, ...]) -> set[tuple[int, ...]]:
        simulation, detector = Simulation(Job(late_rank=5, late_ns=5e6)), LateRank()
        shared = (SharedGpu("node2", 0x60, sharing),)
        groups = {
            index: replace(group, shared_gpus=shared if set(sharing) <= {*group.global_ranks} else ())
            for index, group in simulation.groups.items()
        }
        for collectives in simulation.seconds(30):
            detector.ingest_collectives(collectives, replace(simulation.context, groups=groups))
            detector.findings()
        return {finding.ranks for finding in detector.findings()}

    assert named((2, 3)) == {(5,)}
    assert named((5, 6)) == set()


def test_what_named_a_rank_is_not_forgotten_when_the_last_steps_alone_would_not_name_it() -> None:
    _, _, history = run(Job(late_rank=5, late_ns=1.5e6, jitter=0.02, rank_correlation=0.9), 60)
    stated = [finding.confidence for _, found in history for finding in found if finding.until_ns is None]
    assert len(stated) > 20
    assert min(stated) >= 0.98


def test_where_steps_are_long_more_of_them_show_a_faint_case() -> None:
    job = Job(late_rank=5, late_ns=6e6, step_ns=2e9, jitter=0.01, rank_correlation=0.0)
    _, _, history = run(job, 100)
    assert [found[0].ranks for _, found in history if found][:1] == [(5,)]


def test_steps_of_other_groups_that_are_steady_show_a_case_sooner() -> None:
    def found(groups: int) -> list[tuple[int, ...]]:
        job = Job(data=groups, step_ns=1e9, late_rank=5, late_ns=2e6, jitter=0.0005)
        _, detector, _ = run(job, 15)
        return [finding.ranks for finding in detector.findings()]

    assert found(4) == [(5,)]
    assert found(1) == []


def test_a_healthy_job_names_nobody_in_its_first_steps() -> None:
    for seed in range(12):
        _, _, history = run(Job(jitter=0.05), 6, seed)
        assert not any(found for _, found in history)


def test_the_sentence_says_who_how_late_how_often_where_and_what_it_costs() -> None:
    _, _, history = run(Job(late_rank=5, late_ns=2e6), 20)
    (finding,) = history[-1][1]
    assert re.fullmatch(
        r"rank 5 \(node2\) is a straggler: in each step it is the last to reach 8 of 8 AllReduce operations of "
        r"TP group tp2, by (1\.9|2\.0|2\.1) ms on average; costs up to (4\.[89]|5\.\d) % of step time",
        finding.summary,
    )
    assert finding.severity is Severity.WARNING
    assert finding.parallelism == "TP"
    named = finding.evidence["collectives"]
    assert isinstance(named, list)
    assert len(named) == 8
    assert all(re.fullmatch(r"tp2:\d+", each) for each in named)
    assert finding.until_ns is None


def test_the_numbers_of_a_rank_that_loses_time_at_one_place_of_a_step_are_of_that_place() -> None:
    simulation, detector = Simulation(Job(jitter=0.001, late_rank=5, late_ns=0.0)), LateRank()
    began_ns = 0
    for number, collectives in enumerate(simulation.steps(80)):
        if number >= 40:
            at = np.flatnonzero(collectives["communicator"] == simulation.by_kind["TP"][2])[:1]
            collectives["last_rank"][at], collectives["blame_ns"][at] = 1, 12_000_000
            began_ns = int(collectives["end_true_ns"].min()) if number == 40 else began_ns
        detector.ingest_collectives(collectives, simulation.context)
    (finding,) = detector.findings()
    assert finding.summary.startswith(
        "rank 5 (node2) is a straggler: once per step it reaches an AllReduce of TP group tp2 12.0 ms late (1 of 8)"
    )
    evidence = finding.evidence
    assert (evidence["longest_ns"], evidence["late_operations_per_step"], evidence["operations_per_step"]) == (
        12_000_000, 1, 8,
    )  # fmt: skip
    assert evidence["cost_ns"] == pytest.approx(12e6, rel=0.05)
    assert abs(finding.since_ns - began_ns) <= 2 * Job().step_ns


def test_severity_follows_cost_and_lateness_without_a_cost_is_information() -> None:
    assert [severity_of_cost(ratio, LateRankSettings()) for ratio in (0.0004, 0.01, 0.1)] == [
        Severity.INFO, Severity.WARNING, Severity.CRITICAL,
    ]  # fmt: skip


def test_blame_goes_back_through_tensor_pipeline_and_data_groups() -> None:
    job = Job(tensor=4, data=4, pipeline=2, gpus_per_host=8, late_rank=13, late_ns=5e6)
    _, _, history = run(job, 25)
    assert {finding.ranks for _, found in history for finding in found} == {(13,)}
    assert history[-1][1][0].severity is Severity.CRITICAL


def test_two_late_ranks_are_both_named() -> None:
    first, second = Simulation(Job(late_rank=1, late_ns=3e6)), Simulation(Job(late_rank=6, late_ns=3e6), seed=1)
    detector = LateRank()
    tensor_groups = {index: first.by_kind["TP"].index(index) for index in first.by_kind["TP"]}
    for one, other in zip(first.steps(100), second.steps(100), strict=True):
        mine = one[np.isin(one["communicator"], [index for index, at in tensor_groups.items() if at < 2])]
        theirs = other[np.isin(other["communicator"], [index for index, at in tensor_groups.items() if at >= 2])]
        detector.ingest_collectives(np.concatenate([mine, theirs]), first.context)
    assert {finding.ranks for finding in detector.findings()} == {(1,), (6,)}


def test_a_data_parallel_job_names_its_late_rank() -> None:
    job = Job(tensor=1, data=4, pipeline=1, gpus_per_host=1, jitter=0.001, late_rank=2, late_ns=2e6)
    _, _, history = run(job, 30)
    assert {finding.ranks for _, found in history for finding in found} == {(2,)}


def test_it_heals_and_stays_one_finding() -> None:
    job = Job(late_rank=5, late_ns=2e6, fault_from_step=50, fault_to_step=150)
    simulation, _, history = run(job, 90)
    assert all(len(found) <= 1 for _, found in history)
    (finding,) = history[-1][1]
    assert finding.ranks == (5,)
    assert finding.until_ns is not None
    assert finding.since_ns < finding.until_ns < simulation.now_ns


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(), marks=pytest.mark.slow),
        pytest.param(Job(data=4, gpus_per_host=4, jitter=0.03), marks=pytest.mark.slow),
        Job(tensor=1, data=2, pipeline=4, gpus_per_host=2),
        pytest.param(Job(data=4, gpus_per_host=4, imbalance_ns=20e6), marks=pytest.mark.slow),
    ],
    ids=["8 ranks", "16 ranks", "deep pipeline", "experts"],
)
def test_healthy_jobs_name_nobody(job: Job) -> None:
    for seed in range(2):
        _, _, history = run(job, 120, seed)
        assert [finding.summary for _, found in history for finding in found] == []


def test_without_trust_in_clocks_nobody_is_named() -> None:
    simulation, detector = Simulation(Job(late_rank=5, late_ns=5e6)), LateRank()
    for collectives in simulation.steps(100):
        detector.ingest_collectives(collectives, replace(simulation.context, clock_is_trusted=False))
    assert detector.findings() == []


def test_order_of_arrival_does_not_matter() -> None:
    simulation, detector = Simulation(Job(late_rank=5, late_ns=2e6)), LateRank()
    batch = np.concatenate(list(simulation.steps(80)))
    detector.ingest_collectives(batch[np.random.default_rng(0).permutation(len(batch))], simulation.context)
    assert [finding.ranks for finding in detector.findings()] == [(5,)]


def test_a_rank_that_loses_time_at_one_place_of_a_step_is_named_in_spite_of_jitter_all_over_it() -> None:
    job = Job(jitter=0.04, late_rank=5, late_ns=0.0)
    simulation, detector = Simulation(job, 3), LateRank()
    for collectives in simulation.steps(80):
        tensor = simulation.by_kind["TP"][2]
        at = np.flatnonzero(collectives["communicator"] == tensor)[:2]
        collectives["last_rank"][at] = 1
        collectives["blame_ns"][at] = 12_000_000
        detector.ingest_collectives(collectives, simulation.context)
    assert {finding.ranks for finding in detector.findings()} == {(5,)}


BEHIND_A_SLOW_LINK = Job(exchange_ns=1e6, slow_host=2, slow_share=0.5)


def test_ranks_that_wait_for_a_slow_link_are_not_late() -> None:
    for seed in range(2):
        simulation, _, history = run(BEHIND_A_SLOW_LINK, 40, seed)
        assert [finding.summary for _, found in history for finding in found] == []
        data_parallel = {simulation.groups[index].global_ranks for index in simulation.by_kind["DP"]}
        assert (4, 6) in data_parallel  # of which 4 is behind the link, and comes later than 6 each time


def test_a_late_rank_and_a_slow_link_at_once_name_the_rank_and_no_victim_of_either() -> None:
    for seed in range(2):
        _, _, history = run(replace(BEHIND_A_SLOW_LINK, late_rank=1, late_ns=1e6), 40, seed)
        assert {finding.ranks for _, found in history for finding in found} == {(1,)}


def named_where_seen_later(
    simulation: Simulation, communicators: list[int], lag_seconds: int, *, seconds: int
) -> set[tuple[int, ...]]:
    """Who is named where the collectives of some communicators are seen so much later than the others'."""
    detector = LateRank()
    held: list[Columns] = []
    named: set[tuple[int, ...]] = set()
    for collectives in simulation.seconds(seconds):
        is_late = np.isin(collectives["communicator"], communicators)
        held.append(collectives[is_late])
        seen = held.pop(0) if len(held) > lag_seconds else held[0][:0]
        detector.ingest_collectives(np.concatenate([collectives[~is_late], seen]), simulation.context)
        named |= {finding.ranks for finding in detector.findings()}
    return named


@pytest.mark.parametrize("lag_seconds", [3, 8, 20])
def test_nobody_is_named_in_place_of_a_rank_whose_host_is_seen_later_than_others(lag_seconds: int) -> None:
    simulation = Simulation(replace(BEHIND_A_SLOW_LINK, late_rank=1, late_ns=2e6))
    lagging = [index for index, group in simulation.groups.items() if "node0" in group.hosts]
    named = named_where_seen_later(simulation, lagging, lag_seconds, seconds=50)
    assert named == {(1,)}


@pytest.mark.parametrize("lag_seconds", [11, 22, 40])
def test_peers_of_a_late_rank_are_not_named_where_groups_across_hosts_are_seen_later(lag_seconds: int) -> None:
    job = Job(
        tensor=8, data=4, pipeline=1, gpus_per_host=8, step_ns=2e9, late_rank=13, late_ns=20e6, fault_from_step=10
    )
    simulation = Simulation(job)
    across = [index for index, group in simulation.groups.items() if len(set(group.hosts)) > 1]
    named = named_where_seen_later(simulation, across, lag_seconds, seconds=160)
    assert named == {(13,)}


def test_a_name_is_taken_back_when_its_blame_turns_out_to_have_been_handed_on() -> None:
    simulation, detector = Simulation(replace(BEHIND_A_SLOW_LINK, slow_share=0.8)), LateRank()
    history = []
    for second, collectives in enumerate(simulation.seconds(60)):
        context = simulation.context
        if second < 30:  # the pipeline's communicators are not known yet
            known = {i: group for i, group in context.groups.items() if i not in simulation.by_kind["PP"]}
            context = replace(context, groups=known)
        detector.ingest_collectives(collectives, context)
        history.append([finding for finding in detector.findings() if finding.until_ns is None])
    assert any(history)
    assert history[-1] == []


def test_whoever_waited_for_the_root_of_a_broadcast_is_not_late_by_itself() -> None:
    """Rank 4 is late to the Broadcast that opens a step of its tensor-parallel group, so rank 5 is late afterwards."""
    simulation, detector = Simulation(Job(jitter=0.001, data=4, pipeline=1)), LateRank()
    tensor, data = simulation.by_kind["TP"][2], simulation.by_kind["DP"]
    for collectives in simulation.steps(20):
        opening = collectives[collectives["communicator"] == tensor][:1].copy()
        opening["op"] = OPERATION_CODES["Broadcast"]
        opening["last_rank"], opening["blame_ns"] = 0, 30_000_000
        for index in data:
            ranks = simulation.groups[index].global_ranks
            at = np.flatnonzero(collectives["communicator"] == index)
            for rank in {4, 5} & set(ranks):
                collectives["last_rank"][at], collectives["blame_ns"][at] = ranks.index(rank), 30_000_000
        detector.ingest_collectives(np.concatenate([opening, collectives]), simulation.context)
        assert {finding.ranks for finding in detector.findings()} <= {(4,)}
    assert detector.findings()


def test_lateness_that_a_pipeline_hides_is_information_and_a_jitter_of_waits_is_nothing() -> None:
    """Rank 5 comes 5 ms later to its receives than rank 4, which does the same work, and no later to anything else."""
    for hidden_ns, ranks in ((5_000_000, {(5,)}), (0, set[tuple[int, ...]]())):
        simulation, detector = Simulation(Job(jitter=0.01, exchange_ns=1e5)), LateRank()
        hosts, found = simulation.groups[simulation.by_kind["TP"][2]].hosts, list[Finding]()
        for collectives in simulation.steps(30):
            at_wait = np.flatnonzero(collectives["rank"] >= 0)
            own = simulation.context.global_ranks_of(collectives[at_wait])
            collectives["wait_ns"][at_wait[np.isin(own, (4, 5))]] = 20_000_000
            collectives["wait_ns"][at_wait[own == 5][:1]] -= hidden_ns
            detector.ingest_collectives(collectives, simulation.context)
            found = detector.findings()
        assert {finding.ranks for finding in found} == ranks
        for finding in found:
            assert (finding.severity, finding.hosts, finding.evidence["cost_ratio"]) == (Severity.INFO, hosts[:1], 0.0)
            assert finding.evidence["hidden_ns"] == pytest.approx(5e6, rel=0.1)


def test_a_rank_whose_receives_are_not_measured_any_more_is_not_taken_for_one_that_waits_less() -> None:
    """From step 15 on a line is lost, and all but one exchange of ranks 4 and 5 wait for their peer's in vain."""
    simulation, detector = Simulation(Job(jitter=0.01, exchange_ns=1e5)), LateRank()
    for step, collectives in enumerate(simulation.steps(60)):
        at_wait = np.flatnonzero(collectives["rank"] >= 0)
        own = simulation.context.global_ranks_of(collectives[at_wait])
        collectives["wait_ns"][at_wait[np.isin(own, (4, 5))]] = 20_000_000
        is_lost = np.zeros(len(collectives), np.bool_)
        for rank in (4, 5) if step >= 15 else ():
            is_lost[at_wait[own == rank][1:]] = True
            collectives["wait_ns"][at_wait[own == rank][0]] = 0 if rank == 5 else 20_000_000
        detector.ingest_collectives(collectives[~is_lost], simulation.context)
        assert detector.findings() == []
