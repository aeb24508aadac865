"""The way to the service: connects, moves bytes between session and socket, and connects again.

A connection ends when the service closes it, breaks the protocol, or is silent for `silence_seconds`: every
heartbeat is answered, so silence means that one end of the connection is gone without a word.

There are no tasks between session and socket: what comes is given to the session where it is received, and what is to
be sent is written where it was offered. An agent wakes up a few times a second for little work each time, and a task's
turn costs as much as that.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.lowlevel
import structlog

from ncclscope_agent.credentials import Credentials, closed_unheard, tls_sentence
from ncclscope_agent.link.exchange import SessionState
from ncclscope_agent.link.session import AnySession, SessionStatistics
from ncclscope_wire.errors import ConfigError, ProtocolError
from ncclscope_wire.messages import AgentHealth

_log = structlog.get_logger(__name__)

_SOON_SECONDS: Final = 2.0
_SOON_FOR_SECONDS: Final = 60.0
"""For so long an agent that lost its service looks for it this often: most are back after a restart, and one that was
started again waits 10 s for its agents before it goes on. 512 of them in two seconds are no burden for it."""
_STOOD_SECONDS: Final = 5.0
"""A connection that was welcomed, ends sooner and took nothing is a failed attempt: else an agent whose batch is
refused each time would come back four times a second."""
_LATE_SHARE: Final = 0.3
"""Of the time between two heartbeats: one that is due waits so long for something to be sent, and goes with that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Where the service is, and how patient the link is."""

    host: str
    port: int
    credentials: Credentials = field(default_factory=Credentials)
    connect_seconds: float = 10.0
    heartbeat_seconds: float = 1.0
    silence_seconds: float = 20.0
    """After so long without a word the connection is given up, at the next heartbeat."""
    first_retry_seconds: float = 0.25
    last_retry_seconds: float = 15.0
    """Waiting doubles from the first to the last, each time times a random 0.5 to 1; to 2 s in the first minute."""


def retry_seconds(settings: LinkSettings, jitter: Callable[[], float]) -> Iterator[float]:
    """How long to wait before each further attempt; `jitter` gives 0 to 1.

    The jitter keeps a thousand agents from returning in the same moment after a restart of the service.
    """
    longest, waited = settings.first_retry_seconds, 0.0
    while True:
        wait = longest * (0.5 + 0.5 * jitter())
        yield wait
        waited += wait
        bound = settings.last_retry_seconds
        longest = min(2 * longest, bound if waited >= _SOON_FOR_SECONDS else min(_SOON_SECONDS, bound))


def was_of_use(before: SessionStatistics, now: SessionStatistics, *, seconds: float) -> bool:
    """Whether a connection that lasted `seconds` was welcomed, and took something or stood for a while."""
    is_welcomed = now.connections_total > before.connections_total
    return is_welcomed and (now.acknowledged_total > before.acknowledged_total or seconds >= _STOOD_SECONDS)


def _sentence(error: Exception) -> str:
    """The text of an error; some of anyio's have none."""
    return tls_sentence(error) or str(error) or type(error).__name__


class _Conversation(asyncio.Protocol):
    """One connection. `over` is done when it is: with nothing if the last words were sent, else with why."""

    def __init__(self, session: AnySession, on_heard: Callable[[SessionState], None]) -> None:
        self._session = session
        self._on_message = on_heard
        self._transport: asyncio.Transport | None = None
        self._is_full = False
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()
        self.received_at = loop.time()

    def begin(self, transport: asyncio.Transport, token: str) -> None:
        """Says Hello."""
        # What does not leave at once waits in the window. Not 0: to asyncio's TLS all is over that.
        transport.set_write_buffer_limits(1)
        self._transport = transport
        self._session.on_connected(token=token)
        self.write()

    def write(self) -> None:
        """Writes all that the session has to say, or as much as the connection takes."""
        if self._transport is None or self.over.done():
            return
        while not self._is_full and (data := self._session.to_send()):
            self._transport.write(data)
        if self._session.wants_reconnect or (not self._is_full and self._session.exchange.is_closed):
            self.end(None)

    def data_received(self, data: bytes) -> None:
        if self.over.done():
            return
        was = self._session.exchange.state
        self.received_at = self.over.get_loop().time()
        try:
            self._session.on_bytes(bytes(data))
        except ProtocolError as error:
            self.end(error)
        else:
            self._on_message(was)
            if self._session.wants_reconnect:
                self.end(None)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self.write()

    def eof_received(self) -> None:
        self.end(anyio.EndOfStream())

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(anyio.EndOfStream() if exc is None else exc)

    def end(self, why: Exception | None) -> None:
        """Ends it, if it is not over yet; `why` as `over` says it."""
        if self.over.done():
            return
        if why is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(why)


class Link:
    """Keeps one session connected until it is closed."""

    def __init__(
        self,
        session: AnySession,
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
        self._conversation: _Conversation | None = None
        self._nudged: anyio.Event | None = None
        self._changed: anyio.Event | None = None
        self._beat_at = 0.0
        self._beat_timer: asyncio.TimerHandle
        """While there is a conversation."""
        self._last_failure: str | None = None

    def nudge(self) -> None:
        """There may be something to send. Call it on the event loop after `offer` and `finish`."""
        if self._conversation is not None:
            if asyncio.get_running_loop().time() >= self._beat_at:
                self._beat(self._conversation)
            self._conversation.write()
        if self._nudged is not None:
            self._nudged.set()
            self._nudged = None

    async def wait_for_change(self) -> None:
        """Returns when the service has said something, the connection was lost, or `notify_change` was called."""
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    async def run(self) -> None:
        """Connects, again and again, until the session is closed and its last words are sent."""
        waits = retry_seconds(self._settings, self._jitter)
        while not self._session.exchange.is_closed:
            before, began = self._session.statistics(), anyio.current_time()
            await self._run_connection()
            self.notify_change()
            seconds = anyio.current_time() - began
            if self._session.wants_reconnect or was_of_use(before, self._session.statistics(), seconds=seconds):
                waits = retry_seconds(self._settings, self._jitter)
            if not self._session.exchange.is_closed:
                await self._wait_or_closed(next(waits))

    async def _wait_or_closed(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            while not self._session.exchange.is_closed:
                self._nudged = anyio.Event()
                await self._nudged.wait()

    async def _run_connection(self) -> None:
        try:
            token = self._settings.credentials.token()
            transport, conversation = await self._connected()
        except (OSError, TimeoutError, ConfigError) as error:
            self._on_failure(f"cannot connect: {_sentence(error)}")
            self._session.on_disconnected()
            return
        try:
            if self._session.exchange.state is SessionState.CONNECTING:
                await self._converse(transport, conversation, token)
        finally:
            transport.abort()
            await anyio.lowlevel.cancel_shielded_checkpoint()  # which closes it

    async def _connected(self) -> tuple[asyncio.Transport, _Conversation]:
        """A connection over which nothing was said yet; with TLS, one to who can prove to be the service."""
        credentials, loop = self._settings.credentials, asyncio.get_running_loop()
        context = credentials.context()
        connected = await self._connected_socket()
        return await loop.create_connection(
            lambda: _Conversation(self._session, self._on_message),
            sock=connected,
            ssl=context,
            server_hostname=None if context is None else credentials.server_name or self._settings.host,
            ssl_handshake_timeout=None if context is None else self._settings.connect_seconds,
        )

    async def _connected_socket(self) -> socket.socket:
        """A connection to the first of the host's addresses that takes one; each has its share of the time."""
        seconds, loop = self._settings.connect_seconds, asyncio.get_running_loop()
        with anyio.fail_after(seconds):
            found = await loop.getaddrinfo(self._settings.host, self._settings.port, type=socket.SOCK_STREAM)
        failure: Exception = OSError("the name has no address")
        for family, kind, protocol, _, address in found:
            with ExitStack() as unless_connected:
                tried = unless_connected.enter_context(socket.socket(family, kind, protocol))
                tried.setblocking(False)
                try:
                    with anyio.fail_after(seconds / len(found)):
                        await loop.sock_connect(tried, address)
                except (OSError, TimeoutError) as error:
                    failure = error
                else:
                    unless_connected.pop_all()
                    return tried
        raise failure

    async def _converse(self, transport: asyncio.Transport, conversation: _Conversation, token: str) -> None:
        self._conversation = conversation
        try:
            conversation.begin(transport, token)
            await self._keep_up(conversation)
        except TimeoutError:
            self._on_failure(f"the service was silent for {self._settings.silence_seconds:g} s")
        except ProtocolError as error:
            self._on_failure(str(error))
        except anyio.EndOfStream:
            unheard = self._session.exchange.state is SessionState.HELLO_SENT
            hint = closed_unheard(self._settings.credentials) if unheard else ""
            self._on_failure(f"the service closed the connection{hint}")
        except OSError as error:
            self._on_failure(f"the connection broke: {_sentence(error)}")
        finally:
            self._conversation = None
            self._session.on_disconnected()

    async def _keep_up(self, conversation: _Conversation) -> None:
        """Says that we live, and looks whether the service does, until the connection is over."""
        self._expect_beat(conversation)
        try:
            await conversation.over
        finally:
            self._beat_timer.cancel()

    def _expect_beat(self, conversation: _Conversation) -> None:
        loop, seconds = asyncio.get_running_loop(), self._settings.heartbeat_seconds
        self._beat_at = loop.time() + seconds
        self._beat_timer = loop.call_at(self._beat_at + _LATE_SHARE * seconds, self._beat_alone, conversation)

    def _beat_alone(self, conversation: _Conversation) -> None:
        self._beat(conversation)
        conversation.write()

    def _beat(self, conversation: _Conversation) -> None:
        """Has a heartbeat said, or gives up a service that says nothing."""
        self._beat_timer.cancel()
        if asyncio.get_running_loop().time() - conversation.received_at >= self._settings.silence_seconds:
            conversation.end(TimeoutError())
            return
        self._session.exchange.heartbeat(self._health(), agent_wall_ns=self._wall_ns())
        self._expect_beat(conversation)

    def _on_message(self, was: SessionState) -> None:
        if was is SessionState.HELLO_SENT and self._session.exchange.state is SessionState.STREAMING:
            self._on_welcome()
        self.notify_change()

    def notify_change(self) -> None:
        """Wakes all who wait for a change: they look at the session and at what else they wait for."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _on_welcome(self) -> None:
        self._last_failure = None
        self._beat_at = 0.0
        self.nudge()
        _log.info("connected", service=self._address, generation=self._session.generation)

    def _on_failure(self, why: str) -> None:
        """Logs a failure once; the same again and again is the same state."""
        refusal = self._session.exchange.refusal
        if refusal is not None:
            why = f"the service refused: {refusal.message}"
        if why != self._last_failure and not self._session.exchange.is_closed:
            _log.warning("not_connected", service=self._address, why=why)
        self._last_failure = why

    @property
    def _address(self) -> str:
        return f"{self._settings.host}:{self._settings.port}"
