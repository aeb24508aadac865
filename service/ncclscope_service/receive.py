"""The agents' connections: bytes to batches that were not seen before, each in its order.

One `Receiver` serves all connections. A connection is a small machine (`_TRANSITIONS`): first a Hello, then
batches and heartbeats, at last a Goodbye. What outlives it is kept per agent (`agents.py`). Whatever an agent
does wrong closes its own connection, with a sentence that it logs, and is counted by reason here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from ncclscope_service.access import Grant, digest_of
from ncclscope_service.admission import Admission, HostWatch, owned_id, owner_of
from ncclscope_service.agents import AgentError, AgentRecord, KnownAgent, Received
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import MAX_FRAME_BYTES, Deframer, encode_frame
from ncclscope_wire.messages import (
    PROTOCOL_VERSION,
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

__all__ = ["AgentRecord", "Arrival", "Outcome", "ReceiveLimits", "ReceiveStatistics", "Received", "Receiver"]

_MAX_TEXT: Final = 256
"""Longest text of a Hello, in characters: they become labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveLimits:
    """What bounds the memory of a receiver."""

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
    """What came of some bytes. Deliver `received` first, then send, then close."""

    received: tuple[Received, ...] = ()
    to_send: bytes = b""
    close: bool = False
    fault: str | None = None
    """What the agent did wrong: the reason, a colon and a sentence. None where the close is in order."""
    arrival: Arrival | None = None
    """Who the connection is of, where these bytes told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveStatistics:
    """Counters since the start of the service."""

    connections: int
    agents: int
    """Known, connected or not."""
    bytes_total: int
    batches_total: int
    """Handed on."""
    duplicates: Mapping[str, int]
    """Batches dropped, by why: "sequence", "position"."""
    faults: Mapping[str, int]
    """Connections closed for what their agent sent, by reason."""
    superseded_total: int
    """Connections whose agent came back on another one."""
    agents_forgotten_total: int
    sources_forgotten_total: int


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
    """What it may say; None before its Hello was accepted."""
    token_digest: bytes | None = None
    is_revoked: bool = False
    """The rules have changed, and would not let it in as it came."""
    state: _State = _State.AWAITING_HELLO
    agent: KnownAgent | None = None
    arrival: Arrival | None = None
    """Until it was told."""

    @property
    def is_closed(self) -> bool:
        return self.state is _State.CLOSED

    def known_agent(self) -> KnownAgent:
        assert self.agent is not None, "a connection was established without an agent"
        return self.agent


class Receiver:
    """All agents, known and connected."""

    def __init__(self, *, limits: ReceiveLimits | None = None, admission: Admission | None = None) -> None:
        self._limits = limits or ReceiveLimits()
        self._admission = admission or Admission()
        self._watches: dict[str, HostWatch] = {}
        """Of agents whose hosts are restricted, by agent id."""
        self._connections: dict[int, _Connection] = {}
        self._agents: dict[str, KnownAgent] = {}
        self._faults = Counter[str]()
        self._duplicates = Counter[str]()
        self._bytes = self._batches = self._superseded = self._agents_forgotten = self._sources_forgotten = 0

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
        """What came of bytes of one connection; `now_ns` is the service's wall clock.

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
            for payload in _payloads(connection.deframer, data):
                self._on_message(connection, _decoded(payload), now_ns, received, replies)
        except AgentError as error:
            fault = error
            replies.append(self._closed(connection, error))
        self._batches += len(received)
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

        Gives the agent that is away now; None where nobody is: no Hello came, or it has a newer connection.
        """
        agent = self._connections.pop(connection_id).agent
        if agent is None:
            return None
        agent.connection = None
        return agent.record()

    def is_established(self, connection_id: int) -> bool:
        """Its agent has said a Hello that was accepted."""
        return self._connections[connection_id].state is _State.ESTABLISHED

    def agents(self) -> tuple[AgentRecord, ...]:
        """Every agent that is remembered, by agent id."""
        return tuple(self._agents[agent_id].record() for agent_id in sorted(self._agents))

    def statistics(self) -> ReceiveStatistics:
        """A snapshot of the counters."""
        duplicates = sum((agent.duplicates for agent in self._agents.values()), self._duplicates)
        forgotten = sum(agent.sources_forgotten for agent in self._agents.values())
        return ReceiveStatistics(
            connections=len(self._connections),
            agents=len(self._agents),
            bytes_total=self._bytes,
            batches_total=self._batches,
            duplicates=dict(duplicates),
            faults=dict(self._faults),
            superseded_total=self._superseded,
            agents_forgotten_total=self._agents_forgotten,
            sources_forgotten_total=self._sources_forgotten + forgotten,
        )

    def _closed(self, connection: _Connection, fault: AgentError) -> Refused:
        connection.state = _State.CLOSED
        self._faults[fault.reason] += 1
        if fault.forgets_session and connection.agent is not None:
            connection.agent.forget_session()
        return Refused(reason=fault.reason, message=str(fault))

    def _on_message(
        self,
        connection: _Connection,
        message: Message,
        now_ns: int,
        received: list[Received],
        replies: list[Message],
    ) -> None:
        if isinstance(message, ForeignHello):
            raise AgentError("wrong_version", _version_sentence(message))
        state = _TRANSITIONS.get((connection.state, type(message)))
        if state is None:
            what = type(message).__name__
            raise AgentError("unexpected_message", f"{what} is not allowed while {connection.state.name}")
        if isinstance(message, Hello):
            replies.append(self._on_hello(connection, message))
        connection.state = state
        agent = connection.known_agent()
        agent.last_contact_ns = now_ns
        if isinstance(message, BatchMessage):
            watch = self._watch(connection, agent)
            new = agent.on_batch(message)
            if new is not None:
                received.append(new if watch is None else replace(new, batch=watch.allowed(new.batch)))
            _acknowledge(replies, agent)
        elif isinstance(message, Heartbeat):
            agent.on_heartbeat(message, now_ns)
            _acknowledge(replies, agent)
        elif isinstance(message, Goodbye):
            agent.said_goodbye = True

    def _is_still_allowed(self, connection: _Connection, agent: KnownAgent) -> bool:
        try:
            now = self._admission.admit(agent.hello, connection.token_digest, connection.certificate)
        except AgentError:
            return False
        return now == connection.grant

    def _watch(self, connection: _Connection, agent: KnownAgent) -> HostWatch | None:
        """Who looks at what this agent says of hosts; None where it may speak of any."""
        agent_id, grant = agent.hello.agent_id, connection.grant
        if grant is None or not grant.hosts:
            self._watches.pop(agent_id, None)
            return None
        if agent.acknowledged == 0:
            self._watches[agent_id] = HostWatch()
        watch = self._watches.get(agent_id)
        if watch is None:
            raise AgentError(
                "unauthorized", "its hosts are restricted since it began: begin anew", forgets_session=True
            )
        watch.grant = grant
        return watch

    def _on_hello(self, connection: _Connection, hello: Hello) -> Welcome:
        _check_texts(hello)
        connection.token_digest = digest_of(hello.token) if hello.token else None
        hello = replace(hello, token="")
        grant = connection.grant = self._admission.admit(hello, connection.token_digest, connection.certificate)
        hello = replace(hello, agent_id=owned_id(hello.agent_id, grant))
        connection.deframer.max_frame_bytes = self._limits.max_frame_bytes
        agent = self._agents.get(hello.agent_id)
        is_known = agent is not None
        if agent is None:
            self._make_room_for_an_agent(grant.name)
            agent = self._agents[hello.agent_id] = KnownAgent(hello, max_sources=self._limits.max_sources)
        replaces = agent.connection
        if replaces is not None:
            self._supersede(self._connections[replaces])
        agent.connection, connection.agent = connection.number, agent
        welcome = agent.on_hello(hello)
        connection.arrival = Arrival(agent=agent.record(), is_known=is_known, replaces=replaces)
        return welcome

    def _supersede(self, older: _Connection) -> None:
        """The newest connection of an agent is the one: the older is dead, or of a second agent of that name."""
        older.state, older.agent = _State.CLOSED, None
        self._superseded += 1

    def _make_room_for_an_agent(self, owner: str) -> None:
        if len(self._agents) < self._limits.max_agents:
            return
        away = [(agent.last_contact_ns, key) for key, agent in self._agents.items() if agent.connection is None]
        # Who comes makes room among its own first: one with many names must not have others forgotten.
        away = [each for each in away if owner_of(each[1]) == owner] or away
        if not away:
            raise AgentError("too_many_agents", f"{len(self._agents)} agents are connected, which is the limit")
        _, key = min(away)
        self._watches.pop(key, None)
        forgotten = self._agents.pop(key)
        self._duplicates += forgotten.duplicates
        self._sources_forgotten += forgotten.sources_forgotten
        self._agents_forgotten += 1


def _payloads(deframer: Deframer, data: bytes) -> list[bytes]:
    try:
        return deframer.feed(data)
    except ProtocolError as error:
        raise AgentError("frame_too_long", str(error)) from error


def _decoded(payload: bytes) -> Message:
    try:
        return decode_message(payload)
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


def _acknowledge(replies: list[Message], agent: KnownAgent) -> None:
    """One acknowledgement an answer is enough: it stands for all batches before it."""
    if replies and isinstance(replies[-1], Acknowledge):
        replies.pop()
    replies.append(Acknowledge(sequence=agent.acknowledged))
