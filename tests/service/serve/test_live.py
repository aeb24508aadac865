"""The hub: every listener gets what it can take, and none holds up another."""

from __future__ import annotations

from contextlib import aclosing

import anyio
import pytest

from ncclscope_service.serve.live import HEARTBEAT, RETRY, Event, Hub

pytestmark = pytest.mark.asyncio


def event(data: bytes, name: str = "overview") -> Event:
    return Event(name=name, data=data)


def data_of(received: bytes) -> bytes:
    """The data of an event as it travelled."""
    return received.partition(b"data: ")[2].strip()


async def test_an_event_is_two_lines_and_an_empty_one() -> None:
    assert event(b'{"a":1}').as_bytes() == b'event: overview\ndata: {"a":1}\n\n'
    assert Event(name="finding", data=b"{}", id="e-1").as_bytes() == b"id: e-1\nevent: finding\ndata: {}\n\n"


async def test_a_listener_gets_its_first_events_and_then_what_is_published() -> None:
    hub = Hub()
    async with aclosing(hub.listen((event(b"first"),))) as events:
        assert await anext(events) == RETRY
        assert data_of(await anext(events)) == b"first"
        hub.publish_nowait(event(b"second"))
        assert data_of(await anext(events)) == b"second"
    assert hub.statistics().clients == 0


async def test_a_slow_listener_loses_the_oldest_events_and_the_others_lose_none() -> None:
    hub = Hub(queue_size=2)
    async with aclosing(hub.listen()) as slow, aclosing(hub.listen()) as quick:
        assert [await anext(slow), await anext(quick)] == [RETRY, RETRY]
        received: list[bytes] = []
        for data in (b"1", b"2", b"3", b"4"):
            hub.publish_nowait(event(data))
            received.append(data_of(await anext(quick)))
        assert received == [b"1", b"2", b"3", b"4"]
        assert [data_of(await anext(slow)), data_of(await anext(slow))] == [b"3", b"4"]
        assert hub.statistics().dropped_total == 2


async def test_silence_is_broken_by_a_heartbeat() -> None:
    hub = Hub(heartbeat_seconds=0.01)
    async with aclosing(hub.listen()) as events:
        assert await anext(events) == RETRY
        assert await anext(events) == HEARTBEAT
        hub.publish_nowait(event(b"news"))
        with anyio.fail_after(60):
            while b"news" not in await anext(events):
                pass


async def test_closing_ends_every_stream_after_what_it_holds() -> None:
    hub = Hub()
    async with aclosing(hub.listen()) as events:
        assert await anext(events) == RETRY
        hub.publish_nowait(event(b"last"))
        hub.close()
        hub.publish_nowait(event(b"too late"))
        assert [data_of(each) async for each in events] == [b"last"]
    assert not hub.has_room()
    assert [each async for each in hub.listen()] == [RETRY]


async def test_more_listeners_than_allowed_are_refused_and_counted() -> None:
    hub = Hub(max_clients=1)
    assert hub.has_room()
    async with aclosing(hub.listen()) as events:
        await anext(events)
        assert not hub.has_room()
    assert hub.has_room()
    assert hub.statistics().refused_total == 1


async def received_by(hub: Hub, *, wanted: frozenset[str] | None = None, after: str | None = None) -> list[bytes]:
    """What a listener gets of a hub that closes at once."""
    found: list[bytes] = []
    async with aclosing(hub.listen(wanted=wanted, after=after)) as events:
        assert await anext(events) == RETRY
        hub.publish_nowait(event(b"live"))
        hub.close()
        found.extend([each async for each in events])
    return found


def busy_hub(*, kept: int = 256) -> Hub:
    hub = Hub(era="e", kept=kept)
    for number in range(1, 5):
        hub.publish_kept("finding", str(number).encode())
    hub.publish_nowait(event(b"stale"))
    return hub


async def test_a_listener_that_comes_back_gets_what_it_missed_and_then_what_comes() -> None:
    received = await received_by(busy_hub(), after="e-2")
    assert [data_of(each) for each in received] == [b"3", b"4", b"live"]
    assert received[0].startswith(b"id: e-3\nevent: finding\n")


async def test_a_new_listener_gets_nothing_old() -> None:
    assert [data_of(each) for each in await received_by(busy_hub())] == [b"live"]


@pytest.mark.parametrize("after", ["e-1", "another era-2", "nonsense"])
async def test_a_listener_that_was_away_too_long_or_knew_another_start_is_told_that_it_missed_something(
    after: str,
) -> None:
    received = await received_by(busy_hub(kept=2), after=after)
    assert received[0].startswith(b"event: missed\n")
    assert [data_of(each) for each in received[1:]] == [b"3", b"4", b"live"]


async def test_a_listener_gets_only_the_events_that_it_wants() -> None:
    hub = busy_hub()
    assert [data_of(each) for each in await received_by(hub, wanted=frozenset({"finding"}), after="e-3")] == [b"4"]
    assert not hub.has_listener("finding")
    hub = Hub()
    async with aclosing(hub.listen(wanted=frozenset({"finding"}))) as events:
        await anext(events)
        assert (hub.has_listener("finding"), hub.has_listener("overview")) == (True, False)
