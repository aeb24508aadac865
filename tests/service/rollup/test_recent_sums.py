"""What is shown of the last minutes is the same whether it was added up as it came or all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from service.simulated_batches import SECOND_NS, batches_by_job

from ncclscope_service.columns.buckets import BUCKET_NS, Window, window_until
from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.job.iterations import STEP_KEPT_NS
from ncclscope_service.metrics.scrape import gather
from ncclscope_service.metrics.series import ScrapeCache, SeriesBudget
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.rollup.recent_sums import DURATION, WAIT, RecentSums, series_key
from ncclscope_service.rollup.series import Tally
from ncclscope_service.show.communicators import Waits
from ncclscope_service.show.health import ServiceHealth
from ncclscope_service.show.overview import Overview, make_overview
from ncclscope_service.store.rows import Match
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig
from ncclscope_simulator.faults import parse_faults
from ncclscope_wire.batch import Batch

_JOBS = {
    "plain": SimulationConfig(iterations=6, nodes=2, gpus=2, tp=2, pp=1, dp=2),
    "pipelined": SimulationConfig(
        iterations=6, nodes=2, gpus=2, tp=1, pp=2, dp=2, chunk_seconds=0.5,
        faults=parse_faults(["drop_lines:ratio=0.02", "drop_kernels:ratio=0.02", "late_rank:rank=1,ms=2"]),
    ),
    "graphs": SimulationConfig(
        iterations=6, nodes=1, gpus=2, tp=2, pp=1, dp=1, cuda_graphs=2, cuda_graph_trace="node", chunk_seconds=0.5,
    ),
    "inspector": SimulationConfig(
        iterations=6, nodes=1, gpus=2, tp=2, pp=1, dp=1, inspector="v4.2", inspector_holes=0.1, capture="duty:0.5",
    ),
    "unnamed": SimulationConfig(iterations=6, nodes=1, gpus=4, tp=2, pp=2, dp=1, nccl="2.20.5", capture="duty:0.5"),
    "logs only": SimulationConfig(iterations=6, nodes=1, gpus=2, tp=2, pp=1, dp=1, capture="none"),
}  # fmt: skip
_STEP_NS = 700_000_000
_OF_ITERATIONS = (
    "ncclscope_iteration_seconds", "ncclscope_communication_ratio", "ncclscope_exposed_communication_ratio",
    "ncclscope_step_part_seconds",
)  # fmt: skip
_HEALTH = ServiceHealth(version="0")


@pytest.fixture(scope="module")
def batches_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Batch]]:
    """The batches of each job, simulated once."""
    return batches_by_job(_JOBS, tmp_path_factory)


class _Run:
    """A pipeline that is fed as it would be live, with the clock of the job."""

    def __init__(self, batches: list[Batch], *, window_operations: int = 1_000_000) -> None:
        stamps = np.concatenate([batch.operations["logged_at_ns"] for batch in batches])
        starts = np.concatenate([batch.kernels["start_ns"] for batch in batches])
        self.now_ns = int(stamps.min() if stamps.min(initial=1) > 0 else starts.min())
        self.pipeline = Pipeline(PipelineSettings(window_operations=window_operations))
        self.aliases, self.budget = Aliases(), SeriesBudget(max_communicators=4)

    def feed(self, batch: Batch, *, job: str = "j", agent: str = "a") -> None:
        self.now_ns += _STEP_NS
        self.pipeline.ingest_batch(batch, agent=agent, session="s", job=job)
        self.pipeline.process_backlog(self.now_ns)
        leaving = self.pipeline.evictable(self.now_ns)
        self.pipeline.evict(leaving, self.now_ns)

    def shown(self, sums: RecentSums | None = None) -> Overview:
        """By the sums that were kept, or others."""
        return make_overview(
            self.pipeline.store, aliases=Aliases(), agents=[], health=_HEALTH, now_ns=self.now_ns,
            sums=sums or self.pipeline.recent,
        )  # fmt: skip

    def waits(self, sums: RecentSums, job: str) -> tuple[list[int], list[list[float]]]:
        """Ranks and their wait shares by bucket; -1 where nothing was recorded."""
        found = Waits(self.pipeline.store, sums, window_until(self.now_ns)).of_job(job)
        return found.ranks.tolist(), np.nan_to_num(found.by_bucket, nan=-1.0).tolist()

    def scraped(self, sums: RecentSums, cache: ScrapeCache) -> dict[str, dict[tuple[str, ...], float]]:
        store, tally = self.pipeline.store, Tally()
        tally.count_rows(store)
        view = gather(
            store, tally=tally, aliases=self.aliases, agents=[], health=_HEALTH, now_ns=self.now_ns,
            budget=self.budget, sums=sums, cache=cache,
        )  # fmt: skip
        return {
            name: dict(zip(samples.labels, np.nan_to_num(samples.values, nan=-1.0).tolist(), strict=True))
            for name, samples in view.samples.items()
        }

    def added_at_once(self) -> RecentSums:
        return RecentSums.of_store(self.pipeline.store, self.now_ns)


@pytest.mark.parametrize("job", _JOBS)
def test_after_every_portion_the_sums_are_those_of_the_whole_store(
    job: str, batches_of: Callable[[str], list[Batch]]
) -> None:
    batches = batches_of(job)
    run, cache = _Run(batches), ScrapeCache()
    for number, batch in enumerate(batches):
        run.feed(batch)
        if number % 3 == 0 and _JOBS[job].nccl != "2.20.5":  # whose lines have no times: kernels give them, at the end
            assert run.shown() == run.shown(run.added_at_once())
    run.now_ns += STEP_KEPT_NS
    run.pipeline.finish(run.now_ns)
    assert run.shown() == run.shown(run.added_at_once())
    assert run.waits(run.pipeline.recent, "j") == run.waits(run.added_at_once(), "j")
    assert run.scraped(run.pipeline.recent, cache) == run.scraped(run.added_at_once(), ScrapeCache())
    (shown,) = run.shown().jobs
    assert shown.operations_per_second is not None
    if _JOBS[job].capture == "full":
        assert run.waits(run.pipeline.recent, "j")[0]
        assert shown.alignment.matched > 0


@pytest.mark.parametrize("job", ["plain", "pipelined"])
def test_rows_that_left_the_window_are_still_in_the_last_minutes(
    job: str, batches_of: Callable[[str], list[Batch]]
) -> None:
    batches = batches_of(job)
    short, whole = _Run(batches, window_operations=50), _Run(batches)
    for batch in batches:
        short.feed(batch)
        whole.feed(batch)
    assert short.pipeline.store.operations.first > 0
    mine, theirs = short.shown().jobs[0], whole.shown().jobs[0]
    in_memory = short.shown(short.added_at_once()).jobs[0].alignment
    captured = theirs.alignment.captured_ratio
    assert mine.step is not None
    assert theirs.step is not None
    assert mine.step.now_ns == pytest.approx(theirs.step.now_ns, rel=0.01), (
        "what left before its step had ended is left out"
    )
    assert mine == replace(
        theirs,
        alignment=replace(in_memory, captured_ratio=captured),
        exposed_ratio=mine.exposed_ratio,
        step=mine.step,
    ), "what is exposed is of the newest operations that are in memory"
    table = short.pipeline.store.operations.rows
    assert short.pipeline.recent.matches().sum() == len(table)
    assert short.pipeline.recent.of_member().sum() == len(table)


@pytest.mark.parametrize("job", ["pipelined", "unnamed"])
def test_what_scrapes_leave_to_the_next_changes_none(job: str, batches_of: Callable[[str], list[Batch]]) -> None:
    batches = batches_of(job)
    run, cache = _Run(batches), ScrapeCache()
    shown: set[str] = set()
    for number, batch in enumerate(batches):
        run.feed(batch)
        run.now_ns += STEP_KEPT_NS * (number % 2)
        kept, anew = (run.scraped(run.pipeline.recent, of) for of in (cache, ScrapeCache()))
        for name in _OF_ITERATIONS if number % 2 == 0 else ():
            kept.pop(name, None)
            anew.pop(name, None)
        assert kept == anew
        shown |= {alias for _, alias, *_ in kept["ncclscope_operations"]} if "ncclscope_operations" in kept else set()
    assert len(shown) > len(run.pipeline.store.listed_communicators()) or "other" in shown


def test_jobs_that_run_side_by_side_are_told_apart(batches_of: Callable[[str], list[Batch]]) -> None:
    one, two = batches_of("plain"), batches_of("logs only")
    run = _Run(one + two)
    for batch in one:
        run.feed(batch, job="one", agent="1")
    for batch in two:
        run.feed(batch, job="two", agent="2")
    assert run.shown() == run.shown(run.added_at_once())
    alone = _Run(one + two)
    for batch in one:
        alone.feed(batch, job="one", agent="1")
    alone.pipeline.process_backlog(run.now_ns)
    alone.now_ns = run.now_ns
    first, second = run.shown().jobs
    assert first.alignment == alone.shown().jobs[0].alignment
    assert run.waits(run.pipeline.recent, "one") == alone.waits(alone.pipeline.recent, "one")
    assert run.waits(run.pipeline.recent, "two") == ([], [])
    assert second.alignment.matched == 0


def test_an_operation_whose_state_changes_is_counted_in_the_new_one(
    batches_of: Callable[[str], list[Batch]],
) -> None:
    batches = batches_of("plain")
    run = _Run(batches)
    for batch in batches:
        run.feed(batch)
    store, sums = run.pipeline.store, run.pipeline.recent
    before = sums.matches()[:, Match.UNMATCHED].sum()
    matched = np.flatnonzero(store.operations.rows["match"] == Match.MATCHED)[:3]
    store.operations.rows["match"][matched] = Match.UNMATCHED
    sums.touch(store.operations.first + matched)
    sums.process_window(run.now_ns)
    assert sums.matches()[:, Match.UNMATCHED].sum() == before + 3
    assert run.shown() == run.shown(run.added_at_once())


def _totals(run: _Run, sums: RecentSums, window: Window) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Bytes by communicator, waits by member and bandwidth by series, by bucket."""
    store = run.pipeline.store
    communicators, members = np.arange(len(store.communicators)), np.arange(len(store.members))
    series = store.series.rows
    keys = series_key(series["communicator"], series["op"], series["size_class"])
    return [
        sums.bytes_by_bucket(window, communicators, communicators, len(communicators)),
        *(sums.waits_by_bucket(of, window, members, members, len(members)) for of in (WAIT, DURATION)),
        sums.bandwidth_by_bucket(window, keys, np.arange(len(keys)), len(keys)),
    ]


@pytest.mark.parametrize("job", ["plain", "pipelined", "inspector", "logs only"])
def test_a_job_keeps_its_sums_when_the_minutes_are_over_however_they_came(
    job: str, batches_of: Callable[[str], list[Batch]]
) -> None:
    run = _Run(batches_of(job))
    for batch in batches_of(job):
        run.feed(batch)
    run.pipeline.finish(run.now_ns)
    store, began_ns, later_ns = run.pipeline.store, run.now_ns - 120 * SECOND_NS, run.now_ns + 1800 * SECOND_NS
    store.job_histories.clear()
    sums = RecentSums.of_store(store, run.now_ns, keeps_history=True)
    of_job = store.job_histories["j"].window("j", began_ns, run.now_ns)
    recent = _totals(run, sums, replace(of_job, job=None))
    assert recent[0].sum() > 0
    assert not store.job_histories["j"].bytes.begins()
    for minute in range(40):
        sums.process_window(run.now_ns + 60 * SECOND_NS * minute)
    of_job = store.job_histories["j"].window("j", began_ns, later_ns)
    assert of_job.bucket_ns == 2 * BUCKET_NS
    passed_on = _totals(run, sums, of_job)
    for before, after in zip(recent[:-1], passed_on[:-1], strict=True):
        np.testing.assert_allclose(after.sum(axis=1), before.sum(axis=1))
    series = store.collectives.rows[np.isfinite(store.collectives.rows["busbw"])]
    assert np.isfinite(passed_on[-1]).any() == bool(len(series))
    assert all(np.nan_to_num(each).sum() == 0 for each in _totals(run, sums, replace(of_job, job=None)))
    kept = {name: history.window("j", began_ns, later_ns) for name, history in store.job_histories.items()}
    store.job_histories.clear()
    late = RecentSums.of_store(store, later_ns, keeps_history=True)
    assert {name: history.window("j", began_ns, later_ns) for name, history in store.job_histories.items()} == kept
    for at_once, after in zip(_totals(run, late, of_job), passed_on, strict=True):
        np.testing.assert_allclose(at_once, after)


def test_what_lasts_outlives_a_restart_and_goes_with_its_job(batches_of: Callable[[str], list[Batch]]) -> None:
    run = _Run(batches_of("plain"))
    for batch in batches_of("plain"):
        run.feed(batch)
    run.pipeline.process_backlog(run.now_ns + 1800 * SECOND_NS)
    histories = run.pipeline.store.job_histories
    assert histories["j"].bytes.begins()
    assert histories["j"].lost_time.begins()
    restored = Pipeline.restore(run.pipeline.snapshot())
    assert restored.store.job_histories == histories
    for day in (1, 2, 3, 4):
        now_ns = run.now_ns + day * 86_400 * SECOND_NS
        restored.process_backlog(now_ns)
        while len(leaving := restored.evictable(now_ns)):
            restored.evict(leaving, now_ns)
        restored.evict(leaving, now_ns)
    assert "j" not in restored.store.job_histories
