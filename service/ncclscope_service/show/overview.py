"""The overview page as records, made from the store: jobs, communicators, ranks, clocks, findings, agents.

Pure and stateless but for the aliases; a missing value is None, which the page writes as "not recorded".
`/api/overview` and the event stream carry the dataclasses as JSON, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final

import numpy as np

from ncclscope_models.expected_step import ExpectedStep
from ncclscope_service.columns.buckets import Int64s, Window, window_until
from ncclscope_service.detect.settings import THRESHOLDS, Threshold, split_name
from ncclscope_service.export.json_files import clock_violation_ratio, clocks_by_host, has_clock_estimate
from ncclscope_service.intake.aliases import Aliases, Names, with_names
from ncclscope_service.job.iterations import IterationSummaries, IterationSummary
from ncclscope_service.job.utilization import Utilization, utilization_of
from ncclscope_service.rollup.recent_sums import RecentSums, jobs_with_kernels
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.show.communicators import (
    CommunicatorView,
    CommunicatorViews,
    bytes_of_communicators,
    four_digits,
    most_telling,
    named_by_findings,
    recent_of_communicators,
    size_class_name,
)
from ncclscope_service.show.health import AgentView, ServiceHealth
from ncclscope_service.show.steps import LENGTHENS_STEPS, SLOWS_GROUPS, StepTimeView, begin_of_job, step_time
from ncclscope_service.store.records import (
    Acknowledgement,
    Communicator,
    FailureLine,
    Finding,
    Mute,
    RankStanding,
    Verdict,
)
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store, version_of

MAX_FINDINGS: Final = 50
"""Findings on the page, latest first."""

MAX_STANDING: Final = 16
"""Ranks of a silent job of which the page says where they stood."""

_RATE_BUCKETS: Final = 6
"""Full buckets over which the current rate is taken."""


class Level(StrEnum):
    """Sources that a job provides, and so what is known about it."""

    LOGS_ONLY = "logs only"
    LOGS_AND_INSPECTOR = "logs and Inspector"
    LOGS_AND_KERNELS = "logs and nsys"
    LOGS_INSPECTOR_AND_KERNELS = "logs, Inspector and nsys"
    INSPECTOR_ONLY = "Inspector only"
    INSPECTOR_AND_KERNELS = "Inspector and nsys"
    KERNELS_ONLY = "kernels only"


_LEVELS: Final = {
    (False, False, False): Level.LOGS_ONLY,
    (True, False, False): Level.LOGS_ONLY,
    (True, True, False): Level.LOGS_AND_INSPECTOR,
    (True, False, True): Level.LOGS_AND_KERNELS,
    (True, True, True): Level.LOGS_INSPECTOR_AND_KERNELS,
    (False, True, False): Level.INSPECTOR_ONLY,
    (False, True, True): Level.INSPECTOR_AND_KERNELS,
    (False, False, True): Level.KERNELS_ONLY,
}
"""By what was seen of a job: operations in logs, records of NCCL Inspector, kernels. A job of which only the start was
logged counts as logs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentView:
    """Outcome of a job's recent operations."""

    matched: int
    unmatched: int
    not_covered: int
    no_kernel: int
    pending: int
    matched_ratio: float | None
    """Of the operations inside a capture; None if no capture covered any."""
    captured_ratio: float | None
    """Share of the window that captures cover; None without exports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixEntry:
    """Operations of one kind since the start, over all ranks."""

    parallelism: str | None
    op: str
    size_class: str
    operations: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismView:
    """All communicators of one kind together."""

    parallelism: str | None
    communicators: int
    operations: int
    bytes: int
    wait_ratio: float | None
    """Median over its communicators, last minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """A finding as the page shows it."""

    kind: str
    severity: str
    job: str
    communicator: str | None
    """Alias."""
    comm_id: str | None
    parallelism: str | None
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    since_ns: int
    until_ns: int | None
    confidence: float
    summary: str
    evidence: dict[str, object]
    groups: tuple[str, ...] = ()
    """Aliases of all communicators that it names or that prove it."""
    names: dict[str, str] = field(default_factory=dict[str, str])
    """Their aliases by `comm_id`, as it stands in the evidence."""
    lengthens_steps: bool = False
    slows_groups: bool = False
    """It shows in the bandwidth of `groups`."""
    id: str = ""
    acknowledged: Acknowledgement | None = None
    muted: Mute | None = None
    """The mute that lasts longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictView:
    """How a job ended that is over or silent, as far as its logs tell."""

    ending: str
    """hang, crashed, killed, ended together or unclear."""
    is_provisional: bool
    """The job is silent but not known to be over."""
    summary: str
    ranks: tuple[int, ...]
    """Global ranks that hung, or that failed first."""
    hosts: tuple[str, ...]
    first_failure: FailureLine | None
    standing: tuple[RankStanding, ...]
    """Where the first MAX_STANDING ranks of groups that stand apart stood, culprits first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job."""

    name: str
    verdict: VerdictView | None
    """None of a job that goes on."""
    level: Level
    hosts: int
    processes: int
    versions: tuple[str, ...]
    """NCCL versions."""
    clock_sigma_seconds: float | None
    """The largest uncertainty of its hosts' clocks; 0 on one host, None if the clock of any host is not known."""
    communicators_known: int
    communicators: tuple[CommunicatorView, ...]
    """The most telling ones."""
    parallelisms: tuple[ParallelismView, ...]
    operations: int
    """Since the start, over all ranks."""
    bytes: int
    operations_per_second: float | None
    begin_ns: int
    """Where charts over its whole time begin: with its first step, else with the first that is known of it."""
    step: StepTimeView | None
    """None while no step has ended, or the job's steps are not known."""
    exposed_ratio: float | None
    expected_step: ExpectedStep | None
    """Seconds, by the description and the calibration of another run."""
    utilization: Utilization | None
    """Of the GPUs' peak; None where the description or the GPU is not known."""
    """Share of a step in which NCCL kernels ran and no other kernel of that GPU did; None without computation."""
    alignment: AlignmentView
    mix: tuple[MixEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockView:
    """A host's clock against the reference."""

    host: str
    offset_seconds: float
    """Now."""
    drift_ppm: float
    sigma_seconds: float
    samples: int
    steps: int
    is_reference: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdView(Threshold):
    """One threshold of a detector."""

    started: float | None
    """As given by file or flag; None: as by default."""
    changed: float | None
    """As changed while the service ran; None: it was not."""
    jobs: dict[str, float]
    """By pattern of job names: what holds for those jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdChange:
    """One change of a threshold while the service ran."""

    at_ns: int
    by: str
    name: str
    value: float | None
    """None: as given at the start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsView:
    """What can be changed while the service runs."""

    thresholds: tuple[ThresholdView, ...]
    changes: tuple[ThresholdChange, ...]
    """The last ones, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarksView:
    """What people said of findings, as far as it holds."""

    acknowledged: dict[str, Acknowledgement]
    """By id of the finding."""
    mutes: tuple[Mute, ...]
    """Oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthView:
    """Where agents connect, and counts of what was lost, skipped or refused."""

    version: str
    agents_port: int | None
    agents_need: tuple[str, ...]
    """Options of the agent without which it is refused."""
    understood: dict[str, int]
    skipped: dict[str, int]
    gaps: dict[str, int]
    sessions_refused: dict[str, int]
    ingest_lag_seconds: float | None
    backlog_batches: int | None
    window_operations: int
    page_events_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Everything that the page shows, at one time."""

    now_ns: int
    window_begin_ns: int
    bucket_seconds: float
    jobs: tuple[JobView, ...]
    findings: tuple[FindingView, ...]
    """Open ones first, latest first."""
    findings_known: int
    clocks: tuple[ClockView, ...]
    clock_violation_ratio: float | None
    agents: tuple[AgentView, ...]
    health: HealthView


def make_overview(
    store: Store,
    *,
    aliases: Aliases,
    agents: Sequence[AgentView],
    health: ServiceHealth,
    now_ns: int,
    sums: RecentSums | None = None,
    iterations: IterationSummaries | None = None,
) -> Overview:
    """The overview at `now_ns` (service's wall clock); gives new communicators their aliases.

    `sums` and `iterations`: those of this store; computed if not given.
    """
    aliases.update(store.communicators, store.members)
    window = window_until(now_ns)
    jobs = sorted({*store.process_job, *(each.job for each in store.communicators)})
    summaries = (iterations or IterationSummaries()).summaries(store, jobs, now_ns)
    makers = _JobViews(store, aliases, sums or RecentSums.of_store(store, now_ns), window, summaries, now_ns)
    return Overview(
        now_ns=now_ns,
        window_begin_ns=window.begin_ns,
        bucket_seconds=window.bucket_seconds,
        jobs=tuple(makers.job(name) for name in jobs),
        findings=finding_views(store, aliases),
        findings_known=len(store.findings),
        clocks=clock_views(store, now_ns),
        clock_violation_ratio=clock_violation_ratio(store, store.clocks),
        agents=tuple(sorted(agents, key=lambda agent: agent.name)),
        health=health_view(store, health),
    )


def finding_views(store: Store, aliases: Aliases, *, most: int | None = MAX_FINDINGS) -> tuple[FindingView, ...]:
    """The latest findings, the open ones first; `most` None for all. The aliases must be up to date."""
    names = _names_by_id(store, aliases)
    ordered = sorted(store.findings, key=lambda finding: (finding.until_ns is not None, -finding.since_ns))
    return tuple(_finding(finding, names) for finding in ordered[:most])


def _names_by_id(store: Store, aliases: Aliases) -> Names:
    return {(each.job, each.comm_id): aliases[each.index] for each in store.communicators}


def clock_views(store: Store, now_ns: int) -> tuple[ClockView, ...]:
    """Every host's clock, by name, the reference first; none while there are several hosts and no estimate."""
    if len({process.host for process in store.processes}) > 1 and not has_clock_estimate(store):
        return ()
    references = {clocks.reference for clocks in store.clocks.values()}
    views = [
        ClockView(
            host=host,
            offset_seconds=(clock.offset_ns + clock.drift_ppm * 1e-6 * (now_ns - clock.at_ns)) * 1e-9,
            drift_ppm=clock.drift_ppm,
            sigma_seconds=clock.sigma_ns * 1e-9,
            samples=clock.samples,
            steps=len(clock.steps),
            is_reference=host in references,
        )
        for host, clock in clocks_by_host(store, store.clocks).items()
    ]
    return tuple(sorted(views, key=lambda view: (not view.is_reference, view.host)))


def _clock_sigma(store: Store, job: str, hosts: Set[str]) -> float | None:
    """See `JobView.clock_sigma_seconds`; the reference's own uncertainty is left out, it agrees with itself."""
    if len(hosts) <= 1:
        return 0.0
    clocks = store.clocks.get(job)
    if clocks is None or not has_clock_estimate(store) or not hosts <= clocks.hosts.keys():
        return None
    return max(clocks.hosts[host].sigma_ns for host in hosts if host != clocks.reference) * 1e-9


def gap_counts(store: Store) -> dict[str, int]:
    """Gaps of all sources by reason."""
    counts = store.retired.gaps.copy()
    for gaps in store.gaps.values():
        counts.update(gaps.by_reason)
    return dict(sorted(counts.items()))


class AlignmentViews:
    """Outcome of the operations of each job that are in memory."""

    def __init__(self, store: Store, sums: RecentSums, window: Window) -> None:
        self._store = store
        self._captured = sums.captured
        self._matches = sums.matches()
        self._first_ns, self._last_ns = sums.logged.within(window, len(store.processes))

    def of_job(self, job: str) -> AlignmentView:
        """The view of one job."""
        own = processes_of(self._store, job)
        counts = self._matches[own].sum(axis=0).tolist()
        covered = counts[Match.MATCHED] + counts[Match.UNMATCHED]
        return AlignmentView(
            matched=counts[Match.MATCHED],
            unmatched=counts[Match.UNMATCHED],
            not_covered=counts[Match.NOT_COVERED],
            no_kernel=counts[Match.NO_KERNEL],
            pending=counts[Match.PENDING],
            matched_ratio=round(counts[Match.MATCHED] / covered, 4) if covered else None,
            captured_ratio=self._captured.ratio(self._store, own, self._first_ns[own], self._last_ns[own]),
        )


def processes_of(store: Store, job: str) -> Int64s:
    """The processes of a job."""
    return np.array([index for index, name in enumerate(store.process_job) if name == job], np.int64)


def _verdict(verdict: Verdict | None, names: Names) -> VerdictView | None:
    if verdict is None:
        return None
    return VerdictView(
        ending=verdict.ending.value,
        is_provisional=verdict.is_provisional,
        summary=with_names(verdict.summary, verdict.job, names),
        ranks=verdict.ranks,
        hosts=verdict.hosts,
        first_failure=verdict.first_failure,
        standing=verdict.standing[:MAX_STANDING],
    )


class _JobViews:
    """The view of each job, from values computed once for all jobs."""

    def __init__(
        self,
        store: Store,
        aliases: Aliases,
        sums: RecentSums,
        window: Window,
        summaries: Mapping[str, IterationSummary],
        now_ns: int,
    ) -> None:
        self._store = store
        self._now_ns = now_ns
        self._summaries = summaries
        self._sums = sums
        self._recent = recent_of_communicators(store, sums, window)
        self._window = window
        self._names = _names_by_id(store, aliases)
        self._communicators = CommunicatorViews(store, aliases, self._recent)
        self._alignments = AlignmentViews(store, sums, window)
        self._with_kernels = jobs_with_kernels(store, sorted(sums.with_kernels))
        series = store.series.rows
        inspected = np.unique(series["communicator"][series["inspected"] > 0]).tolist()
        self._with_inspector = {store.communicators[index].job for index in inspected if index >= 0}
        self._bytes = bytes_of_communicators(store)
        self._named = named_by_findings(store)

    def job(self, name: str) -> JobView:
        """One job's view."""
        store = self._store
        processes = processes_of(store, name).tolist()
        communicators = [each for each in store.listed_communicators() if each.job == name]
        mix = self._mix(communicators)
        shown = most_telling(communicators, self._bytes, self._named)
        step = step_time(store.step_histories.get(name), [each for each in store.findings if each.job == name])
        return JobView(
            name=name,
            verdict=_verdict(store.verdicts.get(name), self._names),
            level=_LEVELS[bool(mix), name in self._with_inspector, name in self._with_kernels],
            hosts=len({store.processes[index].host for index in processes}),
            processes=len(processes),
            versions=_versions(store, processes),
            clock_sigma_seconds=_clock_sigma(store, name, {store.processes[index].host for index in processes}),
            communicators_known=len(communicators),
            communicators=tuple(self._communicators.view(each) for each in shown),
            parallelisms=self._parallelisms(communicators, mix),
            operations=sum(entry.operations for entry in mix),
            bytes=sum(entry.bytes for entry in mix),
            operations_per_second=self._operation_rate(name),
            begin_ns=begin_of_job(store, self._sums, name, self._now_ns),
            step=step,
            exposed_ratio=self._summaries[name].exposed_ratio,
            expected_step=store.expected_step_of(name),
            utilization=utilization_of(store, name, None if step is None else step.now_ns),
            alignment=self._alignments.of_job(name),
            mix=mix,
        )

    def _mix(self, communicators: Sequence[Communicator]) -> tuple[MixEntry, ...]:
        kinds = list(dict.fromkeys(each.parallelism for each in communicators))
        kind_of = np.full(len(self._store.communicators) + 1, -1, np.int64)
        for each in communicators:
            kind_of[each.index] = kinds.index(each.parallelism)
        series = self._store.series.rows
        own = series[(kind_of[series["communicator"]] >= 0) & (series["operations"] > 0)]
        keys = (kind_of[own["communicator"]] << 16) | (own["op"].astype(np.int64) << 8) | own["size_class"]
        found, groups = np.unique(keys, return_inverse=True)
        operations = np.bincount(groups, weights=own["operations"], minlength=len(found))
        amounts = np.bincount(groups, weights=own["bytes"], minlength=len(found))
        entries = [
            MixEntry(
                parallelism=kinds[key >> 16],
                op=operation_name(key >> 8 & 255),
                size_class=size_class_name(key & 255),
                operations=int(count),
                bytes=int(amount),
            )
            for key, count, amount in zip(found.tolist(), operations, amounts, strict=True)
        ]
        return tuple(sorted(entries, key=lambda entry: (-entry.bytes, -entry.operations)))

    def _parallelisms(
        self, communicators: Sequence[Communicator], mix: Sequence[MixEntry]
    ) -> tuple[ParallelismView, ...]:
        views: list[ParallelismView] = []
        for kind in dict.fromkeys(each.parallelism for each in communicators):
            waits = self._recent.wait_ratio[[each.index for each in communicators if each.parallelism == kind]]
            waits = waits[np.isfinite(waits)]
            views.append(
                ParallelismView(
                    parallelism=kind,
                    communicators=sum(each.parallelism == kind for each in communicators),
                    operations=sum(entry.operations for entry in mix if entry.parallelism == kind),
                    bytes=sum(entry.bytes for entry in mix if entry.parallelism == kind),
                    wait_ratio=four_digits(float(np.median(waits))) if len(waits) else None,
                )
            )
        return tuple(sorted(views, key=lambda view: -view.bytes))

    def _operation_rate(self, name: str) -> float | None:
        """Operations per second over the last full buckets; None if no line has a time."""
        own = processes_of(self._store, name)
        first_ns, last_ns = self._sums.logged.within(self._window, len(self._store.processes))
        first_ns = first_ns[own][first_ns[own] <= last_ns[own]]
        if not len(first_ns):
            return None
        last = self._window.end_ns - self._window.bucket_ns
        first = max(last - _RATE_BUCKETS * self._window.bucket_ns, int(first_ns.min()))
        if first >= last:
            return None
        logged = self._sums.operations.by_bucket(0, self._window, own, np.zeros(len(own), np.int64), 1)[0]
        return four_digits(float(logged[-1 - _RATE_BUCKETS : -1].sum()) / ((last - first) * 1e-9))


def _versions(store: Store, processes: Sequence[int]) -> tuple[str, ...]:
    """The different versions of these processes, sorted."""
    own = [store.process_version.get(process) for process in processes]  # most processes report their own
    silent = (process for process, version in zip(processes, own, strict=True) if version is None)
    found = {*own, *(version_of(store, process) for process in silent)}
    return tuple(sorted(version for version in found if version is not None))


def _finding(finding: Finding, alias_of: Names) -> FindingView:
    names = {each: alias_of[finding.job, each] for each in _named_in(finding) if (finding.job, each) in alias_of}
    return FindingView(
        kind=finding.kind,
        severity=finding.severity,
        job=finding.job,
        communicator=None if finding.comm_id is None else alias_of.get((finding.job, finding.comm_id)),
        comm_id=finding.comm_id,
        parallelism=finding.parallelism,
        ranks=finding.ranks,
        hosts=finding.hosts,
        since_ns=finding.since_ns,
        until_ns=finding.until_ns,
        confidence=finding.confidence,
        summary=with_names(finding.summary, finding.job, alias_of),
        evidence=finding.evidence,
        groups=tuple(names.values()),
        names=names,
        lengthens_steps=finding.kind in LENGTHENS_STEPS,
        slows_groups=finding.kind in SLOWS_GROUPS,
        id=finding.id,
        acknowledged=finding.acknowledged,
        muted=finding.muted,
    )


def _named_in(finding: Finding) -> list[str]:
    """Every `comm_id` that a finding names, itself or in its evidence (`groups`, `slow_groups`, `comm_id:coll_seq`)."""
    found = [] if finding.comm_id is None else [finding.comm_id]
    for name in ("groups", "slow_groups", "collectives"):
        values = finding.evidence.get(name)
        if isinstance(values, list | tuple):
            found += [str(each).rpartition(":")[0] if name == "collectives" else str(each) for each in values]
    return list(dict.fromkeys(found))


def settings_view(
    started: Mapping[str, float], changed: Mapping[str, float], changes: Sequence[ThresholdChange]
) -> SettingsView:
    """All thresholds; `started` and `changed`: those that were given, by name (`detect.settings`)."""
    of_jobs: dict[str, dict[str, float]] = {}
    for name, value in {**started, **changed}.items():
        pattern, own = split_name(name)
        if pattern is not None:
            of_jobs.setdefault(own, {})[pattern] = value
    return SettingsView(
        thresholds=tuple(
            ThresholdView(
                **{field.name: getattr(each, field.name) for field in fields(each)},
                started=started.get(name),
                changed=changed.get(name),
                jobs=of_jobs.get(name, {}),
            )
            for name, each in THRESHOLDS.items()
        ),
        changes=tuple(changes),
    )


def health_view(store: Store, health: ServiceHealth) -> HealthView:
    """Counts of what was lost, skipped or refused so far."""
    return HealthView(
        version=health.version,
        agents_port=health.agents_port,
        agents_need=health.agents_need,
        understood=dict(store.understood.most_common()),
        skipped=dict(store.skipped.most_common()),
        gaps=gap_counts(store),
        sessions_refused=dict(health.sessions_refused),
        ingest_lag_seconds=health.ingest_lag_seconds,
        backlog_batches=health.backlog_batches,
        window_operations=len(store.operations),
        page_events_dropped=health.page_events_dropped,
    )
