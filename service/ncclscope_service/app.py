"""The service as a process: one task group for the agents' port, the HTTP port and the pipeline's timer."""

from __future__ import annotations

import gc
import resource
import signal
import socket
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import structlog
import uvicorn
from anyio import to_thread
from anyio.abc import TaskStatus

from ncclscope_service import last_time
from ncclscope_service.clock_prior import ClockPrior
from ncclscope_service.credentials import CredentialFiles, Credentials
from ncclscope_service.disk_probe import DiskProbe
from ncclscope_service.export.directory import write_run
from ncclscope_service.finding_news import FindingEvent
from ncclscope_service.health import AgentView, ServiceHealth
from ncclscope_service.http_door import Door, DoorProtocol
from ncclscope_service.http_gate import HttpGate
from ncclscope_service.job_ends import SILENCE_NS, has_destroyed_all
from ncclscope_service.journal_entry import Told
from ncclscope_service.kept import Kept
from ncclscope_service.listen import Listener, ListenSettings
from ncclscope_service.live import Hub
from ncclscope_service.metrics import MetricsView, gather
from ncclscope_service.overview import (
    FindingView,
    HealthView,
    Overview,
    health_view,
    make_overview,
)
from ncclscope_service.persistence import Persistence, PersistenceSettings
from ncclscope_service.pipeline import Pipeline, PipelineSettings
from ncclscope_service.receive import AgentRecord, Received, Receiver
from ncclscope_service.routes import make_app
from ncclscope_service.scrape_memo import ScrapeMemo
from ncclscope_service.snapshot_shelf import SnapshotShelf
from ncclscope_service.store import Ids, Store
from ncclscope_service.views_of_job import JobAsked, ask_job
from ncclscope_service.vitals import Vital, journal_vital, tick_vital
from ncclscope_service.webhook import Notifier, WebhookSettings
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.loopback import is_loopback

_log = structlog.get_logger(__name__)

_TICK_SECONDS: Final = 0.5
_LEAST_PAUSE_SECONDS: Final = 0.1
_MOMENT_SECONDS: Final = 0.005
_GARBAGE_THRESHOLDS: Final = (20_000, 20, 20)
"""Objects after which Python looks for those that refer to themselves, of which few are made here: by its own
thresholds (700, 10, 10) that was a twentieth of the work, and a quarter of a second at a time."""
_GATHERED_EVERY_SECONDS: Final = 0.25
"""Metrics are not gathered more often while operations come: 20 ms each time."""
_ROWS_OF_TICK: Final = 100_000
"""Operations and records of Inspector that are applied between two ticks: half a second of work."""
_ROWS_WAITING: Final = 3_000_000
"""Kernels and calls that may wait to be aligned: 300 MB, and half a minute of work."""
_SILENT_NS: Final = 15_000_000_000
"""An agent sends a heartbeat every second: after so long it is out of reach."""
_RETURN_SECONDS: Final = 10.0
"""So long agents of before a restart are waited for, until work goes on: what they hold comes first."""
_MINUTE_NS: Final = 60_000_000_000
_MISTAKES_SECONDS: Final = 10.0
_GRACEFUL_SECONDS: Final = 2
_JOB_ENDS_SECONDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """What a user may set."""

    version: str
    agents: ListenSettings = field(default_factory=ListenSettings)
    http_host: str = "127.0.0.1"
    http_port: int = 9798
    """0: any free port."""
    agent_files: CredentialFiles = field(default_factory=CredentialFiles)
    """What the agents' port shows and asks for."""
    http_files: CredentialFiles = field(default_factory=CredentialFiles)
    """The same of the HTTP port."""
    data: Path | None = None
    """Folder for state, journal and finished operations; None: nothing outlives the service, and operations are
    forgotten when they leave the window."""
    persistence: PersistenceSettings = field(default_factory=PersistenceSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    webhooks: tuple[WebhookSettings, ...] = ()
    """Who is told of findings."""
    public_url: str | None = None
    """Where people reach the live page, for the links in notifications; None: the HTTP address."""
    snapshot_on_end: Path | None = None
    """Folder that gets the files of a run when the service is stopped, and of each job that ends in one of its own."""
    snapshots_kept: int = 20
    """Folders of ended jobs; the oldest are removed."""
    stop_seconds: float = 45.0
    """A service that is asked to stop ends within that time: what is not decided or written by then is left to the
    next start."""
    job_silence_ns: int = SILENCE_NS
    """A job of which nothing came for so long has ended."""


class Service:
    """Everything the service holds, and the views of it (`routes.ServiceView`)."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._agent_credentials = Credentials(settings.agent_files, what="agents")
        self._http_credentials = Credentials(settings.http_files, what="http")
        self._gate = HttpGate(
            access=self._http_credentials.access,
            asks_for_certificate=self._http_credentials.asks_for_certificate,
            names=_own_names(settings) if is_loopback(settings.http_host) else None,
        )
        self._door = Door()
        scheme = "http" if settings.http_files.cert is None else "https"
        page = settings.public_url or f"{scheme}://{settings.http_host}:{settings.http_port}"
        self._notifier = Notifier(settings.webhooks, page, self._on_settled)
        self._kept = Kept(settings.pipeline)
        self._kept.outboxes = self._notifier.outboxes()
        self.receiver = Receiver(agents=self._kept.agents)
        self._persistence: Persistence | None = None
        """While `run` has opened it."""
        self._listener: Listener | None = None
        self._hub = Hub()
        self._metrics: MetricsView | None = None
        self._memo = ScrapeMemo()
        self._gathered_rows = 0
        """Rows that were fed since the last tick, and are in `_metrics`."""
        self._gathered_at = 0.0
        self._ingest_lag_seconds: float | None = None
        self._tick_seconds: float | None = None
        self._ticked_at: float | None = None
        self._mistakes_told_until = 0.0
        self._has_failed = False
        """Whether the last tick made a mistake: then the next one does not follow at once, or it might for ever."""
        self._heard = 0
        """How often an agent had its turn."""
        self._disk = None if settings.data is None else DiskProbe(settings.data)
        self._why_not_ready = "the agents' port is not open yet"
        self._ticked = anyio.Event()
        self._is_full = anyio.Event()

    @property
    def pipeline(self) -> Pipeline:
        """All stages, and the store."""
        return self._kept.pipeline

    async def deliver(self, received: Received) -> None:
        """Applies one batch."""
        if not self._kept.feed(received):
            self.receiver.end_session(received.agent)
        self._tell_mistakes()
        if received.batch.observed_at_ns is not None:
            self._ingest_lag_seconds = max(0.0, (time.time_ns() - received.batch.observed_at_ns) * 1e-9)

    def tick(self, now_ns: int) -> None:
        """Works on what came, and lets go of what is old."""
        began = time.perf_counter()
        self._gate.access = self._http_credentials.access
        priors = {record.host: _clock_prior(record) for record in self.receiver.agents()}
        trouble = "" if self._persistence is None else self._persistence.trouble()
        ticked = self._kept.changes(priors, self._silent_hosts(now_ns), now_ns, trouble)
        if self._persistence is not None:
            self._persistence.journal.append(ticked)
        mistakes = self.pipeline.mistakes.counted.total()
        self._kept.tick(ticked, self._archive)
        self._has_failed = self.pipeline.mistakes.counted.total() > mistakes
        if self._persistence is None:
            self._notifier.wake()
        self._tell_mistakes()
        self._metrics = None
        self._tick_seconds = time.perf_counter() - began
        self._ticked_at = time.monotonic()

    def _tell_mistakes(self) -> None:
        """Logs what could not be applied; once in a while, since what is wrong once is often wrong each time."""
        mistakes = self.pipeline.mistakes.take()
        if mistakes and time.monotonic() >= self._mistakes_told_until:
            self._mistakes_told_until = time.monotonic() + _MISTAKES_SECONDS
            last = mistakes[-1]
            _log.error("work_failed", where=last.where, what=last.what, trace=last.trace)

    def finish(self, now_ns: int, *, until: float | None = None) -> None:
        """Keeps the state, then decides what is open and writes what was asked for; the service is being stopped.

        `until` (`time.monotonic`): what is not done by then is left out. All that was acknowledged is in the journal,
        and the next start goes on from there.
        """
        steps: dict[str, Callable[[], None]] = {"keep": lambda: None, "decide": lambda: self.pipeline.flush(now_ns)}
        if self._settings.snapshot_on_end is not None:
            steps["snapshot"] = partial(self._write_run, self._settings.snapshot_on_end)
        if self._persistence is not None:
            steps["keep"] = partial(self._persistence.close, self._kept)
            steps["archive"] = partial(self._archive_rest, self._persistence)
        seconds: dict[str, float] = {}
        with suppress(last_time.TimeIsUpError), last_time.until(until):
            for name, step in steps.items():
                began = time.monotonic()
                step()
                seconds[name] = round(time.monotonic() - began, 3)
        if self._persistence is not None:
            self._persistence.release()
        left_out = [name for name in steps if name not in seconds]
        tell = _log.warning if left_out else _log.info
        tell("stopped", seconds=seconds, **({"left_out": left_out} if left_out else {}))

    def _write_run(self, folder: Path) -> None:
        write_run(self.pipeline.store, folder)

    def _archive_rest(self, persistence: Persistence) -> None:
        table = self.pipeline.store.operations
        persistence.archive_rest(self.pipeline.store, table.first + table.rows["finished"].nonzero()[0])

    def reload_credentials(self) -> None:
        """Reads certificates and lists of tokens anew, now."""
        for known in (self._agent_credentials, self._http_credentials):
            known.reload(is_forced=True)
        self._gate.access = self._http_credentials.access

    def overview(self) -> Overview:
        """Everything the page shows, now."""
        return make_overview(
            self.pipeline.store,
            aliases=self._kept.aliases,
            agents=self._agents(),
            health=self._health(),
            now_ns=time.time_ns(),
            sums=self.pipeline.recent,
        )

    def findings(self) -> tuple[FindingView, ...]:
        """All findings that are kept, the open ones first."""
        return self._kept.findings()

    def health(self) -> HealthView:
        """What was lost, skipped or refused."""
        return health_view(self.pipeline.store, self._health())

    def job(self, name: str) -> tuple[JobAsked, int] | None:
        """What can be asked about a job, now."""
        now_ns = time.time_ns()
        asked = ask_job(self.pipeline.store, self._kept.aliases, name, now_ns, sums=self.pipeline.recent)
        return None if asked is None else (asked, now_ns)

    def metrics(self) -> MetricsView:
        """Every metric as the last tick left it, with the operations that came since counted.

        Gathered once for all scrapes between two ticks where nothing came, and else for those of a moment.
        """
        if self._metrics is None or self._is_outdated():
            self._gathered_rows, self._gathered_at = self.pipeline.fed_rows, time.monotonic()
            self._kept.tally.feed(self.pipeline.store)
            self._metrics = gather(
                self.pipeline.store,
                tally=self._kept.tally,
                aliases=self._kept.aliases,
                agents=self._agents(),
                health=self._health(),
                now_ns=time.time_ns(),
                budget=self._kept.budget,
                sums=self.pipeline.recent,
                memo=self._memo,
                series=self.pipeline.expected_series(),
            )
        return self._metrics

    def _is_outdated(self) -> bool:
        """Whether operations came since metrics were gathered; not at once again, whoever asks how often."""
        is_over = time.monotonic() - self._gathered_at >= _GATHERED_EVERY_SECONDS
        return is_over and self.pipeline.fed_rows != self._gathered_rows

    def is_ready(self) -> tuple[bool, str]:
        """Whether agents can be served."""
        return not self._why_not_ready, self._why_not_ready or "listening for agents"

    def vitals(self) -> tuple[Vital, ...]:
        """What was looked at of the service itself."""
        ticked = None if self._ticked_at is None else time.monotonic() - self._ticked_at
        disk = () if self._disk is None else (self._disk.vital(),)
        journal = () if self._persistence is None else (journal_vital(self._persistence.trouble()),)
        return (tick_vital(ticked), *disk, *journal)

    async def write_snapshot(
        self, directory: Path, job: str | None, minutes: float | None, *, with_perfetto: bool = False
    ) -> None:
        """Writes the files of a run as it stands now; the service goes on meanwhile."""
        since_ns = None if minutes is None else time.time_ns() - round(minutes * _MINUTE_NS)
        frozen = self.pipeline.store.copy()
        await to_thread.run_sync(
            lambda: write_run(frozen, directory, job=job, since_ns=since_ns, with_perfetto=with_perfetto)
        )

    async def write_ended_jobs(self, now_ns: int) -> None:
        """Writes the files of each job that has ended since the last call, where that was asked for."""
        store = self.pipeline.store
        ended = self._kept.job_ends.take_ended(
            self.receiver.agents(),
            lambda job: has_destroyed_all(store, job),
            now_ns,
            silence_ns=self._settings.job_silence_ns,
        )
        for job in ended:
            _log.info("job_ended", job=job)
            await self.shelve(job)

    async def shelve(self, job: str) -> None:
        """Writes the files of a job that has ended into a folder of its own, where that was asked for."""
        if self._settings.snapshot_on_end is None:
            return
        shelf = SnapshotShelf(self._settings.snapshot_on_end, self._settings.snapshots_kept)
        folder = shelf.place(job, time.time_ns())
        try:
            await self.write_snapshot(folder, job, None)
            await to_thread.run_sync(shelf.tidy)
        except OSError as error:
            _log.warning("snapshot_failed", job=job, folder=str(folder), reason=str(error))
        else:
            _log.info("snapshot_written", job=job, folder=str(folder))

    async def run(self, *, task_status: TaskStatus[tuple[int, int]] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until it is cancelled; reports (agents' port, HTTP port) once both are open."""
        async with anyio.create_task_group() as tasks:
            http_port: int = await tasks.start(self._serve_http)
            persistence = await self._open()
            room = None if persistence is None else persistence.journal.wait_for_room
            listener = self._listener = Listener(
                self.receiver,
                self.deliver,
                self._settings.agents,
                credentials=self._agent_credentials,
                wait_for_room=room,
                wait_for_turn=self._wait_for_turn,
            )
            agents_port: int = await tasks.start(listener.run)
            self._why_not_ready = ""
            tasks.start_soon(self._tick_for_ever)
            tasks.start_soon(self._watch_job_ends)
            tasks.start_soon(self._notifier.run)
            if self._disk is not None:
                tasks.start_soon(self._disk.run)
            tasks.start_soon(self._agent_credentials.watch)
            tasks.start_soon(self._http_credentials.watch)
            if persistence is not None:
                tasks.start_soon(persistence.journal.run)
                tasks.start_soon(self._write_states, persistence)
            task_status.started((agents_port, http_port))

    async def _open(self) -> Persistence | None:
        """Takes the data folder, and goes on from what it holds."""
        if self._settings.data is None:
            return None
        self._why_not_ready = "the state of before the restart is being restored"
        persistence = Persistence(self._settings.data, self._settings.persistence)
        self._kept = await to_thread.run_sync(
            persistence.open, self._settings.pipeline, self._notifier.outboxes(), self._on_kept, time.time_ns()
        )
        self._notifier.adopt(self._kept.outboxes)
        self.receiver = Receiver(agents=self._kept.agents, record=persistence.journal.append)
        self._persistence = persistence
        self._metrics = None
        self._memo = ScrapeMemo()
        return persistence

    def _on_kept(self, entry: int) -> None:
        assert self._listener is not None, "the journal was written before agents could connect"
        for connection, data in self.receiver.on_kept(entry).items():
            self._listener.send_soon(connection, data)
        self._notifier.wake()

    def _on_settled(self, receiver: str, event: FindingEvent, is_taken: bool) -> None:
        if self._persistence is not None:
            told = Told(receiver=receiver, finding=event.id, news=event.event, is_taken=is_taken)
            self._persistence.journal.append(told)

    async def _write_states(self, persistence: Persistence) -> None:
        while True:
            await anyio.sleep(1)
            if persistence.is_due():
                await persistence.write_state(self._kept)

    def _archive(self, known: Store, operations: Ids) -> bool:
        return True if self._persistence is None else self._persistence.archive(known, operations)

    async def _tick_for_ever(self) -> None:
        with anyio.move_on_after(_RETURN_SECONDS):
            while not all(  # noqa: ASYNC110
                record.connected or record.said_goodbye for record in self.receiver.agents()
            ):
                await anyio.sleep(_TICK_SECONDS)
        while True:
            began = anyio.current_time()
            self.tick(time.time_ns())
            self._is_full = anyio.Event()
            self._ticked.set()
            self._ticked = anyio.Event()
            if self.pipeline.has_backlog and not self._has_failed:
                with anyio.move_on_after(_TICK_SECONDS):
                    await self._wait_for_quiet()
                continue
            # A tick that takes long must leave the loop as much time as it took, or nothing else gets its turn: but
            # where agents have brought in that time what a tick may work on, they wait for the next one.
            await anyio.sleep(_TICK_SECONDS if self._has_failed else _LEAST_PAUSE_SECONDS)
            with anyio.move_on_after(max(_TICK_SECONDS, anyio.current_time() - began) - _LEAST_PAUSE_SECONDS):
                await self._is_full.wait()

    async def _wait_for_quiet(self) -> None:
        """Between two slices of work: returns when agents have nothing more to bring, or all have to wait.

        Not as soon as none waits for its turn: the lines of an agent that sends an export come behind it, which takes
        many turns.
        """
        heard = -1
        while heard != self._heard and not self._is_full.is_set():
            heard = self._heard
            await anyio.sleep(_MOMENT_SECONDS)

    async def _wait_for_turn(self) -> None:
        """Returns when more may be applied: at once, unless ticks have enough to work on.

        Who sends faster than that waits, and is told late that the service has it. Agents hold what is not
        acknowledged, and leave the rest in the files.
        """
        self._heard += 1
        while (
            self.pipeline.fed_rows >= _ROWS_OF_TICK
            or self.pipeline.waiting_rows >= _ROWS_WAITING
            or self.pipeline.is_full
        ):
            self._is_full.set()
            await self._ticked.wait()

    async def _watch_job_ends(self) -> None:
        while True:
            await anyio.sleep(_JOB_ENDS_SECONDS)
            await self.write_ended_jobs(time.time_ns())

    async def _serve_http(self, *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED) -> None:
        address = (self._settings.http_host, self._settings.http_port)
        try:
            bound = socket.create_server(address, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for HTTP on {address[0]}:{address[1]}: {error.strerror}; "
                "is another service running? choose another port with --http HOST:PORT"
            ) from error
        config = uvicorn.Config(
            make_app(self, self._hub, self._gate),
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACEFUL_SECONDS,
            ws="none",
            h11_max_incomplete_event_size=self._door.limits.max_head_bytes,
        )
        server = _Server(config)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_serve_to_the_end, server, bound)
            while not server.started:  # noqa: ASYNC110  (uvicorn offers no event to wait for)
                await anyio.sleep(0.01)
            context = self._http_credentials.context
            tasks.start_soon(self._door.serve, bound, partial(server.protocol, self._door), context)
            port: int = bound.getsockname()[1]
            _log.info("listening_for_http", host=address[0], port=port, tls=context is not None)
            task_status.started(port)
            try:
                await anyio.sleep_forever()
            finally:
                self._hub.close()
                server.should_exit = True

    def _health(self) -> ServiceHealth:
        hub = self._hub.statistics()
        return ServiceHealth(
            version=self._settings.version,
            sessions_refused=self._sessions_refused(),
            http_refused=self._door.refused + self._gate.refused,
            ingest_lag_seconds=self._ingest_lag_seconds,
            backlog_batches=sum(agent.queued_batches or 0 for agent in self._agents() if agent.connected),
            page_clients=hub.clients,
            page_events_dropped=hub.dropped_total,
            page_clients_refused=hub.refused_total,
            tick_seconds=self._tick_seconds,
            mistakes=dict(self.pipeline.mistakes.counted),
            receivers=self._notifier.views(),
            journal=None if self._persistence is None else self._persistence.health(),
            operations_not_archived=self._kept.not_archived,
        )

    def _sessions_refused(self) -> Mapping[str, int]:
        at_the_door = {} if self._listener is None else self._listener.statistics().refused
        return Counter(self.receiver.statistics().faults) + Counter(at_the_door)

    def _agents(self) -> tuple[AgentView, ...]:
        return tuple(_agent_view(record) for record in self.receiver.agents())

    def _silent_hosts(self, now_ns: int) -> frozenset[str]:
        return frozenset(
            record.host
            for record in self.receiver.agents()
            if not record.connected or now_ns - record.last_contact_ns > _SILENT_NS
        )


class _Server(uvicorn.Server):
    """A server that leaves signals to the process it is part of, and its connections to the door."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application."""
        await self.lifespan.startup()
        assert not self.lifespan.should_exit, "the application did not start"
        self.servers = []
        self.started = True

    def protocol(self, door: Door, on_lost: Callable[[], None]) -> DoorProtocol:
        """What speaks on one more connection."""
        return DoorProtocol(self.config, self.server_state, self.lifespan.state, door=door, on_lost=on_lost)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none."""
        yield


async def _serve_to_the_end(server: _Server, bound: socket.socket) -> None:
    """Serves until the server is told to exit; open requests get their time even when all else is cancelled."""
    with anyio.CancelScope(shield=True):
        await server.serve(sockets=[bound])


def _own_names(settings: ServiceSettings) -> frozenset[str]:
    """Names under which people ask for the page."""
    public = urllib.parse.urlsplit(settings.public_url or "").hostname
    return frozenset(filter(None, (settings.http_host.lower(), socket.gethostname().lower(), public)))


def _raise_open_files() -> None:
    """As many connections as this process may have: the soft limit is often 1,024 for old programs' sake alone."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _clock_prior(record: AgentRecord) -> ClockPrior:
    health = record.health
    return ClockPrior(
        heartbeat_offset_ns=record.clock_offset_ns, error_ns=None if health is None else health.clock_error_ns
    )


def _agent_view(record: AgentRecord) -> AgentView:
    health = record.health
    if health is None:
        return AgentView(
            name=record.name,
            host=record.host,
            job=record.job,
            connected=record.connected,
            said_goodbye=record.said_goodbye,
            last_contact_ns=record.last_contact_ns,
        )
    is_spooling = health.spool_bytes is not None
    return AgentView(
        name=record.name,
        host=record.host,
        job=record.job,
        connected=record.connected,
        said_goodbye=record.said_goodbye,
        last_contact_ns=record.last_contact_ns,
        lag_seconds=health.lag_seconds,
        lines_total=health.lines_total,
        bytes_read_total=health.bytes_read_total,
        unread_bytes=health.lag_bytes,
        skipped=health.skipped,
        cpu_seconds=health.cpu_seconds,
        rss_bytes=health.rss_bytes,
        sent_bytes_total=health.sent_bytes_total,
        is_slowed=health.is_slowed,
        queued_batches=health.window_batches,
        spool_bytes=health.spool_bytes,
        spool_oldest_seconds=health.spool_oldest_seconds if is_spooling else None,
        spool_dropped=health.spool_dropped if is_spooling else None,
        spool_replayed=health.spool_replayed if is_spooling else None,
        spool_failures=health.spool_failures if is_spooling else None,
    )


async def run_service(settings: ServiceSettings, *, on_started: Callable[[int, int], None]) -> None:
    """Runs a service until SIGINT or SIGTERM, then decides what is open, writes, and returns.

    `on_started` is called with (agents' port, HTTP port) once both are open.
    """
    _raise_open_files()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    service = Service(settings)
    until: float | None = None
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with anyio.create_task_group() as tasks:
            ports: tuple[int, int] = await tasks.start(service.run)
            on_started(*ports)
            async for received in signals:
                if received is signal.SIGHUP:
                    service.reload_credentials()
                    continue
                until = time.monotonic() + settings.stop_seconds
                _log.info("stopping", signal=signal.Signals(received).name, within_seconds=settings.stop_seconds)
                tasks.cancel_scope.cancel()
                break
    service.finish(time.time_ns(), until=until)
