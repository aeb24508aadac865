"""The service as a process: one task group for the agents' port, the HTTP port and the pipeline's timer."""

from __future__ import annotations

import ctypes
import gc
import resource
import signal
import socket
import time
import urllib.parse
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskStatus

from ncclscope_service.auth.credentials import CredentialFiles, Credentials
from ncclscope_service.clock.host_clocks import ClockPrior
from ncclscope_service.columns.table import Ids
from ncclscope_service.export.directory import write_run
from ncclscope_service.intake.journal_entry import NotificationSettled, OperatorEntry
from ncclscope_service.intake.receive import AgentRecord, Received, Receiver
from ncclscope_service.keep.persistence import Persistence, PersistenceSettings
from ncclscope_service.keep.service_state import SILENCE_NS, ServiceState, has_destroyed_all
from ncclscope_service.metrics.scrape import MetricsView
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.serve.http_server import HttpAccess, serve_http, serve_probes
from ncclscope_service.serve.listen import Listener, ListenSettings, Turns
from ncclscope_service.serve.live import Hub
from ncclscope_service.serve.notify import Notifier, ReceiverSettings
from ncclscope_service.serve.routes import make_app, make_probes
from ncclscope_service.serve.snapshots import SnapshotShelf
from ncclscope_service.serve.views import DiskProbe, ServiceStatus, ServiceViews
from ncclscope_service.show.finding_events import FindingEvent
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.loopback import is_loopback

_log = structlog.get_logger(__name__)

_TICK_SECONDS: Final = 0.5
_LEAST_PAUSE_SECONDS: Final = 0.1
_OTHERS_SHARE: Final = 0.1
"""Of the time that a tick took: so long others get their turns before the next one, whatever waits for it. A probe, a
page or an agent that connects needs several turns: with one between two ticks an agent of a service under more load
than it can bear waited for half a minute, gave up the connection, and sent its window again."""
_GARBAGE_THRESHOLDS: Final = (20_000, 20, 20)
"""Objects after which Python looks for those that refer to themselves, of which few are made here: by its own
thresholds (700, 10, 10) that was a twentieth of the work, and a quarter of a second at a time."""
_TRIM_SECONDS: Final = 5.0
"""glibc keeps what was freed between arrays that stay: behind a large capture a fifth of the memory. It takes
60 ms to give it back then, else 5."""
_ROWS_OF_TICK: Final = 100_000
"""Operations and records of Inspector that are applied between two ticks: half a second of work."""
_ROWS_WAITING: Final = 3_000_000
"""Kernels and calls that may wait to be aligned: 300 MB, and half a minute of work."""
_SILENT_NS: Final = 15_000_000_000
"""An agent sends a heartbeat every second: after so long it is out of reach."""
_RETURN_SECONDS: Final = 10.0
"""So long agents of before a restart are waited for, until work goes on: what they hold comes first."""
_MISTAKES_SECONDS: Final = 10.0
_JOB_ENDS_SECONDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Settings of the service that a user may change."""

    version: str
    agents: ListenSettings = field(default_factory=ListenSettings)
    http_host: str = "127.0.0.1"
    http_port: int = 9798
    """0: any free port."""
    probes: tuple[str, int] | None = None
    """Where `/healthz` and `/readyz` are served by a thread of their own too."""
    agent_files: CredentialFiles = field(default_factory=CredentialFiles)
    """Certificates and tokens of the agents' port."""
    http_files: CredentialFiles = field(default_factory=CredentialFiles)
    """Certificates and tokens of the HTTP port."""
    data: Path | None = None
    """Folder for state, journal and finished operations; None: nothing outlives the service, and operations are
    forgotten when they leave the window."""
    persistence: PersistenceSettings = field(default_factory=PersistenceSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    receivers: tuple[ReceiverSettings, ...] = ()
    """Who gets notifications of findings."""
    push_metrics: tuple[Callable[[Callable[[], MetricsView]], Coroutine[object, object, None]], ...] = ()
    """Each exports metrics somewhere until it is cancelled."""
    public_url: str | None = None
    """Where people reach the live page, for the links in notifications; None: the HTTP address."""
    snapshot_on_end: Path | None = None
    """Folder that gets the files of a run when the service is stopped, and of each job that ends in one of its own."""
    snapshots_kept: int = 20
    """Folders of ended jobs; the oldest are removed."""
    read_thresholds: Callable[[], dict[str, float]] | None = None
    """Reads the thresholds of `pipeline` again, at SIGHUP. Raises ConfigError."""
    stop_seconds: float = 45.0
    """A service that is asked to stop ends by that time, or as soon as the piece of work that is under way then is
    done: what is not decided or written is left to the next start."""
    job_silence_ns: int = SILENCE_NS
    """A job of which nothing came for so long has ended."""


class _OutOfTimeError(Exception):
    """The service has to end now."""


class Service:
    """Applies what agents send, works on it at ticks, and keeps the state; `views` shows it."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._agent_credentials = Credentials(settings.agent_files, what="agents")
        self._http_credentials = Credentials(settings.http_files, what="http")
        self._access = HttpAccess(
            lambda: self._http_credentials.access,
            names=_own_names(settings) if is_loopback(settings.http_host) else None,
        )
        self._notifier = Notifier(settings.receivers, self._on_settled)
        self._state = ServiceState(settings.pipeline)
        self._state.outboxes = self._notifier.outboxes()
        self.receiver = Receiver(agents=self._state.agents)
        self._persistence: Persistence | None = None
        """While `run` has opened it."""
        self._listener: Listener | None = None
        self._hub = Hub()
        self.probes_port: int | None = None
        """While `run` serves probes."""
        self._disk = None if settings.data is None else DiskProbe(settings.data)
        self._status = ServiceStatus()
        self.views = ServiceViews(
            settings.version,
            self._state,
            self.receiver,
            self._status,
            hub=self._hub,
            access=self._access,
            notifier=self._notifier,
            disk=self._disk,
            on_operator=self._on_operator,
        )
        self._turns = Turns(self._is_full)
        self._mistakes_told_until = 0.0
        self._has_failed = False
        """Whether the last tick had an internal error: then the next one does not follow at once, or it might for
        ever."""

    @property
    def pipeline(self) -> Pipeline:
        """All stages, and the store."""
        return self._state.pipeline

    async def deliver(self, received: Received) -> None:
        """Applies one batch."""
        if not self._state.ingest_batch(received):
            self.receiver.end_session(received.agent)
        self._log_mistakes()
        if received.batch.observed_at_ns is not None:
            lag_ns = time.time_ns() - received.batch.observed_at_ns
            self._status.ingest_lag_seconds = max(0.0, lag_ns * 1e-9)

    def tick(self, now_ns: int) -> None:
        """Works on what came, and lets go of what is old."""
        began = time.perf_counter()
        priors = {record.host: _clock_prior(record) for record in self.receiver.agents()}
        trouble = "" if self._persistence is None else self._persistence.trouble()
        ticked = self._state.next_tick(priors, self._silent_hosts(now_ns), now_ns, trouble)
        if self._persistence is not None:
            self._persistence.journal.append(ticked)
        mistakes = self.pipeline.errors.counts.total()
        self._state.tick(ticked, self._archive)
        self._has_failed = self.pipeline.errors.counts.total() > mistakes
        if self._persistence is None:
            self._notifier.wake()
        self._log_mistakes()
        self._status.ticks += 1
        self._status.tick_seconds = time.perf_counter() - began
        self._status.ticked_at = time.monotonic()

    def finish(self, now_ns: int, *, until: float | None = None) -> None:
        """Keeps the state, then decides what is open and writes what was asked for; the service is being stopped.

        `until` (`time.monotonic`): what is not done by then is left out, but for the piece of work that is under way.
        All that was acknowledged is in the journal, and the next start goes on from there.
        """

        def on_piece(*_: object) -> None:
            if until is not None and time.monotonic() >= until:
                raise _OutOfTimeError

        steps: dict[str, Callable[[], object]] = {
            "keep": lambda: None,
            "decide": partial(self._decide_rest, now_ns, on_piece),
        }
        if self._settings.snapshot_on_end is not None:
            folder = self._settings.snapshot_on_end
            steps["snapshot"] = lambda: write_run(self.pipeline.store, folder, on_file=on_piece)
        if self._persistence is not None:
            steps["keep"] = partial(self._persistence.close, self._state, on_piece)
            steps["archive"] = partial(self._archive_rest, self._persistence, on_piece)
        seconds: dict[str, float] = {}
        with suppress(_OutOfTimeError):
            for name, step in steps.items():
                on_piece()
                began = time.monotonic()
                step()
                seconds[name] = round(time.monotonic() - began, 3)
        if self._persistence is not None:
            self._persistence.release()
        left_out = [name for name in steps if name not in seconds]
        if left_out:
            _log.warning("stopped", seconds=seconds, left_out=left_out)
        else:
            _log.info("stopped", seconds=seconds)

    def _decide_rest(self, now_ns: int, on_piece: Callable[[], None]) -> None:
        """Decides everything that is open, in slices as a tick does."""
        counts = self.pipeline.errors.counts
        before = counts.total()
        while self.pipeline.has_backlog and counts.total() == before:
            on_piece()
            self.pipeline.process_backlog(now_ns, silent_hosts=self._state.silent)
        on_piece()
        self.pipeline.finish(now_ns)

    def reload_credentials(self) -> None:
        """Reads certificates and lists of tokens again, now."""
        for known in (self._agent_credentials, self._http_credentials):
            known.reload(is_forced=True)

    def reload_thresholds(self) -> None:
        """Reads the thresholds of the detectors again from where they were given; wrong ones change nothing."""
        read = self._settings.read_thresholds
        if read is None:
            return
        try:
            self.pipeline.settings = replace(self.pipeline.settings, thresholds=read())
        except ConfigError as error:
            _log.error("thresholds_not_read", why=str(error))

    async def run(self, *, task_status: TaskStatus[tuple[int, int]] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until it is cancelled; reports (agents' port, HTTP port) once both are open."""
        async with anyio.create_task_group() as tasks:
            if self._settings.probes is not None:
                self.probes_port = await tasks.start(serve_probes, make_probes(self.views), self._settings.probes)
            app = make_app(self.views, self._hub, self._access)
            address = (self._settings.http_host, self._settings.http_port)
            context = self._http_credentials.context
            http_port: int = await tasks.start(serve_http, app, self._access, address, context, self._hub.close)
            scheme = "http" if context is None else "https"
            page = self._settings.public_url or f"{scheme}://{self._settings.http_host}:{http_port}"
            self._notifier.page = page.rstrip("/")
            persistence = await self._open()
            room = None if persistence is None else persistence.journal.wait_for_room
            listener = self._listener = Listener(
                self.receiver,
                self.deliver,
                self._settings.agents,
                credentials=self._agent_credentials,
                wait_for_room=room,
                wait_for_turn=self._turns.take,
            )
            self.views.show_listener(listener)
            agents_port: int = await tasks.start(listener.run)
            files = self._settings.agent_files
            options = {"--tls-ca": files.cert, "--token-file": files.tokens, "--tls-cert": files.client_ca}
            self.views.show_agents_port(agents_port, tuple(name for name, file in options.items() if file is not None))
            self._status.why_not_ready = ""
            tasks.start_soon(self._tick_for_ever)
            tasks.start_soon(self._watch_job_ends)
            tasks.start_soon(self._notifier.run)
            for push in self._settings.push_metrics:
                tasks.start_soon(push, self.views.metrics)
            if self._disk is not None:
                tasks.start_soon(self._disk.run)
            tasks.start_soon(self._agent_credentials.watch)
            tasks.start_soon(self._http_credentials.watch)
            if persistence is not None:
                tasks.start_soon(persistence.journal.run)
                tasks.start_soon(self._write_states, persistence)
            tasks.start_soon(_trim_memory)
            task_status.started((agents_port, http_port))

    # Ticks

    async def _tick_for_ever(self) -> None:
        await self._turns.wait_for(self._are_agents_back, within=_RETURN_SECONDS)
        while True:
            began = anyio.current_time()
            self.tick(time.time_ns())
            await self._turns.tick_done()
            if self.pipeline.has_backlog and not self._has_failed:
                await anyio.sleep(_OTHERS_SHARE * (anyio.current_time() - began))
                await self._turns.wait_until_quiet(within=_TICK_SECONDS)
                continue
            # A tick that takes long must leave the loop as much time as it took, or nothing else gets its turn: but
            # if agents have brought in that time what a tick may work on, they wait for the next one.
            await anyio.sleep(_TICK_SECONDS if self._has_failed else _LEAST_PAUSE_SECONDS)
            pause = max(_TICK_SECONDS, anyio.current_time() - began) - _LEAST_PAUSE_SECONDS
            await self._turns.wait_until_awaited(within=pause)

    def _is_full(self) -> bool:
        """Whether a tick has enough to work on."""
        pipeline = self.pipeline
        return (
            pipeline.unprocessed_rows >= _ROWS_OF_TICK or pipeline.unaligned_rows >= _ROWS_WAITING or pipeline.is_full
        )

    def _are_agents_back(self) -> bool:
        """Whether all agents of before a restart have come back, or left in order."""
        return all(record.connected or record.said_goodbye for record in self.receiver.agents())

    def _silent_hosts(self, now_ns: int) -> frozenset[str]:
        return frozenset(
            record.host
            for record in self.receiver.agents()
            if not record.connected or now_ns - record.last_contact_ns > _SILENT_NS
        )

    def _log_mistakes(self) -> None:
        """Logs what could not be applied; once in a while, since what is wrong once is often wrong each time."""
        mistakes = self.pipeline.errors.drain()
        if mistakes and time.monotonic() >= self._mistakes_told_until:
            self._mistakes_told_until = time.monotonic() + _MISTAKES_SECONDS
            last = mistakes[-1]
            _log.error("work_failed", where=last.where, what=last.what, trace=last.trace)

    # State

    async def _open(self) -> Persistence | None:
        """Takes the data folder, and goes on from what it holds."""
        if self._settings.data is None:
            return None
        self._status.why_not_ready = "the state of before the restart is being restored"
        persistence = Persistence(self._settings.data, self._settings.persistence)
        self._state = await to_thread.run_sync(
            persistence.open, self._settings.pipeline, self._notifier.outboxes(), self._on_durable, time.time_ns()
        )
        self._notifier.adopt(self._state.outboxes)
        self.receiver = Receiver(agents=self._state.agents, record=persistence.journal.append)
        self._persistence = persistence
        self.views.show_restored(self._state, self.receiver, persistence)
        return persistence

    def _on_durable(self, entry: int) -> None:
        assert self._listener is not None, "the journal was written before agents could connect"
        for connection, data in self.receiver.on_durable(entry).items():
            self._listener.send_soon(connection, data)
        self._notifier.wake()

    def _on_settled(self, receiver: str, event: FindingEvent, is_delivered: bool) -> None:
        if self._persistence is not None:
            settled = NotificationSettled(
                receiver=receiver, finding=event.id, change=event.event, is_delivered=is_delivered
            )
            self._persistence.journal.append(settled)

    def _on_operator(self, entry: OperatorEntry) -> None:
        """A person marked findings or changed thresholds, and it was found right."""
        if self._persistence is not None:
            self._persistence.journal.append(entry)
        self._state.apply(entry)
        _log.info("changed_by_operator", what=type(entry).__name__, by=entry.by)

    async def _write_states(self, persistence: Persistence) -> None:
        while True:
            await anyio.sleep(1)
            if persistence.is_due():
                await persistence.write_state(self._state)

    def _archive(self, known: Store, operations: Ids) -> bool:
        return True if self._persistence is None else self._persistence.archive(known, operations)

    def _archive_rest(self, persistence: Persistence, on_piece: Callable[[], None]) -> None:
        table = self.pipeline.store.operations
        persistence.archive_rest(self.pipeline.store, table.first + table.rows["finished"].nonzero()[0], on_piece)

    # Files

    async def _watch_job_ends(self) -> None:
        """Writes the files of each job that ends, if that was asked for."""
        folder = self._settings.snapshot_on_end
        shelf = None if folder is None else SnapshotShelf(folder, self._settings.snapshots_kept)
        while True:
            await anyio.sleep(_JOB_ENDS_SECONDS)
            store = self.pipeline.store
            for job in self._state.job_ends.take_ended(
                self.receiver.agents(),
                partial(has_destroyed_all, store),
                time.time_ns(),
                silence_ns=self._settings.job_silence_ns,
            ):
                _log.info("job_ended", job=job)
                if shelf is not None:
                    await shelf.write(store, job)


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


async def _trim_memory() -> None:
    """Gives freed memory back to the system now and then."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    while trim is not None:
        await anyio.sleep(_TRIM_SECONDS)
        trim(0)


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
                    service.reload_thresholds()
                    continue
                until = time.monotonic() + settings.stop_seconds
                _log.info("stopping", signal=signal.Signals(received).name, within_seconds=settings.stop_seconds)
                tasks.cancel_scope.cancel()
                break
    service.finish(time.time_ns(), until=until)
