"""The faults, one function each: what is done to a world, and how often."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.faults.hostile import HOSTILE
from benchmarks.faults.logs import LOGS
from benchmarks.faults.processes import SLOW_DISK, Hooks
from benchmarks.faults.proxy import Weather
from benchmarks.faults.spooled import SPOOLED
from benchmarks.faults.wire import Wire, wired
from benchmarks.faults.world import Result, World, repeated, small_disk

Fault = Callable[[Path, int], Result]


def killed_service(folder: Path, times: int) -> Result:
    """kill -9 of the service."""
    return repeated(World(folder), times, World.restart_service, 0.05, 1.2)


def killed_agent(folder: Path, times: int) -> Result:
    """kill -9 of the agent."""
    return repeated(World(folder), times, World.restart_agent, 0.05, 1.2)


def killed_both(folder: Path, times: int) -> Result:
    """kill -9 of both at once."""

    def both(world: World) -> None:
        world.service.kill()
        world.restart_agent()
        world.service = world.start_service()

    return repeated(World(folder), times, both, 0.05, 1.5)


def cut(folder: Path, times: int) -> Result:
    """Connections are reset, and refused for 0.1 to 1 s."""
    return repeated(World(folder, with_proxy=True), times, _weather(Weather.CUT, 0.1, 1.0), 0.3, 1.5)


def half_open(folder: Path, times: int) -> Result:
    """The service's end is closed, the agent's end stays and hears nothing: it gives up after 20 s."""

    def half(world: World) -> None:
        assert world.proxy is not None
        world.proxy.half_open()
        time.sleep(22)
        world.proxy.weather = Weather.CLEAR

    return repeated(World(folder, with_proxy=True), times, half, 0.5, 1.5)


def black_hole(folder: Path, times: int) -> Result:
    """Nothing passes for 3 to 25 s, and nobody is told."""
    return repeated(World(folder, with_proxy=True), times, _weather(Weather.BLACK_HOLE, 3, 25), 0.5, 1.5)


def late_and_reset(folder: Path, times: int) -> Result:
    """Every piece is late by up to 0.3 s, with resets in between: old and new connections overlap."""
    return repeated(World(folder, with_proxy=True), times, _weather(Weather.SLOW, 3, 5), 0.2, 1.0)


def turned_on_the_way(folder: Path, times: int) -> Result:
    """For 2 to 5 s, one byte of each tenth piece between agent and service is another."""
    return repeated(World(folder, with_proxy=True), times, _weather(Weather.TURNED, 2, 5), 0.3, 1.5)


def clock_of_service(folder: Path, times: int) -> Result:
    """The service's wall clock is set by up to an hour, forth and back."""
    clock = _clock(folder)
    world = World(folder, service_hooks=Hooks(clock_file=clock))
    return repeated(world, times, lambda known: _set(clock, known), 0.5, 2.0)


def clock_of_agent(folder: Path, times: int) -> Result:
    """The agent's wall clock is set by up to an hour, forth and back."""
    clock = _clock(folder)
    world = World(folder, agent_hooks=Hooks(clock_file=clock))
    return repeated(world, times, lambda known: _set(clock, known), 0.5, 2.0)


def torn_journal(folder: Path, times: int) -> Result:
    """After kill -9, up to 20 kB of the journal's end are gone, as after a loss of power with a disk that lied."""

    def tear(world: World) -> None:
        world.service.kill()
        newest = max((world.data / "journal").glob("*.journal"), default=None)
        if newest is not None:
            size = newest.stat().st_size
            os.truncate(newest, max(0, size - world.random.randrange(1, 20_000)))
        world.service = world.start_service()

    return repeated(World(folder), times, tear, 0.5, 1.5)


def turned_journal(folder: Path, times: int) -> Result:
    """After kill -9, one byte of the journal, anywhere, is another."""

    def turn(world: World) -> None:
        world.service.kill()
        paths = sorted((world.data / "journal").glob("*.journal"))
        if paths:
            _turn_a_byte(world, world.random.choice(paths))
        world.service = world.start_service()

    return repeated(World(folder), times, turn, 0.5, 1.5)


def turned_state(folder: Path, times: int) -> Result:
    """After kill -9, one byte of the newest state file is another."""

    def turn(world: World) -> None:
        world.service.kill()
        newest = max((world.data / "state").glob("*.state"), default=None)
        if newest is not None:
            _turn_a_byte(world, newest)
        world.service = world.start_service()

    return repeated(World(folder, serve=("--state-every", "0.05")), times, turn, 3.5, 5.0)


def outage_with_spool(folder: Path, times: int) -> Result:
    """No service for 4 s: logs are rotated and deleted meanwhile, the agent is killed, and its spool has the rest."""

    def outage(world: World) -> None:
        world.service.kill()
        for number in range(4):
            world.writer.rotate(number)
        time.sleep(2.5)
        for path in world.writer.rotated():
            path.unlink()
        world.restart_agent()
        time.sleep(1.5)
        world.service = world.start_service()
        world.recovered()

    return repeated(_spooling(folder), times, outage, 0.5, 1.5)


def torn_spool(folder: Path, times: int) -> Result:
    """Service and agent are killed, and up to 5 kB of the end of a file of the spool are gone."""

    def tear(world: World) -> None:
        def tear_one(path: Path) -> None:
            os.truncate(path, max(0, path.stat().st_size - world.random.randrange(1, 5000)))

        _spoil_spool(world, tear_one)

    return repeated(_spooling(folder), times, tear, 0.5, 1.5)


def turned_spool(folder: Path, times: int) -> Result:
    """Service and agent are killed, and a byte of a file of the spool is another."""
    return repeated(
        _spooling(folder),
        times,
        lambda world: _spoil_spool(world, lambda path: _turn_a_byte(world, path)),
        0.5,
        1.5,
    )


def _spooling(folder: Path) -> World:
    return World(folder, agent=("--spool", str(folder / "spool")))


def _spoil_spool(world: World, spoil: Callable[[Path], None]) -> None:
    world.service.kill()
    time.sleep(1)
    world.agent.kill()
    files = [path for path in (world.folder / "spool").rglob("*") if path.is_file() and path.stat().st_size]
    if files:
        spoil(world.random.choice(files))
    world.agent = world.start_agent()
    world.service = world.start_service()


def full_disk(folder: Path, times: int) -> Result:
    """No room on the service's disk for 3 s (a tmpfs that a file fills)."""
    with small_disk(folder, 300) as data:

        def fill(world: World) -> None:
            filler = data / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(65536))
            time.sleep(3)
            said = world.get("/healthz") or b""
            if b"No space left" not in said:
                world.note += f" /healthz said {said[:40]!r};"
            if world.random.random() < 0.3:
                world.restart_service()
            filler.unlink()

        return repeated(World(folder, data=data, serve=("--state-every", "0.5")), times, fill, 0.5, 1.5)


def slow_disk(folder: Path, times: int) -> Result:
    """The disk of the service syncs in 5 s and reads 1 MB/s; kill -9 of the service besides."""
    world = World(folder, service_hooks=SLOW_DISK)
    return repeated(world, times, World.restart_service, 3.0, 15.0)


def two_agents(folder: Path, times: int) -> Result:
    """A second agent of the same name follows the same files for a while."""

    def second(world: World) -> None:
        other = world.start_agent()
        world.pause(2, 4)
        other.end()

    return repeated(World(folder), times, second, 0.5, 1.5)


def two_services(folder: Path, times: int) -> Result:
    """A second service is started on the same folder: it must refuse."""

    def second(world: World) -> None:
        other = world.start_service()
        world.wait_for(lambda: not other.is_running, 120)
        if other.status in (0, None):
            world.note += f" the second service ended with {other.status};"
            other.kill()

    return repeated(World(folder), times, second, 0.2, 1.0)


def bad_exports(folder: Path, times: int) -> Result:
    """Exports appear that shrink, vanish while they are read, or are never finished."""

    def spoil(world: World) -> None:
        exports = folder / "exports"
        data = b"SQLite format 3\0" + world.random.randbytes(200_000)
        path = exports / f"report{world.times}.sqlite"
        path.write_bytes(data)
        world.pause(0.2, 0.8)
        what = world.times % 3
        if what == 0:
            os.truncate(path, 5000)
        elif what == 1:
            path.unlink()
        else:
            (exports / f"report{world.times}.sqlite-journal").write_bytes(data[:512])

    (folder / "exports").mkdir(parents=True, exist_ok=True)
    return repeated(World(folder), times, spoil, 0.3, 1.0)


def slow_service(folder: Path, times: int) -> Result:
    """The service stands still for 2 to 5 s at 5,000 operations/s; its agent holds a window of 256 KiB."""

    def stop(world: World) -> None:
        world.service.signal(signal.SIGSTOP)
        world.pause(2, 5)
        world.service.signal(signal.SIGCONT)

    world = World(folder, rate=5_000, agent=("--window-bytes", "262144"))
    return repeated(world, times, stop, 0.5, 1.5)


def soak(folder: Path, times: int) -> Result:
    """72 hours on clocks that run 432 times as fast (10 minutes); logs are rotated, old ones deleted, every 6 hours."""
    clock = folder / "clock"
    clock.write_text("x 432")
    hooks = Hooks(clock_file=clock)
    world = World(folder, rate=1000, service_hooks=hooks, agent_hooks=hooks)
    samples: list[str] = []
    for turn in range(12 * times):
        time.sleep(50)
        world.times += 1
        old = world.writer.rotated()
        world.writer.rotate(turn % 4)
        for path in old:
            path.unlink()
        both = (world.service, world.agent)
        samples.append(" / ".join(f"{each.memory_bytes() / 1e6:.0f} MB, {each.descriptors()}" for each in both))
    world.note = f"memory and open files, service / agent: {'; '.join(samples)}"
    return world.finish()


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


FAULTS: Final[dict[str, tuple[Fault, int]]] = {
    "killed_service": (killed_service, 150),
    "killed_agent": (killed_agent, 80),
    "killed_both": (killed_both, 40),
    "cut": (cut, 30),
    "half_open": (half_open, 2),
    "black_hole": (black_hole, 3),
    "late_and_reset": (late_and_reset, 6),
    "turned_on_the_way": (turned_on_the_way, 10),
    "clock_of_service": (clock_of_service, 10),
    "clock_of_agent": (clock_of_agent, 10),
    "torn_journal": (torn_journal, 20),
    "turned_journal": (turned_journal, 20),
    "turned_state": (turned_state, 6),
    "outage_with_spool": (outage_with_spool, 10),
    "torn_spool": (torn_spool, 15),
    "turned_spool": (turned_spool, 15),
    "full_disk": (full_disk, 4),
    "slow_disk": (slow_disk, 5),
    "two_agents": (two_agents, 4),
    "two_services": (two_services, 10),
    **LOGS,
    "bad_exports": (bad_exports, 12),
    "slow_service": (slow_service, 4),
    **SPOOLED,
    **HOSTILE,
    "pulled_cable": (pulled_cable, 6),
    "pulled_and_killed": (pulled_and_killed, 6),
    "bad_wire": (bad_wire, 6),
    "soak": (soak, 1),
}
"""By name, with how often each is done."""


def _over_wire(folder: Path, times: int, fault: Callable[[World, Wire], None], least: float, most: float) -> Result:
    with wired() as wire:
        return repeated(World(folder, wire=wire), times, lambda world: fault(world, wire), least, most)


def _weather(weather: Weather, least: float, most: float) -> Callable[[World], None]:
    def change(world: World) -> None:
        assert world.proxy is not None
        world.proxy.weather = weather
        world.pause(least, most)
        world.proxy.weather = Weather.CLEAR

    return change


def _clock(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    clock = folder / "clock"
    clock.write_text("0")
    return clock


def _set(clock: Path, world: World) -> None:
    clock.with_suffix(".new").write_text(str(world.random.uniform(-3600, 3600)))
    clock.with_suffix(".new").replace(clock)


def _turn_a_byte(world: World, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[world.random.randrange(len(data))] ^= world.random.randrange(1, 256)
    path.write_bytes(data)


def run(name: str, folder: Path, times: int | None = None) -> Result:
    """One fault in a folder that is made.

    Raises:
        NotHereError: it needs a network that this machine does not give.
    """
    fault, usual = FAULTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    return fault(folder, usual if times is None else times)
