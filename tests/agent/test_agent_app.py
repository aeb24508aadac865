"""The agent as a whole, over real sockets, with a follower that reads no files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest
from agent.fake_follower import FakeFollower
from service.loopback import Service
from wire.sample_batches import HELLO

from ncclscope_agent.app import Agent, next_pause
from ncclscope_agent.files.follower import Followed
from ncclscope_agent.link.frames import WindowLimits
from ncclscope_agent.link.network import LinkSettings
from ncclscope_agent.link.session import Session
from ncclscope_agent.printed import print_batches
from ncclscope_wire.batch import Batch

STARTS = iter(range(1, 1000))


def followed(follower: FakeFollower, *, in_thread: bool = False, look: Callable[[int], bool] | None = None) -> Followed:
    return Followed(
        follower=follower,
        tick_min_seconds=0.001,
        tick_max_seconds=0.01,
        in_thread=in_thread,
        look=look,
        gather_seconds=0.105,
    )


def agent_to(
    port: int,
    *followers: FakeFollower,
    in_thread: bool = False,
    window: int = 64,
    flush: float = 60.0,
    look: Callable[[int], bool] | None = None,
) -> tuple[Agent, Session]:
    session = Session(
        replace(HELLO, session_id=f"start {next(STARTS)}"),
        limits=WindowLimits(max_batches=window),
    )
    link = LinkSettings(
        host="127.0.0.1", port=port, heartbeat_seconds=0.05, first_retry_seconds=0.01, last_retry_seconds=0.02
    )
    known = [followed(follower, in_thread=in_thread, look=look) for follower in followers]
    return Agent(session, link, known, flush_seconds=flush), session


@pytest.mark.asyncio
@pytest.mark.parametrize("in_thread", [False, True])
async def test_once_sends_everything_waits_for_the_acknowledgement_and_ends(in_thread: bool) -> None:
    service, follower = Service(), FakeFollower(200)
    with anyio.fail_after(60):
        async with service.listening() as port:
            agent, _ = agent_to(port, follower, in_thread=in_thread)
            assert await agent.run(once_seconds=60)
            await service.wait_for_goodbyes()
    assert service.lines(follower.source.key) == list(range(200))
    assert follower.closed
    assert len(service.receiver.agents()) == 1


@pytest.mark.asyncio
async def test_stop_takes_a_last_look_and_hands_over_what_it_finds() -> None:
    service, follower = Service(), FakeFollower(20)
    with anyio.fail_after(60):
        async with service.listening() as port, anyio.create_task_group() as tasks:
            agent, _ = agent_to(port, follower)
            tasks.start_soon(agent.run)
            await service.wait_for_rows(follower.source.key, 20)
            follower.rows = 30
            agent.stop()
    assert service.lines(follower.source.key) == list(range(30))
    assert not follower.closed


@pytest.mark.asyncio
async def test_an_agent_that_never_reached_the_service_stops_all_the_same() -> None:
    service, follower = Service(), FakeFollower(20)
    async with service.listening() as port:
        pass
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            agent, _ = agent_to(port, follower)
            tasks.start_soon(agent.run)
            agent.stop()
    assert follower.resets == []


@pytest.mark.asyncio
async def test_a_service_that_does_not_take_the_rest_ends_the_stop_at_its_deadline() -> None:
    service, follower = Service(), FakeFollower(1000)
    service.gate = anyio.sleep_forever
    results: list[bool] = []
    with anyio.fail_after(60):
        async with service.listening() as port, anyio.create_task_group() as tasks:
            agent, session = agent_to(port, follower, window=4, flush=0.1)

            async def run() -> None:
                results.append(await agent.run())

            tasks.start_soon(run)
            while session.has_room or session.generation == 0:
                await anyio.lowlevel.checkpoint()
            agent.stop()
    assert results == [False]


@pytest.mark.asyncio
async def test_readers_wait_while_the_service_is_slow() -> None:
    service, follower = Service(), FakeFollower(100_000, per_batch=100, per_poll=1000)
    entered, release = anyio.Event(), anyio.Event()

    async def gate() -> None:
        entered.set()
        await release.wait()

    service.gate = gate
    with anyio.fail_after(60):
        async with service.listening() as port, anyio.create_task_group() as tasks:
            agent, session = agent_to(port, follower, window=16)
            tasks.start_soon(agent.run)
            await entered.wait()
            while session.has_room:
                await anyio.lowlevel.checkpoint()
            assert agent.health().waiting_batches <= 1
            assert follower.at <= 100 * (16 + 1)
            assert session.statistics().window_batches == 16
            release.set()
            await service.wait_for_rows(follower.source.key, 100_000)
            agent.stop()
    assert service.lines(follower.source.key) == list(range(100_000))


@pytest.mark.asyncio
async def test_printing_shows_rows_and_connects_to_nothing() -> None:
    written: list[str] = []
    await print_batches([followed(FakeFollower(25, per_batch=25))], written.append, anyio.Event(), once=True)
    assert written[0] == "rank1.log [0, 25) operations=25 new_texts=1"
    assert written[1] == "  line 0: AllReduce opCount=0 count=0 int8 nranks=0 comm=0x0 at=0ns"
    assert written[-1] == "  ... and 5 more"


def test_the_pause_is_shortest_while_something_comes_and_grows_while_nothing_does() -> None:
    known = Followed(follower=FakeFollower(0), tick_min_seconds=0.05, tick_max_seconds=0.25)
    pauses = [0.05]
    for _ in range(5):
        pauses.append(next_pause(pauses[-1], known, read_something=False, busy_seconds=0))
    assert pauses == pytest.approx([0.05, 0.075, 0.1125, 0.16875, 0.25, 0.25])
    assert next_pause(0.25, known, read_something=True, busy_seconds=0) == 0.05


def test_what_comes_is_gathered_for_as_long_as_it_takes_to_keep_to_the_share_of_a_core() -> None:
    known = Followed(
        follower=FakeFollower(0), tick_min_seconds=0.01, tick_max_seconds=0.25, look=lambda _: False, gather_seconds=1.0
    )
    assert next_pause(0.01, known, read_something=True, busy_seconds=0.001) == pytest.approx(0.5)
    assert next_pause(0.01, known, read_something=True, busy_seconds=0.0015) == pytest.approx(0.75)
    assert next_pause(0.01, known, read_something=True, busy_seconds=0.1) == 1.0
    assert next_pause(1.0, known, read_something=False, busy_seconds=0) == 0.25


class BusyFollower(FakeFollower):
    """Takes 2 ms of the processor for each poll, and is looked ahead of; the `asks`-th look asks for a poll."""

    def __init__(self, *, asks: int) -> None:
        super().__init__(100_000)
        self.looks = 0
        self.looks_before_polls: list[int] = []
        self._asks = asks

    def poll(self, now_wall_ns: int) -> Iterator[Batch]:
        self.looks_before_polls.append(self.looks)
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return super().poll(now_wall_ns)

    def look(self, now_wall_ns: int) -> bool:
        self.looks += 1
        return self.looks == self._asks


@pytest.mark.asyncio
@pytest.mark.parametrize(("asks", "looks"), [(2, 2), (1000, 10)])
async def test_looks_are_made_at_each_tick_until_one_asks_for_a_poll_or_enough_is_gathered(
    asks: int, looks: int
) -> None:
    service, follower = Service(), BusyFollower(asks=asks)
    with anyio.fail_after(60):
        async with service.listening() as port, anyio.create_task_group() as tasks:
            agent, _ = agent_to(port, follower, look=follower.look)
            tasks.start_soon(agent.run)
            await service.wait_for_rows(follower.source.key, 60)
            agent.stop()
    assert follower.looks_before_polls[:2] == [0, looks]


def test_looks_that_take_long_are_made_more_seldom_but_for_a_follower_that_is_behind() -> None:
    known = Followed(follower=FakeFollower(0), tick_min_seconds=0.01, tick_max_seconds=0.25)
    assert next_pause(0.01, known, read_something=True, busy_seconds=0.0004) == pytest.approx(0.2)
    assert next_pause(0.01, known, read_something=True, busy_seconds=0.1) == 0.25
    behind = FakeFollower(0)
    behind.has_more = True
    known = Followed(follower=behind, tick_min_seconds=0.01, tick_max_seconds=0.25)
    assert next_pause(0.01, known, read_something=True, busy_seconds=0.1) == 0
    assert next_pause(0.01, known, read_something=False, busy_seconds=0) == pytest.approx(0.015)
