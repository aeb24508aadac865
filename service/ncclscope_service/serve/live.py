"""Server-sent events: what the live page and other listeners get pushed.

Every client has its own bounded queue; one that reads too slowly loses its oldest events, which are counted,
and never holds up the service or the other clients. Events with an id are kept for a while, for listeners whose
connection broke. Source: WHATWG HTML, section 9.2 (event stream format, Last-Event-ID).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

HEARTBEAT: Final = b": still here\n\n"
"""A comment, which clients ignore: keeps proxies from closing a silent stream."""

RETRY: Final = b"retry: 1000\n\n"
"""How long a browser waits before it connects again, in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event. `data` is JSON on one line (orjson writes no line breaks)."""

    name: str
    data: bytes
    id: str | None = None
    """Of an event that is kept for listeners who come back; None for one that the next of its name makes stale."""

    def as_bytes(self) -> bytes:
        """The event as bytes of the stream."""
        identity = b"" if self.id is None else b"id: " + self.id.encode() + b"\n"
        return identity + b"event: " + self.name.encode() + b"\ndata: " + self.data + b"\n\n"


MISSED: Final = Event(name="missed", data=b"{}")
"""Sent to a listener that comes back so late, or after a restart, that not all it missed is kept."""


@dataclass(slots=True)
class _Client:
    send: MemoryObjectSendStream[Event]
    receive: MemoryObjectReceiveStream[Event]
    wanted: frozenset[str] | None

    def wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStatistics:
    """Clients of the hub now, and its counts of dropped events and refused clients."""

    clients: int
    dropped_total: int
    refused_total: int


class Hub:
    """Hands events to all clients that listen, and keeps the last ones that have an id."""

    def __init__(
        self,
        *,
        queue_size: int = 64,
        max_clients: int = 256,
        heartbeat_seconds: float = 15.0,
        kept: int = 256,
        era: str | None = None,
    ) -> None:
        """`era` makes the ids of one start of the service differ from those of another; by default the time."""
        self._queue_size = queue_size
        self._max_clients = max_clients
        self._heartbeat_seconds = heartbeat_seconds
        self._clients: dict[int, _Client] = {}
        self._numbers = itertools.count()
        self._kept: deque[Event] = deque(maxlen=kept)
        self._era = era or f"{time.time_ns():x}"
        self._published = 0
        self._dropped = 0
        self._refused = 0
        self._is_closed = False

    def statistics(self) -> HubStatistics:
        """Clients now, and events dropped and clients refused so far."""
        return HubStatistics(clients=len(self._clients), dropped_total=self._dropped, refused_total=self._refused)

    def has_room(self) -> bool:
        """Whether one more client may listen; a refusal is counted."""
        if self._is_closed or len(self._clients) >= self._max_clients:
            self._refused += 1
            return False
        return True

    def has_listener(self, name: str) -> bool:
        """Whether anybody wants events of this name."""
        return any(client.wants(name) for client in self._clients.values())

    def publish_kept(self, name: str, data: bytes) -> None:
        """Gives the event an id, keeps it for listeners who come back, and gives it to every client that wants it."""
        self._published += 1
        event = Event(name=name, data=data, id=f"{self._era}-{self._published}")
        self._kept.append(event)
        self.publish_nowait(event)

    def publish_nowait(self, event: Event) -> None:
        """Gives the event to every client that wants it; the oldest waiting event of a full queue makes room."""
        if self._is_closed:
            return
        for client in self._clients.values():
            if client.wants(event.name):
                self._give(client, event)

    async def listen(
        self, first: tuple[Event, ...] = (), *, wanted: frozenset[str] | None = None, after: str | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The stream of one client: `first`, then what is published, with heartbeats; ends when the hub closes.

        `wanted`: names of events; None for all. `after`: the id of the last event that the client has; what was kept
        since comes first, behind `MISSED` if that is not all.
        """
        missed = [] if after is None else [each for each in self._since(after) if self._is_wanted(each, wanted)]
        with self._client(wanted) as receive:
            yield RETRY
            for event in (*first, *missed):
                yield event.as_bytes()
            while True:
                data = HEARTBEAT
                with anyio.move_on_after(self._heartbeat_seconds):
                    try:
                        data = (await receive.receive()).as_bytes()
                    except anyio.EndOfStream:
                        return
                yield data

    def close(self) -> None:
        """Ends every stream after what it still holds, so that the server can stop."""
        self._is_closed = True
        for client in self._clients.values():
            client.send.close()

    def _since(self, last_id: str) -> list[Event]:
        ids = [event.id for event in self._kept]
        if last_id in ids:
            return list(self._kept)[ids.index(last_id) + 1 :]
        return [MISSED, *self._kept]

    @staticmethod
    def _is_wanted(event: Event, wanted: frozenset[str] | None) -> bool:
        return event is MISSED or wanted is None or event.name in wanted

    def _give(self, client: _Client, event: Event) -> None:
        try:
            client.send.send_nowait(event)
        except anyio.WouldBlock:
            client.receive.receive_nowait()
            client.send.send_nowait(event)
            self._dropped += 1

    @contextmanager
    def _client(self, wanted: frozenset[str] | None) -> Generator[MemoryObjectReceiveStream[Event], None, None]:
        send, receive = anyio.create_memory_object_stream[Event](self._queue_size)
        if self._is_closed:
            send.close()
        number = next(self._numbers)
        with send, receive:
            self._clients[number] = _Client(send, receive, wanted)
            try:
                yield receive
            finally:
                del self._clients[number]
