"""The agent over real files: a log in pieces while the agent is killed, and an export that appears."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from nsys_made import nccl_export
from service.loopback import Service
from wire.sample_batches import HELLO

from ncclscope_agent.app import Agent
from ncclscope_agent.config import AgentSettings, load
from ncclscope_agent.following import followers, watched_directories
from ncclscope_agent.link.network import LinkSettings
from ncclscope_agent.link.session import Session

LINE = (
    "node1:100:200 [0] NCCL INFO AllReduce: opCount {count:x} sendbuff 0x7f0000000000 recvbuff 0x7f0000000200 "
    "count 1024 datatype 7 op 0 root 0 comm 0x55d0 [nranks=2] stream 0x55e0\n"
)


def agent_for(settings: AgentSettings, port: int, resources: ExitStack, *, start: int = 1) -> Agent:
    hello = replace(HELLO, agent_id="agent", session_id=f"start {start}", name="node1", host="node1", job="job")
    link = LinkSettings(host="127.0.0.1", port=port, first_retry_seconds=0.01, last_retry_seconds=0.02)
    followed = followers(settings, resources, host="node1", now_wall_ns=0)
    return Agent(Session(hello), link, followed, flush_seconds=60)


def settings_for(**given: object) -> AgentSettings:
    quick = {"tick_min_seconds": "0.01", "tick_max_seconds": "0.01", "export_tick_seconds": "0.05"}
    return load({**quick, **given}, {}, host="node1")


def write_export(path: Path, *, correlation_id: int) -> None:
    made = nccl_export()
    made.kernel("ncclDevKernel_Broadcast_RING_LL", 20_000, 21_000, correlationId=100 + correlation_id)
    made.write(path)


async def wait_for(service: Service, is_there: Callable[[], bool]) -> None:
    while not is_there():
        service.arrived = anyio.Event()
        await service.arrived.wait()


def op_counts(service: Service) -> list[int]:
    return [count for received in service.received for count in received.batch.operations["op_count"].tolist()]


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_log_written_in_pieces_arrives_once_though_the_agent_is_killed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    content = "".join(LINE.format(count=count) for count in range(600)).encode()
    cuts = sorted(rng.sample(range(1, len(content)), 29))
    pieces = [content[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    log = tmp_path / "nccl.node1.log"
    service, written = Service(), 0
    with anyio.fail_after(60):
        async with service.listening() as port:
            for start in range(1, 4):
                with ExitStack() as resources:
                    async with anyio.create_task_group() as tasks:
                        agent = agent_for(settings_for(logs=(str(tmp_path / "*.log"),)), port, resources, start=start)
                        tasks.start_soon(agent.run)
                        for piece in pieces[(start - 1) * 10 : start * 10]:
                            with log.open("ab") as stream:
                                stream.write(piece)
                            written += len(piece)
                            await anyio.lowlevel.checkpoint()
                        lines = content[:written].count(b"\n")
                        # Somewhere in the middle it is killed; the last one sees it through.
                        wanted = lines if start == 3 else lines - 100
                        await wait_for(service, lambda wanted=wanted: len(op_counts(service)) >= wanted)  # type: ignore[misc]
                        tasks.cancel_scope.cancel()
    assert op_counts(service) == list(range(600))


@pytest.mark.asyncio
async def test_an_export_that_appears_is_read_once_though_the_agent_starts_anew(tmp_path: Path) -> None:
    service = Service()
    with anyio.fail_after(60):
        async with service.listening() as port:
            for start in range(1, 3):
                with ExitStack() as resources:
                    agent = agent_for(settings_for(exports=(str(tmp_path),)), port, resources, start=start)
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(agent.run)
                        write_export(tmp_path / f"chunk{start}.sqlite", correlation_id=start)
                        await wait_for(
                            service,
                            lambda start=start: sum(received.batch.is_last for received in service.received) == start,  # type: ignore[misc]
                        )
                        agent.stop()
    assert [received.batch.source.name for received in service.received if received.batch.is_last] == [
        f"{tmp_path.name}/chunk1.sqlite",
        f"{tmp_path.name}/chunk2.sqlite",
    ]


@pytest.mark.asyncio
async def test_once_waits_for_an_export_that_has_just_been_written(tmp_path: Path) -> None:
    service = Service()
    write_export(tmp_path / "chunk.sqlite", correlation_id=3)
    with anyio.fail_after(60), ExitStack() as resources:
        async with service.listening() as port:
            agent = agent_for(settings_for(exports=(str(tmp_path),)), port, resources)
            assert await agent.run(once_seconds=60)
    assert [received.batch.is_last for received in service.received][-1]


def test_directories_are_watched_up_to_the_first_wildcard(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    patterns = [f"{tmp_path}/logs/*.log", f"{tmp_path}/logs", f"{tmp_path}/run*/x.log", f"{tmp_path}/logs/%h.%p.log"]
    assert watched_directories(patterns) == [tmp_path, tmp_path / "logs"]
    assert watched_directories([f"{tmp_path}/logs/one.log"]) == [tmp_path / "logs"]
