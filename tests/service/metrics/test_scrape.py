"""The scrape: byte for byte, by both formats, absent where not known, bounded where there is much."""

from __future__ import annotations

import gzip
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.large_job import NOW_NS, large_job
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from service import fake_service as fake

from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.intake.journal_entry import MarkAction
from ncclscope_service.job.step_times import STEP
from ncclscope_service.measure.expected_times import transfer_times
from ncclscope_service.metrics import scrape
from ncclscope_service.metrics.exposition import ColumnWriter, Scrapes
from ncclscope_service.metrics.scrape import MetricsView, gather
from ncclscope_service.metrics.series import SILENT_NS, SeriesBudget
from ncclscope_service.metrics.series import Samples as SampleColumns
from ncclscope_service.metrics.table import MAX_SERIES, METRICS, METRICS_BY_NAME
from ncclscope_service.nccl.bandwidth import SIZE_CLASSES
from ncclscope_service.rollup.series import Tally
from ncclscope_service.serve.api_table import MarkRequest
from ncclscope_service.show.health import AgentView, ServiceHealth
from ncclscope_service.store.records import FindingKind, Mute, Severity
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import SECOND_NS
from ncclscope_service.store.tables import Store

GOLDEN = Path(__file__).parent / "golden"
DURATION = "ncclscope_collective_duration_seconds"
STEP_SECONDS = "ncclscope_step_seconds_total"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def text_of(view: MetricsView) -> str:
    return Scrapes().answer(view, accept="", accept_encoding="").body.decode()


@pytest.fixture
def store() -> Store:
    return fake.small(fake.FakeService()).store(fake.NOW_NS)


def counted(store: Store) -> Tally:
    tally = Tally()
    tally.count_rows(store)
    return tally


def samples_of(view: MetricsView) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text_of(view))
        for sample in family.samples
    }


def named(samples: Samples, name: str) -> dict[frozenset[tuple[str, str]], float]:
    return {labels: value for (found, labels), value in samples.items() if found == name}


def small_view() -> MetricsView:
    service = fake.small(fake.FakeService())
    service.mark(MarkRequest(action=MarkAction.MUTE, job="*", seconds=60))
    return service.metrics()


def view_of(
    store: Store, *, budget: SeriesBudget | None = None, now_ns: int = fake.NOW_NS, agents: Sequence[AgentView] = ()
) -> MetricsView:
    health = ServiceHealth(version="0")
    return gather(
        store, tally=counted(store), aliases=Aliases(), agents=agents, health=health, now_ns=now_ns, budget=budget
    )


@pytest.mark.parametrize(("name", "accept"), [("scrape.txt", ""), ("scrape.openmetrics.txt", OPENMETRICS)])
def test_the_scrape_is_the_golden_one(name: str, accept: str) -> None:
    text = Scrapes().answer(small_view(), accept=accept, accept_encoding="").body.decode()
    if os.environ.get("NCCLSCOPE_UPDATE_GOLDEN"):
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text(), "if this is meant: NCCLSCOPE_UPDATE_GOLDEN=1, then read the difference"


def calibrated_view() -> MetricsView:
    """Of a service that knows how long transfers took in another run, twice as long as here, and of a slow link."""
    service = fake.small(fake.FakeService())
    service.mark(MarkRequest(action=MarkAction.MUTE, job="*", seconds=60))
    store = service.store(fake.NOW_NS)
    store.findings.append(replace(store.findings[0], kind=FindingKind.SLOW_LINK, evidence={"loss_ratio": 0.3}))
    rows = store.collectives.rows.take(np.arange(len(store.collectives)))
    rows["transfer_ns"] *= 2
    store.calibration = transfer_times(store, store.communicators[0].job, rows)
    return service.metrics()


def test_a_calibration_says_how_long_transfers_should_take() -> None:
    name = "ncclscope_transfer_over_expected_ratio"
    assert name not in {of for of, _ in samples_of(small_view())}
    over = [value for (of, _), value in samples_of(calibrated_view()).items() if of == name]
    assert over
    assert max(over) < 1
    assert min(abs(each - 0.5) for each in over) < 0.01


def test_every_metric_of_the_table_is_exposed_with_its_labels_and_no_other() -> None:
    families = {family.name: family for family in text_string_to_metric_families(text_of(calibrated_view()))}
    assert set(families) == set(METRICS_BY_NAME)
    for metric in METRICS:
        family = families[metric.name]
        assert family.type == metric.kind
        assert family.documentation == metric.help
        labels = {frozenset(sample.labels) - {"le"} for sample in family.samples}
        assert labels == {frozenset(metric.labels)}


def test_promtool_finds_nothing_to_say() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, which comes with Prometheus (Debian: apt install prometheus)")
    check = subprocess.run(
        [promtool, "check", "metrics"], input=text_of(small_view()), capture_output=True, text=True, check=False
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_openmetrics_says_the_same_and_has_exemplars_and_no_created_series() -> None:
    view = small_view()
    scrape = Scrapes().answer(view, accept=OPENMETRICS, accept_encoding="")
    assert scrape.content_type.startswith("application/openmetrics-text; version=1.0.0")
    families = list(openmetrics_families(scrape.body.decode()))  # type: ignore[no-untyped-call]  # has no types
    found = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    assert {key: found[key] for key in samples_of(view) if not key[0].endswith("_bucket")} == {
        key: value for key, value in samples_of(view).items() if not key[0].endswith("_bucket")
    }
    assert not [name for name, _ in found if name.endswith("_created")]
    exemplars = [s.exemplar for family in families for s in family.samples if s.exemplar]
    assert exemplars
    assert all(set(each.labels) == {"communicator", "coll_seq"} for each in exemplars)


def test_a_scraper_that_takes_gzip_gets_it() -> None:
    view = small_view()
    plain = Scrapes().answer(view, accept="", accept_encoding="deflate, gzip;q=0")
    packed = Scrapes().answer(view, accept="", accept_encoding="deflate, gzip;q=0.5")
    assert (plain.is_gzipped, packed.is_gzipped) == (False, True)
    assert gzip.decompress(packed.body) == plain.body


def test_with_logs_only_what_kernels_would_say_is_absent() -> None:
    samples = samples_of(fake.small(fake.FakeService(with_kernels=False)).metrics())
    names = {name for name, _ in samples}
    assert {"ncclscope_operations_total", "ncclscope_bytes_total", "ncclscope_communicator_info"} <= names
    for missing in (
        "busbw_bytes_per_second", "efficiency_ratio", "bandwidth_drift_ratio", "wait_ratio", "wait_seconds_total",
        "kernel_seconds_total", "transfer_seconds_total", "matched_operations_total", "clock_offset_seconds",
        "clock_violation_ratio", "alignment_matched_ratio", "captured_ratio", "rank_wait_ratio",
        "collective_duration_seconds_count", "collective_wait_seconds_count", "finding_info",
    ):  # fmt: skip
        assert f"ncclscope_{missing}" not in names


def test_an_empty_service_exposes_itself_and_nothing_else() -> None:
    names = {name for name, _ in samples_of(view_of(Store()))}
    assert names == {
        "ncclscope_window_operations", "ncclscope_page_clients", "ncclscope_page_events_dropped_total",
        "ncclscope_page_clients_refused_total", "ncclscope_rows_uncounted_total", "ncclscope_build_info",
    }  # fmt: skip


def test_several_hosts_without_an_estimate_have_no_clock(store: Store) -> None:
    clocks = store.clocks[fake.JOB]
    assert clocks.reference is not None
    alone = {clocks.reference: replace(clocks.hosts[clocks.reference], samples=0)}
    store.clocks[fake.JOB] = replace(clocks, hosts=alone)
    assert not [
        name
        for name, _ in samples_of(view_of(store))
        if name.startswith("ncclscope_clock_") and "violation" not in name
    ]


def test_all_states_of_a_job_are_exposed_once_one_operation_is_settled() -> None:
    store = fake.small(fake.FakeService(with_kernels=False)).store(fake.NOW_NS)
    store.finished.clear()
    store.operations.rows["match"] = Match.NOT_COVERED
    store.finish(np.arange(len(store.operations)))
    states = named(samples_of(view_of(store)), "ncclscope_alignment_operations_total")
    found = {dict(labels)["match"]: value for labels, value in states.items()}
    assert found == {"matched": 0, "unmatched": 0, "not_covered": len(store.operations), "no_kernel": 0, "line_lost": 0}


def test_an_agent_that_has_left_has_no_lag() -> None:
    here = AgentView(name="here", host="h", job="j", connected=True, last_contact_ns=1, lag_seconds=0.5)
    gone = replace(here, name="gone", connected=False)
    view = view_of(Store(), agents=[here, gone, replace(gone, name="done", said_goodbye=True)])
    missing = named(samples_of(view), "ncclscope_agent_missing")
    assert {dict(labels)["agent"]: value for labels, value in missing.items()} == {"here": 0, "gone": 1, "done": 0}
    lags = named(samples_of(view), "ncclscope_agent_lag_seconds")
    assert [dict(labels)["agent"] for labels in lags] == ["here"]
    assert len(named(samples_of(view), "ncclscope_agent_connected")) == 3


def test_efficiency_names_its_reference_and_drift_is_against_the_best_shown(store: Store) -> None:
    series = store.series.rows
    series["busbw"], series["baseline"], series["limit"] = 30e9, 40e9, 50e9
    samples = samples_of(view_of(store))
    efficiency = named(samples, "ncclscope_efficiency_ratio")
    assert {dict(labels)["reference"]: round(value, 6) for labels, value in efficiency.items()} == {
        "topology": 0.6,
        "baseline": 0.75,
    }
    assert set(named(samples, "ncclscope_bandwidth_drift_ratio").values()) == {-0.25}


def test_communicators_beyond_the_cap_are_summed_and_counted(store: Store) -> None:
    whole = named(samples_of(view_of(store)), "ncclscope_bytes_total")
    samples = samples_of(view_of(store, budget=SeriesBudget(max_communicators=3)))
    capped = named(samples, "ncclscope_bytes_total")
    assert sum(capped.values()) == sum(whole.values())
    aliases = {dict(labels)["communicator"] for labels in capped}
    assert aliases == {"world-0", "tp-0", "tp-4", "other"}
    assert set(named(samples, "ncclscope_communicators_summed").values()) == {len(store.communicators) - 3}
    with_bandwidth = {dict(labels)["communicator"] for labels in named(samples, "ncclscope_busbw_bytes_per_second")}
    assert "other" not in with_bandwidth


def test_a_finding_has_its_confidence_and_what_it_costs_where_that_is_known(store: Store) -> None:
    late = replace(store.findings[0], confidence=0.9, evidence={"cost_ns": 9_400_000})
    link = replace(late, kind=FindingKind.SLOW_LINK, evidence={"loss_ratio": 0.49})
    steps = replace(late, kind=FindingKind.SLOW_STEPS, evidence={"step_ns": 412_000_000, "step_before_ns": 400_000_000})
    store.findings = [late, replace(late, confidence=0.95, evidence={}, comm_id="0x1"), link, steps]
    samples = samples_of(view_of(store))

    def by_kind(name: str) -> dict[str, float]:
        return {dict(labels)["kind"]: round(value, 9) for labels, value in named(samples, name).items()}

    assert by_kind("ncclscope_finding_confidence_ratio") == {"late_rank": 0.95, "slow_link": 0.9, "slow_steps": 0.9}
    assert by_kind("ncclscope_finding_cost_seconds") == {"late_rank": 0.0094, "slow_steps": 0.012}
    assert by_kind("ncclscope_finding_loss_ratio") == {"slow_link": 0.49}
    (culprits,) = {
        frozenset({**dict(labels), "kind": ""}.items()) for labels in named(samples, "ncclscope_finding_info")
    }
    assert {
        frozenset({**dict(labels), "kind": ""}.items()) for labels in named(samples, "ncclscope_finding_cost_seconds")
    } == {culprits}


def test_culprits_are_muted_when_all_findings_that_name_them_are_and_keep_their_own_labels() -> None:
    service = fake.small(fake.FakeService())
    store = service.store(fake.NOW_NS)
    (finding,) = [each for each in store.findings if each.until_ns is None]
    before = named(samples_of(view_of(store)), "ncclscope_finding_info")
    mute = Mute(
        id="mute-1", by="", note="", at_ns=0, until_ns=1, finding=None, kind=None, job="*", ranks=(), hosts=()
    )  # fmt: skip
    for muted, amount in (([None], 0), ([mute], 1), ([mute, None], 0), ([mute, mute], 1)):
        store.findings = [replace(finding, muted=each, comm_id=str(at)) for at, each in enumerate(muted)]
        samples = samples_of(view_of(store))
        assert named(samples, "ncclscope_finding_info") == before, "an alert stays the same one"
        shown = named(samples, "ncclscope_finding_muted")
        assert shown == (before if amount else {})


def test_the_labels_of_a_finding_stay_while_its_slowest_group_and_its_numbers_change(store: Store) -> None:
    first = replace(store.findings[0], severity=Severity.WARNING)
    store.findings = [first]
    before = named(samples_of(view_of(store)), "ncclscope_finding_info")
    other = store.communicators[-1]
    moved = replace(
        first, comm_id=other.comm_id, parallelism="PP", confidence=0.5, summary="s", evidence={}, since_ns=1
    )
    for findings in ([moved], [first, moved], [moved, replace(first, severity=Severity.INFO)]):
        store.findings = findings
        assert named(samples_of(view_of(store)), "ncclscope_finding_info") == before


def test_a_finding_names_few_and_counts_the_rest_and_ends_with_it(store: Store) -> None:
    found = replace(store.findings[0], ranks=tuple(range(20)), hosts=tuple("abcdef"), comm_id=None, parallelism=None)
    store.findings = [found, found, replace(found, until_ns=fake.NOW_NS, kind=FindingKind.HANG)]
    (culprits,) = named(samples_of(view_of(store)), "ncclscope_finding_info")
    assert (dict(culprits)["ranks"], dict(culprits)["hosts"]) == ("0,1,2,3,4,5,6,7,+12", "a,b,c,d,+2")


def test_the_groups_of_a_job_that_has_been_silent_for_an_hour_are_not_exposed_until_it_comes_back(store: Store) -> None:
    budget = SeriesBudget(max_communicators=4)
    before = named(samples_of(view_of(store, budget=budget)), "ncclscope_bytes_total")
    later = fake.NOW_NS + SILENT_NS
    silent = samples_of(view_of(store, budget=budget, now_ns=later))
    assert not named(silent, "ncclscope_bytes_total")
    assert named(silent, "ncclscope_finding_info"), "what is open stays"
    store.series.rows["operations"] += 1
    again = named(samples_of(view_of(store, budget=budget, now_ns=later)), "ncclscope_bytes_total")
    assert again == before


def test_ranks_are_bounded_to_those_that_wait_least_or_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MAX_RANKS", 2)
    store = fake.small(fake.FakeService()).store(fake.NOW_NS)
    ranks = {dict(labels)["rank"] for labels in named(samples_of(view_of(store)), "ncclscope_rank_wait_ratio")}
    assert len(ranks) == 2
    assert "5" in ranks, "the late rank waits least"


def test_label_values_from_outside_cannot_break_the_scrape(store: Store) -> None:
    nasty = 'a"b\\c\nd}'
    store.skipped[nasty] = 7
    found = named(samples_of(view_of(store)), "ncclscope_agent_lines_skipped_total")
    assert found[frozenset({"reason": nasty}.items())] == 7


def test_agents_of_one_name_never_make_equal_series() -> None:
    (old, new) = (
        AgentView(name="a", host="h", job="j", connected=False, last_contact_ns=1, lines_total=10),
        AgentView(name="a", host="h", job="j", connected=True, last_contact_ns=2, lines_total=20),
    )
    second = replace(new, last_contact_ns=1, lines_total=30)
    view = view_of(Store(), agents=[old, second, new])
    lines = named(samples_of(view), "ncclscope_agent_lines_total")
    assert {dict(labels)["agent"]: value for labels, value in lines.items()} == {"a": 20, "a#2": 30}
    assert len(view.samples["ncclscope_agent_lines"].labels) == 2


def test_the_tally_counts_each_row_once_also_when_the_store_forgets_it(store: Store) -> None:
    tally = counted(store)
    tally.count_rows(store)
    collectives = int(np.count_nonzero(store.collectives.rows["coll_seq"] >= 0))  # sends and receives are none
    assert sum(int(each.counts.sum()) for each in tally.histograms[DURATION].values()) == collectives

    store.collectives.drop_before(store.collectives.next_id)
    tally.count_rows(store)
    assert sum(int(each.counts.sum()) for each in tally.histograms[DURATION].values()) == collectives
    assert tally.missed == 0


def test_the_tally_says_how_many_rows_it_never_saw(store: Store) -> None:
    store.collectives.drop_before(4)
    assert counted(store).missed == 4


def test_operations_that_are_finished_are_counted_also_when_the_store_forgets_them(store: Store) -> None:
    operations = len(store.operations)
    pending = np.flatnonzero(~store.operations.rows["finished"])
    assert sum(store.finished.values()) == operations - len(pending)
    store.operations.rows["match"][pending] = Match.MATCHED
    store.finish(pending)
    store.operations.drop_before(store.operations.next_id)
    assert sum(store.finished.values()) == operations


def test_steps_and_their_time_are_counted_since_the_job_began_and_of_no_job_without_steps(store: Store) -> None:
    (job,) = {each.job for each in store.communicators}
    steps = np.zeros(3, STEP)
    steps["iteration"] = np.arange(3)
    steps["duration_ns"] = [SECOND_NS, 2 * SECOND_NS, 0]  # that of the last is not known
    before = samples_of(view_of(store))
    store.step_histories[job].add(steps)
    after = samples_of(view_of(store))
    of_job = frozenset({("job", job)})
    grown = {name: after[name, of_job] - before[name, of_job] for name in ("ncclscope_steps_total", STEP_SECONDS)}
    assert grown == {"ncclscope_steps_total": 2, STEP_SECONDS: pytest.approx(3)}
    store.step_histories.clear()
    assert named(samples_of(view_of(store)), "ncclscope_steps_total") == {}


def test_a_duration_falls_into_the_bucket_whose_bound_it_does_not_exceed(store: Store) -> None:
    rows = store.collectives.rows[:3].copy()
    rows["ranks_seen"] = 2
    rows["busy_ns"] = [2 * 10_000, 2 * 10_001, 2 * 60_000_000_000]
    fresh = Store(communicators=store.communicators, members=store.members, processes=store.processes)
    fresh.collectives.append(rows)
    (histogram,) = counted(fresh).histograms[DURATION].values()
    assert histogram.counts.tolist() == [1, 1] + [0] * (len(histogram.bounds) - 2) + [1]
    assert histogram.sum == pytest.approx(60.000020001)


def test_bus_bandwidth_of_small_messages_is_not_in_its_histogram(store: Store) -> None:
    rows = store.collectives.rows[store.collectives.rows["coll_seq"] >= 0]
    large = int(np.count_nonzero(rows["size_class"] > SIZE_CLASSES.index("1MiB")))
    histograms = counted(store).histograms["ncclscope_collective_busbw_bytes_per_second"]
    assert 0 < sum(int(each.counts.sum()) for each in histograms.values()) == large < len(rows)


def test_four_thousand_ranks_stay_below_the_limit_with_every_group_in_its_own_series() -> None:
    job = large_job(4_096)
    view = view_of(job.store, now_ns=NOW_NS, agents=job.agents)
    text = Scrapes().answer(view, accept=OPENMETRICS, accept_encoding="").body
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    assert 40_000 < series <= MAX_SERIES
    assert view.samples["ncclscope_communicators_summed"].values.tolist() == [0]
    named_groups = {labels[1] for labels in view.samples["ncclscope_busbw_bytes_per_second"].labels}
    assert len(named_groups) == len(job.store.communicators) > 2_000


def test_what_is_summed_for_want_of_room_is_not_lost_from_the_sums() -> None:
    job = large_job(512)
    view = view_of(job.store, budget=SeriesBudget(max_communicators=50, max_group_series=60))
    assert len(view.samples["ncclscope_busbw_bytes_per_second"].labels) == 60
    assert view.samples["ncclscope_communicators_summed"].values.tolist() == [len(job.store.communicators) - 50]
    operations = view.samples["ncclscope_operations"].values.sum()
    assert operations == pytest.approx(job.store.series.rows["operations"].sum(), rel=1e-12)


def test_two_scrapes_of_one_tick_are_written_once() -> None:
    scrapes, view = Scrapes(), small_view()
    first = scrapes.answer(view, accept="", accept_encoding="gzip")
    assert scrapes.answer(view, accept="", accept_encoding="gzip") is first
    assert scrapes.answer(view, accept=OPENMETRICS, accept_encoding="gzip") is not first
    next_tick = replace(view)
    again = scrapes.answer(next_tick, accept="", accept_encoding="gzip")
    assert again is not first
    assert again == first


def test_labels_that_change_are_written_anew_and_values_of_the_same_labels_are_the_new_ones() -> None:
    writer = ColumnWriter()

    def scrape(labels: list[tuple[str, ...]], values: list[float]) -> list[str]:
        samples = {"ncclscope_gaps": SampleColumns(labels=labels, values=np.array(values, np.float64))}
        text = writer.write(MetricsView(samples=samples, histograms={}), openmetrics=False).decode()
        return [line.removeprefix("ncclscope_gaps_total") for line in text.splitlines() if not line.startswith("#")]

    assert scrape([("torn",), ("lost",)], [1, 2]) == ['{reason="torn"} 1.0', '{reason="lost"} 2.0']
    assert scrape([("torn",), ("lost",)], [math.nan, 4]) == ['{reason="lost"} 4.0']
    assert scrape([("torn",)], [3]) == ['{reason="torn"} 3.0']
    assert scrape([("torn",), ("a\\b",)], [math.inf, -0.0]) == ['{reason="torn"} +Inf', '{reason="a\\\\b"} -0.0']
    assert scrape([], []) == []


def admitted(budget: SeriesBudget, communicators: list[int], codes: list[int]) -> list[bool]:
    return [bool(each) for each in budget.admit_series(np.array(communicators, np.int64), np.array(codes, np.int64))]


def test_the_first_ones_are_let_in_and_stay() -> None:
    budget = SeriesBudget(max_communicators=2, max_group_series=3)
    assert [budget.admit_communicator(index, "j") for index in (7, 3, 5)] == [True, True, False]
    assert admitted(budget, [7, 3, 5, 3], [1, 1, 1, 2]) == [True, True, False, True]
    assert admitted(budget, [3, 7, 7, 5], [2, 9, 1, 1]) == [True, False, True, False], "in any order"


def test_operations_of_no_known_communicator_are_summed() -> None:
    budget = SeriesBudget()
    budget.admit_communicator(0, "j")
    assert admitted(budget, [-1, 0], [0, 0]) == [False, True]


def test_a_silent_job_makes_room_for_another() -> None:
    budget = SeriesBudget(max_communicators=1, max_group_series=1)
    budget.record_activity({"old": 5}, 0)
    assert budget.admit_communicator(0, "old")
    assert admitted(budget, [0], [4]) == [True]
    budget.record_activity({"old": 5, "new": 1}, SILENT_NS - 1)
    assert not budget.admit_communicator(1, "new")
    budget.record_activity({"old": 5, "new": 2}, SILENT_NS)
    assert (budget.is_silent("old", SILENT_NS), budget.is_silent("new", SILENT_NS)) == (True, False)
    assert budget.admit_communicator(1, "new")
    assert admitted(budget, [1, 0], [4, 4]) == [True, False]
    budget.record_activity({"old": 6}, SILENT_NS + 1)
    assert not budget.is_silent("old", SILENT_NS + 1)
