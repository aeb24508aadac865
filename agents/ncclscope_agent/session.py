"""The agent's side of a session: what is in flight, what is acknowledged, what must be sent again.

    CONNECTING ──connected──▶ HELLO_SENT ──welcomed──▶ STREAMING
        ▲                         │                        │
        └──── disconnected, refused ───────────────────────┘        finished: CLOSED, from every state

Batches that are not acknowledged stay in the *window*, encoded. A new connection sends them again, in order,
where the service knows the session; where it does not, the window is forgotten and the readers are told to go
on from the positions that the service has (`generation` grows, `positions` are new). Either way nothing is lost
and nothing is counted twice. A full window accepts nothing: its reader waits, the files keep the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, cast

from ncclscope_wire.batch import ROW_TABLES, Batch, Columns, without_rows
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import MAX_FRAME_BYTES, Deframer, encode_frame
from ncclscope_wire.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    AgentHealth,
    BatchMessage,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Position,
    Refused,
    Welcome,
)
from ncclscope_wire.records import SourceGap


class SessionState(Enum):
    """Where the session is."""

    CONNECTING = auto()
    HELLO_SENT = auto()
    STREAMING = auto()
    CLOSED = auto()


class SessionEvent(Enum):
    """What moves it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """What may be in flight."""

    max_bytes: int = 16 * 1024 * 1024
    """Encoded bytes. The last batch may pass it: a batch that is larger than all of it must get through too."""
    max_batches: int = 4096
    max_frame_bytes: int = MAX_FRAME_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    """A snapshot of the session."""

    state: SessionState
    window_bytes: int
    window_batches: int
    peak_window_bytes: int
    oldest_observed_at_ns: int | None
    """When the oldest batch in the window was read; None where it is empty or was not read live."""
    batches_total: int
    """Accepted by `offer`, over all generations."""
    acknowledged_total: int
    sent_again_total: int
    connections_total: int
    """Connections that were welcomed."""
    resets_total: int
    """How often the service did not know the session, the first time included."""
    sent_bytes_total: int
    """Given to connections, what was sent again included."""
    too_large_total: int
    """Batches whose rows did not fit a frame and were left out (a SourceGap says so)."""


class Session:
    """The state machine; feed it bytes and events, take bytes from `to_send`."""

    def __init__(self, hello: Hello, *, limits: WindowLimits | None = None) -> None:
        self._hello = hello
        self._limits = limits or WindowLimits()
        self._state = SessionState.CONNECTING
        self._deframer = Deframer(max_frame_bytes=self._limits.max_frame_bytes)
        self._control = bytearray()
        self._heartbeat: Heartbeat | None = None
        self._frames: dict[int, bytes] = {}
        self._observed_at_ns: dict[int, int | None] = {}
        self._reached: dict[int, tuple[str, int | None]] = {}
        self._applied: dict[str, int] = {}
        self._first = self._next = self._next_to_send = 1
        self._highest_sent = 0
        self._window_bytes = self._peak_window_bytes = 0
        self._batches = self._acknowledged = self._sent_again = self._connections = self._too_large = 0
        self._abandoned = self._sent_bytes = 0
        self.generation = 0
        """How often readers were told to begin again; 0: no service has welcomed us, nothing may be read yet."""
        self.positions: Mapping[str, Position] = {}
        """Where readers of this generation begin."""
        self.wants_reconnect = False
        """The connection is of no use any more: another one is to be made."""
        self.refusal: Refused | None = None
        """The last refusal since the last Welcome."""

    @property
    def state(self) -> SessionState:
        """Where the session is."""
        return self._state

    @property
    def is_closed(self) -> bool:
        """It was finished: nothing is accepted any more."""
        return self._state is SessionState.CLOSED

    @property
    def has_room(self) -> bool:
        """`offer` would accept a batch now."""
        return (
            self.generation > 0
            and not self.is_closed
            and self._window_bytes < self._limits.max_bytes
            and len(self._frames) < self._limits.max_batches
        )

    @property
    def applied(self) -> Mapping[str, int]:
        """How far the service has every source that it has not finished, by source key: bytes of a log.

        What lies before was acknowledged, in this generation or in one before; of later batches it says nothing.
        """
        return self._applied

    @property
    def is_drained(self) -> bool:
        """Everything that was offered is acknowledged."""
        return not self._frames

    def offer(self, batch: Batch) -> bool:
        """Takes a batch into the window; False where it is full (or the session is over): offer it again later.

        Batches must come from readers of the present `generation`. A batch that does not fit a frame is
        replaced by its dictionaries and a gap.
        """
        if not self.has_room:
            return False
        frame = encode_frame(self._payload(batch, self._next), max_frame_bytes=self._limits.max_frame_bytes)
        self._frames[self._next] = frame
        self._observed_at_ns[self._next] = batch.observed_at_ns
        self._reached[self._next] = batch.source.key, None if batch.is_last else batch.end
        self._next += 1
        self._batches += 1
        self._window_bytes += len(frame)
        self._peak_window_bytes = max(self._peak_window_bytes, self._window_bytes)
        return True

    def heartbeat(self, health: AgentHealth, *, agent_wall_ns: int) -> None:
        """Says that we live, at the next `to_send`; replaces a heartbeat that could not be sent yet."""
        if self._state is SessionState.STREAMING:
            self._heartbeat = Heartbeat(agent_wall_ns=agent_wall_ns, health=health)

    def finish(self, reason: str) -> None:
        """Ends the session: after what `to_send` still gives, the connection can be closed."""
        if self._state is SessionState.STREAMING:
            if self._heartbeat is not None:
                self._say(self._heartbeat)
            self._say(Goodbye(reason=reason))
        self._heartbeat = None
        self._apply(SessionEvent.FINISHED)

    def on_connected(self, *, token: str = "") -> None:
        """A connection stands: says Hello, with the token that proves it where the service wants one."""
        self._apply(SessionEvent.CONNECTED)
        self._deframer = Deframer(max_frame_bytes=self._limits.max_frame_bytes)
        self._say(replace(self._hello, token=token) if token else self._hello)

    def on_bytes(self, data: bytes) -> None:
        """What the service sent.

        Raises:
            ProtocolError: the service broke the protocol: drop the connection, call `on_disconnected`.
        """
        for payload in self._deframer.feed(data):
            self._on_message(decode_message(payload))

    def on_disconnected(self) -> None:
        """The connection is gone, or could not be made."""
        self._apply(SessionEvent.DISCONNECTED)
        self._control.clear()
        self._heartbeat = None
        self._deframer.flush()

    def to_send(self, *, max_bytes: int = 256 * 1024) -> bytes:
        """The next bytes for the connection; empty where there is nothing to send now. Drains.

        At least one frame, and no further one beyond `max_bytes`.
        """
        if self._heartbeat is not None:
            self._say(self._heartbeat)
            self._heartbeat = None
        sent = bytearray(self._control)
        self._control.clear()
        if self._state is SessionState.STREAMING:
            while self._next_to_send < self._next and (not sent or len(sent) < max_bytes):
                sent += self._frames[self._next_to_send]
                self._sent_again += self._next_to_send <= self._highest_sent
                self._highest_sent = max(self._highest_sent, self._next_to_send)
                self._next_to_send += 1
        self._sent_bytes += len(sent)
        return bytes(sent)

    def statistics(self) -> SessionStatistics:
        """A snapshot of the session."""
        return SessionStatistics(
            state=self._state,
            window_bytes=self._window_bytes,
            window_batches=len(self._frames),
            peak_window_bytes=self._peak_window_bytes,
            oldest_observed_at_ns=self._observed_at_ns.get(self._first),
            batches_total=self._batches,
            acknowledged_total=self._acknowledged,
            sent_again_total=self._sent_again,
            connections_total=self._connections,
            resets_total=self.generation,
            sent_bytes_total=self._sent_bytes,
            too_large_total=self._too_large,
        )

    def _apply(self, event: SessionEvent) -> None:
        state = TRANSITIONS.get((self._state, event))
        assert state is not None, f"the session's shell reported {event.name} while {self._state.name}"
        self._state = state

    def _say(self, message: Message) -> None:
        self._control += encode_frame(encode_message(message))

    def _on_message(self, message: Message) -> None:
        event = _FROM_PEER.get(type(message))
        if event is None or (self._state, event) not in TRANSITIONS:
            raise ProtocolError(f"the service sent {type(message).__name__} while {self._state.name}")
        self._apply(event)
        if isinstance(message, Welcome):
            self._on_welcome(message)
        elif isinstance(message, Acknowledge):
            self._acknowledge(message.sequence)
        elif isinstance(message, Refused):
            self.refusal = message

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the service speaks protocol version {welcome.protocol_version}, not {PROTOCOL_VERSION}"
            )
        self.refusal = None
        self._connections += 1
        if not welcome.session_known:
            self._begin_anew(welcome.positions)
            return
        if not self._first - 1 <= welcome.acknowledged < self._next:
            self._abandon()
            raise ProtocolError(
                f"the service says that batch {welcome.acknowledged} was applied last, "
                f"and batches {self._first} to {self._next - 1} are in flight"
            )
        self._next_to_send = welcome.acknowledged + 1
        self._forget_until(welcome.acknowledged)

    def _begin_anew(self, positions: Mapping[str, Position]) -> None:
        self._frames.clear()
        self._observed_at_ns.clear()
        self._reached.clear()
        self._applied = {key: known.end for key, known in positions.items() if not known.is_complete}
        self._window_bytes = 0
        self._first = self._next = self._next_to_send = 1
        self._highest_sent = 0
        self.generation += 1
        self.positions = positions

    def _abandon(self) -> None:
        """Takes a session id that no service knows, so that the next Welcome makes the readers begin anew."""
        self._abandoned += 1
        base = self._hello.session_id.partition("+")[0]
        self._hello = replace(self._hello, session_id=f"{base}+{self._abandoned}")

    def _acknowledge(self, sequence: int) -> None:
        if sequence >= self._next_to_send:
            raise ProtocolError(f"batch {sequence} was acknowledged, and {self._next_to_send - 1} was sent last")
        self._forget_until(sequence)

    def _forget_until(self, sequence: int) -> None:
        """Later acknowledgements stand for earlier ones; one that comes late says nothing new."""
        while self._first <= sequence:
            self._window_bytes -= len(self._frames.pop(self._first))
            del self._observed_at_ns[self._first]
            self._note_applied(*self._reached.pop(self._first))
            self._first += 1
            self._acknowledged += 1

    def _note_applied(self, key: str, end: int | None) -> None:
        if end is None:
            self._applied.pop(key, None)
        else:
            self._applied[key] = end

    def _payload(self, batch: Batch, sequence: int) -> bytes:
        """A batch as it is sent; without its rows where they do not fit a frame."""
        payload = encode_message(BatchMessage(sequence=sequence, batch=batch))
        if len(payload) > self._limits.max_frame_bytes:
            self._too_large += 1
            stripped = without_rows(batch, _gap(batch, len(payload)))
            payload = encode_message(BatchMessage(sequence=sequence, batch=stripped))
        return payload


def _gap(batch: Batch, size_bytes: int) -> SourceGap:
    """What is said in the place of rows of a batch that is too large."""
    return SourceGap(
        reason="batch_too_large",
        amount=sum(len(cast(Columns, getattr(batch, name))) for name in ROW_TABLES),
        unit="records",
        detail=f"{batch.source.name}: a batch of {size_bytes} bytes does not fit a frame; its rows were left out",
    )
