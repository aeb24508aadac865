"""Messages between agent and service, one record each.

    agent                                     service
      Hello            ─────────────────▶
                       ◀─────────────────  Welcome, or Refused and the end
      BatchMessage 1   ─────────────────▶
      BatchMessage 2   ─────────────────▶
                       ◀─────────────────  Acknowledge 2      (all up to 2 are applied)
      Heartbeat        ─────────────────▶
                       ◀─────────────────  Acknowledge 2      (every heartbeat is answered)
      Goodbye          ─────────────────▶  and the end

A *session* is one unbroken run of sequence numbers and dictionaries of one agent; it outlives connections.
It is born when its batch 1 is applied, and gone when the agent begins another or the service forgets it.
`docs/internals/wire.md` has the rules in full.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ncclscope_wire.batch import Batch

PROTOCOL_VERSION: Final = 3
"""Grows with every change that an older peer would misread: dtypes, codes in terms.py, required fields. From 2 on
batches are compressed, from 3 on every message has a checksum; those of before, in spools and journals, can be read."""
ASKING_VERSION: Final = 0
"""In a Hello of who only asks which version the service speaks, and whether it would let in: it is always refused, and
no agent is made known. No batches were ever of this version."""
WOULD_LET_IN: Final = "an agent with this token or certificate would be let in"
"""At the end of what a Hello of ASKING_VERSION is refused with, if that is so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position up to which a source has been applied: its reader continues there."""

    end: int
    """As `Batch.end`: bytes of a log, chunks of an export."""
    end_line: int = 0
    """As `Batch.end_line`."""
    is_complete: bool = False
    """Its last batch was applied: nothing of it is wanted any more."""
    content_check: int | None = None
    """Tells whether a file that is found later is the one that was read up to here (`files/tail.py`); None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of every connection: who speaks."""

    protocol_version: int
    agent_id: str
    """The same over restarts of the agent: under it the service keeps the positions."""
    session_id: str
    """New with every start of the agent."""
    name: str
    """The name of the agent as people see it."""
    host: str
    """gethostname() up to the first dot, as NCCL prints it."""
    job: str
    """Label of the job whose files are followed."""
    software_version: str
    pid: int
    token: str = field(default="", repr=False)
    """A secret that proves that the agent may speak; empty if the service wants none. Never kept nor shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignHello:
    """A Hello of another protocol version, of which only this is looked at. Never sent, only decoded."""

    protocol_version: int
    host: str = ""
    token: str = field(default="", repr=False)
    """Of one that only asks (`ASKING_VERSION`); both are empty if they are missing or no texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to Hello."""

    protocol_version: int
    session_known: bool
    """False: the agent forgets what it has in flight, and reads every source on from `positions`."""
    acknowledged: int
    """Last sequence number that was applied in this session; 0 if it is not known."""
    positions: dict[str, Position] = field(default_factory=dict[str, Position])
    """By `Source.key`; empty if the session is known, since the agent's readers are further than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMessage:
    """One batch; sequence numbers start with 1 in each session and have no gaps."""

    sequence: int
    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHealth:
    """The agent's own health; totals count from its start."""

    lines_total: int = 0
    bytes_read_total: int = 0
    batches_total: int = 0
    files: int = 0
    """Files that are followed now."""
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    """Lines and records that were skipped, by reason."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Rows that could not be sent, by reason."""
    cpu_seconds: float = 0.0
    """User and system time of the process."""
    rss_bytes: int = 0
    window_bytes: int = 0
    """Sent or waiting to be sent, and not acknowledged."""
    window_batches: int = 0
    waiting_batches: int = 0
    """Read, and waiting for room in the window."""
    lag_bytes: int = 0
    """Written to the followed files, and not read yet."""
    lag_seconds: float = 0.0
    """Age of the oldest batch that is not acknowledged."""
    connections_total: int = 0
    spool_bytes: int | None = None
    """On disk; None without a spool."""
    spool_oldest_seconds: float = 0.0
    """Age of what waits longest in the spool."""
    spool_dropped: int = 0
    """Batches that were lost to the spool: too old, damaged, or of no use to a service that lost its state."""
    spool_replayed: int = 0
    """Batches that were read back from the disk."""
    spool_failures: int = 0
    """Writes to the spool that failed; they are tried again."""
    sent_bytes_total: int = 0
    """Given to the connection, what was sent again included."""
    is_slowed: bool = False
    """It has used up its budget of processor or memory, and rests."""
    clock_error_ns: int | None = None
    """Bound on the host's wall clock against UTC, as the kernel reports it; None if no daemon (NTP, PTP) keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Says that the agent lives; not numbered, never sent again."""

    agent_wall_ns: int
    """Agent's wall clock at sending."""
    health: AgentHealth


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge:
    """All batches of the session up to this number are applied. Answers batches and heartbeats."""

    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The agent ends on purpose."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The service closes this connection, and says why."""

    reason: str
    """A short fixed word, under which the service counts it."""
    message: str
    """A sentence for a person."""


Message: TypeAlias = Hello | ForeignHello | Welcome | BatchMessage | Heartbeat | Acknowledge | Goodbye | Refused
