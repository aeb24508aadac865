"""The running service as the HTTP side sees it: the page's views, metrics, findings, probes and snapshots."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import msgspec
from anyio import to_thread

from ncclscope_service.detect.settings import checked_change
from ncclscope_service.intake.journal_entry import FindingMarked, MarkAction, OperatorEntry, ThresholdsChanged
from ncclscope_service.intake.receive import AgentRecord, Receiver
from ncclscope_service.keep.persistence import Persistence
from ncclscope_service.keep.service_state import ServiceState
from ncclscope_service.metrics.scrape import MetricsView, gather
from ncclscope_service.metrics.series import ScrapeCache
from ncclscope_service.serve.api_table import ChangeRequest, MarkRequest
from ncclscope_service.serve.http_server import HttpAccess
from ncclscope_service.serve.listen import Listener
from ncclscope_service.serve.live import Hub
from ncclscope_service.serve.notify import Notifier
from ncclscope_service.serve.snapshots import write_snapshot
from ncclscope_service.show.details import JobQuery, query_job
from ncclscope_service.show.finding_marks import MOST_CHARACTERS
from ncclscope_service.show.health import AgentView, HealthCheck, ServiceHealth, disk_check, journal_check, tick_check
from ncclscope_service.show.overview import (
    FindingView,
    HealthView,
    MarksView,
    Overview,
    SettingsView,
    health_view,
    make_overview,
    settings_view,
)

_GATHERED_EVERY_SECONDS: Final = 0.25
"""Metrics are not gathered more often while operations come: 20 ms each time."""
_MINUTE_NS: Final = 60_000_000_000
_LOOK_SECONDS: Final = 15.0
_PATIENCE_SECONDS: Final = 30.0
_NAME: Final = ".ncclscope-writable"


@dataclass(slots=True)
class ServiceStatus:
    """How the service's own work goes."""

    why_not_ready: str = "the agents' port is not open yet"
    """Empty once agents can be served."""
    ticks: int = 0
    tick_seconds: float | None = None
    """Duration of the last tick."""
    ticked_at: float | None = None
    """End of the last tick (`time.monotonic`)."""
    ingest_lag_seconds: float | None = None


class DiskProbe:
    """Checks now and then whether the data folder can be written, and how much room it has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trouble: str | None = None
        self._free_bytes: int | None = None

    def health_check(self) -> HealthCheck:
        """As of the last look."""
        return disk_check(trouble=self._trouble, free_bytes=self._free_bytes)

    async def run(self) -> None:
        """Checks the folder every `_LOOK_SECONDS` until cancelled."""
        while True:
            with anyio.move_on_after(_PATIENCE_SECONDS) as patience:
                await self.look()
            if patience.cancelled_caught:
                self._trouble = f"it has not answered for {_PATIENCE_SECONDS:g} s"
            await anyio.sleep(_LOOK_SECONDS)

    async def look(self) -> None:
        """Checks the folder once."""
        try:
            self._free_bytes = await to_thread.run_sync(self._try, abandon_on_cancel=True)
            self._trouble = None
        except OSError as error:
            self._trouble = error.strerror or type(error).__name__

    def _try(self) -> int:
        """Writes a little, and gives the free space."""
        path = self._folder / _NAME
        with path.open("wb") as stream:
            stream.write(b"x" * 4096)
        path.unlink()
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize


class ServiceViews:
    """Views of the service as its routes ask for them; all but `write_snapshot` return at once."""

    def __init__(
        self,
        version: str,
        state: ServiceState,
        receiver: Receiver,
        status: ServiceStatus,
        *,
        hub: Hub,
        access: HttpAccess,
        notifier: Notifier,
        disk: DiskProbe | None,
        on_operator: Callable[[OperatorEntry], None],
    ) -> None:
        """`on_operator` applies what a person does, and keeps it."""
        self._version = version
        self._state = state
        self._receiver = receiver
        self._status = status
        self._hub = hub
        self._access = access
        self._notifier = notifier
        self._disk = disk
        self._on_operator = on_operator
        self._persistence: Persistence | None = None
        self._listener: Listener | None = None
        self._agents_port: int | None = None
        self._agents_need: tuple[str, ...] = ()
        self._metrics: MetricsView | None = None
        self._scrape_cache = ScrapeCache()
        self._gathered = (0, 0)
        """Tick and rows fed since then that are in `_metrics`."""
        self._gathered_at = 0.0

    def show_restored(self, state: ServiceState, receiver: Receiver, persistence: Persistence) -> None:
        """Shows the state that was restored, in place of the empty one."""
        self._state, self._receiver, self._persistence = state, receiver, persistence
        self._metrics, self._scrape_cache = None, ScrapeCache()

    def show_listener(self, listener: Listener) -> None:
        """Shows the connections that the agents' port refused too."""
        self._listener = listener

    def show_agents_port(self, port: int, need: tuple[str, ...]) -> None:
        """Shows where agents can connect, and with which options."""
        self._agents_port, self._agents_need = port, need

    def overview(self) -> Overview:
        """Everything the page shows, now."""
        pipeline = self._state.pipeline
        return make_overview(
            pipeline.store,
            aliases=self._state.aliases,
            agents=self._agents(),
            health=self._health(),
            now_ns=time.time_ns(),
            sums=pipeline.recent,
            iterations=self._scrape_cache.iterations,
        )

    def findings(self) -> tuple[FindingView, ...]:
        """All findings that are kept, the open ones first."""
        return self._state.findings()

    def marks(self) -> MarksView:
        """Marks of people on findings, as far as they hold."""
        marks = self._state.marks
        return MarksView(acknowledged=marks.acknowledged, mutes=tuple(marks.mutes.values()))

    def mark(self, asked: MarkRequest) -> None:
        """Acknowledges or mutes findings, or takes it back. Raises ConfigError if that cannot be done."""
        now_ns = time.time_ns()
        given = msgspec.structs.asdict(asked)
        seconds = given.pop("seconds")
        until_ns = now_ns + round(seconds * 1e9) if asked.action is MarkAction.MUTE else 0
        entry = FindingMarked(**given, at_ns=now_ns, until_ns=until_ns)
        self._state.marks.check(entry, self._state.pipeline.store.findings)
        self._on_operator(entry)

    def settings(self) -> SettingsView:
        """The thresholds of the detectors."""
        pipeline = self._state.pipeline
        return settings_view(pipeline.settings.thresholds, pipeline.changed_thresholds, self._state.threshold_changes)

    def change_settings(self, asked: ChangeRequest) -> None:
        """Changes thresholds. Raises ConfigError if names or numbers are wrong."""
        pipeline = self._state.pipeline
        values = checked_change(asked.values, {**pipeline.settings.thresholds, **pipeline.changed_thresholds})
        self._on_operator(ThresholdsChanged(at_ns=time.time_ns(), by=asked.by[:MOST_CHARACTERS], values=values))

    def health(self) -> HealthView:
        """Counts of all that was lost, skipped or refused."""
        return health_view(self._state.pipeline.store, self._health())

    def job(self, name: str) -> JobQuery | None:
        """A job's data for the detail views, now; None if there is no such job."""
        pipeline = self._state.pipeline
        return query_job(pipeline.store, self._state.aliases, name, time.time_ns(), sums=pipeline.recent)

    def metrics(self) -> MetricsView:
        """Every metric as the last tick left it, with the operations that came since counted.

        Gathered once for all scrapes between two ticks if nothing came, and else for those of a moment.
        """
        state, pipeline = self._state, self._state.pipeline
        if self._metrics is None or self._is_outdated():
            self._gathered, self._gathered_at = (self._status.ticks, pipeline.unprocessed_rows), time.monotonic()
            state.tally.count_rows(pipeline.store)
            self._metrics = gather(
                pipeline.store,
                tally=state.tally,
                aliases=state.aliases,
                agents=self._agents(),
                health=self._health(),
                now_ns=time.time_ns(),
                budget=state.budget,
                sums=pipeline.recent,
                cache=self._scrape_cache,
                series=pipeline.expected_series(),
            )
        return self._metrics

    def is_ready(self) -> tuple[bool, str]:
        """Whether agents can be served, and a sentence that says why or why not; from any thread."""
        return not self._status.why_not_ready, self._status.why_not_ready or "listening for agents"

    def health_checks(self) -> tuple[HealthCheck, ...]:
        """The service's checks of itself; from any thread."""
        ticked_at = self._status.ticked_at
        disk = () if self._disk is None else (self._disk.health_check(),)
        journal = () if self._persistence is None else (journal_check(self._persistence.trouble()),)
        return (tick_check(None if ticked_at is None else time.monotonic() - ticked_at), *disk, *journal)

    async def write_snapshot(self, directory: Path, job: str | None, minutes: float | None) -> None:
        """Writes the files of a run as it stands now; the service goes on meanwhile."""
        since_ns = None if minutes is None else time.time_ns() - round(minutes * _MINUTE_NS)
        await write_snapshot(self._state.pipeline.store, directory, job=job, since_ns=since_ns)

    def _is_outdated(self) -> bool:
        """Whether a tick or operations came since metrics were gathered. Operations count after a moment only."""
        ticks, rows = self._gathered
        if ticks != self._status.ticks:
            return True
        is_over = time.monotonic() - self._gathered_at >= _GATHERED_EVERY_SECONDS
        return is_over and rows != self._state.pipeline.unprocessed_rows

    def _agents(self) -> tuple[AgentView, ...]:
        return tuple(_agent_view(record) for record in self._receiver.agents())

    def _health(self) -> ServiceHealth:
        hub = self._hub.statistics()
        not_admitted = {} if self._listener is None else self._listener.refused
        return ServiceHealth(
            version=self._version,
            agents_port=self._agents_port,
            agents_need=self._agents_need,
            sessions_refused=Counter(self._receiver.statistics().faults) + Counter(not_admitted),
            http_refused=dict(self._access.refused),
            ingest_lag_seconds=self._status.ingest_lag_seconds,
            backlog_batches=sum(agent.queued_batches or 0 for agent in self._agents() if agent.connected),
            page_clients=hub.clients,
            page_events_dropped=hub.dropped_total,
            page_clients_refused=hub.refused_total,
            tick_seconds=self._status.tick_seconds,
            mistakes=dict(self._state.pipeline.errors.counts),
            receivers=self._notifier.views(),
            journal=None if self._persistence is None else self._persistence.health(),
            operations_not_archived=self._state.not_archived,
        )


_OF_RECORD: Final = ("name", "host", "job", "connected", "said_goodbye", "last_contact_ns")
_OF_HEALTH: Final = (
    "lag_seconds", "lines_total", "bytes_read_total", "skipped", "cpu_seconds", "rss_bytes", "sent_bytes_total",
    "is_slowed",
)  # fmt: skip
_OF_SPOOL: Final = ("spool_bytes", "spool_oldest_seconds", "spool_dropped", "spool_replayed", "spool_failures")


def _agent_view(record: AgentRecord) -> AgentView:
    health = record.health
    own = {name: getattr(record, name) for name in _OF_RECORD}
    if health is None:
        return AgentView(**own)
    names = _OF_HEALTH if health.spool_bytes is None else (*_OF_HEALTH, *_OF_SPOOL)
    own |= {name: getattr(health, name) for name in names}
    return AgentView(**own, unread_bytes=health.lag_bytes, queued_batches=health.window_batches)
