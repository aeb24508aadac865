"""Faults of agents that have a spool; the service is away for most of them."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Final

from benchmarks.faults.processes import SLOW_DISK, Hooks
from benchmarks.faults.world import Faults, Result, World, repeated, small_disk

_KILLS_RUNNING: Final = 4


SPOOLED: Final = Faults()


def _spooling(folder: Path, agent_hooks: Hooks | None = None) -> World:
    return World(folder, agent=("--spool", str(folder / "spool"), "--retry-seconds", "1"), agent_hooks=agent_hooks)


@SPOOLED.alone(120)
def killed_with_spool(folder: Path, times: int) -> Result:
    """kill -9 of an agent with a spool, four times running, while the service is there or, each second time, away."""
    away = cycle((False, True))

    def kill(world: World) -> None:
        is_away = next(away)
        if is_away:
            world.service.kill()
        for _ in range(_KILLS_RUNNING - 1):
            world.restart_agent()
            world.pause(0.05, 1.2)
            world.times += 1
        world.restart_agent()
        if is_away:
            world.service = world.start_service()

    return repeated(_spooling(folder), max(1, times // _KILLS_RUNNING), kill, 0.05, 1.0)


@SPOOLED.add(6, 1.5, 2.5, _spooling)
def truncated_with_spool(world: World) -> None:
    """The service is away, a log copied and emptied while its writer is quiet for two seconds, the agent killed."""
    world.service.kill()
    world.writer.copy_and_truncate(world.random.randrange(4))
    world.pause(0.5, 1.0)
    world.restart_agent()
    world.service = world.start_service()


@SPOOLED.add(5, 0.5, 1.5, _spooling)
def lost_spool(world: World) -> None:
    """The service is away and the agent killed; the whole spool is gone."""
    world.service.kill()
    world.pause(0.3, 1.5)
    world.agent.kill()
    shutil.rmtree(world.folder / "spool", ignore_errors=True)
    world.agent = world.start_agent()
    world.pause(0.0, 1.0)
    world.service = world.start_service()


@SPOOLED.alone(6)
def full_disk_of_spool(folder: Path, times: int) -> Result:
    """No room on the spool's disk for 3 s (a tmpfs that a file fills), no service for 2 s of it."""
    with small_disk(folder, 96) as disk:

        def fill(world: World) -> None:
            filler = disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(65536))
            world.service.kill()
            time.sleep(2)
            world.service = world.start_service()
            world.pause(0.5, 1.0)
            if world.random.random() < 0.3:
                world.restart_agent()
            filler.unlink()

        return repeated(World(folder, agent=("--spool", str(disk))), times, fill, 0.5, 1.5)


@SPOOLED.add(6, 3.0, 10.0, _spooling, agent_hooks=SLOW_DISK)
def slow_disk_of_spool(world: World) -> None:
    """The disk of the spool syncs in 5 s and reads 1 MB/s; kill -9 of the service for 1 to 3 s, and of the agent."""
    world.service.kill()
    world.pause(1.0, 3.0)
    world.restart_agent()
    world.service = world.start_service()


@SPOOLED.add(4, 0.2, 1.0, _spooling)
def two_agents_of_spool(world: World) -> None:
    """A second agent of the same name and spool is started: it must refuse."""
    other = world.start_agent()
    world.wait_for(lambda: not other.is_running, 120)
    if other.status != 2:
        world.note += f" the second agent ended with {other.status};"
        other.kill()
