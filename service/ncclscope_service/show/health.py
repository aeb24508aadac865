"""Health of the agents and of the service: what sessions and the shell report, and the answers to probes.

`/healthz` says whether a restart would help, `/readyz` whether agents and people may come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import Final

_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """One agent as its session shows it; None if the agent has not reported the value."""

    name: str
    host: str
    job: str
    connected: bool
    said_goodbye: bool = False
    """It has left in order: nobody needs to look for it."""
    last_contact_ns: int | None = None
    """Service's wall clock."""
    lag_seconds: float | None = None
    """How far it is behind the files that it reads."""
    lines_total: int | None = None
    bytes_read_total: int | None = None
    unread_bytes: int | None = None
    """Of files that it follows, seen and not read yet."""
    skipped: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """Lines by the reason they were skipped."""
    cpu_seconds: float | None = None
    rss_bytes: int | None = None
    sent_bytes_total: int | None = None
    """Given to the connection."""
    is_slowed: bool | None = None
    """It has used up its budget, and pauses."""
    queued_batches: int | None = None
    """Read and not acknowledged."""
    spool_bytes: int | None = None
    """On the agent's disk; None without a spool, and so are the others."""
    spool_oldest_seconds: float | None = None
    spool_dropped: int | None = None
    spool_replayed: int | None = None
    spool_failures: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverView:
    """One receiver of notifications, with the outcome of its deliveries."""

    name: str
    outcomes: Mapping[str, int]
    """Notifications by what became of them; every outcome, 0 included."""
    retries: int
    queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHealth:
    """The journal and state files that keep the service's state over a crash."""

    bytes: int
    """Of the journal on disk."""
    waiting_bytes: int
    """Received, and not on disk yet: not acknowledged."""
    write_seconds: float | None
    """The last group of entries, or the one being written if that takes longer."""
    errors: int
    trouble: str
    """Why nothing can be kept now; empty if it can."""
    damaged: int
    """At the start: stretches of the journal and state files that were not whole."""
    missing: int
    """At the start: entries that were lost, or could not be applied behind one that was."""
    replayed_batches: int
    restore_seconds: float
    state_age_seconds: float
    state_bytes: int | None
    state_seconds: float | None
    """Time to write the last state file, in parallel with the service's work."""
    pause_seconds: float | None
    """How long the service's work paused for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHealth:
    """The service as its process reports it."""

    version: str
    agents_port: int | None = None
    """None: agents cannot connect yet."""
    agents_need: tuple[str, ...] = ()
    """Options without which that port refuses an agent: "--tls-ca", "--token-file"."""
    sessions_refused: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """By reason."""
    http_refused: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """HTTP connections and requests, by reason."""
    ingest_lag_seconds: float | None = None
    """From an agent's reading of the newest line to its place in the store."""
    backlog_batches: int | None = None
    """Held by connected agents, as they last said: a batch that is received is applied at once."""
    page_clients: int = 0
    page_events_dropped: int = 0
    page_clients_refused: int = 0
    tick_seconds: float | None = None
    """Duration of the last pass over what had arrived."""
    mistakes: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """Internal errors, by place in the code."""
    receivers: tuple[ReceiverView, ...] = ()
    journal: JournalHealth | None = None
    """None if no state is kept."""
    operations_not_archived: int = 0
    """Evicted from memory while the disk refused writes."""


MAX_TICK_AGE_SECONDS: Final = 60.0
"""A service that has not finished a pass for so long hangs. The longest pass seen took 4 s."""
MIN_FREE_BYTES: Final = 256 * 1024**2
"""Less free space on the disk of --data than this is reported, before none is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """One check of the service's health."""

    name: str
    is_ok: bool
    message: str
    """A sentence with numbers, either way."""
    is_fatal: bool = False
    """If it is not ok, only a restart can help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """The JSON of a probe."""

    status: str
    """"ok", "degraded" (works, and something should be looked at), "failing"; "ready", "not_ready"."""
    reasons: tuple[str, ...]
    """Sentences that say what is wrong; empty if nothing is."""
    checks: dict[str, str]
    """Every check, in words."""


def tick_check(seconds_since: float | None) -> HealthCheck:
    """Whether the processing loop runs; None before its first pass."""
    if seconds_since is None:
        return HealthCheck(name="tick", is_ok=True, message="no pass yet")
    message = f"last pass {seconds_since:.1f} s ago"
    return HealthCheck(name="tick", is_ok=seconds_since < MAX_TICK_AGE_SECONDS, message=message, is_fatal=True)


def disk_check(*, trouble: str | None, free_bytes: int | None) -> HealthCheck:
    """Whether the disk of --data takes writes; `trouble`: the error of the last try."""
    if trouble is not None:
        return HealthCheck(name="disk", is_ok=False, message=f"write failed: {trouble}")
    if free_bytes is None:
        return HealthCheck(name="disk", is_ok=True, message="not checked yet")
    message = f"{free_bytes // 1024**2} MiB free"
    return HealthCheck(name="disk", is_ok=free_bytes >= MIN_FREE_BYTES, message=message)


def journal_check(trouble: str) -> HealthCheck:
    """Whether what agents send can be kept; `trouble`: why not, else empty. Nothing is lost meanwhile."""
    return HealthCheck(name="journal", is_ok=not trouble, message=trouble or "ok")


def liveness(health_checks: Sequence[HealthCheck]) -> tuple[HTTPStatus, ProbeAnswer]:
    """503 only if a restart would help: a full disk is no reason to forget what is in memory."""
    wrong = [health_check for health_check in health_checks if not health_check.is_ok]
    is_failing = any(health_check.is_fatal for health_check in wrong)
    status = "failing" if is_failing else "degraded" if wrong else "ok"
    return (HTTPStatus.SERVICE_UNAVAILABLE if is_failing else HTTPStatus.OK), _answer(status, health_checks)


def readiness(is_ready: bool, why: str, health_checks: Sequence[HealthCheck]) -> tuple[HTTPStatus, ProbeAnswer]:
    """200 once both ports are open and the state is restored, and while the service is live."""
    status, _ = liveness(health_checks)
    is_ready = is_ready and status is HTTPStatus.OK
    ready = HealthCheck(name="ready", is_ok=is_ready, message=why)
    answer = _answer("ready" if is_ready else "not_ready", [ready, *health_checks])
    return (HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE), answer


def _answer(status: str, health_checks: Sequence[HealthCheck]) -> ProbeAnswer:
    return ProbeAnswer(
        status=status,
        reasons=tuple(
            f"{health_check.name}: {health_check.message}" for health_check in health_checks if not health_check.is_ok
        ),
        checks={health_check.name: health_check.message for health_check in health_checks},
    )
