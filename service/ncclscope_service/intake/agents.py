"""State of one agent that outlives its connections: positions, and the one current session.

Exactly once rests on three rules:

1. A batch is applied if its number is the session's last + 1. A smaller one was sent twice: dropped.
2. A batch is applied if it begins where its source stands. One that ends there or before is known: its rows
   are dropped (its dictionary entries are not: later batches point at them).
3. Whatever else comes closes the connection. If resending cannot heal it (positions, indices), the session is
   forgotten too, and the agent reads on from the positions in the next Welcome.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ncclscope_service.intake.limits import Dictionaries, DictionaryFullError
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.messages import (
    PROTOCOL_VERSION,
    AgentHealth,
    BatchMessage,
    Heartbeat,
    Hello,
    Position,
    Welcome,
)

_OFFSET_SAMPLES: Final = 8
"""Heartbeats over which the clock offset is taken: at one a second clocks drift by 0.8 ms at most meanwhile."""
_MAX_KEY_BYTES: Final = 512
"""Longest source key: keys are sent back in every Welcome."""


class AgentError(ProtocolError):
    """A fault of an agent, with the word by which it is counted."""

    def __init__(self, reason: str, message: str, *, forgets_session: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.forgets_session = forgets_session
        """Sending the same again cannot heal it: the agent must read on from the positions instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One batch that was not seen before, and who sent it."""

    agent: str
    """`Hello.agent_id`. A source is identified by (agent, source key)."""
    session: str
    """Changes whenever the dictionaries of the agent's sources start again."""
    job: str
    host: str
    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """State of one agent, for metrics and page."""

    agent_id: str
    name: str
    host: str
    job: str
    connected: bool
    last_contact_ns: int
    """On the service's wall clock."""
    said_goodbye: bool
    clock_offset_ns: int | None
    """Agent's minus service's wall clock, over the last heartbeats: never more than the true offset, and less by
    the shortest way of a heartbeat. None before the first."""
    batches_total: int
    health: AgentHealth | None


class Strings:
    """The texts of a session, by source; the receiver's dictionaries hold their sizes only."""

    def __init__(self) -> None:
        self._of: dict[str, list[str]] = {}

    def of(self, key: str) -> Sequence[str]:
        """The texts of a source, in order."""
        return self._of.get(key, ())

    def add(self, batch: Batch) -> None:
        """Adds the texts of a batch."""
        if batch.is_last:
            self._of.pop(batch.source.key, None)
        elif batch.strings:
            self._of.setdefault(batch.source.key, []).extend(batch.strings)


@dataclass(slots=True)
class _Session:
    """State that is forgotten when the agent starts again."""

    session_id: str
    label: str
    sequence: int = 0
    kept: int = 0
    """Number of the last batch that a crash of the service cannot undo."""
    dictionaries: dict[str, Dictionaries] = field(default_factory=dict[str, Dictionaries])


class KnownAgent:
    """One agent; the service keeps it while it is away."""

    def __init__(self, hello: Hello, *, max_sources: int) -> None:
        self.hello = hello
        self.connection: int | None = None
        self.last_contact_ns = 0
        self.said_goodbye = False
        self.duplicates = Counter[str]()
        """Batches dropped, by why: "sequence", "position"."""
        self._max_sources = max_sources
        self._session: _Session | None = None
        self._sessions = 0
        self._positions: dict[str, Position] = {}
        self._offsets = deque[int](maxlen=_OFFSET_SAMPLES)
        self.strings: Strings | None = None
        """Texts of the session, if the agent may speak of some hosts only and they are all known since its start."""
        self._health: AgentHealth | None = None
        self._batches = 0

    @property
    def applied(self) -> int:
        """Number of the last batch of the session that was applied."""
        return self._session.sequence if self._session else 0

    @property
    def acknowledged(self) -> int:
        """Number of the last batch of the session that was applied, and that a crash of the service cannot undo."""
        return self._session.kept if self._session else 0

    @property
    def session_label(self) -> str | None:
        """Names the session over all that this agent ever had; None if it has none."""
        return self._session.label if self._session else None

    def remember_strings(self, *, is_restricted: bool) -> None:
        """Before a batch: its agent may speak of some hosts only, or of any."""
        if not is_restricted:
            self.strings = None
        elif self.applied == 0:
            self.strings = Strings()

    def keep(self, label: str | None, sequence: int) -> None:
        """Batches of that session up to this one outlive a crash."""
        if self._session is not None and self._session.label == label:
            self._session.kept = max(self._session.kept, sequence)

    def mark_restarted(self, now_ns: int) -> None:
        """Applies a restart of the service from its saved state: nobody is connected, all that was applied is kept."""
        self.connection = None
        self.last_contact_ns = now_ns
        self._offsets.clear()
        self.keep(self.session_label, self.applied)

    def on_hello(self, hello: Hello) -> Welcome:
        """The agent is back, in the session that is known or in another one."""
        self.hello = hello
        self.said_goodbye = False
        self._offsets.clear()
        is_known = self._session is not None and self._session.session_id == hello.session_id
        if not is_known:
            self._session = None
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            session_known=is_known,
            acknowledged=self.acknowledged,
            positions={} if is_known else dict(self._positions),
        )

    def on_heartbeat(self, heartbeat: Heartbeat, now_ns: int) -> None:
        """Records that the agent lives, its health, and the offset of its clock."""
        self._health = heartbeat.health
        self._offsets.append(heartbeat.agent_wall_ns - now_ns)

    def on_batch(self, message: BatchMessage) -> Received | None:
        """The new part of a batch; None if nothing is new.

        Raises:
            AgentError: a batch is missing before it, or its positions or indices cannot be right.
        """
        session = self._session or self._new_session(message.sequence)
        if message.sequence <= session.sequence:
            self.duplicates["sequence"] += 1
            return None
        if message.sequence != session.sequence + 1:
            raise AgentError("sequence_gap", f"batch {message.sequence} came after batch {session.sequence}")
        batch = self._new_part(session, message.batch)
        self._session, session.sequence = session, message.sequence
        if batch is None:
            return None
        self._batches += 1
        hello = self.hello
        return Received(agent=hello.agent_id, session=session.label, job=hello.job, host=hello.host, batch=batch)

    def forget_session(self) -> None:
        """The next Hello is answered with positions."""
        self._session = None

    def record(self) -> AgentRecord:
        """State of the agent at this moment."""
        return AgentRecord(
            agent_id=self.hello.agent_id,
            name=self.hello.name,
            host=self.hello.host,
            job=self.hello.job,
            connected=self.connection is not None,
            last_contact_ns=self.last_contact_ns,
            said_goodbye=self.said_goodbye,
            clock_offset_ns=max(self._offsets) if self._offsets else None,
            batches_total=self._batches,
            health=self._health,
        )

    def _new_session(self, sequence: int) -> _Session:
        """A session is born by its first batch, so that a Welcome that got lost on its way leaves nothing behind."""
        if sequence != 1:
            raise AgentError("sequence_gap", f"a session begins with batch 1, and batch {sequence} came")
        self._sessions += 1
        session_id = self.hello.session_id
        return _Session(session_id=session_id, label=f"{session_id}.{self._sessions}")

    def _new_part(self, session: _Session, batch: Batch) -> Batch | None:
        """The batch, or what of it was not known; None if that is nothing. Moves the source's position."""
        key = batch.source.key
        position = self._positions.get(key) or self._first_position(key)
        is_known = batch.end <= position.end and (batch.begin < position.end or position.is_complete)
        if not is_known and batch.begin != position.end:
            raise AgentError(
                "position_gap",
                f"{batch.source.name}: a batch of {batch.begin} to {batch.end} came, and {position.end} is reached",
                forgets_session=True,
            )
        self._check_indices(session, batch)
        if is_known:
            self.duplicates["position"] += 1
            return None if position.is_complete else _only_dictionaries(batch, position)
        self._positions[key] = Position(
            end=batch.end, end_line=batch.end_line, is_complete=batch.is_last, content_check=batch.content_check
        )
        return batch

    def _check_indices(self, session: _Session, batch: Batch) -> None:
        dictionaries = session.dictionaries.get(batch.source.key)
        if dictionaries is None:
            dictionaries = session.dictionaries[batch.source.key] = Dictionaries()
        try:
            dictionaries.apply(batch)
        except DictionaryFullError as error:
            raise AgentError("dictionary_too_large", f"{batch.source.name}: {error}", forgets_session=True) from error
        except ProtocolError as error:
            raise AgentError("index_out_of_range", f"{batch.source.name}: {error}", forgets_session=True) from error
        if batch.is_last:
            del session.dictionaries[batch.source.key]

    def _first_position(self, key: str) -> Position:
        if len(key.encode(errors="replace")) > _MAX_KEY_BYTES:
            raise AgentError("undecodable", f"a source's key has over {_MAX_KEY_BYTES} bytes", forgets_session=True)
        if len(self._positions) >= self._max_sources:
            complete = next((known for known, position in self._positions.items() if position.is_complete), None)
            if complete is None:
                raise AgentError("too_many_sources", f"{len(self._positions)} files are followed, which is the limit")
            # If that file still exists when the agent starts again, it is read again.
            del self._positions[complete]
        return Position(end=0)


def _only_dictionaries(batch: Batch, position: Position) -> Batch:
    """An empty batch at the source's position, with the dictionary entries of this one."""
    return Batch(
        source=batch.source,
        begin=position.end,
        end=position.end,
        end_line=position.end_line,
        strings=batch.strings,
        threads=batch.threads,
        operation_templates=batch.operation_templates,
        kernel_templates=batch.kernel_templates,
        range_templates=batch.range_templates,
        inspected_ranks=batch.inspected_ranks,
    )
