"""The hub: every listener gets what it can take, and none holds up another."""

from __future__ import annotations

from contextlib import aclosing

import anyio
import pytest

from ncclscope_service.live import HEARTBEAT, RETRY, Hub, event_bytes

pytestmark = pytest.mark.asyncio


async def test_an_event_is_two_lines_and_an_empty_one() -> None:
    assert event_bytes("overview", b'{"a":1}') == b'event: overview\ndata: {"a":1}\n\n'


async def test_a_listener_gets_its_first_events_and_then_what_is_published() -> None:
    hub = Hub()
    async with aclosing(hub.listen((b"first",))) as events:
        assert await anext(events) == RETRY
        assert await anext(events) == b"first"
        hub.publish_nowait(b"second")
        assert await anext(events) == b"second"
    assert hub.statistics().clients == 0


async def test_a_slow_listener_loses_the_oldest_events_and_the_others_lose_none() -> None:
    hub = Hub(queue_size=2)
    async with aclosing(hub.listen()) as slow, aclosing(hub.listen()) as quick:
        assert [await anext(slow), await anext(quick)] == [RETRY, RETRY]
        received: list[bytes] = []
        for event in (b"1", b"2", b"3", b"4"):
            hub.publish_nowait(event)
            received.append(await anext(quick))
        assert received == [b"1", b"2", b"3", b"4"]
        assert [await anext(slow), await anext(slow)] == [b"3", b"4"]
        assert hub.statistics().dropped_total == 2


async def test_silence_is_broken_by_a_heartbeat() -> None:
    hub = Hub(heartbeat_seconds=0.01)
    async with aclosing(hub.listen()) as events:
        assert await anext(events) == RETRY
        assert await anext(events) == HEARTBEAT
        hub.publish_nowait(b"news")
        assert b"news" in {await anext(events), await anext(events)}


async def test_closing_ends_every_stream_after_what_it_holds() -> None:
    hub = Hub()
    async with aclosing(hub.listen()) as events:
        assert await anext(events) == RETRY
        hub.publish_nowait(b"last")
        hub.close()
        hub.publish_nowait(b"too late")
        assert [event async for event in events] == [b"last"]
    assert not hub.has_room()
    assert [event async for event in hub.listen()] == [RETRY]


async def test_more_listeners_than_allowed_are_refused_and_counted() -> None:
    hub = Hub(max_clients=1)
    assert hub.has_room()
    async with aclosing(hub.listen()) as events:
        await anext(events)
        assert not hub.has_room()
    assert hub.has_room()
    assert hub.statistics().refused_total == 1


async def test_who_waits_for_a_client_wakes_when_one_comes() -> None:
    hub = Hub()
    came = anyio.Event()

    async def watch() -> None:
        await hub.wait_for_client()
        came.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await anyio.lowlevel.checkpoint()
        assert not came.is_set()
        async with aclosing(hub.listen()) as events:
            await anext(events)
            with anyio.fail_after(5):
                await came.wait()
