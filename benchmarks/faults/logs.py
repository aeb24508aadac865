"""Faults of the logs themselves: renamed, emptied, begun again, deleted, slow to read.

What is written and gone before anybody reads it is lost: such rows hold that each log that lost something has a gap.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Final

from benchmarks.faults.processes import Hooks
from benchmarks.faults.world import Faults, World

LOGS: Final = Faults()
_MOST_HELD_SECONDS: Final = 0.5
"""Twice as long is no rest to the agent yet."""


@LOGS.add(20, 0.3, 1.5)
def renamed_logs(world: World) -> None:
    """Logs are renamed and begun again."""
    world.writer.rotate(world.random.randrange(4))


@LOGS.add(6, 2.0, 3.5)
def truncated_logs(world: World) -> None:
    """Logs are copied and emptied while their writer is quiet for two seconds."""
    world.writer.copy_and_truncate(world.random.randrange(4))


@LOGS.add(10, 0.5, 1.5)
def emptied_unread(world: World) -> None:
    """A log is emptied while its writer is busy and its agent stands still: what was not read is gone."""
    _miss(
        world,
        away=lambda: world.agent.signal(signal.SIGSTOP),
        spoil=world.writer.empty,
        back=lambda: world.agent.signal(signal.SIGCONT),
    )


@LOGS.add(10, 0.5, 1.5)
def begun_again_in_place(world: World) -> None:
    """The agent is killed, and a job begins its log again in place (mode "w") before the next one reads its rest."""
    _miss_by_killed(world, world.writer.begin_again)


@LOGS.add(10, 0.5, 1.5)
def deleted_unread(world: World) -> None:
    """The agent is killed, and a log is renamed and deleted before the next one reads its rest."""

    def delete(number: int) -> None:
        world.writer.rotate(number)
        for path in world.writer.rotated():
            path.unlink()

    _miss_by_killed(world, delete)


@LOGS.add(6, 1.0, 4.0, agent_hooks=Hooks(read_bytes_per_s=1e6))
def slow_disk_of_logs(world: World) -> None:
    """Logs are read at 1 MB/s at most, and grow by half as much; kill -9 of the agent besides."""
    world.restart_agent()


def _miss_by_killed(world: World, spoil: Callable[[int], None]) -> None:
    def back() -> None:
        world.agent = world.start_agent()

    _miss(world, away=world.agent.kill, spoil=spoil, back=back)


def _miss(world: World, *, away: Callable[[], None], spoil: Callable[[int], None], back: Callable[[], None]) -> None:
    """Has a log lose what is written to it for a while in which nobody reads."""
    number = world.random.randrange(4)
    begin = _leave_with_all_read(world, away)
    world.pause(0.3, 0.8)
    with world.writer.lock:
        spoil(number)
        world.expect_loss(world.writer.numbers(number, begin))
    back()


def _leave_with_all_read(world: World, away: Callable[[], None]) -> int:
    """Has the agent go when it has read all there is, and gives the number of the operation written last.

    The writer is held up for that, and only shortly: a log that is emptied when it has been at rest leaves no gap.
    """
    until = time.monotonic() + 60
    while True:
        with world.writer.lock:
            held_from = time.monotonic()
            has_shown_all = world.wait_for(world.has_shown_all, _MOST_HELD_SECONDS)
            is_busy = time.monotonic() < held_from + 2 * _MOST_HELD_SECONDS
            if (has_shown_all and is_busy) or time.monotonic() > until:
                away()
                return world.writer.written
        world.pause(0.1, 0.5)
