"""Agents with a spool as real processes: killed, cut off, refused, on a full disk, and their logs deleted."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from benchmarks.ports import free_port
from end_to_end.processes import PATIENCE_SECONDS, end, run_command, running
from service.loopback import Service

from ncclscope_agent.spool_records import header_record, scan
from ncclscope_service.listen import ListenSettings
from ncclscope_wire.codec import encode_message
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import Refused

_LINE = (
    "node17:41822:41903 [2] NCCL INFO AllReduce: opCount {number:x} sendbuff {buffer:#x} recvbuff {buffer:#x} "
    "count 1048576 datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\n"
)


class Logs:
    """Logs that grow by numbered operations."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = 0
        folder.mkdir()

    def write(self, lines: int, name: str = "nccl.log") -> None:
        """Appends the next lines to a log."""
        with (self.folder / name).open("ab") as stream:
            for _ in range(lines):
                self.written += 1
                line = _LINE.format(number=self.written, buffer=0x7F2A40000000 + self.written % 97 * 512)
                stream.write(line.encode())


class Node:
    """One agent after the other over the same logs and spool."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.logs = Logs(folder / "logs")
        self.spool = folder / "spool"
        self.said = folder / "agent.log"
        self.service = Service()

    @property
    def listen(self) -> ListenSettings:
        """Where the service is, when it is there."""
        return ListenSettings(port=self.port)

    def arguments(self, *more: str) -> list[str]:
        """Of the command."""
        return [
            *("agent", "--connect", f"127.0.0.1:{self.port}", "--logs", str(self.logs.folder / "*.log")),
            *("--spool", str(self.spool), "--name", "one", "--retry-seconds", "0.25", "--tick-max-seconds", "0.05"),
            *more,
        ]

    def agent(self, stack: ExitStack, *more: str) -> subprocess.Popen[bytes]:
        """Starts it."""
        return stack.enter_context(running(self.said, *self.arguments(*more)))

    def operations(self) -> Counter[int]:
        """How often the service was given each operation."""
        seen = Counter[int]()
        for received in self.service.received:
            seen.update(received.batch.operations["op_count"].tolist())
        return seen

    def spooled(self) -> int:
        """Bytes in the spool's files."""
        return sum(path.stat().st_size for path in self.spool.rglob("frames-*"))

    async def wait_for_all(self) -> None:
        """Until the service has all operations that were written; each once."""
        await until(lambda: len(self.operations()) >= self.logs.written, "all operations")
        assert set(self.operations()) == set(range(1, self.logs.written + 1))
        assert set(self.operations().values()) == {1}

    async def wait_until_spooled(self, more_than: int) -> None:
        """Until the spool has grown."""
        await until(lambda: self.spooled() > more_than, f"more than {more_than} bytes in the spool")

    async def wait_until_said(self, words: str) -> None:
        """Until an agent has logged this."""
        await until(lambda: words in self.said.read_text(), f"an agent to say: {words}")


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition; fails with what was waited for."""
    with anyio.move_on_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  (files and other processes offer no event)
            await anyio.sleep(0.02)
        return
    raise AssertionError(f"waited in vain for {what}")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)


@pytest.mark.asyncio
async def test_a_log_deleted_while_the_service_was_away_arrives_after_the_agent_was_killed(node: Node) -> None:
    with ExitStack() as stack:
        node.logs.write(1000)
        first = node.agent(stack)
        await node.wait_until_spooled(1000 * 24)
        kill(first)
        (node.logs.folder / "nccl.log").unlink()
        second = node.agent(stack)
        before = node.spooled()
        node.logs.write(500, "other.log")
        await node.wait_until_spooled(before + 500 * 24)
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
            await node.wait_until_spooled(400 * 24)
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
        await node.wait_until_spooled(400 * 24)
        kill(first)
        (node.logs.folder / "nccl.log").unlink()
        _make_older(node.spool)
        node.agent(stack)
        async with node.service.listening(node.listen):
            await node.wait_for_all()


def _make_older(spool: Path) -> None:
    """Has the spool's files say that their batches are of protocol version 0."""
    for path in (*spool.rglob("frames-*"), *spool.rglob("chapter-*")):
        data = path.read_bytes()
        header = scan(data).header
        assert header is not None
        rest = data[len(header_record(header)) :]
        path.write_bytes(header_record(replace(header, protocol_version=0)) + rest)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_full_disk_is_told_of_and_costs_nothing_and_the_spool_recovers(node: Node) -> None:
    with ExitStack() as stack:
        node.logs.write(200)
        agent = node.agent(stack)
        await node.wait_until_spooled(200 * 24)
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (node.spooled() + 100, resource.RLIM_INFINITY))
        node.logs.write(500)
        await node.wait_until_said("not written")
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await node.wait_until_spooled(700 * 24)
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
