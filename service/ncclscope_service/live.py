"""Server-sent events: what the live page and other listeners get pushed.

Every client has its own bounded queue; one that reads too slowly loses its oldest events, which are counted,
and never holds up the service or the other clients. Source: WHATWG HTML, section 9.2 (event stream format).
"""

from __future__ import annotations

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


def event_bytes(name: str, data: bytes) -> bytes:
    """One event as it travels; `data` is JSON on one line (orjson writes no line breaks)."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStatistics:
    """What the hub has done so far."""

    clients: int
    dropped_total: int
    refused_total: int


class Hub:
    """Hands events to all clients that listen."""

    def __init__(self, *, queue_size: int = 8, max_clients: int = 256, heartbeat_seconds: float = 15.0) -> None:
        self._queue_size = queue_size
        self._max_clients = max_clients
        self._heartbeat_seconds = heartbeat_seconds
        self._clients: dict[MemoryObjectSendStream[bytes], MemoryObjectReceiveStream[bytes]] = {}
        self._arrival = anyio.Event()
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

    async def wait_for_client(self) -> None:
        """Returns when there is a client, at once if there is one already."""
        if not self._clients:
            await self._arrival.wait()

    def publish_nowait(self, event: bytes) -> None:
        """Gives the event to every client; the oldest waiting event of a full queue makes room."""
        if self._is_closed:
            return
        for send, receive in self._clients.items():
            try:
                send.send_nowait(event)
            except anyio.WouldBlock:
                receive.receive_nowait()
                send.send_nowait(event)
                self._dropped += 1

    async def listen(self, first: tuple[bytes, ...] = ()) -> AsyncGenerator[bytes, None]:
        """The stream of one client: `first`, then what is published, with heartbeats; ends when the hub closes."""
        with self._client() as receive:
            for event in (RETRY, *first):
                yield event
            while True:
                event = HEARTBEAT
                with anyio.move_on_after(self._heartbeat_seconds):
                    try:
                        event = await receive.receive()
                    except anyio.EndOfStream:
                        return
                yield event

    def close(self) -> None:
        """Ends every stream after what it still holds, so that the server can stop."""
        self._is_closed = True
        for send in self._clients:
            send.close()

    @contextmanager
    def _client(self) -> Generator[MemoryObjectReceiveStream[bytes], None, None]:
        send, receive = anyio.create_memory_object_stream[bytes](self._queue_size)
        if self._is_closed:
            send.close()
        with send, receive:
            self._clients[send] = receive
            self._arrival.set()
            self._arrival = anyio.Event()
            try:
                yield receive
            finally:
                del self._clients[send]
