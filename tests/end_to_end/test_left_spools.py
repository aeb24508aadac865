"""What agents leave in their spools, sent by another process in their place: once, whatever ends or comes meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio
import pytest
from benchmarks.ports import free_port
from end_to_end.processes import end, fetch_json, run_command, running, wait_for
from end_to_end.spool_node import Node, change_spools, kill, until

_NOBODY = 65_534
_OF_ANOTHER_DAY = """
import time
wall_ns = time.time_ns
time.time_ns = lambda: wall_ns() + {days} * 86_400_000_000_000
from ncclscope.cli import main
main(prog_name="ncclscope")
"""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def leave(node: Node, *, batches: int = 1, lines: int = 300, name: str = "nccl.log") -> None:
    """An agent reads a log that grows in so many portions, is stopped without a service, and the log is deleted."""
    with ExitStack() as stack:
        agent = node.agent(stack, "--job", "17", "--flush-seconds", "0.2", "--gather-seconds", "0.05")
        for _ in range(batches):
            before = node.spooled()
            node.logs.write(lines, name)
            await node.wait_until_spooled(before)
        size = (node.logs.folder / name).stat().st_size
        await until(lambda: node.spooled_to() >= size, "all of the log in the spool")
        assert end(agent) == 0
    (node.logs.folder / name).unlink()


async def send(node: Node, *more: str) -> subprocess.CompletedProcess[str]:
    return await anyio.to_thread.run_sync(partial(run_command, *node.send_spools(*more)))


async def send_all(node: Node) -> None:
    """Sends what was left, after which the service has every operation once."""
    sent = await send(node)
    assert sent.returncode == 0, sent.stderr
    await node.wait_for_all()


async def send_days_later(node: Node) -> subprocess.CompletedProcess[str]:
    """Sends by a clock that says what waits is too old."""
    later = [sys.executable, "-c", _OF_ANOTHER_DAY.format(days=4), *node.send_spools()]
    return await anyio.to_thread.run_sync(lambda: subprocess.run(later, capture_output=True, text=True, check=False))


async def wait_for_end(process: subprocess.Popen[bytes]) -> int:
    await until(lambda: process.poll() is not None, "its end")
    return process.returncode


def hold(node: Node, batches: int) -> anyio.Event:
    """Has the service take no more than so many batches until the event is set."""
    may_go_on, given = anyio.Event(), [0]

    async def gate() -> None:
        given[0] += 1
        if given[0] > batches:
            await may_go_on.wait()

    node.service.gate = gate
    return may_go_on


async def held_sender(
    node: Node, stack: ExitStack, batches: int, *more: str
) -> tuple[subprocess.Popen[bytes], anyio.Event]:
    """A sender of which the service has taken so many batches, and takes no more until the event is set."""
    may_go_on = hold(node, batches)
    sender = node.sender(stack, *more)
    await until(lambda: len(node.service.received) == batches, f"{batches} batches")
    return sender, may_go_on


@pytest.mark.asyncio
async def test_what_an_agent_left_arrives_once_in_the_agents_name_and_the_spool_is_gone(node: Node) -> None:
    await leave(node)
    async with node.service.listening(node.listen):
        await send_all(node)
    assert node.spools() == []
    (agent,) = node.service.receiver.agents()
    assert (agent.name, agent.job, agent.said_goodbye) == ("one", "17", True)
    assert {received.job for received in node.service.received} == {"17"}


@pytest.mark.asyncio
async def test_a_sender_killed_in_the_middle_leaves_what_the_next_one_needs(node: Node) -> None:
    await leave(node, batches=4)
    async with node.service.listening(node.listen):
        with ExitStack() as stack:
            first, may_go_on = await held_sender(node, stack, 2, "--window-batches", "1")
            kill(first)
            may_go_on.set()
        assert node.spools()
        await send_all(node)
    assert node.spools() == []


@pytest.mark.slow
@pytest.mark.asyncio
async def test_an_agent_that_is_stopped_reads_all_that_was_written_and_not_a_share_of_it(node: Node) -> None:
    node.logs.write(100_000)
    with ExitStack() as stack:
        agent = node.agent(stack, "--flush-seconds", "12")
        await node.wait_until_spooled(0)
        assert end(agent) == 0
    (node.logs.folder / "nccl.log").unlink()
    async with node.service.listening(node.listen):
        await send_all(node)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_spool_of_an_agent_that_runs_is_left_alone(node: Node) -> None:
    with ExitStack() as stack:
        node.logs.write(500)
        agent = node.agent(stack)
        size = (node.logs.folder / "nccl.log").stat().st_size
        await until(lambda: node.spooled_to() >= size, "all of the log in the spool")
        (directory,) = node.spools()
        before = {path.name: path.read_bytes() for path in (node.spool / directory).iterdir()}
        sent = await send(node)
        assert sent.returncode == 0
        assert '"in_use": 1' in sent.stderr
        assert before.items() <= {path.name: path.read_bytes() for path in (node.spool / directory).iterdir()}.items()
        async with node.service.listening(node.listen):
            await node.wait_for_all()
        assert end(agent) == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_without_a_service_the_spool_stays_and_is_dropped_when_it_is_too_old(node: Node) -> None:
    await leave(node)
    sent = await send(node, "--connect-seconds", "1")
    assert sent.returncode == 1
    assert '"waits": 1' in sent.stderr
    assert node.spooled() > 0
    done = await send_days_later(node)
    assert done.returncode == 0
    assert '"event": "spool_expired"' in done.stderr
    assert '"expired": 1' in done.stderr
    assert node.spools() == []


def forget_job(node: Node) -> None:
    """Has spools be as of an agent that wrote no job down."""
    change_spools(node.spool, "UPDATE agent SET job = ''")


def make_newer(node: Node) -> None:
    """Has spools be as of a later version."""
    for path in node.spool.rglob("spool-2.sqlite*"):
        path.rename(path.with_name(path.name.replace("-2.", "-3.")))


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("change", [forget_job, make_newer], ids=["no job", "newer"])
async def test_what_another_version_left_and_this_one_cannot_send_stays_until_it_is_too_old(
    node: Node, change: Callable[[Node], None]
) -> None:
    await leave(node)
    change(node)
    async with node.service.listening(node.listen):
        sent = await send(node)
        assert sent.returncode == 4
        assert '"event": "spool_stuck"' in sent.stderr
    assert list(node.spool.glob("*/spool-*.sqlite"))
    assert not node.service.received
    for path in node.spool.glob("*/*"):
        os.utime(path, (0, 0))
    done = await send_days_later(node)
    assert done.returncode == 0, done.stderr
    assert node.spools() == []


@pytest.mark.asyncio
async def test_links_and_what_is_no_spool_are_left_alone(node: Node, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious.sqlite").write_text("precious")
    node.spool.mkdir()
    (node.spool / "node1-0123456789ab").symlink_to(elsewhere)
    (node.spool / "notes").mkdir()
    (node.spool / "node2-0123456789ab").mkdir()
    (node.spool / "node2-0123456789ab" / "mine.txt").write_text("mine")
    (node.spool / "node2-0123456789ab" / "spool-1.sqlite").symlink_to(elsewhere / "precious.sqlite")
    sent = await send(node)
    assert sent.returncode == 4
    assert '"event": "spool_not_removed"' in sent.stderr
    assert [path.name for path in elsewhere.iterdir()] == ["precious.sqlite"]
    assert (elsewhere / "precious.sqlite").read_text() == "precious"
    assert node.spools() == ["node1-0123456789ab", "node2-0123456789ab", "notes"]
    assert (node.spool / "node2-0123456789ab" / "mine.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.asyncio
async def test_the_spool_of_another_user_is_told_and_not_touched(node: Node) -> None:
    await leave(node)
    (name,) = node.spools()
    os.chown(node.spool / name, _NOBODY, _NOBODY)
    before = sorted(path.name for path in (node.spool / name).iterdir())
    sent = await send(node)
    assert sent.returncode == 4
    assert f"belongs to the user {_NOBODY}" in sent.stderr
    assert sorted(path.name for path in (node.spool / name).iterdir()) == before


@pytest.mark.slow
def test_it_wants_a_folder_and_follows_nothing(tmp_path: Path) -> None:
    assert "--send-spools needs the folder" in run_command("agent", "--send-spools").stderr
    both = run_command("agent", "--send-spools", "--once", "--spool", str(tmp_path))
    assert (both.returncode, "follows nothing" in both.stderr) == (2, True)
    assert run_command("agent", "--send-spools", "--spool", str(tmp_path / "none")).returncode == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_real_service_stores_what_was_left_once_though_it_is_killed_meanwhile(
    node: Node, tmp_path: Path
) -> None:
    for number in range(3):
        await leave(node, batches=5, lines=2000, name=f"{number}.log")
    web = free_port()
    serve = ("serve", "--listen", f"127.0.0.1:{node.port}", "--http", f"127.0.0.1:{web}")

    def stored() -> int:
        overview = fetch_json(f"http://127.0.0.1:{web}/api/overview")
        return sum(job["operations"] for job in overview["jobs"] if job["name"] == "17")  # type: ignore[index]

    data = ("--data", str(tmp_path / "data"))
    with ExitStack() as stack:
        first = stack.enter_context(running(tmp_path / "serve.log", *serve, *data))
        await anyio.to_thread.run_sync(lambda: wait_for(lambda: stored() == 0, "the service"))
        sender = node.sender(stack, "--window-batches", "1")
        await anyio.to_thread.run_sync(lambda: wait_for(lambda: stored() > 0, "operations"))
        kill(first)
        stack.enter_context(running(tmp_path / "serve.log", *serve, *data))
        assert await wait_for_end(sender) == 0
        await anyio.to_thread.run_sync(lambda: wait_for(lambda: stored() >= node.logs.written, "all operations"))
        await anyio.sleep(1)
        assert stored() == node.logs.written
    assert node.spools() == []
