"""The port for agents, and the turns that agents and ticks take.

One task per connection moves bytes between socket and `Receiver`. The batches of agents are applied as they come; ticks
work on them. Agents are held up when a tick has enough to work on (`Turns`); between two ticks they get time to bring
more.

Back-pressure: a connection is not read while what it sent is being delivered, so a slow service holds at most
one read and one unfinished frame per connection, and its agents wait. `deliver` is called by one task at a
time, in the order in which the receiver accepted the batches. If a journal is kept, acknowledgements are sent
when what they acknowledge is on disk (`send_soon`), beside the conversation, which goes on meanwhile.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, cast

import anyio
import structlog
from anyio.abc import ByteStream, SocketAttribute, SocketListener, SocketStream, TaskGroup, TaskStatus
from anyio.streams.tls import TLSAttribute, TLSStream

from ncclscope_service.auth.access import certificate_names
from ncclscope_service.auth.credentials import Credentials
from ncclscope_service.intake.admission import Admission
from ncclscope_service.intake.receive import AgentRecord, Arrival, Outcome, Received, Receiver
from ncclscope_wire.errors import ConfigError

_QUIET_SECONDS: Final = 0.005
"""An agent that has more to bring takes its next turn within that time."""


class Turns:
    """Decides whether an agent or a tick goes on. The ticks are one task; agents take one turn at a time."""

    def __init__(self, is_full: Callable[[], bool]) -> None:
        """`is_full`: whether a tick has enough to work on, so that nothing more may be applied before it."""
        self._is_full = is_full
        self._changed = anyio.Condition(anyio.Lock(fast_acquire=True))
        self._taken = 0
        self._is_awaited = False

    async def take(self) -> None:
        """Returns when an agent's next batch may be applied: at once, unless a tick has enough to work on.

        Agents that send faster than that are back-pressured: their acknowledgements come later. They hold what is not
        acknowledged, and leave the rest in the files.
        """
        async with self._changed:
            self._taken += 1
            try:
                while self._is_full():
                    self._is_awaited = True
                    self._changed.notify_all()
                    await self._changed.wait()
            finally:
                self._is_awaited = False
            self._changed.notify_all()

    async def tick_done(self) -> None:
        """Lets the agent that waits look again."""
        async with self._changed:
            self._is_awaited = False
            self._changed.notify_all()

    async def wait_for(self, condition: Callable[[], bool], *, within: float) -> None:
        """Returns when the condition holds, which is checked at each turn of an agent, or after `within` seconds."""
        with anyio.move_on_after(within):
            async with self._changed:
                while not condition():
                    await self._changed.wait()

    async def wait_until_awaited(self, *, within: float) -> None:
        """Returns when an agent waits for a tick, or after `within` seconds."""
        await self.wait_for(lambda: self._is_awaited, within=within)

    async def wait_until_quiet(self, *, within: float) -> None:
        """Returns when agents bring nothing more for a moment, or wait for a tick, or after `within` seconds.

        A moment: the lines of an agent that sends an export come behind it, which takes many turns.
        """
        with anyio.move_on_after(within):
            taken = -1
            while taken != self._taken and not self._is_awaited:
                taken = self._taken
                await self.wait_for(partial(self._has_taken_since, taken), within=_QUIET_SECONDS)

    def _has_taken_since(self, taken: int) -> bool:
        return self._taken != taken


_log = structlog.get_logger(__name__)

_RECEIVE_BYTES: Final = 256 * 1024
_RECEIVE_OF_HELLO_BYTES: Final = 4096
"""Of a connection whose Hello was not accepted yet: what comes with a Hello waits for no turn."""
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})
"""Errors that end an attempt to accept, and not the port."""
_PAUSE_SECONDS: Final = 0.1
_LOG_EVERY_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Address of the agents' port, limits and time-outs."""

    host: str = "127.0.0.1"
    port: int = 9797
    """0: any free port."""
    max_connections: int = 4096
    """Beyond it new connections are closed at once; the process must be allowed as many open files."""
    max_per_host: int = 1024
    """The same from one address; a node has one agent or a few, but many may come through one proxy."""
    max_strangers: int = 1024
    """Connections before their Hello was accepted; beyond it the oldest of them is closed."""
    hello_seconds: float = 10.0
    """From the connection to an accepted Hello."""
    silence_seconds: float = 30.0
    """Agents send a heartbeat every second."""
    reassured_seconds: float = 2.0
    """Interval of the signs of life that an agent gets while it waits for its turn."""
    send_seconds: float = 30.0
    """An agent that does not take its acknowledgements for so long is gone."""


@dataclass(slots=True)
class _Sender:
    """Sending side of one connection; sends one message at a time."""

    stream: ByteStream
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    waiting: bytes = b""


class Listener:
    """Accepts agents and hands on what they send."""

    def __init__(
        self,
        receiver: Receiver,
        deliver: Callable[[Received], Awaitable[None]],
        settings: ListenSettings,
        *,
        credentials: Credentials | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        wait_for_room: Callable[[], Awaitable[None]] | None = None,
        wait_for_turn: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`wait_for_room` returns when more may be received; `wait_for_turn` when what one connection sent may be
        taken: connections ask in the order in which they sent, one at a time.
        """
        self._wait_for_room = wait_for_room
        self._wait_for_turn = wait_for_turn
        self._queued: dict[int, float] = {}
        """Since when connections wait for their turn."""
        self._streams: dict[int, _Sender] = {}
        self._tasks: TaskGroup | None = None
        self._receiver = receiver
        self._deliver = deliver
        self._settings = settings
        self._credentials = credentials
        self._generation = -1
        self._wall_ns = wall_ns
        self.refused = Counter[str]()
        """Connections closed before a word was understood, or for silence, by reason: "too_many", "too_many_of_host",
        "too_many_strangers", "no_tls", "no_resources", "silent"."""
        self._of_host = Counter[str]()
        self._strangers: dict[int, anyio.CancelScope] = {}
        """Connections without an accepted Hello, the oldest first."""
        self._logged_until: dict[str, float] = {}
        self._numbers = count(1)
        self._in_order = anyio.Lock()

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
        async with listener, anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._reassure_for_ever)
            port = int(listener.extra(anyio.abc.SocketAttribute.local_port))
            is_encrypted = self._credentials is not None and self._credentials.context is not None
            _log.info("listening_for_agents", host=self._settings.host, port=port, tls=is_encrypted)
            task_status.started(port)
            for each in listener.listeners:
                tasks.start_soon(self._accept_for_ever, cast(SocketListener, each), tasks)

    async def _accept_for_ever(self, listener: SocketListener, tasks: TaskGroup) -> None:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                # Connections that are waiting keep the port readable: without a pause this would turn and turn.
                self.refused["no_resources"] += 1
                await anyio.sleep(_PAUSE_SECONDS)
            else:
                tasks.start_soon(self._serve_connection, stream)

    def send_soon(self, number: int, data: bytes) -> None:
        """Sends on a connection, if it is still open, without waiting; later data take the place of earlier ones
        that could not be sent yet."""
        sender = self._streams.get(number)
        if sender is None or self._tasks is None:
            return
        if not sender.waiting:
            self._tasks.start_soon(self._send_waiting, sender)
        sender.waiting = data

    async def _reassure_for_ever(self) -> None:
        """Tells agents that wait for their turn that the service lives: their heartbeats wait as their batches do."""
        while True:
            await anyio.sleep(self._settings.reassured_seconds)
            since = anyio.current_time() - self._settings.reassured_seconds
            for number in [number for number, at in self._queued.items() if at < since]:
                data = self._receiver.reassurance(number)
                if data:
                    self.send_soon(number, data)

    async def _send_waiting(self, sender: _Sender) -> None:
        try:
            async with sender.turn:
                data, sender.waiting = sender.waiting, b""
                with anyio.fail_after(self._settings.send_seconds):
                    await sender.stream.send(data)
        except (TimeoutError, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            sender.waiting = b""  # the conversation sees what has become of the connection

    async def _serve_connection(self, stream: SocketStream) -> None:
        async with stream:
            host = _host_of(stream)
            reason = self._why_not(host)
            if reason is not None:
                self.refused[reason] += 1
                return
            number = next(self._numbers)
            self._of_host[host] += 1
            try:
                with anyio.CancelScope() as scope:
                    self._add_stranger(number, scope)
                    await self._serve_admitted(number, stream)
            finally:
                self._strangers.pop(number, None)
                self._of_host[host] -= 1
                if not self._of_host[host]:
                    del self._of_host[host]

    def _why_not(self, host: str) -> str | None:
        if self._of_host.total() >= self._settings.max_connections:
            return "too_many"
        if self._of_host[host] >= self._settings.max_per_host:
            return "too_many_of_host"
        return None

    def _add_stranger(self, number: int, scope: anyio.CancelScope) -> None:
        """Adds a connection without a Hello; the one that has waited longest makes room."""
        if len(self._strangers) >= self._settings.max_strangers:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).cancel()
            self.refused["too_many_strangers"] += 1
        self._strangers[number] = scope

    async def _serve_admitted(self, number: int, stream: SocketStream) -> None:
        hello_deadline = anyio.current_time() + self._settings.hello_seconds
        secured = await self._secured(stream, hello_deadline)
        if secured is None:
            return
        self._use_new_tokens()
        self._receiver.open(number, certificate=_certificate_of(secured))
        self._streams[number] = _Sender(secured)
        why: str | None = None  # it stays None if the service itself stops
        try:
            why = await self._converse_to_the_end(number, secured, hello_deadline)
        finally:
            del self._streams[number]
            lost = self._receiver.on_disconnected(number)
            if lost is not None and why is not None:
                _log_lost(lost, why)
        if isinstance(secured, TLSStream):
            with anyio.move_on_after(_CLOSE_SECONDS), suppress(anyio.BrokenResourceError, OSError):
                await secured.aclose()

    async def _secured(self, stream: SocketStream, deadline: float) -> ByteStream | None:
        """The connection, in TLS if the port has a certificate; None if the handshake failed."""
        context = None if self._credentials is None else self._credentials.context
        if context is None:
            return stream
        try:
            with anyio.fail_after(deadline - anyio.current_time()):
                return await TLSStream.wrap(stream, server_side=True, ssl_context=context, standard_compatible=False)
        except TimeoutError:
            self.refused["silent"] += 1
        except (OSError, ValueError, anyio.BrokenResourceError, anyio.EndOfStream):  # ssl's errors are OSErrors
            self.refused["no_tls"] += 1
        return None

    def _may_log(self, reason: str) -> bool:
        """Whether the last log line for this reason is old enough: a peer that connects all the time must not fill the
        disk with them."""
        now = anyio.current_time()
        if now < self._logged_until.get(reason, now):
            return False
        self._logged_until[reason] = now + _LOG_EVERY_SECONDS
        return True

    def _use_new_tokens(self) -> None:
        """Gives the receiver the list of tokens if it has changed."""
        known = self._credentials
        if known is not None and known.generation != self._generation:
            self._generation = known.generation
            self._receiver.use_admission(Admission(known.access))

    async def _converse_to_the_end(self, number: int, stream: ByteStream, hello_deadline: float) -> str:
        """Serves an agent, and gives the reason why the conversation ended."""
        try:
            return await self._converse(number, stream, hello_deadline)
        except TimeoutError:
            self.refused["silent"] += 1
            if not self._receiver.is_established(number) and self._may_log("silent"):
                _log.warning("agent_silent", connection=number)
            return "it was silent for too long"
        except anyio.EndOfStream:
            return "the connection was closed"
        except (anyio.BrokenResourceError, OSError) as error:
            return f"the connection broke: {error.__cause__ or error}".rstrip(": ")

    async def _converse(self, number: int, stream: ByteStream, hello_deadline: float) -> str:
        while True:
            if self._wait_for_room is not None:
                await self._wait_for_room()
            data = await self._receive(number, stream, hello_deadline)
            outcome = await self._take(number, data)
            if outcome.arrival is not None:
                _log_arrival(outcome.arrival)
            if outcome.to_send:
                with anyio.fail_after(self._settings.send_seconds):
                    async with self._streams[number].turn:
                        await stream.send(outcome.to_send)
            if outcome.fault is not None and self._may_log(outcome.fault.partition(":")[0]):
                _log.warning("agent_connection_closed", connection=number, fault=outcome.fault)
            if outcome.close:
                return outcome.fault or "it said goodbye"

    async def _receive(self, number: int, stream: ByteStream, hello_deadline: float) -> bytes:
        deadline, most = anyio.current_time() + self._settings.silence_seconds, _RECEIVE_BYTES
        if not self._receiver.is_established(number):
            deadline, most = min(deadline, hello_deadline), _RECEIVE_OF_HELLO_BYTES
        with anyio.fail_after(deadline - anyio.current_time()):
            return await stream.receive(most)

    async def _take(self, number: int, data: bytes) -> Outcome:
        """Applies what was read, one connection at a time: batches of an agent that reconnects keep their order.

        A Hello waits for nobody: it is answered also while nothing more can be taken, and what an older connection of
        the agent still brings is refused from then on.
        """
        if not self._receiver.is_established(number):
            return await self._apply(number, data)
        self._queued[number] = anyio.current_time()
        try:
            async with self._in_order:
                if self._wait_for_turn is not None:
                    await self._wait_for_turn()
                return await self._apply(number, data)
        finally:
            del self._queued[number]

    async def _apply(self, number: int, data: bytes) -> Outcome:
        # If a journal is kept, `deliver` must not give way to other tasks: what the journal has, the state must have.
        self._use_new_tokens()
        outcome = self._receiver.on_bytes(number, data, self._wall_ns())
        if outcome.arrival is not None:
            self._strangers.pop(number, None)  # from here on it is not cancelled
        for received in outcome.received:
            await self._deliver(received)
        return outcome


def _host_of(stream: SocketStream) -> str:
    """The address that a connection comes from."""
    address = stream.extra(SocketAttribute.remote_address, ("",))
    return str(address[0])


def _certificate_of(stream: ByteStream) -> tuple[str, ...]:
    """Names in the verified certificate of the peer; none if it showed none."""
    return certificate_names(stream.extra(TLSAttribute.peer_certificate, None))


def _log_arrival(arrival: Arrival) -> None:
    agent = arrival.agent
    again = {} if arrival.replaces is None else {"replaces_connection": arrival.replaces}
    _log.info("agent_connected", name=agent.name, host=agent.host, job=agent.job, known=arrival.is_known, **again)


def _log_lost(agent: AgentRecord, why: str) -> None:
    """An agent that said goodbye is no reason to worry."""
    who = {"name": agent.name, "host": agent.host, "job": agent.job}
    if agent.said_goodbye:
        _log.info("agent_lost", **who, why=why)
    else:
        _log.warning("agent_lost", **who, why=why)
