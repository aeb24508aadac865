"""Agents with a spool as real processes: killed, cut off, refused, on a full disk, and their logs deleted."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest
from end_to_end.processes import end
from end_to_end.spool_node import Node, change_spools, kill

from ncclscope_wire.codec import encode_message
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import Refused


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.asyncio
async def test_a_log_deleted_while_the_service_was_away_arrives_after_the_agent_was_killed(node: Node) -> None:
    with ExitStack() as stack:
        node.logs.write(1000)
        first = node.agent(stack)
        await node.wait_until_all_is_spooled()
        kill(first)
        (node.logs.folder / "nccl.log").unlink()
        second = node.agent(stack)
        node.logs.write(500, "other.log")
        await node.wait_until_all_is_spooled()
        async with node.service.listening(node.listen):
            await node.wait_for_all()
        assert end(second) == 0


@pytest.mark.asyncio
async def test_a_service_of_another_version_refuses_and_the_agent_keeps_everything_until_it_is_upgraded(
    node: Node,
) -> None:
    sentence = "the agent speaks protocol version 1 and this service version 2: install the same ncclscope on both"

    async def refuse(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            refused = Refused(reason="wrong_version", message=sentence)
            await stream.send(encode_frame(encode_message(refused)))

    with ExitStack() as stack:
        node.logs.write(400)
        async with (
            await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=node.port) as newer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(newer.serve, refuse)
            node.agent(stack)
            await node.wait_until_all_is_spooled()
            await node.wait_until_said(sentence)
            tasks.cancel_scope.cancel()
        (node.logs.folder / "nccl.log").unlink()
        async with node.service.listening(node.listen):
            await node.wait_for_all()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_what_an_agent_of_another_version_spooled_is_sent_by_its_successor(node: Node) -> None:
    with ExitStack() as stack:
        node.logs.write(400)
        first = node.agent(stack)
        await node.wait_until_all_is_spooled()
        kill(first)
        (node.logs.folder / "nccl.log").unlink()
        change_spools(node.spool, "UPDATE chapter SET protocol_version = 0")
        node.agent(stack)
        async with node.service.listening(node.listen):
            await node.wait_for_all()


async def _kill_at_random(node: Node, *, kills: int, seed: int) -> None:
    """Writes, kills agents, and takes the service away, at random; then waits for everything."""
    rng = random.Random(seed)
    for number in range(kills):
        with ExitStack() as stack:
            agent = node.agent(stack)
            if rng.random() < 0.5:
                async with node.service.listening(node.listen):
                    await _write_for_a_while(node, rng, number)
            else:
                await _write_for_a_while(node, rng, number)
            kill(agent)
    with ExitStack() as stack:
        node.agent(stack)
        async with node.service.listening(node.listen):
            await node.wait_for_all()


async def _write_for_a_while(node: Node, rng: random.Random, number: int) -> None:
    """Half of a second to a start, and a moment after."""
    for _ in range(rng.randrange(5, 30)):
        node.logs.write(rng.randrange(1, 60), f"nccl{number % 3}.log")
        await anyio.sleep(0.05)


@pytest.mark.asyncio
async def test_agents_killed_at_random_moments_lose_nothing_and_send_nothing_twice(node: Node) -> None:
    await _kill_at_random(node, kills=3, seed=1)
