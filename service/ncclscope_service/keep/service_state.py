"""Everything in the service that survives a restart; it changes by the entries of the journal, and by nothing else.

Live, entries are written as they are applied; after a restart the same entries are applied to a snapshot of the state
before them, and give the state after them: the same windows, communicators, clocks, baselines and findings, and
notifications that were delivered are not delivered again.

*End of a job.* The files of a run are written when its job ends. A job ends when, for `SETTLE_NS`, nothing new came of
it and either every communicator that was initialised has been destroyed or aborted, or every one of its agents has said
goodbye; and when it has said nothing at all for `silence_ns`, whatever the reason. A job that speaks again is alive
again, and ends once more.

*Notifications* that a receiver has still to get are a part of the state, so that a restart delivers none twice. They
are bounded: beyond the limit the oldest is dropped and counted. News of a finding replaces older news of it that still
waits: a receiver that was away learns how things stand, not every step on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ncclscope_service.clock.host_clocks import ClockPrior
from ncclscope_service.columns.table import Ids
from ncclscope_service.detect.blind import service_blind_finding
from ncclscope_service.detect.context import by_urgency
from ncclscope_service.intake.agents import KnownAgent
from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.intake.journal_entry import (
    Entry,
    FindingMarked,
    HostPrior,
    NotificationSettled,
    OperatorEntry,
    Ticked,
)
from ncclscope_service.intake.receive import AgentRecord, Received, Receiver, ReplayError
from ncclscope_service.metrics.series import SeriesBudget
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.rollup.series import Tally
from ncclscope_service.show.finding_events import FindingChange, FindingEvent, FindingTracker
from ncclscope_service.show.finding_marks import FindingMarks
from ncclscope_service.show.overview import FindingView, ThresholdChange, finding_views
from ncclscope_service.store import state
from ncclscope_service.store.records import Finding, Severity
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store

SETTLE_NS: Final = 30_000_000_000
"""Agents send what they read within a second; exports of the last capture come later."""
SILENCE_NS: Final = 1_800_000_000_000


@dataclass(slots=True)
class _Job:
    batches: int
    heard_at_ns: int
    is_over: bool = False


@dataclass(slots=True)
class JobEnds:
    """Watches what agents send of each job, and names those that have ended."""

    _jobs: dict[str, _Job] = field(default_factory=dict[str, _Job])

    def take_ended(
        self,
        agents: Iterable[AgentRecord],
        has_destroyed: Callable[[str], bool],
        now_ns: int,
        *,
        silence_ns: int = SILENCE_NS,
    ) -> list[str]:
        """Jobs that ended since the last call, by name; `has_destroyed`: whether all communicators of a job are gone.

        `now_ns` is the service's wall clock, which must not run back by more than is worth waiting for.
        """
        of_job: defaultdict[str, list[AgentRecord]] = defaultdict(list)
        for agent in agents:
            of_job[agent.job].append(agent)
        ended: list[str] = []
        for name, mine in of_job.items():
            job = self._heard(name, sum(agent.batches_total for agent in mine), now_ns)
            if job.is_over or not job.batches:
                continue
            quiet_ns = now_ns - job.heard_at_ns
            is_settled = quiet_ns >= SETTLE_NS
            if quiet_ns >= silence_ns or (is_settled and (_have_left(mine) or has_destroyed(name))):
                job.is_over = True
                ended.append(name)
        return ended

    def _heard(self, name: str, batches: int, now_ns: int) -> _Job:
        job = self._jobs.get(name)
        if job is None or job.batches != batches:
            job = self._jobs[name] = _Job(batches, now_ns)
        return job


def has_destroyed_all(store: Store, job: str) -> bool:
    """Whether the job had communicators and each of their known members was destroyed or aborted."""
    members = [
        store.members[member]
        for communicator in store.communicators
        if communicator.job == job
        for member in (communicator.members or {}).values()
    ]
    return bool(members) and not any(member.is_alive for member in members)


def _have_left(agents: Iterable[AgentRecord]) -> bool:
    return all(agent.said_goodbye and not agent.connected for agent in agents)


_MAX_WAITING: Final = 256
_RANKS: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


@dataclass(slots=True)
class Outbox:
    """The notifications of one receiver, oldest first."""

    name: str
    least: Severity = Severity.WARNING
    """Findings that are less severe are not reported."""
    outcomes: dict[str, int] = field(default_factory=lambda: {"delivered": 0, "failed": 0, "dropped": 0})
    _waiting: dict[str, FindingEvent] = field(default_factory=dict[str, FindingEvent])
    _reported: set[str] = field(default_factory=set[str])
    """Open findings that were offered: their end is reported too, however severe they are by then."""

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, event: FindingEvent) -> None:
        """Adds a change of a finding."""
        is_new = event.id not in self._reported
        if is_new and (event.event is FindingChange.CLOSED or not self._is_severe(event)):
            return
        if event.event is FindingChange.CLOSED:
            self._reported.discard(event.id)
        else:
            self._reported.add(event.id)
        waiting = self._waiting.get(event.id)
        if waiting is None and len(self._waiting) >= _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
            self.outcomes["dropped"] += 1
        if waiting is not None and (waiting.event, event.event) == (FindingChange.OPENED, FindingChange.CHANGED):
            event = FindingEvent(event=FindingChange.OPENED, id=event.id, finding=event.finding)
        self._waiting[event.id] = event

    def first(self) -> FindingEvent | None:
        """The notification that waits longest."""
        return next(iter(self._waiting.values()), None)

    def newest(self, finding: str) -> FindingEvent | None:
        """The notification of this finding that waits, if any."""
        return self._waiting.get(finding)

    def settle(self, finding: str, change: str, *, is_delivered: bool) -> None:
        """A notification was delivered, or given up; newer news of the finding stays."""
        self.outcomes["delivered" if is_delivered else "failed"] += 1
        waiting = self._waiting.get(finding)
        if waiting is not None and waiting.event == change:
            del self._waiting[finding]

    def _is_severe(self, event: FindingEvent) -> bool:
        return _RANKS[Severity(event.finding.severity)] >= _RANKS[self.least]


_SEGMENT_OPERATIONS: Final = 50_000
_SEGMENT_NS: Final = 10_000_000_000
"""Operations are evicted when `_SEGMENT_OPERATIONS` are due, or this long after the last ones."""

Archiving = Callable[[Store, Ids], bool]
"""Writes operations that leave the window; False if that was not possible, and they must stay."""


@dataclass(slots=True)
class ReplayCounts:
    """Entries of a journal by what became of them."""

    batches: int = 0
    """Applied."""
    left_out: int = 0
    """Entries that were whole but could not be applied, since one before them was damaged."""
    agents: set[str] = field(default_factory=set[str])
    """Agents of whom something was left out: they read on from their positions."""


_CHANGES_KEPT: Final = 100


class ServiceState:
    """The pipeline, agents and their sessions, totals, findings with their marks, and notifications."""

    marks: FindingMarks = FindingMarks()
    threshold_changes: tuple[ThresholdChange, ...] = ()
    """The last ones, oldest first."""
    _muted: frozenset[str] = frozenset()
    """Open findings that were muted at the last tick, by id."""

    def __init__(self, settings: PipelineSettings | None = None) -> None:
        self.pipeline = Pipeline(settings)
        self.pipeline.errors.are_isolated = True
        self.pipeline.limit_names()
        self.agents: dict[str, KnownAgent] = {}
        """By id; shared with the receiver."""
        self.aliases = Aliases()
        self.tally = Tally()
        self.budget = SeriesBudget()
        self.news = FindingTracker()
        self.job_ends = JobEnds()
        self.outboxes: dict[str, Outbox] = {}
        """By the name of the receiver of notifications."""
        self.priors: dict[str, ClockPrior] = {}
        self.silent: frozenset[str] = frozenset()
        self.at_ns = 0
        """The last tick; the service's wall clock."""
        self.not_archived = 0
        """Operations that left memory while they could not be written: the disk took nothing for too long."""
        self._evicted_at_ns = 0
        self._trouble_since_ns: int | None = None

    def parts(self) -> list[state.Part]:
        """The whole state as bytes, in pieces that are right until the work goes on.

        Raises:
            StateError: it holds what cannot be kept.
        """
        return state.parts_of(self)

    @classmethod
    def restore(cls, snapshot: state.Part, settings: PipelineSettings | None = None) -> ServiceState:
        """The state of a snapshot. `settings` of sizes, windows and what is known of machine and job count now.

        Raises:
            StateError: the snapshot is damaged, or another version wrote it.
        """
        restored = state.restore(snapshot, cls)
        if settings is not None:
            restored.pipeline.settings = settings
            restored.pipeline.store.measured_baseline = settings.baseline
            restored.pipeline.store.calibration = settings.calibration
            restored.pipeline.store.description = settings.description
            restored.pipeline.store.expected_step = settings.expected_step
            restored.pipeline.store.gpu = settings.gpu
        return restored

    def mark_restarted(self, now_ns: int) -> None:
        """The service starts from this state: nobody is connected."""
        for agent in self.agents.values():
            agent.mark_restarted(now_ns)

    def ingest_batch(self, received: Received) -> bool:
        """Applies a batch, which the receiver has found to be the next one.

        A batch on which our own code fails is skipped and counted, live as after a restart (`Pipeline.errors`).
        False: its agent has to begin another session.
        """
        return self.pipeline.ingest_batch(
            received.batch, agent=received.agent, session=received.session, job=received.job
        )

    def tick(self, ticked: Ticked, archive: Archiving) -> list[FindingEvent]:
        """Processes what came, evicts what is old, and gives the changes of findings."""
        now_ns = self.at_ns = ticked.at_ns
        self.priors.update({each.host: _clock_prior(each) for each in ticked.priors})
        if ticked.silent is not None:
            self.silent = frozenset(ticked.silent)
        with self.pipeline.errors.isolated("advance", "what was due"):
            self.pipeline.set_clock_priors(self.priors)
            self.pipeline.process_backlog(now_ns, silent_hosts=self.silent)
        with self.pipeline.errors.isolated("tally", "what was due"):
            self._add_trouble(ticked)
            self.tally.count_rows(self.pipeline.store)
        with self.pipeline.errors.isolated("expire", "what was due"):
            expired = self.pipeline.evictable(now_ns)
            if self._is_due(len(expired), now_ns):
                self._archive_and_evict(expired, now_ns, archive)
        news: list[FindingEvent] = []
        with self.pipeline.errors.isolated("notify", "what was due"):
            news = self.news.compare(self.findings(), now_ns)
            known = self.pipeline.store
            known.findings = self.news.identified(known.findings)
            self.marks = self.marks.at((each.id for each in known.findings), now_ns)
            self._mark_findings()
            for event in self._to_notify(news):
                for outbox in self.outboxes.values():
                    outbox.offer(event)
        return news

    def apply(self, entry: OperatorEntry) -> None:
        """Applies what a person did; `marks.check` and `detect.settings.check` have found it right."""
        if isinstance(entry, FindingMarked):
            self.marks = self.marks.applied(entry)
            self._mark_findings()
            return
        values = {**self.pipeline.changed_thresholds, **entry.values}
        self.pipeline.changed_thresholds = {name: value for name, value in values.items() if value is not None}
        changes = [
            ThresholdChange(at_ns=entry.at_ns, by=entry.by, name=name, value=value)
            for name, value in entry.values.items()
        ]
        self.threshold_changes = (*self.threshold_changes, *changes)[-_CHANGES_KEPT:]

    def _mark_findings(self) -> None:
        self.pipeline.store.findings = self.marks.marked(self.pipeline.store.findings)

    def _to_notify(self, news: Sequence[FindingEvent]) -> list[FindingEvent]:
        """The changes that are reported: none of muted findings but their end, and those whose mute has ended."""
        views = {each.id: each for each in self.findings() if each.until_ns is None}
        muted = frozenset(each.id for each in views.values() if each.muted is not None)
        told = [event for event in news if event.id not in muted]
        again = sorted((self._muted - muted) & views.keys() - {event.id for event in told})
        self._muted = muted
        return [*told, *(FindingEvent(event=FindingChange.OPENED, id=each, finding=views[each]) for each in again)]

    def findings(self) -> tuple[FindingView, ...]:
        """All findings that are kept, the open ones first."""
        self.aliases.update(self.pipeline.store.communicators, self.pipeline.store.members)
        return finding_views(self.pipeline.store, self.aliases, most=None)

    def next_tick(self, priors: Mapping[str, ClockPrior], silent: frozenset[str], now_ns: int, trouble: str) -> Ticked:
        """The journal entry of a tick: what has changed since the last one."""
        changed = {host: prior for host, prior in priors.items() if self.priors.get(host) != prior}
        return Ticked(
            at_ns=now_ns,
            priors=tuple(HostPrior(host, each.heartbeat_offset_ns, each.error_ns) for host, each in changed.items()),
            silent=None if silent == self.silent else tuple(sorted(silent)),
            trouble=trouble,
        )

    def replay(self, entry: Entry, receiver: Receiver, archive: Archiving, counts: ReplayCounts) -> None:
        """Applies one entry of the journal; `receiver` has these agents, and writes nothing.

        Raises:
            ProtocolError: another version wrote it.
        """
        if isinstance(entry, Ticked):
            self.tick(entry, archive)
        elif isinstance(entry, NotificationSettled):
            if (outbox := self.outboxes.get(entry.receiver)) is not None:
                outbox.settle(entry.finding, entry.change, is_delivered=entry.is_delivered)
        elif isinstance(entry, OperatorEntry):
            self.apply(entry)
        else:
            try:
                received = receiver.replay(entry)
            except ReplayError:
                counts.left_out += 1
                counts.agents.add(getattr(entry, "agent", ""))
                return
            if received is not None:
                self.ingest_batch(received)
                counts.batches += 1

    def _is_due(self, expired: int, now_ns: int) -> bool:
        """Whether operations leave now: a file for each tick would be too many."""
        return expired >= _SEGMENT_OPERATIONS or not 0 <= now_ns - self._evicted_at_ns < _SEGMENT_NS

    def _archive_and_evict(self, expired: Ids, now_ns: int, archive: Archiving) -> None:
        known = self.pipeline.store
        is_archived = archive(known, expired)
        if not is_archived and len(known.operations) > 2 * self.pipeline.settings.window_operations:
            self.not_archived += len(expired)
            is_archived = True
        if is_archived:
            self._evicted_at_ns = now_ns
            self.pipeline.evict(expired, now_ns)

    def _add_trouble(self, ticked: Ticked) -> None:
        """The service's own disk is no detector's matter, and every job's."""
        if not ticked.trouble:
            self._trouble_since_ns = None
            return
        since_ns = self._trouble_since_ns = self._trouble_since_ns or ticked.at_ns
        known = self.pipeline.store
        own = [_trouble(job, since_ns, ticked.trouble) for job in sorted(set(known.process_job))]
        known.findings = by_urgency([*known.findings, *own])


def _clock_prior(prior: HostPrior) -> ClockPrior:
    return ClockPrior(heartbeat_offset_ns=prior.heartbeat_offset_ns, error_ns=prior.error_ns)


def _trouble(job: str, since_ns: int, why: str) -> Finding:
    summary = f"the service cannot write to disk: {why}; agents hold their data until it can"
    return service_blind_finding(job, since_ns, reason=why, summary=summary)
