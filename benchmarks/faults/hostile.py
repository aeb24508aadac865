"""Faults that somebody makes on purpose, or that are too much of what is usual: nobody else may lose by them."""

from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.faults.processes import Running
from benchmarks.faults.world import Faults, Result, World, repeated
from benchmarks.hostile_writer import hostile_lines

from ncclscope_service.intake.limits import TOO_MANY_NAMES

_HOSTILE_LINES_PER_SECOND: Final = 20_000
_BURST_SECONDS: Final = 4.0
_OVERLOAD_SECONDS: Final = 10.0
_OVERLOAD_RATE: Final = 8_000


HOSTILE: Final = Faults()


@HOSTILE.alone(2)
def hostile_writer(folder: Path, times: int) -> Result:
    """Another agent, with its own token, sends names without end (20,000 lines/s for 4 s); kill -9 of the service."""
    tokens = {who: f"{who}-token-0123456789" for who in ("honest", "evil")}
    folder.mkdir(parents=True, exist_ok=True)
    for who, token in tokens.items():
        (folder / f"{who}.token").write_text(token)
    jobs = {"honest": "default", "evil": "evil"}
    listed = folder / "agent-tokens"
    listed.write_text("".join(f"{token} name={who} job={jobs[who]}\n" for who, token in tokens.items()))
    (folder / "evil").mkdir()
    log = folder / "evil" / "nccl.log"
    log.touch()
    world = World(
        folder,
        serve=("--state-every", "0.1", "--agent-tokens", str(listed)),
        agent=("--token-file", str(folder / "honest.token")),
    )
    lines = hostile_lines()
    evil = Running(
        ["agent", "--logs", f"{folder}/evil/*.log", "--connect", f"127.0.0.1:{world.agents_port}", "--job", "evil",
         "--name", "evil", "--token-file", str(folder / "evil.token")],
        folder / "evil.out",
    )  # fmt: skip

    def burst(known: World) -> None:
        with log.open("a") as stream:
            for _ in range(int(_BURST_SECONDS * 10)):
                stream.writelines(itertools.islice(lines, _HOSTILE_LINES_PER_SECOND // 10))
                stream.flush()
                time.sleep(0.1)
        if not known.wait_for(lambda: TOO_MANY_NAMES in known.gaps(), 60):
            known.note += " names over the limits were not told;"
        known.restart_service()

    try:
        result = repeated(world, times, burst, 0.5, 1.5)
    finally:
        evil.end(60)
    return result


@HOSTILE.add(2, 0.5, 1.5, rate=_OVERLOAD_RATE, agent=("--window-bytes", "262144"))
def overload(world: World) -> None:
    """For 10 s the service gets a tenth of a core, at 8,000 operations/s: what it has no time for waits in the logs."""
    until = time.monotonic() + _OVERLOAD_SECONDS
    while time.monotonic() < until:
        world.service.signal(signal.SIGSTOP)
        time.sleep(0.45)
        world.service.signal(signal.SIGCONT)
        time.sleep(0.05)


@HOSTILE.alone(10)
def released_logs(folder: Path, times: int) -> Result:
    """Logs are released as they are read, links among them lead to another's file; kill -9 of the agent."""
    folder.mkdir(parents=True, exist_ok=True)
    victim = folder / "victim"
    content = (b"what somebody else wrote\n" * 40 + b"node1:1:1 [0] NCCL INFO AllReduce: opCount 0\n") * 1_000
    victim.write_bytes(content)
    world = World(folder, agent=("--release-logs", "--release-owner", str(os.getuid())))

    def link(known: World) -> None:
        (known.writer.folder / f"nccl.{known.times}.log.link").symlink_to(victim)
        known.pause(0.2, 0.8)
        known.restart_agent()

    result = repeated(world, times, link, 0.5, 1.5)
    looked_at = [path.stat() for path in world.writer.folder.glob("nccl.*.log")]
    released = sum(max(0, each.st_size - 512 * each.st_blocks) for each in looked_at)
    changed = "" if victim.read_bytes() == content else " **the other's file was changed**;"
    return replace(result, note=f"{result.note}{changed} {released / 1e6:.0f} MB were released".strip())
