"""How the agents and the service itself are: what the sessions and the shell report beside the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentView:
    """One agent as its session shows it; None where the agent has not said."""

    name: str
    host: str
    job: str
    connected: bool
    said_goodbye: bool = False
    """It has left in order: nobody need look for it."""
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
    """It has used up its budget, and rests."""
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
    """One receiver of notifications, and how its deliveries went."""

    name: str
    outcomes: Mapping[str, int]
    """Notifications by what became of them; every outcome, 0 where there is none."""
    retries: int
    queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHealth:
    """What keeps the service's state over a crash."""

    bytes: int
    """Of the journal on disk."""
    waiting_bytes: int
    """Received, and not on disk yet: not acknowledged."""
    write_seconds: float | None
    """The last group of entries, or the one being written where that takes longer."""
    errors: int
    trouble: str
    """Why nothing can be kept now; empty where it can."""
    damaged: int
    """At the start: stretches of the journal and state files that were not whole."""
    missing: int
    """At the start: entries that were lost, or could not be applied behind one that was."""
    replayed_batches: int
    restore_seconds: float
    state_age_seconds: float
    state_bytes: int | None
    state_seconds: float | None
    """What the last state file took to be written, beside the service's work."""
    pause_seconds: float | None
    """For how long the service's work stood still for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHealth:
    """The service as its shell shows it."""

    version: str
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
    """How long the last pass over what had come took."""
    mistakes: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    """What our own code failed on, by where."""
    receivers: tuple[ReceiverView, ...] = ()
    journal: JournalHealth | None = None
    """None where no state is kept."""
    operations_not_archived: int = 0
    """Left memory while the disk took nothing."""
