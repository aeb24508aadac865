"""Faults of the logs themselves: renamed, emptied, begun again, deleted, slow to read.

What is written and gone before anybody reads it is lost: such rows hold that each log that lost something has a gap.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.faults.processes import Hooks
from benchmarks.faults.world import Result, World, repeated


def renamed_logs(folder: Path, times: int) -> Result:
    """Logs are renamed and begun again."""
    return repeated(World(folder), times, lambda world: world.writer.rotate(world.random.randrange(4)), 0.3, 1.5)


def truncated_logs(folder: Path, times: int) -> Result:
    """Logs are copied and emptied while their writer is quiet for two seconds."""
    return repeated(
        World(folder), times, lambda world: world.writer.copy_and_truncate(world.random.randrange(4)), 2.0, 3.5
    )


def emptied_unread(folder: Path, times: int) -> Result:
    """A log is emptied while its writer is busy and its agent stands still: what was not read is gone."""

    def miss(world: World) -> None:
        _miss(
            world,
            away=lambda: world.agent.signal(signal.SIGSTOP),
            spoil=world.writer.empty,
            back=lambda: world.agent.signal(signal.SIGCONT),
        )

    return repeated(World(folder), times, miss, 0.5, 1.5)


def begun_again_in_place(folder: Path, times: int) -> Result:
    """The agent is killed, and a job begins its log again in place (mode "w") before the next one reads its rest."""
    return _missed_by_killed(folder, times, lambda world, number: world.writer.begin_again(number))


def deleted_unread(folder: Path, times: int) -> Result:
    """The agent is killed, and a log is renamed and deleted before the next one reads its rest."""

    def delete(world: World, number: int) -> None:
        world.writer.rotate(number)
        for path in world.writer.rotated():
            path.unlink()

    return _missed_by_killed(folder, times, delete)


def slow_disk_of_logs(folder: Path, times: int) -> Result:
    """Logs are read at 1 MB/s at most, and grow by half as much; kill -9 of the agent besides."""
    world = World(folder, agent_hooks=Hooks(read_bytes_per_s=1e6))
    return repeated(world, times, World.restart_agent, 1.0, 4.0)


LOGS: Final[dict[str, tuple[Callable[[Path, int], Result], int]]] = {
    "renamed_logs": (renamed_logs, 20),
    "truncated_logs": (truncated_logs, 6),
    "emptied_unread": (emptied_unread, 10),
    "begun_again_in_place": (begun_again_in_place, 10),
    "deleted_unread": (deleted_unread, 10),
    "slow_disk_of_logs": (slow_disk_of_logs, 6),
}
"""By name, with how often each is done."""


def _missed_by_killed(folder: Path, times: int, spoil: Callable[[World, int], None]) -> Result:
    def miss(world: World) -> None:
        def back() -> None:
            world.agent = world.start_agent()

        _miss(world, away=world.agent.kill, spoil=lambda number: spoil(world, number), back=back)

    return repeated(World(folder), times, miss, 0.5, 1.5)


def _miss(world: World, *, away: Callable[[], None], spoil: Callable[[int], None], back: Callable[[], None]) -> None:
    """Has a log lose what is written to it for a while in which nobody reads."""
    number = world.random.randrange(4)
    with world.writer.lock:
        world.wait_for(world.has_shown_all, 60)
        away()
        begin = world.writer.written
    world.pause(0.3, 0.8)
    with world.writer.lock:
        spoil(number)
        world.expect_loss(world.writer.numbers(number, begin))
    back()
