"""The agents' connections: bytes to batches that were not seen before, each in its order.

One `Receiver` serves all connections. A connection is a small machine (`_TRANSITIONS`): first a Hello, then
batches and heartbeats, at last a Goodbye. What outlives it is kept per agent (`agents.py`). Whatever an agent
does wrong closes its own connection, with a sentence that it logs, and is counted by reason here.

If a journal is kept, all that changes what outlives connections is written there (`record`), and a batch is
acknowledged when the journal says that it is on disk (`on_durable`). `replay` makes the same changes from its entries.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from ncclscope_service.auth.access import Grant, digest_of
from ncclscope_service.intake.admission import Admission, HostWatch, owned_id, owner_of
from ncclscope_service.intake.agents import AgentError, AgentRecord, KnownAgent, Received
from ncclscope_service.intake.journal_entry import BatchTaken, Entry, GoodbyeSaid, HelloSaid, SessionForgotten
from ncclscope_service.intake.limits import ContentLimits
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_kept_hello, decode_message, encode_message
from ncclscope_wire.errors import DamagedError, ProtocolError
from ncclscope_wire.frame import MAX_FRAME_BYTES, Deframer, encode_frame
from ncclscope_wire.messages import (
    ASKING_VERSION,
    PROTOCOL_VERSION,
    WOULD_LET_IN,
    Acknowledge,
    BatchMessage,
    ForeignHello,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Welcome,
)

__all__ = [
    "AgentRecord",
    "Arrival",
    "Outcome",
    "ReceiveLimits",
    "ReceiveStatistics",
    "Received",
    "Receiver",
    "ReplayError",
]

_MAX_TEXT: Final = 256
"""Longest text of a Hello, in characters: they become labels."""


class ReplayError(AgentError):
    """An entry of the journal cannot be applied, since one before it is missing."""

    def __init__(self, message: str) -> None:
        super().__init__("replay", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveLimits:
    """Bounds on the memory of a receiver."""

    max_frame_bytes: int = MAX_FRAME_BYTES
    max_hello_bytes: int = 16 * 1024
    """Longest frame of one who has not been let in yet."""
    max_agents: int = 8192
    """Known agents; beyond it the one that was longest away is forgotten, positions and all."""
    max_sources: int = 20_000
    """Sources of one agent; beyond it the oldest complete one is forgotten. With keys of 512 bytes a Welcome of
    that many has 12 MB, and must fit one frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """An agent whose Hello was accepted."""

    agent: AgentRecord
    is_known: bool
    """It was here before, since the start of the service."""
    replaces: int | None
    """Its older connection, which was still open: that one is dead, or of a second agent of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of some bytes. Deliver `received` first, then send, then close."""

    received: tuple[Received, ...] = ()
    to_send: bytes = b""
    close: bool = False
    fault: str | None = None
    """The agent's fault: the reason, a colon and a sentence. None if the close is in order."""
    arrival: Arrival | None = None
    """The agent of the connection, if its Hello was in these bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveStatistics:
    """Counters since the start of the service."""

    bytes_total: int
    duplicates: Mapping[str, int]
    """Batches dropped, by why: "sequence", "position"."""
    faults: Mapping[str, int]
    """Connections closed for what their agent sent, by reason."""


class _State(Enum):
    AWAITING_HELLO = auto()
    ESTABLISHED = auto()
    CLOSED = auto()


_TRANSITIONS: Final[Mapping[tuple[_State, type[Message]], _State]] = {
    (_State.AWAITING_HELLO, Hello): _State.ESTABLISHED,
    (_State.ESTABLISHED, BatchMessage): _State.ESTABLISHED,
    (_State.ESTABLISHED, Heartbeat): _State.ESTABLISHED,
    (_State.ESTABLISHED, Goodbye): _State.CLOSED,
}


@dataclass(slots=True)
class _Connection:
    number: int
    deframer: Deframer
    certificate: tuple[str, ...] = ()
    """Names in the certificate that its peer has proved to hold."""
    grant: Grant | None = None
    """The jobs and hosts that it may speak of; None before its Hello was accepted."""
    token_digest: bytes | None = None
    is_revoked: bool = False
    """The rules have changed, and would not let it in as it came."""
    session_is_over: bool = False
    """The service failed on a batch, and can make nothing of what follows in this session."""
    state: _State = _State.AWAITING_HELLO
    agent: KnownAgent | None = None
    arrival: Arrival | None = None
    """Kept until an `Outcome` has reported it."""
    heard: int = 0
    """Number of the last batch that came on it, or that its Welcome named: no later one may be acknowledged here."""

    @property
    def acknowledged(self) -> int:
        """Number of the last batch that may be acknowledged on it."""
        return min(self.known_agent().acknowledged, self.heard)

    @property
    def is_closed(self) -> bool:
        return self.state is _State.CLOSED

    def known_agent(self) -> KnownAgent:
        assert self.agent is not None, "a connection was established without an agent"
        return self.agent


@dataclass(frozen=True, slots=True)
class _Unkept:
    """A batch that was applied, and is not yet on disk."""

    entry: int
    agent: KnownAgent
    session: str | None
    sequence: int


class Receiver:
    """All agents, known and connected."""

    def __init__(
        self,
        *,
        limits: ReceiveLimits | None = None,
        admission: Admission | None = None,
        agents: dict[str, KnownAgent] | None = None,
        record: Callable[[Entry], int] | None = None,
    ) -> None:
        """`agents`: those that are known already, by id. `record` writes an entry and gives its number; None: no
        journal is kept, and what is applied is acknowledged at once."""
        self._limits = limits or ReceiveLimits()
        self._admission = admission or Admission()
        self._contents = ContentLimits()
        self._connections: dict[int, _Connection] = {}
        self._agents: dict[str, KnownAgent] = {} if agents is None else agents
        self._record = record
        self._unkept = deque[_Unkept]()
        self._faults = Counter[str]()
        self._duplicates = Counter[str]()
        self._bytes = 0

    def use_admission(self, admission: Admission) -> None:
        """Other rules from now on; agents that they would not let in as they came are refused at their next word."""
        self._admission = admission
        for connection in self._connections.values():
            if connection.agent is not None:
                connection.is_revoked = not self._is_still_allowed(connection, connection.agent)

    def open(self, connection_id: int, *, certificate: tuple[str, ...] = ()) -> None:
        """A connection was accepted; nothing is known of who it is but the names in its certificate."""
        assert connection_id not in self._connections, "a connection was opened twice"
        deframer = Deframer(max_frame_bytes=self._limits.max_hello_bytes)
        self._connections[connection_id] = _Connection(connection_id, deframer, certificate)

    def on_bytes(self, connection_id: int, data: bytes, now_ns: int) -> Outcome:
        """Result of bytes of one connection; `now_ns` is the service's wall clock.

        Bad input is part of the outcome, never an exception. Batches before it are handed on.
        """
        connection = self._connections[connection_id]
        self._bytes += len(data)
        if connection.is_closed:
            return Outcome(close=True)
        received: list[Received] = []
        replies: list[Message] = []
        fault: AgentError | None = None
        try:
            if connection.is_revoked:
                raise AgentError("unauthorized", "what this agent may do was changed: it must connect again")
            if connection.session_is_over:
                raise AgentError(
                    "internal_error", "a batch could not be applied: begin another session", forgets_session=True
                )
            for payload in _payloads(connection.deframer, data):
                self._on_message(connection, payload, now_ns, received, replies)
        except AgentError as error:
            fault = error
            replies.append(self._closed(connection, error))
        arrival, connection.arrival = connection.arrival, None
        return Outcome(
            received=tuple(received),
            to_send=b"".join(encode_frame(encode_message(reply)) for reply in replies),
            close=connection.is_closed,
            fault=None if fault is None else f"{fault.reason}: {fault}",
            arrival=arrival,
        )

    def on_disconnected(self, connection_id: int) -> AgentRecord | None:
        """The connection is gone; its agent may come back.

        Gives the agent that is away now; None if nobody is: no Hello came, or it has a newer connection.
        """
        agent = self._connections.pop(connection_id).agent
        if agent is None:
            return None
        agent.connection = None
        return agent.record()

    def on_durable(self, entry: int) -> dict[int, bytes]:
        """All entries up to this one are on disk: what is to be sent for it, by connection."""
        changed: dict[int, None] = {}
        while self._unkept and self._unkept[0].entry <= entry:
            kept = self._unkept.popleft()
            kept.agent.keep(kept.session, kept.sequence)
            if kept.agent.connection is not None:
                changed[kept.agent.connection] = None
        return {
            number: encode_frame(encode_message(Acknowledge(sequence=self._connections[number].acknowledged)))
            for number in changed
        }

    def end_session(self, agent_id: str) -> None:
        """The service can make nothing of what follows in this agent's session: its next word is answered so."""
        agent = self._agents.get(agent_id)
        if agent is not None and agent.connection is not None:
            self._connections[agent.connection].session_is_over = True

    def replay(self, entry: HelloSaid | BatchTaken | SessionForgotten | GoodbyeSaid) -> Received | None:
        """Makes the change that an entry of the journal describes; gives what is to be applied.

        Raises:
            ReplayError: something before it is missing: the agent has to read on from its positions.
            ProtocolError: another version wrote the message.
        """
        if isinstance(entry, HelloSaid):
            self._replay_hello(entry)
            return None
        agent = self._agents.get(entry.agent)
        if agent is None:
            raise ReplayError("the agent's Hello is missing")
        if isinstance(entry, BatchTaken):
            agent.last_contact_ns = max(agent.last_contact_ns, entry.at_ns)
            return _replayed_batch(agent, entry)
        if isinstance(entry, SessionForgotten):
            agent.forget_session()
        else:
            agent.said_goodbye = True
        return None

    def reassurance(self, connection_id: int) -> bytes:
        """A frame that shows that the service lives and says nothing new; empty before its Hello and after its end."""
        connection = self._connections[connection_id]
        if connection.state is not _State.ESTABLISHED:
            return b""
        return encode_frame(encode_message(Acknowledge(sequence=connection.acknowledged)))

    def is_established(self, connection_id: int) -> bool:
        """Its agent has said a Hello that was accepted."""
        return self._connections[connection_id].state is _State.ESTABLISHED

    def agents(self) -> tuple[AgentRecord, ...]:
        """Every agent that is remembered, by agent id."""
        return tuple(self._agents[agent_id].record() for agent_id in sorted(self._agents))

    def statistics(self) -> ReceiveStatistics:
        """A snapshot of the counters."""
        duplicates = sum((agent.duplicates for agent in self._agents.values()), self._duplicates)
        return ReceiveStatistics(
            bytes_total=self._bytes,
            duplicates=dict(duplicates),
            faults=dict(self._faults),
        )

    def _closed(self, connection: _Connection, fault: AgentError) -> Refused:
        connection.state = _State.CLOSED
        self._faults[fault.reason] += 1
        if fault.forgets_session and connection.agent is not None:
            connection.agent.forget_session()
            self._write(SessionForgotten(agent=connection.agent.hello.agent_id))
        return Refused(reason=fault.reason, message=str(fault))

    def _on_message(
        self,
        connection: _Connection,
        payload: bytes,
        now_ns: int,
        received: list[Received],
        replies: list[Message],
    ) -> None:
        message = _decoded(payload)
        if isinstance(message, ForeignHello):
            raise self._answer_to(message, connection.certificate)
        state = _TRANSITIONS.get((connection.state, type(message)))
        if state is None:
            what = type(message).__name__
            raise AgentError("unexpected_message", f"{what} is not allowed while {connection.state.name}")
        if isinstance(message, Hello):
            replies.append(self._on_hello(connection, message, now_ns))
        connection.state = state
        agent = connection.known_agent()
        agent.last_contact_ns = now_ns
        if isinstance(message, BatchMessage):
            new = self._on_batch(connection, agent, message, payload, now_ns)
            received.extend([] if new is None else [new])
            connection.heard = message.sequence
            if agent.acknowledged >= message.sequence:
                _acknowledge(replies, connection)
        elif isinstance(message, Heartbeat):
            agent.on_heartbeat(replace(message, health=self._contents.bounded_health(message.health)), now_ns)
            _acknowledge(replies, connection)
        elif isinstance(message, Goodbye):
            agent.said_goodbye = True
            self._write(GoodbyeSaid(agent=agent.hello.agent_id))

    def _answer_to(self, hello: ForeignHello, certificate: tuple[str, ...]) -> AgentError:
        """Why a Hello of another version is refused; one that only asks learns whether it would be let in."""
        sentence = _version_sentence(hello)
        if hello.protocol_version != ASKING_VERSION:
            return AgentError("wrong_version", sentence)
        try:
            self._admission.admit_host(hello.host, digest_of(hello.token) if hello.token else None, certificate)
        except AgentError as error:
            return AgentError(error.reason, f"{sentence}; {error}")
        return AgentError("wrong_version", f"{sentence}; {WOULD_LET_IN}")

    def _is_still_allowed(self, connection: _Connection, agent: KnownAgent) -> bool:
        try:
            now = self._admission.admit(agent.hello, connection.token_digest, connection.certificate)
        except AgentError:
            return False
        return now == connection.grant

    def _watch(self, connection: _Connection, agent: KnownAgent) -> HostWatch | None:
        """Who looks at what this agent says of hosts; None if it may speak of any."""
        grant = connection.grant
        is_restricted = grant is not None and bool(grant.hosts)
        agent.remember_strings(is_restricted=is_restricted)
        if grant is None or not is_restricted:
            return None
        if agent.strings is None:
            raise AgentError(
                "unauthorized", "its hosts are restricted since it began: begin again", forgets_session=True
            )
        return HostWatch(grant, agent.strings)

    def _on_batch(
        self, connection: _Connection, agent: KnownAgent, message: BatchMessage, payload: bytes, now_ns: int
    ) -> Received | None:
        watch = self._watch(connection, agent)
        before = agent.session_label, agent.applied
        new = agent.on_batch(message)
        if (agent.session_label, agent.applied) == before:
            return new
        if new is not None:
            batch = self._contents.bounded(new.batch)
            try:
                batch = batch if watch is None else watch.allowed(batch)
            except AgentError:
                # Its source has moved on all the same.
                self._note_taken(agent, _encoded(message, _without_content(new.batch)), now_ns)
                raise
            if batch is not new.batch:
                # The journal must not hold what was taken out either, or a restart would let it in.
                new = replace(new, batch=batch)
                payload = _encoded(message, batch)
        self._note_taken(agent, payload, now_ns)
        return new

    def _note_taken(self, agent: KnownAgent, payload: bytes, now_ns: int) -> None:
        hello = agent.hello
        taken = BatchTaken(
            agent=hello.agent_id,
            session=hello.session_id,
            payload=payload,
            at_ns=now_ns,
            is_restricted=agent.strings is not None,
            job=hello.job,
        )
        number = self._write(taken)
        if number is None:
            agent.keep(agent.session_label, agent.applied)
        else:
            self._unkept.append(_Unkept(number, agent, agent.session_label, agent.applied))

    def _write(self, entry: Entry) -> int | None:
        return None if self._record is None else self._record(entry)

    def _replay_hello(self, entry: HelloSaid) -> None:
        hello = decode_kept_hello(entry.payload)  # before an upgrade it may have been of another version
        if entry.forgotten is not None:
            self._agents.pop(entry.forgotten, None)
        agent = self._agents.get(hello.agent_id)
        if agent is None:
            agent = self._agents[hello.agent_id] = KnownAgent(hello, max_sources=self._limits.max_sources)
        agent.on_hello(hello)
        agent.last_contact_ns = entry.at_ns

    def _on_hello(self, connection: _Connection, hello: Hello, now_ns: int) -> Welcome:
        _check_texts(hello)
        connection.token_digest = digest_of(hello.token) if hello.token else None
        hello = replace(hello, token="")
        grant = connection.grant = self._admission.admit(hello, connection.token_digest, connection.certificate)
        hello = replace(hello, agent_id=owned_id(hello.agent_id, grant))
        connection.deframer.max_frame_bytes = self._limits.max_frame_bytes
        agent = self._agents.get(hello.agent_id)
        is_known = agent is not None
        forgotten: str | None = None
        if agent is None:
            forgotten = self._make_room_for_an_agent(grant.name)
            agent = self._agents[hello.agent_id] = KnownAgent(hello, max_sources=self._limits.max_sources)
        replaces = agent.connection
        if replaces is not None:
            self._supersede(self._connections[replaces])
        agent.connection, connection.agent = connection.number, agent
        welcome = agent.on_hello(hello)
        connection.heard = welcome.acknowledged
        said = HelloSaid(payload=encode_message(hello), at_ns=now_ns, forgotten=forgotten, is_new=not is_known)
        self._write(said)
        connection.arrival = Arrival(agent=agent.record(), is_known=is_known, replaces=replaces)
        return welcome

    def _supersede(self, older: _Connection) -> None:
        """The newest connection of an agent is the one: the older is dead, or of a second agent of that name."""
        older.state, older.agent = _State.CLOSED, None

    def _make_room_for_an_agent(self, owner: str) -> str | None:
        """The agent that was forgotten to make room; None if there was room."""
        if len(self._agents) < self._limits.max_agents:
            return None
        away = [(agent.last_contact_ns, key) for key, agent in self._agents.items() if agent.connection is None]
        # Who comes makes room among its own first: one with many names must not have others forgotten.
        away = [each for each in away if owner_of(each[1]) == owner] or away
        if not away:
            raise AgentError("too_many_agents", f"{len(self._agents)} agents are connected, which is the limit")
        agent_id = min(away)[1]
        forgotten = self._agents.pop(agent_id)
        self._duplicates += forgotten.duplicates
        return agent_id


def _encoded(message: BatchMessage, batch: Batch) -> bytes:
    return encode_message(replace(message, batch=batch))


def _without_content(batch: Batch) -> Batch:
    return Batch(
        source=batch.source,
        begin=batch.begin,
        end=batch.end,
        end_line=batch.end_line,
        is_last=batch.is_last,
        content_check=batch.content_check,
    )


def _replayed_batch(agent: KnownAgent, entry: BatchTaken) -> Received | None:
    message = decode_message(entry.payload)
    if not isinstance(message, BatchMessage):
        raise ProtocolError("the journal holds another message where a batch must be")
    try:
        if entry.session != agent.hello.session_id:
            raise ReplayError("its session's Hello is missing")
        if message.sequence <= agent.applied:
            raise ReplayError("what ended its session is missing")
        agent.remember_strings(is_restricted=entry.is_restricted)
        received = agent.on_batch(message)
    except AgentError as error:
        # Nothing may be applied behind a hole: the dictionaries may lack what it brought.
        agent.forget_session()
        raise ReplayError(str(error)) from error
    if received is not None and agent.strings is not None:
        agent.strings.add(received.batch)
    return received


def _payloads(deframer: Deframer, data: bytes) -> list[bytes]:
    try:
        return deframer.ingest_bytes(data)
    except ProtocolError as error:
        raise AgentError("frame_too_long", str(error)) from error


def _decoded(payload: bytes) -> Message:
    try:
        return decode_message(payload, is_sent=True)
    except DamagedError as error:
        raise AgentError("damaged", f"{error}: the connection is made again, and all is sent again") from error
    except ProtocolError as error:
        raise AgentError("undecodable", str(error), forgets_session=True) from error


def _version_sentence(hello: ForeignHello) -> str:
    return (
        f"the agent speaks protocol version {hello.protocol_version} and this service version {PROTOCOL_VERSION}: "
        "install the same ncclscope on both"
    )


def _check_texts(hello: Hello) -> None:
    texts = (hello.agent_id, hello.session_id, hello.name, hello.host, hello.job, hello.software_version)
    if max(len(text) for text in texts) > _MAX_TEXT:
        raise AgentError("undecodable", f"hello: a text has over {_MAX_TEXT} characters")
    if not all(text.isprintable() for text in texts):
        raise AgentError("undecodable", "hello: a text has characters that cannot be printed")


def _acknowledge(replies: list[Message], connection: _Connection) -> None:
    """One acknowledgement an answer is enough: it stands for all batches before it."""
    if replies and isinstance(replies[-1], Acknowledge):
        replies.pop()
    replies.append(Acknowledge(sequence=connection.acknowledged))
