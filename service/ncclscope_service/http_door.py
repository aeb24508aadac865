"""The HTTP port's door: accepts connections within limits, and gives up those that keep it waiting.

uvicorn speaks HTTP; it bounds neither how many come, nor how long one may take to say what it wants.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import anyio
import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ncclscope_service.access import certificate_names

_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})
_PAUSE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """What bounds connections; what is over it is closed and counted."""

    max_connections: int = 512
    max_per_host: int = 256
    """From one address, which may be a proxy's."""
    handshake_seconds: float = 10.0
    request_seconds: float = 10.0
    """From the connection, or the end of the last answer, to the end of a request."""
    reading_seconds: float = 60.0
    """A client that takes nothing of its answer for so long is gone."""
    max_head_bytes: int = 16 * 1024
    """Request line and headers."""


class Door:
    """Connections of one port, by where they come from."""

    def __init__(self, limits: DoorLimits | None = None) -> None:
        self.limits = limits or DoorLimits()
        self.refused = Counter[str]()
        """Connections closed, by reason: "too_many", "too_many_of_host", "no_resources", "no_tls", "slow_request",
        "slow_reader"."""
        self._of_host = Counter[str]()

    async def serve(
        self,
        bound: socket.socket,
        make: Callable[[Callable[[], None]], asyncio.Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        """Accepts until cancelled; `make` is given what to call when its connection is lost."""
        bound.setblocking(False)
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    accepted, address = await loop.sock_accept(bound)
                except OSError as error:
                    if error.errno not in _OUT_OF_RESOURCES:
                        raise
                    self.refused["no_resources"] += 1
                    await anyio.sleep(_PAUSE_SECONDS)
                    continue
                host = str(address[0])
                reason = self._why_not(host)
                if reason is None:
                    self._of_host[host] += 1
                    tasks.start_soon(self._hand_over, accepted, host, make, context)
                else:
                    self.refused[reason] += 1
                    accepted.close()

    def _why_not(self, host: str) -> str | None:
        if self._of_host.total() >= self.limits.max_connections:
            return "too_many"
        return "too_many_of_host" if self._of_host[host] >= self.limits.max_per_host else None

    async def _hand_over(
        self,
        accepted: socket.socket,
        host: str,
        make: Callable[[Callable[[], None]], asyncio.Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        def leave() -> None:
            self._of_host[host] -= 1
            if not self._of_host[host]:
                del self._of_host[host]

        patience = None if context is None else self.limits.handshake_seconds
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: make(leave), accepted, ssl=context, ssl_handshake_timeout=patience
            )
        except OSError:  # ssl's errors and its timeout too
            self.refused["no_tls"] += 1
            leave()
            accepted.close()


class DoorProtocol(H11Protocol):
    """HTTP on one connection, for who says in time what it wants and takes what it gets."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        door: Door,
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self._door = door
        self._on_lost = on_lost
        self._request_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        """Notes who it is, and begins to wait for a request."""
        super().connection_made(transport)
        encrypted: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        certificate = None if encrypted is None else encrypted.getpeercert()
        self.app_state = {**self.app_state, "certificate": certificate_names(certificate)}
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing more."""
        super().connection_lost(exc)
        for timer in (self._request_timer, self._reading_timer):
            if timer is not None:
                timer.cancel()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """The next request may come."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """The client takes nothing."""
        super().pause_writing()
        self._reading_timer = self.loop.call_later(self._door.limits.reading_seconds, self._give_up, "slow_reader")

    def resume_writing(self) -> None:
        """It took something."""
        super().resume_writing()
        if self._reading_timer is not None:
            self._reading_timer.cancel()

    def _look(self) -> None:
        """Waits for the end of a request that is not complete, from its beginning on."""
        is_waiting = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_waiting and self._request_timer is None:
            self._request_timer = self.loop.call_later(self._door.limits.request_seconds, self._give_up, "slow_request")
        elif not is_waiting and self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _give_up(self, reason: str) -> None:
        self._door.refused[reason] += 1
        self.transport.abort()
