"""What the page is told: complete where recorded, None where not, small at four thousand ranks."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from service import fake_service as fake

from ncclscope_service.columns.buckets import window_until
from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.rollup.recent_sums import RecentSums
from ncclscope_service.serve.routes import to_json
from ncclscope_service.show.communicators import MAX_SHOWN, RankWaits, Waits
from ncclscope_service.show.health import ServiceHealth
from ncclscope_service.show.overview import JobView, Level, Overview, make_overview
from ncclscope_service.store.records import Ending, FindingKind, RankStanding, Verdict
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_NUMBER

SMALL = fake.Shape(nodes=2, per_node=4, pipeline=1, late_rank=5, noise=0.0)


def small_store(*, with_kernels: bool = True) -> Store:
    return fake.StoreMaker(SMALL, now_ns=fake.NOW_NS, with_kernels=with_kernels, per_minute=6).make()


def overview_of(store: Store, *, later_ns: int = 0) -> Overview:
    return make_overview(
        store, aliases=Aliases(), agents=[], health=ServiceHealth(version="0"), now_ns=fake.NOW_NS + later_ns
    )


def job_of(store: Store, *, later_ns: int = 0) -> JobView:
    (job,) = overview_of(store, later_ns=later_ns).jobs
    return job


def test_a_job_says_what_it_is_made_of() -> None:
    job = job_of(small_store())
    assert (job.name, job.level, job.hosts, job.processes) == (fake.JOB, Level.LOGS_INSPECTOR_AND_KERNELS, 2, 8)
    assert job.versions == ("2.28.3",)
    assert job.communicators_known == len(job.communicators)
    assert [each.parallelism for each in job.parallelisms] == ["TP", "DP", "PP", "WORLD"]
    assert sum(entry.operations for entry in job.mix) == job.operations
    assert sum(each.bytes for each in job.communicators) == job.bytes


def test_clocks_agree_to_the_largest_uncertainty_and_to_nothing_where_one_is_not_known() -> None:
    store = small_store()
    assert job_of(store).clock_sigma_seconds == pytest.approx(710e-9)
    clocks = store.clocks[fake.JOB].hosts
    (known, unknown) = sorted(clocks)
    del clocks[unknown]
    assert job_of(store).clock_sigma_seconds is None
    clocks[known] = replace(clocks[known], samples=0)
    assert overview_of(store).clocks == (), "the reference alone says nothing about the others"
    store.processes = [replace(process, host=known) for process in store.processes]
    assert job_of(store).clock_sigma_seconds == 0.0
    assert [clock.host for clock in overview_of(store).clocks] == [known]


def test_a_version_that_was_inferred_is_shown() -> None:
    store = small_store()
    store.process_version = {}
    store.job_versions[fake.JOB] = {"2.21.5"}
    assert job_of(store).versions == ("2.21.5",)


def test_with_logs_only_nothing_that_kernels_say_is_made_up() -> None:
    overview = overview_of(small_store(with_kernels=False))
    (job,) = overview.jobs
    assert job.level == Level.LOGS_ONLY
    assert job.alignment.matched_ratio is None
    assert job.alignment.captured_ratio is None
    assert overview.clocks == ()
    assert overview.clock_violation_ratio is None
    for each in job.communicators:
        assert (each.busbw, each.limit, each.baseline, each.wait_ratio) == (None, None, None, None)
        assert set(each.busbw_history) == {None}
    assert job.operations > 0
    assert job.operations_per_second is not None
    assert any(rate is not None for each in job.communicators for rate in each.bytes_history)


def test_waiting_is_that_of_the_last_kernels_until_they_are_five_minutes_old() -> None:
    def waits(later_seconds: int) -> list[float | None]:
        job = job_of(small_store(), later_ns=later_seconds * fake.SECOND)
        return [each.wait_ratio for each in job.communicators if each.parallelism == "TP"]

    assert None not in waits(0)
    assert None not in waits(120), "captures come now and then"
    assert set(waits(600)) == {None}


def test_an_empty_store_gives_an_empty_overview() -> None:
    overview = overview_of(Store())
    assert overview.jobs == ()
    assert overview.findings == ()
    assert overview.health.window_operations == 0


def test_bandwidth_over_time_is_bytes_over_transfer_time_of_the_main_series() -> None:
    store = small_store()
    rows = store.collectives.rows
    tp = next(each for each in store.communicators if each.parallelism == "TP")
    chosen = np.flatnonzero(rows["communicator"] == tp.index)[:2]
    bucket_start = fake.NOW_NS - 20 * fake.SECOND
    store.collectives.rows["end_true_ns"] = 0
    store.collectives.rows["end_true_ns"][chosen] = bucket_start
    store.collectives.rows["busbw"][chosen] = [10e9, 40e9]
    store.collectives.rows["transfer_ns"][chosen] = [3000, 1000]
    view = next(each for each in job_of(store).communicators if each.comm_id == tp.comm_id)
    assert [value for value in view.busbw_history if value is not None] == [17.5e9]
    assert (view.main_op, view.main_size_class) == ("AllReduce", "256MiB")


def test_another_size_does_not_disturb_the_bandwidth_that_is_shown() -> None:
    store = small_store()
    tp = next(each for each in store.communicators if each.parallelism == "TP")
    before = next(each for each in job_of(store).communicators if each.comm_id == tp.comm_id)
    small = store.collectives.rows[store.collectives.rows["communicator"] == tp.index].copy()
    small["size_class"], small["busbw"] = 0, 1e6
    store.collectives.append(small)
    after = next(each for each in job_of(store).communicators if each.comm_id == tp.comm_id)
    assert after.busbw_history == before.busbw_history


def test_send_and_receive_have_a_bandwidth_too() -> None:
    job = job_of(small_store())
    pipeline = [each for each in job.communicators if each.parallelism == "PP"]
    assert pipeline
    assert all(any(value is not None for value in each.busbw_history) for each in pipeline)


def waits_of(store: Store) -> RankWaits:
    window = window_until(fake.NOW_NS)
    return Waits(store, RecentSums.of_store(store, fake.NOW_NS), window).of_job(fake.JOB)


def test_the_late_rank_is_the_one_that_does_not_wait() -> None:
    waits = waits_of(small_store())
    assert waits.ranks.tolist() == list(range(8))
    assert 4 + int(waits.mean_ratio[4:].argmin()) == 5


def test_a_kernel_of_several_operations_counts_once_in_the_waits() -> None:
    store = small_store()
    before = waits_of(store)
    rows = store.operations.rows.copy()
    fresh = small_store()
    fresh.operations.drop_before(fresh.operations.next_id)
    fresh.operations.append(np.repeat(rows, 3))
    np.testing.assert_array_equal(waits_of(fresh).by_bucket, before.by_bucket)


def test_time_without_a_capture_is_a_hole_and_not_a_zero() -> None:
    assert np.isnan(waits_of(small_store()).by_bucket).any(axis=1).all()


def test_a_group_is_expected_to_do_what_it_or_the_groups_like_it_have_shown() -> None:
    store = small_store()
    series, dp = store.series.rows, [each.index for each in store.communicators if each.parallelism == "DP"]
    main = [np.flatnonzero(series["communicator"] == index)[0] for index in dp]
    series["baseline"][main] = [20e9, 40e9, 41e9, 42e9]  # the first was slow from its first step
    views = {each.alias: each for each in job_of(store).communicators}
    assert [views[f"dp-{place}"].expected for place in range(4)] == [40.5e9, 40.5e9, 41e9, 42e9]
    series["baseline"][main] = np.nan
    views = {each.alias: each for each in job_of(store).communicators}
    assert views["dp-0"].expected == views["dp-0"].limit
    assert (views["world-0"].is_latency_bound, views["world-0"].expected) == (True, None)


def test_a_finding_names_all_its_groups_and_what_it_does_to_them() -> None:
    store = small_store()
    dp = [each.comm_id for each in store.communicators if each.parallelism == "DP"]
    late = store.findings[0]
    evidence: dict[str, object] = {"slow_groups": dp[:2], "collectives": [f"{dp[2]}:7"], "groups": ["0xgone"]}
    store.findings = [replace(late, kind=FindingKind.SLOW_LINK, comm_id=dp[1], evidence=evidence), late]
    slow, other = overview_of(store).findings
    assert slow.groups == ("dp-1", "dp-0", "dp-2")
    assert slow.names == {dp[1]: "dp-1", dp[0]: "dp-0", dp[2]: "dp-2"}
    assert (slow.slows_groups, slow.lengthens_steps) == (True, True)
    assert (other.slows_groups, other.lengthens_steps) == (False, True)
    assert other.groups == ("tp-4",)


def test_alignment_counts_every_operation_in_memory() -> None:
    store = small_store()
    alignment = job_of(store).alignment
    assert (
        alignment.matched + alignment.unmatched + alignment.not_covered + alignment.no_kernel + alignment.pending
        == len(store.operations)
    )
    assert alignment.matched_ratio == 1.0
    store.operations.rows["match"][store.operations.rows["match"] == Match.MATCHED] = Match.UNMATCHED
    assert job_of(store).alignment.matched_ratio == 0.0


def test_the_captured_share_is_of_the_time_that_processes_logged() -> None:
    ratio = job_of(small_store()).alignment.captured_ratio
    assert ratio == pytest.approx(42 / 60, abs=0.03)


def test_an_operation_of_an_unknown_communicator_disturbs_nothing() -> None:
    store = small_store()
    rows = store.operations.rows[:5].copy()
    rows["member"] = NO_NUMBER
    before = job_of(store)
    store.operations.append(rows)
    after = job_of(store)
    assert after.communicators == before.communicators


def test_open_findings_come_before_closed_ones_and_later_before_earlier() -> None:
    store = small_store()
    (late,) = store.findings
    closed = replace(late, since_ns=late.since_ns + 5, until_ns=late.since_ns + 9)
    later = replace(late, since_ns=late.since_ns + 3)
    store.findings = [closed, late, later]
    findings = overview_of(store).findings
    assert [(each.since_ns, each.until_ns is None) for each in findings] == [
        (later.since_ns, True),
        (late.since_ns, True),
        (closed.since_ns, False),
    ]
    assert findings[0].communicator == "tp-4"


def test_buckets_stand_still_while_time_goes_on() -> None:
    first, later = window_until(fake.NOW_NS), window_until(fake.NOW_NS + 4 * fake.SECOND)
    assert first == later
    assert first.begin_ns <= fake.NOW_NS < first.end_ns


@pytest.mark.slow
def test_four_thousand_ranks_stay_small_and_quick() -> None:
    shape = fake.Shape(nodes=512, per_node=8, pipeline=8, late_rank=2049)
    store = fake.StoreMaker(shape, now_ns=fake.NOW_NS, per_minute=8).make()
    aliases, health = Aliases(), ServiceHealth(version="0")
    overview = make_overview(store, aliases=aliases, agents=[], health=health, now_ns=fake.NOW_NS)
    began = time.process_time()
    overview = make_overview(store, aliases=aliases, agents=[], health=health, now_ns=fake.NOW_NS)
    took = time.process_time() - began
    (job,) = overview.jobs
    assert len(job.communicators) == MAX_SHOWN
    assert len(to_json(overview)) < 400_000
    assert took < 2.0
    print(f"{len(store.operations):,} operations, {job.communicators_known:,} communicators: {took * 1e3:.0f} ms")  # noqa: T201


def test_of_a_silent_job_the_view_says_how_it_stands_and_of_another_nothing() -> None:
    store = small_store()
    assert job_of(store).verdict is None
    standing = tuple(
        RankStanding(
            rank=rank, host="node1", comm_id="0x1", parallelism=None, enqueued=9, behind=1, stopped_at="0x1:9",
            waits_for=(), blamed=(),
        )
        for rank in range(20)
    )  # fmt: skip
    store.verdicts[fake.JOB] = Verdict(
        job=fake.JOB, ending=Ending.HANG, is_provisional=True, summary="rank 0 is missing", standing=standing
    )
    shown = job_of(store).verdict
    assert shown is not None
    assert (shown.ending, shown.is_provisional, shown.summary) == ("hang", True, "rank 0 is missing")
    assert shown.standing == standing[:16]
