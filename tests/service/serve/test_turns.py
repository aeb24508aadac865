"""Turns of agents and ticks."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from ncclscope_service.serve.listen import Turns

pytestmark = pytest.mark.asyncio

LONG = 60.0


class Work:
    """What was applied since the last tick, of which two make it full."""

    def __init__(self) -> None:
        self.applied = 0
        self.total = 0
        self.turns = Turns(lambda: self.applied >= 2)

    async def bring(self, amount: int) -> None:
        for _ in range(amount):
            await self.turns.take()
            self.applied += 1
            self.total += 1

    async def tick(self) -> None:
        self.applied = 0
        await self.turns.tick_done()


async def test_an_agent_goes_on_until_a_tick_has_enough_to_work_on() -> None:
    work = Work()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work.bring, 5)
        for total in (2, 4):
            with anyio.fail_after(LONG):
                await work.turns.wait_until_awaited(within=2 * LONG)
            assert work.total == total
            await work.tick()
    assert work.total == 5


async def test_a_tick_that_made_no_room_leaves_the_agent_waiting() -> None:
    work = Work()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work.bring, 3)
        await work.turns.wait_until_awaited(within=LONG)
        await work.turns.tick_done()
        with anyio.fail_after(LONG):
            await work.turns.wait_until_awaited(within=2 * LONG)
        assert work.total == 2
        tasks.cancel_scope.cancel()
    began = anyio.current_time()
    await work.turns.wait_until_awaited(within=0.05)
    assert anyio.current_time() - began >= 0.05, "an agent that was cut off waits no more"


async def test_nobody_who_waits_for_agents_waits_for_ever() -> None:
    turns = Turns(lambda: False)
    with anyio.fail_after(LONG):
        await turns.wait_until_awaited(within=0.01)
        await turns.wait_until_quiet(within=LONG)
        await turns.wait_for(lambda: False, within=0.01)


async def test_it_is_quiet_when_agents_bring_nothing_more_or_have_to_wait() -> None:
    work, busy = Work(), True

    async def bring_for_ever() -> None:
        while busy:
            await work.turns.take()
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bring_for_ever)
        began = anyio.current_time()
        await work.turns.wait_until_quiet(within=0.1)
        assert anyio.current_time() - began >= 0.1, "there is always more"
        busy = False
        with anyio.fail_after(LONG):
            await work.turns.wait_until_quiet(within=2 * LONG)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work.bring, 3)
        with anyio.fail_after(LONG):
            await work.turns.wait_until_quiet(within=2 * LONG)
        assert work.total == 2
        await work.tick()


async def test_a_condition_is_looked_at_with_each_turn() -> None:
    work = Work()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work.bring, 2)
        with anyio.fail_after(LONG):
            await work.turns.wait_for(lambda: work.total >= 1, within=2 * LONG)
