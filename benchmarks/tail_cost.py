"""What it costs to tail: `python benchmarks/tail_cost.py [--seconds 20] [--files 8] [--rate 5000] [--templates 500]`.

A process writes so many operation lines a second in all to so many files, each line by a write of its own as NCCL
does, without and with time stamps; every file has so many templates that recur, in the same order each time or, with
`--shuffled`, in a random one. It is followed once by the agent's follower alone, at the pauses that the agent makes,
and once by a whole agent process that sends to a service that only counts. Processor time (user and system) and
memory are of the process that follows, after a warm-up of 3 s. The delay is from a line's write to its batch: behind
`poll` for the follower, at the service for the agent. A line tells by its opCount when it was written.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import anyio
import numpy as np
from numpy.typing import NDArray

from ncclscope_agent.app import Followed, next_pause
from ncclscope_agent.config import AgentSettings
from ncclscope_agent.following import FollowedLogs
from ncclscope_agent.health import resident_bytes
from ncclscope_service.listen import Listener, ListenSettings
from ncclscope_service.receive import Received, Receiver
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import AgentHealth

WARM_UP_SECONDS = 3.0
WRITES_EVERY_SECONDS = 0.002


@dataclass(slots=True)
class Seen:
    """The batches that came, once warm."""

    is_warm: bool = False
    operations: int = 0
    batches: int = 0
    delays_us: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])

    def add(self, batch: Batch) -> None:
        """Counts a batch that is here now."""
        if self.is_warm and len(batch.operations):
            self.batches += 1
            self.operations += len(batch.operations)
            self.delays_us.append(time.time_ns() // 1000 - batch.operations["op_count"].astype(np.int64))

    async def deliver(self, received: Received) -> None:
        """The same, for a service."""
        self.add(received.batch)

    def row(self, name: str, cpu_seconds: float, rss_bytes: int, seconds: float) -> str:
        """One row of the table."""
        p50, p99 = np.percentile(np.concatenate(self.delays_us), [50, 99]) / 1e3
        return (
            f"| {name} | {self.operations / seconds:,.0f} | {self.batches / seconds:.0f} "
            f"| {100 * cpu_seconds / seconds:.2f} | {rss_bytes / 1e6:.0f} | {p50:.0f} | {p99:.0f} |"
        )


def write(given: argparse.Namespace) -> None:
    """Grows the files evenly until it is ended; they stay open, as NCCL keeps them."""
    streams = [(Path(given.write) / f"nccl.{number}.log").open("ab", buffering=0) for number in range(given.files)]
    began, number, order = time.monotonic(), 0, random.Random(5)
    while True:
        wanted = int((time.monotonic() - began) * given.rate)
        for number in range(number, wanted):  # noqa: B020 - goes on where it ended
            file, place = number % given.files, number // given.files
            template = order.randrange(given.templates) if given.shuffled else place % given.templates
            streams[file].write(line(file, template, with_stamp=given.stamps))
        number = wanted
        time.sleep(WRITES_EVERY_SECONDS)


def line(file: int, template: int, *, with_stamp: bool) -> bytes:
    """One COLL line, written now."""
    now_us = time.time_ns() // 1000
    stamp = datetime.fromtimestamp(now_us / 1e6, UTC).strftime("[%Y-%m-%d %H:%M:%S.%f] ") if with_stamp else ""
    return (
        f"{stamp}node17:{41822 + file}:{41903 + file} [{file}] NCCL INFO AllReduce: opCount {now_us:x} "
        f"sendbuff {0x7F2A40000000 + template * 512:#x} recvbuff {0x7F2A80000000 + template * 512:#x} "
        f"count {1024 + template} datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\n"
    ).encode()


@contextmanager
def written(given: argparse.Namespace, *, stamps: bool) -> Generator[str, None, None]:
    """A pattern of files that grow until this is left."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = [f"--{name}={getattr(given, name)}" for name in ("files", "rate", "templates")]
        flags = [*(["--stamps"] if stamps else []), *(["--shuffled"] if given.shuffled else [])]
        command = [sys.executable, __file__, "--write", folder, *numbers, *flags]
        process = subprocess.Popen(command)
        try:
            yield f"{folder}/*.log"
        finally:
            process.terminate()
            process.wait()


def follow(pattern: str, name: str, seconds: float) -> str:
    """What the follower takes in this process."""
    settings = AgentSettings()
    logs = FollowedLogs([pattern])
    known = Followed(
        follower=logs,
        tick_min_seconds=settings.tick_min_seconds,
        tick_max_seconds=settings.tick_max_seconds,
        look=logs.look,
        gather_seconds=settings.gather_seconds,
    )
    seen, pause = Seen(), known.tick_min_seconds
    with logs.watch:
        begin = cpu_before = 0.0
        warm_at = time.monotonic() + WARM_UP_SECONDS
        while (now := time.monotonic()) < warm_at + seconds:
            if not seen.is_warm and now >= warm_at:
                seen.is_warm, begin, cpu_before = True, now, time.process_time()
            busy = time.thread_time()
            batches = list(logs.poll(time.time_ns()))
            busy = time.thread_time() - busy
            for batch in batches:
                seen.add(batch)
            pause = next_pause(pause, known, read_something=bool(batches), busy_seconds=busy)
            wait_for(logs, pause, settings.tick_max_seconds)
        return seen.row(name, time.process_time() - cpu_before, resident_bytes(), time.monotonic() - begin)


def wait_for(logs: FollowedLogs, seconds: float, tick_seconds: float) -> None:
    """Waits, and looks ahead meanwhile."""
    while seconds > tick_seconds:
        time.sleep(tick_seconds)
        seconds -= tick_seconds
        if logs.look(time.time_ns()):
            return
    time.sleep(seconds)


async def run_agent(pattern: str, name: str, seconds: float) -> str:
    """What a whole agent takes, in its own process."""
    seen, receiver, row = Seen(), Receiver(), ""
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(Listener(receiver, seen.deliver, ListenSettings(port=0)).run)
        command = [sys.executable, "-m", "ncclscope", "agent", "--logs", pattern, "--connect", f"127.0.0.1:{port}"]
        process = await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            await anyio.sleep(2 * WARM_UP_SECONDS)  # it starts, too
            before, begin, seen.is_warm = health_of(receiver), time.monotonic(), True
            await anyio.sleep(seconds)
            after, end, seen.is_warm = health_of(receiver), time.monotonic(), False
            row = seen.row(name, after.cpu_seconds - before.cpu_seconds, after.rss_bytes, end - begin)
        finally:
            process.terminate()
        await process.wait()
        tasks.cancel_scope.cancel()
    return row


def health_of(receiver: Receiver) -> AgentHealth:
    """What the agent said last: heartbeats come every second, so the share is exact to one in `seconds`."""
    health = receiver.agents()[0].health
    assert health is not None, "the agent said nothing yet"
    return health


def main() -> None:
    """Prints the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=20)
    arguments.add_argument("--files", type=int, default=8)
    arguments.add_argument("--rate", type=int, default=5000)
    arguments.add_argument("--templates", type=int, default=500)
    arguments.add_argument("--shuffled", action="store_true", help="no iteration recurs")
    arguments.add_argument("--only", choices=["follower", "agent"])
    arguments.add_argument("--write", help=argparse.SUPPRESS)
    arguments.add_argument("--stamps", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.write:
        write(given)
    print("| what | operations/s | batches/s | CPU of a core, % | RSS, MB | delay p50, ms | p99, ms |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for stamps in (False, True):
        ending = ", stamps" if stamps else ""
        if given.only != "agent":
            with written(given, stamps=stamps) as pattern:
                print(follow(pattern, "follower" + ending, given.seconds))
        if given.only != "follower":
            with written(given, stamps=stamps) as pattern:
                print(anyio.run(run_agent, pattern, "agent" + ending, given.seconds))


if __name__ == "__main__":
    main()
