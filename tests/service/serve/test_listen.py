"""The port for agents, over real sockets on loopback."""

from __future__ import annotations

from collections.abc import AsyncGenerator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketStream
from service.loopback import Service
from structlog.testing import capture_logs
from wire.sample_batches import HELLO, log_batch, log_source

from ncclscope_service.serve.listen import ListenSettings
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ConfigError
from ncclscope_wire.frame import Deframer, encode_frame
from ncclscope_wire.messages import Acknowledge, BatchMessage, Hello, Message, Refused, Welcome

pytestmark = pytest.mark.asyncio


def hello(agent_id: str = "a") -> Hello:
    return replace(HELLO, agent_id=agent_id)


def said(message: Message) -> bytes:
    return encode_frame(encode_message(message))


class Peer:
    """One end of a connection that speaks in messages."""

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self.deframer = Deframer()
        self.messages: list[Message] = []

    async def hear(self) -> Message:
        """The next message; EndOfStream at the end."""
        while not self.messages:
            data = await self.stream.receive()
            self.messages += [decode_message(payload) for payload in self.deframer.ingest_bytes(data)]
        return self.messages.pop(0)


async def connect(service: Service, who: Hello) -> Peer:
    """An agent that was welcomed. It tries again where its Hello came too late for a service that waits for nobody."""
    while True:
        peer = Peer(await anyio.connect_tcp("127.0.0.1", service.port))
        try:
            await peer.stream.send(said(who))
            welcome = await peer.hear()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            await peer.stream.aclose()
        else:
            assert isinstance(welcome, Welcome)
            return peer


@asynccontextmanager
async def listening(settings: ListenSettings | None = None) -> AsyncGenerator[Service]:
    """A service that agents can connect to, for a minute at most."""
    service = Service()
    with anyio.fail_after(60):
        async with service.listening(settings):
            yield service


async def test_a_batch_is_delivered_before_it_is_acknowledged() -> None:
    async with listening() as service:
        peer = await connect(service, hello())
        await peer.stream.send(said(BatchMessage(sequence=1, batch=log_batch(0, 1))))
        assert await peer.hear() == Acknowledge(sequence=1)
        assert [received.batch.end for received in service.received] == [1]
        await peer.stream.aclose()


async def test_garbage_closes_its_own_connection_and_no_other() -> None:
    async with listening() as service:
        good, bad = await connect(service, hello("good")), await connect(service, hello("bad"))
        await bad.stream.send((2**31).to_bytes(4, "big"))
        refusal = await bad.hear()
        assert isinstance(refusal, Refused)
        assert refusal.reason == "frame_too_long"
        with pytest.raises(anyio.EndOfStream):
            await bad.hear()
        await good.stream.send(said(BatchMessage(sequence=1, batch=log_batch(0, 1))))
        assert await good.hear() == Acknowledge(sequence=1)
        await good.stream.aclose()
        await bad.stream.aclose()


async def test_one_who_says_no_hello_is_closed_after_the_deadline() -> None:
    async with listening(ListenSettings(port=0, hello_seconds=0.05)) as service:
        async with await anyio.connect_tcp("127.0.0.1", service.port) as stream:
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
        assert service.listener is not None
        assert service.listener.refused == {"silent": 1}


async def test_an_agent_that_falls_silent_is_closed_and_stays_known() -> None:
    async with listening(ListenSettings(port=0, silence_seconds=0.05)) as service:
        peer = await connect(service, hello())
        with pytest.raises(anyio.EndOfStream):
            await peer.hear()
        await peer.stream.aclose()
        (agent,) = service.receiver.agents()
        assert not agent.connected


async def test_connections_over_the_limit_are_closed_at_once() -> None:
    async with listening(ListenSettings(port=0, max_connections=1)) as service:
        first = await connect(service, hello("first"))
        async with await anyio.connect_tcp("127.0.0.1", service.port) as second:
            with pytest.raises(anyio.EndOfStream):
                await second.receive()
        assert service.listener is not None
        assert service.listener.refused.total() == 1
        await first.stream.aclose()


async def test_a_slow_delivery_leaves_the_rest_in_the_sockets() -> None:
    service = Service()
    release = anyio.Event()
    waiting = anyio.Event()

    async def gate() -> None:
        waiting.set()
        await release.wait()

    service.gate = gate
    batch = log_batch(0, 0, operations=tuple((0, line) for line in range(1)), strings=("x",), templates=1)
    frame = said(BatchMessage(sequence=1, batch=batch))
    with anyio.fail_after(60):
        async with service.listening():
            peer = await connect(service, hello())
            await peer.stream.send(frame)
            await waiting.wait()
            sent_bytes = 0
            while not sent_bytes:
                with anyio.move_on_after(0.2):
                    while True:
                        await peer.stream.send(said(BatchMessage(sequence=1, batch=batch)) * 500)
                        sent_bytes += 500 * len(frame)
            read_bytes = service.receiver.statistics().bytes_total
            assert read_bytes <= len(frame) + 256 * 1024 + 1000
            assert sent_bytes > 2 * read_bytes
            assert service.received == []
            release.set()
            assert await peer.hear() == Acknowledge(sequence=1)
            assert service.lines(log_source().key) == [0]
            await peer.stream.aclose()


def _told(logs: list[MutableMapping[str, Any]]) -> list[tuple[object, ...]]:
    """Who came and went, as the log tells it."""
    return [
        (line["event"], line["name"], line["host"], line["job"], line.get("known", line.get("why")))
        for line in logs
        if line["event"] in ("agent_connected", "agent_lost")
    ]


async def test_the_log_tells_once_of_each_agent_that_comes_goes_and_comes_back() -> None:
    service = Service()
    with capture_logs() as logs, anyio.fail_after(60):
        async with service.listening(ListenSettings(port=0, silence_seconds=0.05)):
            for _ in range(2):
                peer = await connect(service, hello())
                with pytest.raises(anyio.EndOfStream):
                    await peer.hear()
                await peer.stream.aclose()
    came, went = ("agent_connected", "n", "h", "j"), ("agent_lost", "n", "h", "j", "it was silent for too long")
    assert _told(logs) == [(*came, False), went, (*came, True), went]


async def test_the_log_tells_of_an_agent_that_was_killed_but_not_of_agents_that_the_service_itself_leaves() -> None:
    service = Service()
    with capture_logs() as logs, anyio.fail_after(60):
        async with service.listening():
            stays, killed = await connect(service, hello("stays")), await connect(service, hello("killed"))
            await killed.stream.aclose()
            while sum(agent.connected for agent in service.receiver.agents()) > 1:
                await anyio.lowlevel.checkpoint()
        await stays.stream.aclose()
    assert [line for line in _told(logs) if line[0] == "agent_lost"] == [
        ("agent_lost", "n", "h", "j", "the connection was closed")
    ]


async def test_a_port_that_is_taken_is_a_wrong_setting_that_is_named() -> None:
    service = Service()
    async with service.listening() as port:
        with pytest.raises(ExceptionGroup) as caught:
            async with Service().listening(ListenSettings(port=port)):
                pass
    assert isinstance(caught.value.exceptions[0], ConfigError)
    assert f"127.0.0.1:{port}" in str(caught.value.exceptions[0])
    assert "--listen" in str(caught.value.exceptions[0])


async def test_agents_whose_turn_does_not_come_hear_that_the_service_lives_and_nothing_new() -> None:
    async with listening(ListenSettings(port=0, reassured_seconds=0.02)) as service:
        peers = [await connect(service, hello(name)) for name in ("first", "second")]
        has_room = anyio.Event()
        service.turn = has_room.wait
        for peer in peers:
            await peer.stream.send(said(BatchMessage(sequence=1, batch=log_batch(0, 1))))
        for peer in peers:
            assert [await peer.hear() for _ in range(2)] == [Acknowledge(sequence=0)] * 2
        assert service.received == []
        has_room.set()
        for peer in peers:
            while await peer.hear() != Acknowledge(sequence=1):
                pass
        assert len(service.received) == 2
        for peer in peers:
            await peer.stream.aclose()


async def test_an_agent_that_comes_back_while_nothing_may_be_taken_is_welcomed_and_its_batch_counts_once() -> None:
    async with listening() as service:
        first = await connect(service, hello())
        has_room = anyio.Event()
        service.turn = has_room.wait
        batch = said(BatchMessage(sequence=1, batch=log_batch(0, 1)))
        await first.stream.send(batch)
        again = await connect(service, hello())
        await again.stream.send(batch)
        await anyio.lowlevel.checkpoint()
        assert service.received == []
        has_room.set()
        while await again.hear() != Acknowledge(sequence=1):
            pass
        assert len(service.received) == 1
        for peer in (first, again):
            await peer.stream.aclose()
