"""Agents with a spool as real processes: killed, cut off, refused, on a full disk, and their logs deleted."""

from __future__ import annotations

import random
import resource
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest
from end_to_end.processes import end, run_command
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


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_agent_that_is_stopped_without_a_service_leaves_what_it_has_in_the_spool(node: Node) -> None:
    with ExitStack() as stack:
        node.logs.write(300)
        first = node.agent(stack, "--flush-seconds", "0.3")
        await node.wait_until_spooled(0)
        node.logs.write(300)
        assert end(first) == 0
        assert "kept_in_spool" in node.said.read_text()
        (node.logs.folder / "nccl.log").unlink()
        node.agent(stack)
        async with node.service.listening(node.listen):
            await node.wait_for_all()


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_second_agent_over_the_same_logs_says_that_the_spool_is_in_use(node: Node) -> None:
    with ExitStack() as stack:
        node.logs.write(10)
        first = node.agent(stack)
        await node.wait_until_spooled(0)
        second = await anyio.to_thread.run_sync(lambda: run_command(*node.arguments()))
        assert second.returncode == 2
        assert f"in use by another agent (process {first.pid})" in second.stderr


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


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_full_disk_is_told_of_and_costs_nothing_and_the_spool_recovers(node: Node) -> None:
    with ExitStack() as stack:
        node.logs.write(200)
        agent = node.agent(stack)
        await node.wait_until_all_is_spooled()
        largest = max(path.stat().st_size for path in node.spool.rglob("spool-*"))
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (largest + 100, resource.RLIM_INFINITY))
        node.logs.write(500)
        await node.wait_until_said("not written")
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await node.wait_until_all_is_spooled()
        await node.wait_until_said("written again")
        kill(agent)
        (node.logs.folder / "nccl.log").unlink()
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


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_hundred_agents_killed_at_random_moments_lose_nothing_and_send_nothing_twice(node: Node) -> None:
    await _kill_at_random(node, kills=100, seed=2)
