"""The link: connecting, connecting again, and giving up what is dead."""

from __future__ import annotations

import itertools
from dataclasses import replace

import anyio
import pytest
from service.loopback import Service
from wire.sample_batches import HELLO

from ncclscope_agent.link.exchange import SessionState
from ncclscope_agent.link.network import Link, LinkSettings, retry_seconds, was_of_use
from ncclscope_agent.link.session import Session
from ncclscope_service.serve.listen import ListenSettings
from ncclscope_wire.messages import AgentHealth


def session() -> Session:
    return Session(HELLO)


def link_to(port: int, known: Session, *, silence_seconds: float = 60.0) -> Link:
    settings = LinkSettings(
        host="127.0.0.1",
        port=port,
        heartbeat_seconds=0.02,
        silence_seconds=silence_seconds,
        first_retry_seconds=0.01,
        last_retry_seconds=0.02,
    )
    return Link(known, settings, health=AgentHealth, wall_ns=lambda: 7, jitter=lambda: 0.5)


def test_waiting_doubles_to_two_seconds_for_a_minute_then_to_its_bound_and_jitters_by_half() -> None:
    settings = LinkSettings(host="h", port=1, first_retry_seconds=1, last_retry_seconds=5)
    waits = list(itertools.islice(retry_seconds(settings, lambda: 1.0), 35))
    assert waits == [1, *[2] * 30, 4, 5, 5, 5]
    assert list(itertools.islice(retry_seconds(settings, lambda: 0.0), 3)) == [0.5, 1, 1]
    sooner = LinkSettings(host="h", port=1, first_retry_seconds=0.25, last_retry_seconds=0.5)
    assert list(itertools.islice(retry_seconds(sooner, lambda: 1.0), 3)) == [0.25, 0.5, 0.5]


async def wait_until(link: Link, known: Session, state: SessionState) -> None:
    while known.exchange.state is not state:
        await link.wait_for_change()


@pytest.mark.asyncio
async def test_the_link_waits_for_a_service_that_comes_later_and_for_one_that_comes_back() -> None:
    known, service = session(), Service()
    with anyio.fail_after(60):
        async with service.listening() as port:
            pass
        async with anyio.create_task_group() as tasks:
            link = link_to(port, known)
            tasks.start_soon(link.run)
            for _ in range(2):
                async with service.listening(ListenSettings(port=port)):
                    await wait_until(link, known, SessionState.STREAMING)
                await wait_until(link, known, SessionState.CONNECTING)
            known.exchange.finish("done")
            link.nudge()
    assert known.statistics().connections_total == 2
    assert known.generation == 2


@pytest.mark.asyncio
async def test_a_service_that_accepts_and_says_nothing_is_given_up_and_tried_again() -> None:
    known = session()
    accepted = 0
    twice = anyio.Event()

    async def say_nothing(stream: anyio.abc.SocketStream) -> None:
        nonlocal accepted
        accepted += 1
        if accepted == 2:
            twice.set()
        async with stream:
            while True:
                try:
                    await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    return

    with anyio.fail_after(60):
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            port = int(listener.extra(anyio.abc.SocketAttribute.local_port))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listener.serve, say_nothing)
                tasks.start_soon(link_to(port, known, silence_seconds=0.05).run)
                await twice.wait()
                tasks.cancel_scope.cancel()
    assert known.generation == 0


@pytest.mark.asyncio
async def test_a_session_that_is_finished_before_it_ever_connected_ends_the_link() -> None:
    known, service = session(), Service()
    async with service.listening() as port:
        pass
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            link = link_to(port, known)
            tasks.start_soon(link.run)
            await link.wait_for_change()
            known.exchange.finish("done")
            link.nudge()


def test_a_connection_that_ends_soon_and_took_nothing_is_a_failed_attempt_though_it_was_welcomed() -> None:
    before = session().statistics()
    welcomed = replace(before, connections_total=1)
    further = replace(welcomed, acknowledged_total=1)
    assert not was_of_use(before, before, seconds=60)
    assert not was_of_use(before, welcomed, seconds=0.1)
    assert was_of_use(before, welcomed, seconds=60)
    assert was_of_use(before, further, seconds=0.1)
