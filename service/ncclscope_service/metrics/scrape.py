"""Values of `/metrics`, gathered from the store at scrape time as columns per metric of the table.

A value that is not known has no series: what is missing is absent, never 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np
from prometheus_client.samples import Exemplar

from ncclscope_models.difference import Reason
from ncclscope_service.columns.buckets import Floats, Window, window_until
from ncclscope_service.export.json_files import clock_violation_ratio
from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.job.iterations import IterationSummary
from ncclscope_service.job.ranks import host_of_ranks
from ncclscope_service.metrics.series import UNKNOWN, Labels, Samples, ScrapeCache, SeriesBudget, series_columns
from ncclscope_service.metrics.table import MAX_FINDINGS, MAX_RANKS, METRICS_BY_NAME
from ncclscope_service.rollup.recent_sums import RecentSums
from ncclscope_service.rollup.series import Histogram, HistogramLabels, Tally
from ncclscope_service.show.communicators import Waits, host_waits, recent_wait_ratio
from ncclscope_service.show.health import AgentView, ServiceHealth
from ncclscope_service.show.overview import AlignmentViews, clock_views, gap_counts
from ncclscope_service.store.plan_records import PlanLine
from ncclscope_service.store.records import Finding, FindingKind, Severity
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns

_FILES_SKIPPED: Final = ("export_refused", "file_too_many", "file_unreadable")
"""Reasons under which an agent counts skipped files rather than lines."""
NAMED_RANKS: Final = 8
"""In the label `ranks` of a finding."""
_NAMED_HOSTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSamples:
    """One histogram of collectives."""

    labels: HistogramLabels
    cumulative: tuple[int, ...]
    """By bucket."""
    sum: float
    exemplars: tuple[Exemplar | None, ...]
    """By bucket: the newest collective in it, with communicator and coll_seq."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsView:
    """All values at one time; holds no reference into the store, so that another thread may render it."""

    samples: Mapping[str, Samples]
    """By name in the table; a metric without samples may lack."""
    histograms: Mapping[str, tuple[HistogramSamples, ...]]
    """By name in the table."""


def gather(
    store: Store,
    *,
    tally: Tally,
    aliases: Aliases,
    agents: Sequence[AgentView],
    health: ServiceHealth,
    now_ns: int,
    budget: SeriesBudget | None = None,
    sums: RecentSums | None = None,
    cache: ScrapeCache | None = None,
    series: Columns | None = None,
) -> MetricsView:
    """The view at `now_ns` (service's wall clock); the caller has updated the tally.

    `budget` remembers from one view to the next which groups have series of their own; `sums` are those of this store,
    computed here if not given; `cache` is that of earlier views of the same store; `series` replaces the store's series
    if there are operations not counted in them yet.
    """
    budget, cache = budget or SeriesBudget(), cache or ScrapeCache()
    aliases.update(store.communicators, store.members)
    window = window_until(now_ns)
    sums = sums or RecentSums.of_store(store, now_ns)
    jobs = sorted({*store.process_job, *(each.job for each in store.communicators)})
    own_labels = _communicators_with_own_labels(store, budget, now_ns)
    collected = _Collected()
    for name, samples in series_columns(store, aliases, budget, now_ns, cache.labels, series=series):
        collected.add_samples(name, samples)
    _add_communicators(
        collected, store, aliases, own_labels, jobs,
        waits=recent_wait_ratio(sums, len(store.communicators), window), cache=cache,
    )  # fmt: skip
    _add_jobs(collected, store, sums, window, jobs)
    _add_iterations(collected, cache.iterations.summaries(store, jobs, now_ns))
    _add_steps(collected, store)
    _add_plans(collected, store)
    _add_matches(collected, store)
    _add_healed_numbers(collected, store)
    _add_inspector(collected, store)
    _add_clocks(collected, store, now_ns)
    _add_stamp_offsets(collected, store)
    _add_findings(collected, store, jobs)
    _add_culprits(collected, store)
    _add_agents(collected, agents)
    _add_service(collected, store, health, tally)
    return MetricsView(
        samples=collected.samples(),
        histograms={name: _histograms(own, aliases) for name, own in tally.histograms.items()},
    )


class _Collected:
    """Samples by metric while they are gathered; refuses a name or a number of labels that the table does not have."""

    def __init__(self) -> None:
        self._columns: dict[str, Samples] = {}
        self._single: defaultdict[str, dict[Labels, float]] = defaultdict(dict)

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """One sample; None stands for not known."""
        if value is not None:
            self._single[name][labels] = value

    def add_samples(self, name: str, samples: Samples) -> None:
        """All samples of a metric."""
        assert all(len(each) == len(METRICS_BY_NAME[name].labels) for each in samples.labels[:1]), name
        self._columns[name] = samples

    def samples(self) -> dict[str, Samples]:
        """By metric."""
        columns = dict(self._columns)
        for name, own in self._single.items():
            assert {*map(len, own)} == {len(METRICS_BY_NAME[name].labels)}, name
            columns[name] = Samples(labels=list(own), values=np.array(list(own.values()), np.float64))
        return columns


def _communicators_with_own_labels(store: Store, budget: SeriesBudget, now_ns: int) -> frozenset[int]:
    """Communicators that have series of their own, of jobs that were active recently."""
    series = store.series.rows
    operations = np.bincount(
        np.maximum(series["communicator"], 0), weights=series["operations"], minlength=len(store.communicators)
    ).tolist()
    of_job: Counter[str] = Counter()
    for communicator in store.communicators:
        of_job[communicator.job] += int(operations[communicator.index])
    budget.record_activity(of_job, now_ns)
    return frozenset(
        each.index
        for each in store.listed_communicators()
        if not budget.is_silent(each.job, now_ns) and budget.admit_communicator(each.index, each.job)
    )


def _add_communicators(
    collected: _Collected,
    store: Store,
    aliases: Aliases,
    own_labels: frozenset[int],
    jobs: Sequence[str],
    *,
    waits: Floats,
    cache: ScrapeCache,
) -> None:
    ratios = waits.tolist()
    listed, summed = Counter[str](), Counter[str]()
    for each in store.listed_communicators():
        listed[each.job] += 1
        if each.index not in own_labels:
            summed[each.job] += 1
            continue
        alias, parallelism = aliases[each.index], each.parallelism or UNKNOWN
        collected.add("ncclscope_wait_ratio", ratios[each.index], each.job, alias, parallelism)
        hosts = cache.hosts.host_count(store, each)
        about = (each.comm_id, str(each.size), parallelism, str(each.identity), str(hosts))
        collected.add("ncclscope_communicator_info", 1, each.job, alias, *about)
    for job in jobs:
        collected.add("ncclscope_communicators", listed[job], job)
        collected.add("ncclscope_communicators_summed", summed[job], job)


def _add_jobs(collected: _Collected, store: Store, sums: RecentSums, window: Window, jobs: Sequence[str]) -> None:
    alignments, waits, hosts = AlignmentViews(store, sums, window), Waits(store, sums, window), host_of_ranks(store)
    for job in jobs:
        alignment = alignments.of_job(job)
        collected.add("ncclscope_alignment_matched_ratio", alignment.matched_ratio, job)
        collected.add("ncclscope_captured_ratio", alignment.captured_ratio, job)
        means = waits.means_of_job(job)
        for position in means.most_telling(MAX_RANKS):
            rank = str(means.ranks[position])
            collected.add("ncclscope_rank_wait_ratio", float(means.mean_ratio[position]), job, rank)
        for host, ratio in host_waits(means, hosts.get(job, {})):
            collected.add("ncclscope_host_wait_ratio", ratio, job, host)


def _add_iterations(collected: _Collected, of_jobs: Mapping[str, IterationSummary]) -> None:
    for job, summary in of_jobs.items():
        for percentile, duration in (("50", summary.median_ns), ("90", summary.p90_ns)):
            collected.add("ncclscope_iteration_seconds", None if duration is None else duration * 1e-9, job, percentile)
        collected.add("ncclscope_communication_ratio", summary.communication_ratio, job)
        collected.add("ncclscope_exposed_communication_ratio", summary.exposed_ratio, job)
        if summary.utilization is not None:
            collected.add("ncclscope_model_flops_utilization_ratio", summary.utilization.mfu, job)
            collected.add("ncclscope_hardware_flops_utilization_ratio", summary.utilization.hfu, job)
        for part in () if summary.step is None else summary.step.parts:
            seconds, kind = part.mean_ns * 1e-9, part.parallelism or ""
            collected.add("ncclscope_step_part_seconds", seconds, job, part.part, kind)


def _add_steps(collected: _Collected, store: Store) -> None:
    for job, history in sorted(store.step_histories.items()):
        buckets = history.rows()
        collected.add("ncclscope_steps", int(buckets["steps"].sum()), job)
        collected.add("ncclscope_step_seconds", int(buckets["duration_ns"].sum()) * 1e-9, job)


def _add_matches(collected: _Collected, store: Store) -> None:
    """Every outcome of a job that has any, 0 included: a rate needs a series that starts at 0."""
    outcomes = [match for match in Match if match is not Match.PENDING]
    for job in sorted({job for job, match in store.finished if match in outcomes}):
        for match in outcomes:
            amount = store.finished[job, match]
            collected.add("ncclscope_alignment_operations", amount, job, match.name.lower())


def _add_plans(collected: _Collected, store: Store) -> None:
    for job, plan in sorted(store.plans.items()):
        collected.add("ncclscope_plan_known", 1, job, "given")
        if (step := store.expected_step_of(job)) is not None:
            for bound in ("low", "typical", "high"):
                collected.add("ncclscope_expected_step_seconds", getattr(step, bound), job, bound)
        expected, sizes = dict[tuple[str, str], int](), dict[tuple[str, str], int]()
        unexplained = dict.fromkeys((_groups_of(line) for each in plan.classes for line in each.lines), 0)
        for each in plan.classes:
            own, bytes_of = defaultdict[tuple[str, str], int](int), defaultdict[tuple[str, str], int](int)
            for line in each.lines:
                own[_groups_of(line), line.op] += line.expected
                bytes_of[_groups_of(line), line.op] += line.expected_bytes
                if line.reason == Reason.UNEXPLAINED:
                    missing = abs(line.observed - line.expected) or 1
                    unexplained[_groups_of(line)] += missing * each.rank_iterations
            for key, amount in own.items():
                expected[key] = max(expected.get(key, 0), amount)
                sizes[key] = max(sizes.get(key, 0), bytes_of[key])
        for (groups, op), amount in sorted(expected.items()):
            collected.add("ncclscope_expected_operations", amount, job, groups, op)
            collected.add("ncclscope_expected_bytes", sizes[groups, op], job, groups, op)
        for groups, amount in sorted(unexplained.items()):
            collected.add("ncclscope_unexplained_operations", amount, job, groups)


def _groups_of(line: PlanLine) -> str:
    return " ".join(line.groups) or UNKNOWN


def _add_healed_numbers(collected: _Collected, store: Store) -> None:
    for (job, reason), amount in sorted(store.numbers_healed.items()):
        collected.add("ncclscope_numbers_healed", amount, job, reason)
    for job, amount in sorted(store.numbers_uncertain.items()):
        collected.add("ncclscope_numbers_uncertain", amount, job)


def _add_inspector(collected: _Collected, store: Store) -> None:
    for (job, outcome), amount in sorted(store.inspector_records.items()):
        collected.add("ncclscope_inspector_outcomes", amount, job, outcome)


def _add_clocks(collected: _Collected, store: Store, now_ns: int) -> None:
    for clock in clock_views(store, now_ns):
        collected.add("ncclscope_clock_offset_seconds", clock.offset_seconds, clock.host)
        collected.add("ncclscope_clock_drift_ratio", clock.drift_ppm * 1e-6, clock.host)
        collected.add("ncclscope_clock_uncertainty_seconds", clock.sigma_seconds, clock.host)
    collected.add("ncclscope_clock_violation_ratio", clock_violation_ratio(store, store.clocks))


def _add_stamp_offsets(collected: _Collected, store: Store) -> None:
    """Of hosts whose job was not forgotten."""
    kept, offsets = {each.job for each in store.communicators}, dict[tuple[str, str], int]()
    for process, offset_ns in store.stamp_offsets.of_stamps().items():
        key = store.process_job[process], store.processes[process].host
        if key[0] in kept:
            offsets[key] = max(offset_ns, offsets.get(key, 0), key=abs)
    for (job, host), offset_ns in sorted(offsets.items()):
        collected.add("ncclscope_stamp_offset_seconds", offset_ns * 1e-9, job, host)


def _add_findings(collected: _Collected, store: Store, jobs: Sequence[str]) -> None:
    """Every kind and severity of each job, 0 included: an alert needs a series that rises."""
    counts = {(job, kind, severity): 0 for job in jobs for kind in FindingKind for severity in Severity}
    for finding in store.findings:
        key = (finding.job, finding.kind, finding.severity)
        counts[key] = counts.get(key, 0) + (finding.until_ns is None)
    for (job, kind, severity), count in counts.items():
        collected.add("ncclscope_findings", count, job, str(kind), str(severity))


def _add_culprits(collected: _Collected, store: Store) -> None:
    """Ranks and hosts that open findings name, each set once with the gravest severity; the store has that one first.

    Every other label would make an alert a new one when it changes, as the group that is slowest at the moment does. A
    set is muted if all findings are that name it.
    """
    severity_of: dict[Labels, Severity] = {}
    audible: set[Labels] = set()
    numbers: dict[str, dict[Labels, float]] = {name: {} for name in _FINDING_NUMBERS}
    for finding in [each for each in store.findings if each.until_ns is None][:MAX_FINDINGS]:
        ranks = culprits_label([str(rank) for rank in finding.ranks], NAMED_RANKS)
        hosts = culprits_label(finding.hosts, _NAMED_HOSTS)
        key = (finding.job, str(finding.kind), ranks, hosts)
        severity_of.setdefault(key, finding.severity)
        if finding.muted is None:
            audible.add(key)
        for name, number_of in _FINDING_NUMBERS.items():
            if (number := number_of(finding)) is not None:
                numbers[name][key] = max(number, numbers[name].get(key, number))
    for culprits, severity in severity_of.items():
        labels = (*culprits[:2], str(severity), *culprits[2:])
        collected.add("ncclscope_finding_info", 1, *labels)
        if culprits not in audible:
            collected.add("ncclscope_finding_muted", 1, *labels)
        for name, known in numbers.items():
            collected.add(name, known.get(culprits), *labels)


def _cost_seconds(finding: Finding) -> float | None:
    """Seconds by which it lengthens a step."""
    cost = finding.evidence.get("cost_ns")
    if finding.kind is FindingKind.SLOW_STEPS:
        now, before = finding.evidence.get("step_ns"), finding.evidence.get("step_before_ns")
        cost = now - before if isinstance(now, int) and isinstance(before, int) else None
    return cost * 1e-9 if isinstance(cost, int) else None


def _loss_ratio(finding: Finding) -> float | None:
    loss = finding.evidence.get("loss_ratio")
    return float(loss) if isinstance(loss, int | float) else None


_FINDING_NUMBERS: Final[dict[str, Callable[[Finding], float | None]]] = {
    "ncclscope_finding_confidence_ratio": lambda finding: finding.confidence,
    "ncclscope_finding_cost_seconds": _cost_seconds,
    "ncclscope_finding_loss_ratio": _loss_ratio,
}


def culprits_label(names: Sequence[str], most: int) -> str:
    """The first of the ranks or hosts of a finding, and how many more there are: a label must not grow with the job."""
    rest = [f"+{len(names) - most}"] if len(names) > most else []
    return ",".join([*names[:most], *rest])


def _with_unique_names(agents: Sequence[AgentView]) -> list[AgentView]:
    """One agent per (name, host): a scrape with equal series is refused as a whole.

    Of several the one in touch last keeps the name; others get a number while they are connected (two agents
    run there), and are left out when they are not (the agent was restarted).
    """
    named: dict[Labels, AgentView] = {}
    for agent in sorted(agents, key=lambda each: (not each.connected, -(each.last_contact_ns or 0))):
        name, number = agent.name, 1
        while (name, agent.host) in named:
            number += 1
            name = f"{agent.name}#{number}"
        if number == 1 or agent.connected:
            named[(name, agent.host)] = agent if number == 1 else replace(agent, name=name)
    return sorted(named.values(), key=lambda each: (each.name, each.host))


def _add_agents(collected: _Collected, agents: Sequence[AgentView]) -> None:
    for agent in _with_unique_names(agents):
        for name, value in (
            ("ncclscope_agent_connected", float(agent.connected)),
            ("ncclscope_agent_missing", float(not agent.connected and not agent.said_goodbye)),
            ("ncclscope_agent_lines", agent.lines_total),
            ("ncclscope_agent_read_bytes", agent.bytes_read_total),
            ("ncclscope_agent_lag_seconds", agent.lag_seconds if agent.connected else None),
            ("ncclscope_agent_unread_bytes", agent.unread_bytes if agent.connected else None),
            ("ncclscope_agent_queued_batches", agent.queued_batches),
            ("ncclscope_agent_spool_bytes", agent.spool_bytes),
            ("ncclscope_agent_spool_oldest_seconds", agent.spool_oldest_seconds),
            ("ncclscope_agent_spool_dropped_batches", agent.spool_dropped),
            ("ncclscope_agent_spool_replayed_batches", agent.spool_replayed),
            ("ncclscope_agent_spool_failures", agent.spool_failures),
            ("ncclscope_agent_cpu_seconds", agent.cpu_seconds),
            ("ncclscope_agent_resident_memory_bytes", agent.rss_bytes),
            ("ncclscope_agent_sent_bytes", agent.sent_bytes_total),
            ("ncclscope_agent_slowed", None if agent.is_slowed is None else float(agent.is_slowed)),
        ):
            collected.add(name, value, agent.name, agent.host)
        for reason in _FILES_SKIPPED:
            if count := agent.skipped.get(reason):
                collected.add("ncclscope_agent_files_skipped", count, agent.name, agent.host, reason)


def _add_service(collected: _Collected, store: Store, health: ServiceHealth, tally: Tally) -> None:
    for name, counts in (
        ("ncclscope_agent_lines_skipped", store.skipped),
        ("ncclscope_agent_lines_understood", store.understood),
        ("ncclscope_sessions_refused", health.sessions_refused),
        ("ncclscope_http_refused", health.http_refused),
        ("ncclscope_gaps", gap_counts(store)),
        ("ncclscope_alignment_checked", store.alignment_checked),
        ("ncclscope_alignment_disagreements", store.alignment_disagreements),
    ):
        for label, count in sorted(counts.items()):
            collected.add(name, count, label)
    collected.add("ncclscope_ingest_lag_seconds", health.ingest_lag_seconds)
    collected.add("ncclscope_ingest_backlog_batches", health.backlog_batches)
    collected.add("ncclscope_window_operations", len(store.operations))
    collected.add("ncclscope_rows_uncounted", tally.missed)
    collected.add("ncclscope_tick_seconds", health.tick_seconds)
    for where, count in sorted(health.mistakes.items()):
        collected.add("ncclscope_mistakes", count, where)
    _add_journal(collected, health)
    collected.add("ncclscope_page_clients", health.page_clients)
    collected.add("ncclscope_page_events_dropped", health.page_events_dropped)
    collected.add("ncclscope_page_clients_refused", health.page_clients_refused)
    for receiver in health.receivers:
        for outcome, count in receiver.outcomes.items():
            collected.add("ncclscope_notifications", count, receiver.name, outcome)
        collected.add("ncclscope_notification_retries", receiver.retries, receiver.name)
        collected.add("ncclscope_notifications_queued", receiver.queued, receiver.name)
    collected.add("ncclscope_build_info", 1, health.version)


def _add_journal(collected: _Collected, health: ServiceHealth) -> None:
    journal = health.journal
    if journal is None:
        return
    for name, value in (
        ("ncclscope_journal_bytes", journal.bytes),
        ("ncclscope_journal_waiting_bytes", journal.waiting_bytes),
        ("ncclscope_journal_write_seconds", journal.write_seconds),
        ("ncclscope_journal_errors", journal.errors),
        ("ncclscope_journal_failing", float(bool(journal.trouble))),
        ("ncclscope_journal_damaged", journal.damaged),
        ("ncclscope_journal_missing_entries", journal.missing),
        ("ncclscope_replayed_batches", journal.replayed_batches),
        ("ncclscope_restore_seconds", journal.restore_seconds),
        ("ncclscope_state_age_seconds", journal.state_age_seconds),
        ("ncclscope_state_bytes", journal.state_bytes),
        ("ncclscope_state_write_seconds", journal.state_seconds),
        ("ncclscope_state_pause_seconds", journal.pause_seconds),
        ("ncclscope_operations_not_archived", health.operations_not_archived),
    ):
        collected.add(name, value)


def _histograms(own: Mapping[HistogramLabels, Histogram], aliases: Aliases) -> tuple[HistogramSamples, ...]:
    ordered = sorted(own.items(), key=lambda item: (item[0].job, item[0].parallelism, item[0].op))
    return tuple(_histogram(labels, histogram, aliases) for labels, histogram in ordered)


def _histogram(labels: HistogramLabels, histogram: Histogram, aliases: Aliases) -> HistogramSamples:
    return HistogramSamples(
        labels=labels,
        cumulative=tuple(accumulate(histogram.counts.tolist())),
        sum=histogram.sum,
        exemplars=tuple(
            None
            if each is None
            else Exemplar({"communicator": aliases[each.communicator], "coll_seq": str(each.coll_seq)}, each.value)
            for each in histogram.exemplars
        ),
    )
