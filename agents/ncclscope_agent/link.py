"""The way to the service: connects, moves bytes between session and socket, and connects again.

A connection ends when the service closes it, breaks the protocol, or is silent for `silence_seconds`: every
heartbeat is answered, so silence means that one end of the connection is gone without a word.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final

import anyio
import structlog
from anyio.abc import ByteStream

from ncclscope_agent.session import Session, SessionState
from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.messages import AgentHealth

_log = structlog.get_logger(__name__)

_RECEIVE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Where the service is, and how patient the link is."""

    host: str
    port: int
    connect_seconds: float = 10.0
    heartbeat_seconds: float = 1.0
    silence_seconds: float = 10.0
    """After so long without a word the connection is given up, at the next heartbeat."""
    first_retry_seconds: float = 0.25
    last_retry_seconds: float = 15.0
    """Waiting doubles from the first to the last, each time times a random 0.5 to 1."""


def retry_seconds(settings: LinkSettings, jitter: Callable[[], float]) -> Iterator[float]:
    """How long to wait before each further attempt; `jitter` gives 0 to 1.

    The jitter keeps a thousand agents from returning in the same moment after a restart of the service.
    """
    longest = settings.first_retry_seconds
    while True:
        yield longest * (0.5 + 0.5 * jitter())
        longest = min(2 * longest, settings.last_retry_seconds)


def _sentence(error: Exception) -> str:
    """The text of an error; some of anyio's have none."""
    return str(error) or type(error).__name__


class Link:
    """Keeps one session connected until it is closed."""

    def __init__(
        self,
        session: Session,
        settings: LinkSettings,
        *,
        health: Callable[[], AgentHealth],
        wall_ns: Callable[[], int] = time.time_ns,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._session = session
        self._settings = settings
        self._health = health
        self._wall_ns = wall_ns
        self._jitter = jitter
        self._something_to_send: anyio.Event | None = None
        self._changed: anyio.Event | None = None
        self._heard_at = 0.0
        self._last_failure: str | None = None

    def nudge(self) -> None:
        """There may be something to send. Call it on the event loop after `offer` and `finish`."""
        if self._something_to_send is not None:
            self._something_to_send.set()
            self._something_to_send = None

    async def wait_for_change(self) -> None:
        """Returns when the service has said something, the connection was lost, or `tell_change` was called."""
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    async def run(self) -> None:
        """Connects, again and again, until the session is closed and its last words are sent."""
        waits = retry_seconds(self._settings, self._jitter)
        while not self._session.is_closed:
            welcomes = self._session.statistics().connections_total
            await self._run_connection()
            self.tell_change()
            if self._session.statistics().connections_total > welcomes:
                waits = retry_seconds(self._settings, self._jitter)
            if not self._session.is_closed:
                await self._wait_or_closed(next(waits))

    async def _wait_or_closed(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            while not self._session.is_closed:
                await self._wait_for_nudge()

    async def _run_connection(self) -> None:
        try:
            with anyio.fail_after(self._settings.connect_seconds):
                stream = await anyio.connect_tcp(self._settings.host, self._settings.port)
        except (OSError, TimeoutError) as error:
            self._on_failure(f"cannot connect: {_sentence(error)}")
            self._session.on_disconnected()
            return
        async with stream:
            if self._session.state is SessionState.CONNECTING:
                await self._converse(stream)

    async def _converse(self, stream: ByteStream) -> None:
        self._session.on_connected()
        try:
            async with anyio.create_task_group() as tasks:
                for work in (self._send, self._receive, self._beat):
                    tasks.start_soon(self._until_over, work, stream, tasks.cancel_scope)
        finally:
            self._session.on_disconnected()

    async def _until_over(
        self, work: Callable[[ByteStream], Awaitable[None]], stream: ByteStream, scope: anyio.CancelScope
    ) -> None:
        """Runs one direction; whichever is over first ends the others."""
        try:
            await work(stream)
        except TimeoutError:
            self._on_failure(f"the service was silent for {self._settings.silence_seconds:g} s")
        except ProtocolError as error:
            self._on_failure(str(error))
        except anyio.EndOfStream:
            self._on_failure("the service closed the connection")
        except (anyio.BrokenResourceError, OSError) as error:
            self._on_failure(f"the connection broke: {_sentence(error)}")
        scope.cancel()

    async def _send(self, stream: ByteStream) -> None:
        while True:
            if data := self._session.to_send():
                await stream.send(data)
            elif self._session.is_closed:
                return
            else:
                await self._wait_for_nudge()

    async def _wait_for_nudge(self) -> None:
        self._something_to_send = anyio.Event()
        await self._something_to_send.wait()

    async def _receive(self, stream: ByteStream) -> None:
        while True:
            data = await stream.receive(_RECEIVE_BYTES)
            self._heard_at = anyio.current_time()
            was = self._session.state
            self._session.on_bytes(data)
            if was is SessionState.HELLO_SENT and self._session.state is SessionState.STREAMING:
                self._on_welcome()
            self.tell_change()

    async def _beat(self, _: ByteStream) -> None:
        """Says that we live, and looks whether the service does: one timer for both, none for each receipt."""
        self._heard_at = anyio.current_time()
        while True:
            await anyio.sleep(self._settings.heartbeat_seconds)
            if anyio.current_time() - self._heard_at >= self._settings.silence_seconds:
                raise TimeoutError
            self._session.heartbeat(self._health(), agent_wall_ns=self._wall_ns())
            self.nudge()

    def tell_change(self) -> None:
        """Wakes all who wait for a change: they look at the session and at what else they wait for."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _on_welcome(self) -> None:
        self._last_failure = None
        self._session.heartbeat(self._health(), agent_wall_ns=self._wall_ns())
        self.nudge()
        _log.info("connected", service=self._address, generation=self._session.generation)

    def _on_failure(self, why: str) -> None:
        """Logs a failure once; the same again and again is the same state."""
        refusal = self._session.refusal
        if refusal is not None:
            why = f"the service refused: {refusal.message}"
        if why != self._last_failure and not self._session.is_closed:
            _log.warning("not_connected", service=self._address, why=why)
        self._last_failure = why

    @property
    def _address(self) -> str:
        return f"{self._settings.host}:{self._settings.port}"
