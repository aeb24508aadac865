"""The agent's side of a session: what is in flight, what is acknowledged, what must be sent again.

Batches that are not acknowledged stay in the *window*. A new connection sends them again, in order, if the service
knows the session; if it does not, the window is forgotten and the readers go on from the positions that the service
has (`generation` grows, `positions` are new). Either way nothing is lost and nothing is counted twice. A full window
accepts nothing: its reader waits, the files keep the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from ncclscope_agent.link.exchange import Exchange
from ncclscope_agent.link.frames import InFlight, Window, WindowLimits
from ncclscope_wire.batch import Batch
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import Hello, Position, Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    """A snapshot of the session."""

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
    stripped: Mapping[str, int]
    """Batches whose rows and records were left out, by the reason that a SourceGap of each says."""


class AnySession(ABC):
    """A session, with or without a spool: takes bytes and events, gives the bytes to send in `to_send`."""

    def __init__(self, hello: Hello, *, limits: WindowLimits | None = None) -> None:
        self.window = Window(limits or WindowLimits())
        self.exchange = Exchange(hello, max_frame_bytes=self.window.limits.max_frame_bytes)
        self.generation = 0
        """How often readers had to begin again; 0: nothing may be read yet."""
        self.positions: Mapping[str, Position] = {}
        """Where readers of this generation begin, by source key."""
        self.applied: dict[str, int] = {}
        """How far the service has every source that it has not finished, by source key: bytes of a log. All up to
        here was acknowledged, in this generation or before; later batches may be too."""
        self.wants_reconnect = False
        """The connection is of no use any more: another one is to be made."""
        self._batches = self._sent_bytes = 0

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """`offer` would accept a batch now."""

    @property
    @abstractmethod
    def is_drained(self) -> bool:
        """Everything that was offered is acknowledged."""

    @abstractmethod
    def offer(self, batch: Batch) -> bool:
        """Takes a batch of the present generation; False if it is full or over: offer it again later."""

    def on_connected(self, *, token: str = "") -> None:
        """A connection stands: sends Hello."""
        self.exchange.on_connected(token=token)

    def on_bytes(self, data: bytes) -> None:
        """Takes in what the service sent.

        Raises:
            ProtocolError: the service broke the protocol: drop the connection, call `on_disconnected`.
        """
        for message in self.exchange.messages(data):
            if self.wants_reconnect:
                continue  # it is about the session before
            if isinstance(message, Welcome):
                self._on_welcome(message)
            elif message.sequence >= self.window.next_to_send:
                last = self.window.next_to_send - 1
                raise ProtocolError(f"batch {message.sequence} was acknowledged, and {last} was sent last")
            else:
                self._on_acknowledge(message.sequence)

    def on_disconnected(self) -> None:
        """The connection is gone, or could not be made."""
        self.exchange.on_disconnected()

    def to_send(self, *, max_bytes: int = 256 * 1024) -> bytes:
        """The next bytes for the connection; none if there is nothing to send now, or it is to be given up. Drains.

        At least one frame, and no further one beyond `max_bytes`.
        """
        if self.wants_reconnect:
            return b""
        sent = self.exchange.drain()
        if self.exchange.is_streaming:
            self.window.drain_into(sent, max_bytes)
        self._sent_bytes += len(sent)
        return bytes(sent)

    def statistics(self) -> SessionStatistics:
        """A snapshot of the session."""
        oldest = self.window.oldest
        return SessionStatistics(
            window_bytes=self.window.bytes,
            window_batches=len(self.window),
            oldest_observed_at_ns=None if oldest is None else oldest.observed_at_ns,
            batches_total=self._batches,
            acknowledged_total=self.window.acknowledged,
            connections_total=self.exchange.connections,
            resets_total=self.generation,
            sent_bytes_total=self._sent_bytes,
            stripped=dict(self.window.stripped),
        )

    @abstractmethod
    def _on_welcome(self, welcome: Welcome) -> None:
        """The service says whether it knows the session, and how far it has it."""

    @abstractmethod
    def _on_acknowledge(self, sequence: int) -> None:
        """All batches up to this number are applied."""

    def _record_applied(self, batch: InFlight) -> None:
        """Records that the service has applied this batch."""
        if batch.is_last:
            self.applied.pop(batch.key, None)
        else:
            self.applied[batch.key] = batch.end


class Session(AnySession):
    """A session whose unacknowledged batches are in memory alone; its readers wait while the window is full."""

    def __init__(self, hello: Hello, *, limits: WindowLimits | None = None) -> None:
        super().__init__(hello, limits=limits)
        self._abandoned = 0

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
        self._on_acknowledge(welcome.acknowledged)

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

    def _on_acknowledge(self, sequence: int) -> None:
        for batch in self.window.acknowledge(sequence):
            self._record_applied(batch)


def unfinished(positions: Mapping[str, Position]) -> dict[str, int]:
    """How far the service has each source that is not complete."""
    return {key: known.end for key, known in positions.items() if not known.is_complete}
