"""Messages of one session with the service: who may say what, and when.

    CONNECTING ──connected──▶ HELLO_SENT ──welcomed──▶ STREAMING
        ▲                         │                        │
        └──── disconnected, refused ───────────────────────┘        finished: CLOSED, from every state

Batches are not its concern: `frames.py` has those in flight, and `session.py` decides what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Final

from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import Deframer, encode_frame
from ncclscope_wire.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    AgentHealth,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Welcome,
)


class SessionState(Enum):
    """State of the session."""

    CONNECTING = auto()
    HELLO_SENT = auto()
    STREAMING = auto()
    CLOSED = auto()


class SessionEvent(Enum):
    """Reason for a change of state."""

    CONNECTED = auto()
    WELCOMED = auto()
    ACKNOWLEDGED = auto()
    REFUSED = auto()
    DISCONNECTED = auto()
    FINISHED = auto()


TRANSITIONS: Final[Mapping[tuple[SessionState, SessionEvent], SessionState]] = {
    (SessionState.CONNECTING, SessionEvent.CONNECTED): SessionState.HELLO_SENT,
    (SessionState.CONNECTING, SessionEvent.DISCONNECTED): SessionState.CONNECTING,
    (SessionState.HELLO_SENT, SessionEvent.WELCOMED): SessionState.STREAMING,
    (SessionState.HELLO_SENT, SessionEvent.REFUSED): SessionState.CONNECTING,
    (SessionState.HELLO_SENT, SessionEvent.DISCONNECTED): SessionState.CONNECTING,
    (SessionState.STREAMING, SessionEvent.ACKNOWLEDGED): SessionState.STREAMING,
    (SessionState.STREAMING, SessionEvent.REFUSED): SessionState.CONNECTING,
    (SessionState.STREAMING, SessionEvent.DISCONNECTED): SessionState.CONNECTING,
    (SessionState.CLOSED, SessionEvent.ACKNOWLEDGED): SessionState.CLOSED,
    (SessionState.CLOSED, SessionEvent.REFUSED): SessionState.CLOSED,
    (SessionState.CLOSED, SessionEvent.DISCONNECTED): SessionState.CLOSED,
    (SessionState.CONNECTING, SessionEvent.FINISHED): SessionState.CLOSED,
    (SessionState.HELLO_SENT, SessionEvent.FINISHED): SessionState.CLOSED,
    (SessionState.STREAMING, SessionEvent.FINISHED): SessionState.CLOSED,
    (SessionState.CLOSED, SessionEvent.FINISHED): SessionState.CLOSED,
}
"""The whole law; a peer's message that is not in it is a ProtocolError."""

_FROM_PEER: Final[Mapping[type[Message], SessionEvent]] = {
    Welcome: SessionEvent.WELCOMED,
    Acknowledge: SessionEvent.ACKNOWLEDGED,
    Refused: SessionEvent.REFUSED,
}


class Exchange:
    """The state machine: give it bytes and events, and send what `drain` gives."""

    def __init__(self, hello: Hello, *, max_frame_bytes: int) -> None:
        self._hello = hello
        self._max_frame_bytes = max_frame_bytes
        self._deframer = Deframer(max_frame_bytes=max_frame_bytes)
        self._control = bytearray()
        self._heartbeat: Heartbeat | None = None
        self.state = SessionState.CONNECTING
        self.refusal: Refused | None = None
        """The last refusal since the last Welcome."""
        self.connections = 0
        """Number of connections that were welcomed."""

    @property
    def is_streaming(self) -> bool:
        """Whether batches may be sent."""
        return self.state is SessionState.STREAMING

    @property
    def is_closed(self) -> bool:
        """It was finished: nothing is accepted any more."""
        return self.state is SessionState.CLOSED

    @property
    def session_id(self) -> str:
        """The id that the next Hello gives."""
        return self._hello.session_id

    def rename(self, session_id: str) -> None:
        """Has the next Hello give another session id."""
        self._hello = replace(self._hello, session_id=session_id)

    def heartbeat(self, health: AgentHealth, *, agent_wall_ns: int) -> None:
        """Sends a heartbeat with the next bytes; replaces one that could not be sent yet."""
        if self.is_streaming:
            self._heartbeat = Heartbeat(agent_wall_ns=agent_wall_ns, health=health)

    def finish(self, reason: str) -> None:
        """Ends the session: after what is still to be sent, the connection can be closed."""
        if self.is_streaming:
            if self._heartbeat is not None:
                self._send(self._heartbeat)
            self._send(Goodbye(reason=reason))
        self._heartbeat = None
        self._apply(SessionEvent.FINISHED)

    def on_connected(self, *, token: str = "") -> None:
        """A connection stands: sends Hello, with the token that proves it if the service wants one."""
        self._apply(SessionEvent.CONNECTED)
        self._deframer = Deframer(max_frame_bytes=self._max_frame_bytes)
        self._send(replace(self._hello, token=token) if token else self._hello)

    def on_disconnected(self) -> None:
        """The connection is gone, or could not be made."""
        self._apply(SessionEvent.DISCONNECTED)
        self._control.clear()
        self._heartbeat = None
        self._deframer.finish()

    def messages(self, data: bytes) -> Iterator[Welcome | Acknowledge]:
        """Messages of the service on which the session has to act.

        Raises:
            ProtocolError: the service broke the protocol: drop the connection, call `on_disconnected`.
        """
        for payload in self._deframer.ingest_bytes(data):
            message = decode_message(payload, is_sent=True)
            event = _FROM_PEER.get(type(message))
            if event is None or (self.state, event) not in TRANSITIONS:
                raise ProtocolError(f"the service sent {type(message).__name__} while {self.state.name}")
            self._apply(event)
            if isinstance(message, Welcome):
                self._check(message)
                yield message
            elif isinstance(message, Acknowledge):
                yield message
            elif isinstance(message, Refused):
                self.refusal = message

    def drain(self) -> bytearray:
        """Takes out the bytes to be sent before batches."""
        if self._heartbeat is not None:
            self._send(self._heartbeat)
            self._heartbeat = None
        sent, self._control = self._control, bytearray()
        return sent

    def _check(self, welcome: Welcome) -> None:
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the service speaks protocol version {welcome.protocol_version}, not {PROTOCOL_VERSION}"
            )
        self.refusal = None
        self.connections += 1

    def _apply(self, event: SessionEvent) -> None:
        state = TRANSITIONS.get((self.state, event))
        assert state is not None, f"the session's shell reported {event.name} while {self.state.name}"
        self.state = state

    def _send(self, message: Message) -> None:
        self._control += encode_frame(encode_message(message))
