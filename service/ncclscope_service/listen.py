"""The port for agents: one task per connection moves bytes between socket and `Receiver`.

Back-pressure: a connection is not read while what it sent is being delivered, so a slow service holds at most
one read and one unfinished frame per connection, and its agents wait. `deliver` is called by one task at a
time, in the order in which the receiver accepted the batches.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

import anyio
import structlog
from anyio.abc import ByteStream, TaskStatus

from ncclscope_service.receive import AgentRecord, Arrival, Outcome, Received, Receiver
from ncclscope_wire.errors import ConfigError

_log = structlog.get_logger(__name__)

_RECEIVE_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Where agents are heard, and for how long silence is borne."""

    host: str = "127.0.0.1"
    port: int = 9797
    """0: any free port."""
    max_connections: int = 4096
    """Beyond it new connections are closed at once; the process must be allowed as many open files."""
    hello_seconds: float = 10.0
    """From the connection to an accepted Hello."""
    silence_seconds: float = 30.0
    """Agents send a heartbeat every second."""
    send_seconds: float = 30.0
    """An agent that does not take its acknowledgements for so long is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenStatistics:
    """Counters since the start."""

    connections: int
    accepted_total: int
    rejected_total: int
    """Closed at once: too many connections."""
    silent_total: int
    """Closed for silence, before or after the Hello."""
    port: int | None
    """The port that is bound; None before."""


class Listener:
    """Accepts agents and hands on what they send."""

    def __init__(
        self,
        receiver: Receiver,
        deliver: Callable[[Received], Awaitable[None]],
        settings: ListenSettings,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._receiver = receiver
        self._deliver = deliver
        self._settings = settings
        self._wall_ns = wall_ns
        self._numbers = count(1)
        self._in_order = anyio.Lock()
        self._connections = self._accepted = self._rejected = self._silent = 0
        self._port: int | None = None

    async def run(self, *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; reports the port once agents can connect.

        Raises:
            ConfigError: the address cannot be bound.
        """
        host, port = self._settings.host, self._settings.port
        try:
            listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
        except OSError as error:
            hint = "is another service running? " if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(
                f"cannot listen for agents on {host}:{port}: {error.strerror or error}; "
                f"{hint}choose another address with --listen HOST:PORT"
            ) from error
        async with listener:
            self._port = int(listener.extra(anyio.abc.SocketAttribute.local_port))
            _log.info("listening_for_agents", host=self._settings.host, port=self._port)
            task_status.started(self._port)
            await listener.serve(self._serve_connection)

    def statistics(self) -> ListenStatistics:
        """A snapshot of the counters."""
        return ListenStatistics(
            connections=self._connections,
            accepted_total=self._accepted,
            rejected_total=self._rejected,
            silent_total=self._silent,
            port=self._port,
        )

    async def _serve_connection(self, stream: ByteStream) -> None:
        async with stream:
            if self._connections >= self._settings.max_connections:
                self._rejected += 1
                return
            number = next(self._numbers)
            self._connections += 1
            self._accepted += 1
            self._receiver.open(number)
            why: str | None = None  # it stays so where the service itself stops
            try:
                why = await self._converse_to_the_end(number, stream)
            finally:
                self._connections -= 1
                lost = self._receiver.on_disconnected(number)
                if lost is not None and why is not None:
                    _tell_lost(lost, why)

    async def _converse_to_the_end(self, number: int, stream: ByteStream) -> str:
        """Why the conversation was over."""
        try:
            return await self._converse(number, stream)
        except TimeoutError:
            self._silent += 1
            if not self._receiver.is_established(number):
                _log.warning("agent_silent", connection=number)
            return "it was silent for too long"
        except anyio.EndOfStream:
            return "the connection was closed"
        except (anyio.BrokenResourceError, OSError) as error:
            return f"the connection broke: {error.__cause__ or error}".rstrip(": ")

    async def _converse(self, number: int, stream: ByteStream) -> str:
        hello_deadline = anyio.current_time() + self._settings.hello_seconds
        while True:
            data = await self._receive(number, stream, hello_deadline)
            outcome = await self._take(number, data)
            if outcome.arrival is not None:
                _tell_arrival(outcome.arrival)
            if outcome.to_send:
                with anyio.fail_after(self._settings.send_seconds):
                    await stream.send(outcome.to_send)
            if outcome.fault is not None:
                _log.warning("agent_connection_closed", connection=number, fault=outcome.fault)
            if outcome.close:
                return outcome.fault or "it said goodbye"

    async def _receive(self, number: int, stream: ByteStream, hello_deadline: float) -> bytes:
        deadline = anyio.current_time() + self._settings.silence_seconds
        if not self._receiver.is_established(number):
            deadline = min(deadline, hello_deadline)
        with anyio.fail_after(deadline - anyio.current_time()):
            return await stream.receive(_RECEIVE_BYTES)

    async def _take(self, number: int, data: bytes) -> Outcome:
        """One at a time, from the bytes to the delivery: batches of an agent that reconnects keep their order."""
        async with self._in_order:
            outcome = self._receiver.on_bytes(number, data, self._wall_ns())
            for received in outcome.received:
                await self._deliver(received)
        return outcome


def _tell_arrival(arrival: Arrival) -> None:
    """Says who has come, or come back."""
    agent = arrival.agent
    again = {} if arrival.replaces is None else {"replaces_connection": arrival.replaces}
    _log.info("agent_connected", name=agent.name, host=agent.host, job=agent.job, known=arrival.is_known, **again)


def _tell_lost(agent: AgentRecord, why: str) -> None:
    """Says who has gone; one that said goodbye is no reason to worry."""
    tell = _log.info if agent.said_goodbye else _log.warning
    tell("agent_lost", name=agent.name, host=agent.host, job=agent.job, why=why)
