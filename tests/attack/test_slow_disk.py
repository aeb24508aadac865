"""A disk that takes for ever to sync, and a second to read 1 MB: logs are followed, and nothing is lost."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from agent.fake_follower import FakeFollower
from agent.log_samples import operation_line
from agent.released_logs import op_counts
from service.loopback import Service
from wire.sample_batches import HELLO

from ncclscope_agent.app import Agent
from ncclscope_agent.files.finding import FollowLimits
from ncclscope_agent.files.follower import Followed
from ncclscope_agent.files.logs import LogFollower
from ncclscope_agent.link.network import LinkSettings
from ncclscope_agent.spool import keeper as keeper_module
from ncclscope_agent.spool.contents import Spool
from ncclscope_agent.spool.database import SpoolDatabase
from ncclscope_agent.spool.directory import SpoolDirectory
from ncclscope_agent.spool.keeper import SpoolKeeper
from ncclscope_agent.spool.limits import SpoolLimits
from ncclscope_agent.spool.records import DiskState, Owner, Transaction
from ncclscope_agent.spool.session import SpooledSession
from ncclscope_service.serve.listen import ListenSettings
from ncclscope_wire.batch import Batch

SECOND_NS = 1_000_000_000
PENDING_BYTES = 4 * 1024
ROWS = 20_000
"""Many more than `PENDING_BYTES` hold."""


class StuckDisk:
    """Transactions of every spool wait until it is `released`; they fail if it `is_broken` then."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.is_broken = False
        commit = SpoolDatabase.commit

        def stuck(database: SpoolDatabase, wanted: Transaction) -> DiskState:
            self.released.wait()
            if self.is_broken:
                raise OSError("the disk is gone")
            return commit(database, wanted)

        patched.setattr(SpoolDatabase, "commit", stuck)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckDisk]:
    """A disk that hangs until the test, or its end, releases it."""
    stuck = StuckDisk(monkeypatch)
    monkeypatch.setattr(keeper_module, "_TICK_SECONDS", 0.01)
    yield stuck
    stuck.is_broken = not stuck.released.is_set()
    stuck.released.set()


@dataclass(slots=True)
class Running:
    """An agent with a spool."""

    agent: Agent
    follower: FakeFollower
    spool: Spool
    session: SpooledSession
    results: list[bool]


@asynccontextmanager
async def running(port: int, folder: Path, *, flush: float = 60.0) -> AsyncGenerator[Running]:
    """An agent that reads `ROWS` rows to a service on this port, and is stopped at the end of the block."""
    path = folder / HELLO.agent_id
    spool = Spool(Owner(HELLO.agent_id), limits=SpoolLimits(pending_bytes=PENDING_BYTES))
    follower = FakeFollower(ROWS, per_batch=100)
    link = LinkSettings(
        host="127.0.0.1", port=port, heartbeat_seconds=0.05, first_retry_seconds=0.01, last_retry_seconds=0.02
    )
    followed = Followed(follower=follower, tick_min_seconds=0.001, tick_max_seconds=0.01)
    with anyio.fail_after(120), SpoolKeeper(spool, SpoolDirectory(path)) as keeper:
        session = SpooledSession(replace(HELLO, session_id="first"), spool, new_id=lambda: "another")
        agent = Agent(session, link, [followed], flush_seconds=flush, spool=keeper)
        results: list[bool] = []

        async def run() -> None:
            results.append(await agent.run())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            yield Running(agent, follower, spool, session, results)
            agent.stop()


@pytest.mark.asyncio
async def test_a_spool_whose_disk_hangs_does_not_stop_the_reading_while_the_service_takes_it(
    disk: StuckDisk, tmp_path: Path
) -> None:
    service = Service()
    async with service.listening() as port, running(port, tmp_path) as known:
        await service.wait_for_rows(known.follower.source.key, ROWS)
        assert known.spool.statistics().bytes_on_disk == 0
        disk.released.set()
    assert service.lines(known.follower.source.key) == list(range(ROWS))
    assert known.results == [True]


@pytest.mark.asyncio
async def test_without_a_service_the_logs_wait_unread_when_memory_is_full_and_all_of_them_is_sent_later(
    disk: StuckDisk, tmp_path: Path
) -> None:
    service = Service()
    async with service.listening() as port:
        pass
    async with running(port, tmp_path) as known:
        while known.session.generation == 0 or known.spool.has_room:
            await anyio.lowlevel.checkpoint()
        assert 0 < known.follower.at < ROWS
        assert known.spool.statistics().pending_bytes < 2 * PENDING_BYTES
        disk.released.set()
        while known.follower.at < ROWS:  # the disk takes what the service cannot
            await anyio.lowlevel.checkpoint()
        async with service.listening(ListenSettings(port=port)):
            await service.wait_for_rows(known.follower.source.key, ROWS)
            known.agent.stop()
            await service.wait_for_goodbyes()
    assert service.lines(known.follower.source.key) == list(range(ROWS))


@pytest.mark.asyncio
async def test_an_agent_whose_disk_hangs_stops_in_time(disk: StuckDisk, tmp_path: Path) -> None:
    service = Service()
    async with service.listening() as port, running(port, tmp_path, flush=0.1) as known:
        await service.wait_for_rows(known.follower.source.key, ROWS)
    assert not disk.released.is_set()
    assert known.results == [True]
    assert known.spool.statistics().bytes_on_disk == 0


# Logs


class SlowReads:
    """A clock that a disk of 1 MB/s moves on: by what is read of files."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        pread = os.pread

        def slow(handle: int, size: int, offset: int) -> bytes:
            data = pread(handle, size, offset)
            self.now_ns += len(data) * 1000
            return data

        patched.setattr(os, "pread", slow)


def test_a_look_at_many_logs_on_a_slow_disk_ends_soon_and_each_log_has_its_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines, logs = 2_000, 24
    for log in range(logs):
        numbers = range(log * lines, (log + 1) * lines)
        (tmp_path / f"{log}.log").write_text("".join(operation_line(op_count=f"{one:06x}") + "\n" for one in numbers))
    clock = SlowReads(monkeypatch)
    limits = FollowLimits()
    follower = LogFollower([f"{tmp_path}/*.log"], limits=limits, monotonic_ns=lambda: clock.now_ns)
    longest_ns = limits.poll_ns + 1000 * (limits.bytes_per_turn + 64 * 1024)
    batches: list[Batch] = []
    begun: list[int] = []
    is_more = True
    while is_more:
        for ask in (follower.look, follower.poll):
            began_ns = clock.now_ns
            given = ask(SECOND_NS)
            assert clock.now_ns - began_ns <= longest_ns
            batches += given if isinstance(given, list) else []
        begun.append(len({batch.source.key for batch in batches}))
        is_more = follower.has_more
    assert sorted(op_counts(batches)) == list(range(logs * lines))
    assert begun[logs - 1] == logs
    assert clock.now_ns < 1.1 * 1000 * sum(path.stat().st_size for path in tmp_path.iterdir())
