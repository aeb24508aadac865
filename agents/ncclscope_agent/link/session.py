"""The agent's side of a session: what is in flight, what is acknowledged, what must be sent again.

Batches that are not acknowledged stay in the *window*. A new connection sends them again, in order, if the service
knows the session; if it does not, the window is forgotten and the readers go on from the positions that the service
has (`generation` grows, `positions` are new). Either way nothing is lost and nothing is counted twice. A full window
accepts nothing: its reader waits, the files keep the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ncclscope_agent.link.exchange import Exchange, SessionState
from ncclscope_agent.link.frames import InFlight, Window, WindowLimits
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import Hello, Position, Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    """A snapshot of the session."""

    state: SessionState
    window_bytes: int
    window_batches: int
    oldest_observed_at_ns: int | None
    """When the oldest batch in the window was read; None if it is empty or was not read live."""
    batches_total: int
    """Accepted by `offer`, over all generations."""
    acknowledged_total: int
    connections_total: int
    """Connections that were welcomed."""
    resets_total: int
    """How often the service did not know the session, the first time included."""
    sent_bytes_total: int
    """Given to connections, what was sent again included."""
    too_large_total: int
    """Batches whose rows did not fit a frame and were left out (a SourceGap says so)."""


class AnySession(Protocol):
    """A session, with or without a spool."""

    @property
    def exchange(self) -> Exchange:
        """The exchange of messages with the service."""
        ...

    @property
    def generation(self) -> int:
        """How often readers had to begin again; 0: nothing may be read yet."""
        ...

    @property
    def positions(self) -> Mapping[str, Position]:
        """Where readers of this generation begin, by source key."""
        ...

    @property
    def applied(self) -> Mapping[str, int]:
        """How far the service has every source that it has not finished, by source key: bytes of a log."""
        ...

    @property
    def wants_reconnect(self) -> bool:
        """The connection is of no use any more: another one is to be made."""
        ...

    @property
    def has_room(self) -> bool:
        """`offer` would accept a batch now."""
        ...

    @property
    def is_drained(self) -> bool:
        """Everything that was offered is acknowledged."""
        ...

    def offer(self, batch: Batch) -> bool:
        """Takes a batch of the present generation; False if it is full or over: offer it again later."""
        ...

    def on_connected(self, *, token: str = "") -> None:
        """A connection stands."""
        ...

    def on_bytes(self, data: bytes) -> None:
        """Takes in what the service sent; raises ProtocolError if it broke the protocol."""
        ...

    def on_disconnected(self) -> None:
        """The connection is gone, or could not be made."""
        ...

    def to_send(self, *, max_bytes: int = 256 * 1024) -> bytes:
        """The next bytes for the connection; empty if there is nothing to send now. Drains."""
        ...

    def statistics(self) -> SessionStatistics:
        """A snapshot of the session."""
        ...


class Session:
    """The state machine: takes bytes and events, gives the bytes to send in `to_send`."""

    wants_reconnect = False

    def __init__(self, hello: Hello, *, limits: WindowLimits | None = None) -> None:
        self.window = Window(limits or WindowLimits())
        self.exchange = Exchange(hello, max_frame_bytes=self.window.limits.max_frame_bytes)
        self.applied: dict[str, int] = {}
        """By source key: all up to here was acknowledged, in this generation or before; later batches may be too."""
        self._batches = self._abandoned = self._sent_bytes = 0
        self.generation = 0
        self.positions: Mapping[str, Position] = {}

    @property
    def has_room(self) -> bool:
        """`offer` would accept a batch now."""
        return self.generation > 0 and not self.exchange.is_closed and self.window.has_room()

    @property
    def is_drained(self) -> bool:
        """Everything that was offered is acknowledged."""
        return not len(self.window)

    def offer(self, batch: Batch) -> bool:
        """Takes a batch into the window; False if it is full (or the session is over): offer it again later.

        Batches must come from readers of the present `generation`. A batch that does not fit a frame is
        replaced by its dictionaries and a gap.
        """
        if not self.has_room:
            return False
        payload = self.window.payload(batch, self.window.next)
        framed = encode_frame(payload, max_frame_bytes=self.window.limits.max_frame_bytes)
        self.window.add(InFlight(framed, batch.source.key, batch.end, batch.is_last, batch.observed_at_ns))
        self._batches += 1
        return True

    def on_connected(self, *, token: str = "") -> None:
        """A connection stands: sends Hello."""
        self.exchange.on_connected(token=token)

    def on_bytes(self, data: bytes) -> None:
        """Takes in what the service sent.

        Raises:
            ProtocolError: the service broke the protocol: drop the connection, call `on_disconnected`.
        """
        for message in self.exchange.messages(data):
            if isinstance(message, Welcome):
                self._on_welcome(message)
            elif message.sequence >= self.window.next_to_send:
                last = self.window.next_to_send - 1
                raise ProtocolError(f"batch {message.sequence} was acknowledged, and {last} was sent last")
            else:
                self._acknowledge(message.sequence)

    def on_disconnected(self) -> None:
        """The connection is gone, or could not be made."""
        self.exchange.on_disconnected()

    def to_send(self, *, max_bytes: int = 256 * 1024) -> bytes:
        """The next bytes for the connection; empty if there is nothing to send now. Drains.

        At least one frame, and no further one beyond `max_bytes`.
        """
        sent = self.exchange.drain()
        if self.exchange.is_streaming:
            self.window.drain_into(sent, max_bytes)
        self._sent_bytes += len(sent)
        return bytes(sent)

    def statistics(self) -> SessionStatistics:
        """A snapshot of the session."""
        return session_statistics(
            self.exchange, self.window, batches=self._batches, resets=self.generation, sent_bytes=self._sent_bytes
        )

    def _on_welcome(self, welcome: Welcome) -> None:
        if not welcome.session_known:
            self._restart(welcome.positions)
            return
        window = self.window
        if not window.first - 1 <= welcome.acknowledged < window.next:
            in_flight = f"{window.first} to {window.next - 1}"
            self._abandon()
            raise ProtocolError(
                f"the service says that batch {welcome.acknowledged} was applied last, "
                f"and batches {in_flight} are in flight"
            )
        window.next_to_send = welcome.acknowledged + 1
        self._acknowledge(welcome.acknowledged)

    def _restart(self, positions: Mapping[str, Position]) -> None:
        self.window.clear()
        self.applied = unfinished(positions)
        self.generation += 1
        self.positions = positions

    def _abandon(self) -> None:
        """Takes a session id that no service knows, so that the next Welcome makes the readers begin again."""
        self._abandoned += 1
        base = self.exchange.session_id.partition("+")[0]
        self.exchange.rename(f"{base}+{self._abandoned}")

    def _acknowledge(self, sequence: int) -> None:
        for batch in self.window.acknowledge(sequence):
            record_applied(self.applied, batch)


def unfinished(positions: Mapping[str, Position]) -> dict[str, int]:
    """How far the service has each source that is not complete."""
    return {key: known.end for key, known in positions.items() if not known.is_complete}


def record_applied(applied: dict[str, int], batch: InFlight) -> None:
    """Records that the service has applied this batch."""
    if batch.is_last:
        applied.pop(batch.key, None)
    else:
        applied[batch.key] = batch.end


def session_statistics(
    exchange: Exchange, window: Window, *, batches: int, resets: int, sent_bytes: int
) -> SessionStatistics:
    """A snapshot of a session of these."""
    oldest = window.oldest
    return SessionStatistics(
        state=exchange.state,
        window_bytes=window.bytes,
        window_batches=len(window),
        oldest_observed_at_ns=None if oldest is None else oldest.observed_at_ns,
        batches_total=batches,
        acknowledged_total=window.acknowledged,
        connections_total=exchange.connections,
        resets_total=resets,
        sent_bytes_total=sent_bytes,
        too_large_total=window.too_large,
    )
