"""Faults of a network of the kernel's own (`wire.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.faults.wire import Wire, wired
from benchmarks.faults.world import Result, World, repeated


def pulled_cable(folder: Path, times: int) -> Result:
    """The cable between agent and service is out for 3 to 25 s: TCP sends again, or the agent gives up after 20 s."""

    def pull(world: World, wire: Wire) -> None:
        wire.pull()
        world.pause(3, 25)
        wire.plug()

    return _over_wire(folder, times, pull, 0.5, 1.5)


def pulled_and_killed(folder: Path, times: int) -> Result:
    """The cable is out while the service is killed and started anew: the agent's connection is half open."""

    def pull(world: World, wire: Wire) -> None:
        wire.pull()
        world.restart_service()
        world.pause(1, 8)
        wire.plug()

    return _over_wire(folder, times, pull, 0.5, 1.5)


def bad_wire(folder: Path, times: int) -> Result:
    """Segments are late and lost for 5 to 15 s (netem: disordered and doubled too); the service is killed meanwhile."""

    def spoil(world: World, wire: Wire) -> None:
        how = wire.spoil()
        if f"by {how}" not in world.note:
            world.note += f" by {how};"
        world.pause(2, 7)
        world.restart_service()
        world.pause(3, 8)
        wire.mend()

    return _over_wire(folder, times, spoil, 0.5, 1.5)


WIRED: Final[dict[str, tuple[Callable[[Path, int], Result], int]]] = {
    "pulled_cable": (pulled_cable, 6),
    "pulled_and_killed": (pulled_and_killed, 6),
    "bad_wire": (bad_wire, 6),
}
"""By name, with how often each is done."""


def _over_wire(folder: Path, times: int, fault: Callable[[World, Wire], None], least: float, most: float) -> Result:
    with wired() as wire:
        return repeated(World(folder, wire=wire), times, lambda world: fault(world, wire), least, most)
