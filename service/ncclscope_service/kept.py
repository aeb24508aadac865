"""All of the service that outlives a restart: it changes by the entries of the journal, and by nothing else.

Live, entries are written as they are applied; after a restart the same entries are applied to a snapshot of the state
before them, and give the state after them: the same windows, communicators, clocks, baselines and findings, and
notifications that were delivered are not delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from ncclscope_service import state
from ncclscope_service.agents import KnownAgent
from ncclscope_service.aliases import Aliases
from ncclscope_service.clock_prior import ClockPrior
from ncclscope_service.detect.blind import service_is_blind
from ncclscope_service.detect.findings import ordered
from ncclscope_service.finding_news import FindingEvent, FindingNews
from ncclscope_service.job_ends import JobEnds
from ncclscope_service.journal_entry import Entry, HostPrior, Ticked, Told
from ncclscope_service.outbox import Outbox
from ncclscope_service.overview import FindingView, finding_views
from ncclscope_service.pipeline import Pipeline, PipelineSettings
from ncclscope_service.receive import Received, Receiver, ReplayError
from ncclscope_service.rows import Finding
from ncclscope_service.series_budget import SeriesBudget
from ncclscope_service.store import Ids, Store
from ncclscope_service.tally import Tally

_SEGMENT_OPERATIONS: Final = 50_000
_SEGMENT_NS: Final = 10_000_000_000
"""Operations leave memory when so many are due, or so long after those before."""

Archiving = Callable[[Store, Ids], bool]
"""Writes operations that leave the window; False where that was not possible, and they must stay."""


@dataclass(slots=True)
class Replayed:
    """What a journal gave."""

    batches: int = 0
    """Applied."""
    left_out: int = 0
    """Entries that were whole but could not be applied, since one before them was damaged."""
    agents: set[str] = field(default_factory=set[str])
    """Agents of whom something was left out: they read on from their positions."""


class Kept:
    """The state. `restore` gives another one its place."""

    def __init__(self, settings: PipelineSettings | None = None) -> None:
        self.pipeline = Pipeline(settings)
        self.pipeline.mistakes.are_borne = True
        self.agents: dict[str, KnownAgent] = {}
        """By id; shared with the receiver."""
        self.aliases = Aliases()
        self.tally = Tally()
        self.budget = SeriesBudget()
        self.news = FindingNews()
        self.job_ends = JobEnds()
        self.outboxes: dict[str, Outbox] = {}
        """By the name of the receiver of notifications."""
        self.priors: dict[str, ClockPrior] = {}
        self.silent: frozenset[str] = frozenset()
        self.at_ns = 0
        """The last tick; the service's wall clock."""
        self.not_archived = 0
        """Operations that left memory while they could not be written: the disk took nothing for too long."""
        self._let_go_at_ns = 0
        self._trouble_since_ns: int | None = None

    def parts(self) -> list[state.Part]:
        """The whole state as bytes, in pieces that are right until the work goes on.

        Raises:
            StateError: it holds what cannot be kept.
        """
        return state.parts_of(self)

    @classmethod
    def restore(cls, snapshot: state.Part, settings: PipelineSettings | None = None) -> Kept:
        """The state of a snapshot. `settings` of sizes, windows and the baseline count from now on.

        Raises:
            StateError: the snapshot is damaged, or another version wrote it.
        """
        kept = state.restore(snapshot, cls(settings))
        if settings is not None:
            kept.pipeline.settings = settings
            kept.pipeline.store.measured_baseline = settings.baseline
        return kept

    def reopened(self, now_ns: int) -> None:
        """The state is that of a service that starts: nobody is connected, and what waits is due."""
        for agent in self.agents.values():
            agent.reopened(now_ns)
        for outbox in self.outboxes.values():
            outbox.reopened()

    def feed(self, received: Received) -> bool:
        """Applies a batch, which the receiver has found to be the next one.

        One that a mistake of ours cannot take is skipped and counted, live as after a restart (`Pipeline.mistakes` has
        what there is to tell). False: its agent has to begin another session.
        """
        return self.pipeline.feed(received.batch, agent=received.agent, session=received.session, job=received.job)

    def tick(self, ticked: Ticked, archive: Archiving) -> list[FindingEvent]:
        """Works on what came, lets go of what is old, and gives the news."""
        now_ns = self.at_ns = ticked.at_ns
        self.priors.update({each.host: _clock_prior(each) for each in ticked.priors})
        if ticked.silent is not None:
            self.silent = frozenset(ticked.silent)
        with self._borne("advance"):
            self.pipeline.believe_clocks(self.priors)
            self.pipeline.advance(now_ns, silent_hosts=self.silent)
        with self._borne("tally"):
            self._add_trouble(ticked)
            self.tally.feed(self.pipeline.store)
        with self._borne("expire"):
            expired = self.pipeline.expired(now_ns)
            if self._is_due(len(expired), now_ns):
                self._let_go(expired, now_ns, archive)
        news: list[FindingEvent] = []
        with self._borne("notify"):
            news = self.news.look(self.findings(), now_ns)
            for event in news:
                for outbox in self.outboxes.values():
                    outbox.offer(event)
        return news

    @contextmanager
    def _borne(self, where: str) -> Generator[None]:
        """Goes on behind a mistake of ours, live as after a restart: the tick does what else there is to do."""
        try:
            yield
        except Exception as error:
            self.pipeline.mistakes.bear(error, where, "what was due")

    def findings(self) -> tuple[FindingView, ...]:
        """All findings that are kept, the open ones first."""
        self.aliases.update(self.pipeline.store.communicators, self.pipeline.store.members)
        return finding_views(self.pipeline.store, self.aliases, most=None)

    def changes(self, priors: Mapping[str, ClockPrior], silent: frozenset[str], now_ns: int, trouble: str) -> Ticked:
        """The entry of a tick: what is not as at the last one."""
        changed = {host: prior for host, prior in priors.items() if self.priors.get(host) != prior}
        return Ticked(
            at_ns=now_ns,
            priors=tuple(HostPrior(host, each.heartbeat_offset_ns, each.error_ns) for host, each in changed.items()),
            silent=None if silent == self.silent else tuple(sorted(silent)),
            trouble=trouble,
        )

    def replay(self, entry: Entry, receiver: Receiver, archive: Archiving, replayed: Replayed) -> None:
        """Applies one entry of the journal; `receiver` has these agents, and writes nothing.

        Raises:
            ProtocolError: another version wrote it.
        """
        if isinstance(entry, Ticked):
            self.tick(entry, archive)
        elif isinstance(entry, Told):
            if (outbox := self.outboxes.get(entry.receiver)) is not None:
                outbox.settle(entry.finding, entry.news, is_taken=entry.is_taken)
        else:
            try:
                received = receiver.replay(entry)
            except ReplayError:
                replayed.left_out += 1
                replayed.agents.add(getattr(entry, "agent", ""))
                return
            if received is not None:
                self.feed(received)
                replayed.batches += 1

    def _is_due(self, expired: int, now_ns: int) -> bool:
        """Whether operations leave now: a file for each tick would be too many."""
        return expired >= _SEGMENT_OPERATIONS or not 0 <= now_ns - self._let_go_at_ns < _SEGMENT_NS

    def _let_go(self, expired: Ids, now_ns: int, archive: Archiving) -> None:
        known = self.pipeline.store
        is_archived = archive(known, expired)
        if not is_archived and len(known.operations) > 2 * self.pipeline.settings.window_operations:
            self.not_archived += len(expired)
            is_archived = True
        if is_archived:
            self._let_go_at_ns = now_ns
            self.pipeline.forget(expired, now_ns)

    def _add_trouble(self, ticked: Ticked) -> None:
        """The service's own disk is no detector's matter, and every job's."""
        if not ticked.trouble:
            self._trouble_since_ns = None
            return
        since_ns = self._trouble_since_ns = self._trouble_since_ns or ticked.at_ns
        known = self.pipeline.store
        own = [_trouble(job, since_ns, ticked.trouble) for job in sorted(set(known.process_job))]
        known.findings = ordered([*known.findings, *own])


def _clock_prior(prior: HostPrior) -> ClockPrior:
    return ClockPrior(heartbeat_offset_ns=prior.heartbeat_offset_ns, error_ns=prior.error_ns)


def _trouble(job: str, since_ns: int, why: str) -> Finding:
    summary = f"The service cannot keep what it is told: {why}. Agents keep it until it can."
    return service_is_blind(job, since_ns, reason=why, summary=summary)
