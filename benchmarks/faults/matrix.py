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
from benchmarks.faults.world import Faults, Result, World, repeated, small_disk

_FIRST, _MORE, _WIRE, _LAST = Faults(), Faults(), Faults(), Faults()
"""In the order of the table; faults of logs, spools and enemies are among them."""


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


def _weather(world: World, weather: Weather, least: float, most: float) -> None:
    assert world.proxy is not None
    world.proxy.weather = weather
    world.pause(least, most)
    world.proxy.weather = Weather.CLEAR


def _exporting(folder: Path) -> World:
    (folder / "exports").mkdir()
    return World(folder)


def _clock(folder: Path) -> Path:
    clock = folder / "clock"
    clock.write_text("0")
    return clock


def _set_clock(world: World) -> None:
    clock = world.folder / "clock"
    clock.with_suffix(".new").write_text(str(world.random.uniform(-3600, 3600)))
    clock.with_suffix(".new").replace(clock)


def _turn_a_byte(world: World, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[world.random.randrange(len(data))] ^= world.random.randrange(1, 256)
    path.write_bytes(data)


def _over_wire(times: int) -> Callable[[Callable[[World, Wire], None]], Callable[[World, Wire], None]]:
    """Adds a fault of a cable between agent and service."""

    def add(fault: Callable[[World, Wire], None]) -> Callable[[World, Wire], None]:
        def done(folder: Path, often: int) -> Result:
            with wired() as wire:
                return repeated(World(folder, wire=wire), often, lambda world: fault(world, wire), 0.5, 1.5)

        done.__doc__ = fault.__doc__
        _WIRE[fault.__name__] = done, times
        return fault

    return add


@_FIRST.add(150, 0.05, 1.2)
def killed_service(world: World) -> None:
    """kill -9 of the service."""
    world.restart_service()


@_FIRST.add(80, 0.05, 1.2)
def killed_agent(world: World) -> None:
    """kill -9 of the agent."""
    world.restart_agent()


@_FIRST.add(40, 0.05, 1.5)
def killed_both(world: World) -> None:
    """kill -9 of both at once."""
    world.service.kill()
    world.restart_agent()
    world.service = world.start_service()


@_FIRST.add(30, 0.3, 1.5, with_proxy=True)
def cut(world: World) -> None:
    """Connections are reset, and refused for 0.1 to 1 s."""
    _weather(world, Weather.CUT, 0.1, 1.0)


@_FIRST.add(2, 0.5, 1.5, with_proxy=True)
def half_open(world: World) -> None:
    """The service's end is closed, the agent's end stays and hears nothing: it gives up after 20 s."""
    assert world.proxy is not None
    world.proxy.half_open()
    time.sleep(22)
    world.proxy.weather = Weather.CLEAR


@_FIRST.add(3, 0.5, 1.5, with_proxy=True)
def black_hole(world: World) -> None:
    """Nothing passes for 3 to 25 s, without an error."""
    _weather(world, Weather.BLACK_HOLE, 3, 25)


@_FIRST.add(6, 0.2, 1.0, with_proxy=True)
def late_and_reset(world: World) -> None:
    """Every piece is late by up to 0.3 s, with resets in between: old and new connections overlap."""
    _weather(world, Weather.SLOW, 3, 5)


@_FIRST.add(10, 0.3, 1.5, with_proxy=True)
def turned_on_the_way(world: World) -> None:
    """For 2 to 5 s, one byte of each tenth piece between agent and service is another."""
    _weather(world, Weather.TURNED, 2, 5)


@_FIRST.add(10, 0.5, 2.0, lambda folder: World(folder, service_hooks=Hooks(clock_file=_clock(folder))))
def clock_of_service(world: World) -> None:
    """The service's wall clock is set by up to an hour, forth and back."""
    _set_clock(world)


@_FIRST.add(10, 0.5, 2.0, lambda folder: World(folder, agent_hooks=Hooks(clock_file=_clock(folder))))
def clock_of_agent(world: World) -> None:
    """The agent's wall clock is set by up to an hour, forth and back."""
    _set_clock(world)


@_FIRST.add(20, 0.5, 1.5)
def torn_journal(world: World) -> None:
    """After kill -9, up to 20 kB of the journal's end are gone, as after a loss of power with a disk that lied."""
    world.service.kill()
    newest = max((world.data / "journal").glob("*.journal"), default=None)
    if newest is not None:
        size = newest.stat().st_size
        os.truncate(newest, max(0, size - world.random.randrange(1, 20_000)))
    world.service = world.start_service()


@_FIRST.add(20, 0.5, 1.5)
def turned_journal(world: World) -> None:
    """After kill -9, one byte of the journal, anywhere, is another."""
    world.service.kill()
    paths = sorted((world.data / "journal").glob("*.journal"))
    if paths:
        _turn_a_byte(world, world.random.choice(paths))
    world.service = world.start_service()


@_FIRST.add(6, 3.5, 5.0, serve=("--state-every", "0.05"))
def turned_state(world: World) -> None:
    """After kill -9, one byte of the newest state file is another."""
    world.service.kill()
    newest = max((world.data / "state").glob("*.state"), default=None)
    if newest is not None:
        _turn_a_byte(world, newest)
    world.service = world.start_service()


@_FIRST.add(10, 0.5, 1.5, _spooling)
def outage_with_spool(world: World) -> None:
    """No service for 4 s: logs are rotated and deleted meanwhile, the agent is killed, and its spool has the rest."""
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


@_FIRST.add(15, 0.5, 1.5, _spooling)
def torn_spool(world: World) -> None:
    """Service and agent are killed, and up to 5 kB of the end of a file of the spool are gone."""

    def tear_one(path: Path) -> None:
        os.truncate(path, max(0, path.stat().st_size - world.random.randrange(1, 5000)))

    _spoil_spool(world, tear_one)


@_FIRST.add(15, 0.5, 1.5, _spooling)
def turned_spool(world: World) -> None:
    """Service and agent are killed, and a byte of a file of the spool is another."""
    _spoil_spool(world, lambda path: _turn_a_byte(world, path))


@_FIRST.alone(4)
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


@_FIRST.add(5, 3.0, 15.0, service_hooks=SLOW_DISK)
def slow_disk(world: World) -> None:
    """The disk of the service syncs in 5 s and reads 1 MB/s; kill -9 of the service besides."""
    world.restart_service()


@_FIRST.add(4, 0.5, 1.5)
def two_agents(world: World) -> None:
    """A second agent of the same name follows the same files for a while."""
    other = world.start_agent()
    world.pause(2, 4)
    other.end()


@_FIRST.add(10, 0.2, 1.0)
def two_services(world: World) -> None:
    """A second service is started on the same folder: it must refuse."""
    other = world.start_service()
    world.wait_for(lambda: not other.is_running, 120)
    if other.status in (0, None):
        world.note += f" the second service ended with {other.status};"
        other.kill()


@_MORE.add(12, 0.3, 1.0, _exporting)
def bad_exports(world: World) -> None:
    """Exports appear that shrink, vanish while they are read, or are never finished."""
    exports = world.folder / "exports"
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


@_MORE.add(4, 0.5, 1.5, rate=5_000, agent=("--window-bytes", "262144"))
def slow_service(world: World) -> None:
    """The service stands still for 2 to 5 s at 5,000 operations/s; its agent holds a window of 256 KiB."""
    world.service.signal(signal.SIGSTOP)
    world.pause(2, 5)
    world.service.signal(signal.SIGCONT)


@_LAST.alone(1)
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


@_over_wire(6)
def pulled_cable(world: World, wire: Wire) -> None:
    """The cable between agent and service is out for 3 to 25 s: TCP sends again, or the agent gives up after 20 s."""
    wire.pull()
    world.pause(3, 25)
    wire.plug()


@_over_wire(6)
def pulled_and_killed(world: World, wire: Wire) -> None:
    """The cable is out while the service is killed and started anew: the agent's connection is half open."""
    wire.pull()
    world.restart_service()
    world.pause(1, 8)
    wire.plug()


@_over_wire(6)
def bad_wire(world: World, wire: Wire) -> None:
    """Segments are late and lost for 5 to 15 s (netem: disordered and doubled too); the service is killed meanwhile."""
    how = wire.spoil()
    if f"by {how}" not in world.note:
        world.note += f" by {how};"
    world.pause(2, 7)
    world.restart_service()
    world.pause(3, 8)
    wire.mend()


FAULTS: Final = Faults({**_FIRST, **LOGS, **_MORE, **SPOOLED, **HOSTILE, **_WIRE, **_LAST})


def run(name: str, folder: Path, times: int | None = None) -> Result:
    """One fault in a folder that is made.

    Raises:
        NotHereError: it needs a network that this machine does not give.
    """
    fault, usual = FAULTS[name]
    folder.mkdir(parents=True, exist_ok=True)
    return fault(folder, usual if times is None else times)
