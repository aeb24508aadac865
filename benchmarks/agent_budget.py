"""CPU, memory and bytes of an agent: `python -m benchmarks.agent_budget [--seconds 20] [--files 8] [--shuffled]
[--rates 100 1000 5000 20000]`.

For each rate a process writes so many operation lines a second in all to so many files, with time stamps and 5 % TUNING
lines, the operations in recurring or, with `--shuffled`, in random order, and a real agent process follows them and
sends to a service that only counts. The writer works in bursts ten times a second, each line by a write of its own as
NCCL does, and measures how many lines a second it writes within bursts. First the agent works for so many seconds: its
processor time (user and system), its memory, what it read and what of that came from the disk, and what it sent. Then,
for as long, it is stopped (SIGSTOP) for a second and works for the next, in turn: the writer's rates with and without
it are of one run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import anyio
import structlog
from benchmarks.freshness import resident_mib

from ncclscope_service.intake.receive import Received, Receiver
from ncclscope_service.serve.listen import Listener, ListenSettings

WARM_UP_SECONDS = 3.0
TURN_SECONDS = 1.0
BURSTS_PER_SECOND = 10
MOST_TEMPLATES = 500
"""Of a file; fewer at low rates, so that all have come when it is measured."""
TUNING_EVERY = 20


def write(folder: Path, *, files: int, rate: int, shuffled: bool) -> None:
    """Grows the files until it is ended; prints when each burst began, and its lines a second."""
    with ExitStack() as open_files:
        streams = [
            open_files.enter_context((folder / f"nccl.{number}.log").open("ab", buffering=0)) for number in range(files)
        ]
        templates = min(MOST_TEMPLATES, max(1, int(rate * WARM_UP_SECONDS / files)))
        number, began, order = 0, time.monotonic(), random.Random(5)
        while True:
            wanted = max(number, int((time.monotonic() - began) * rate))
            texts = [
                (streams[at % files], text)
                for at in range(number, wanted)
                for text in texts_of(
                    at, at % files, order.randrange(templates) if shuffled else at // files % templates
                )
            ]
            number, burst_at = wanted, time.perf_counter()
            for stream, text in texts:
                stream.write(text)
            took = time.perf_counter() - burst_at
            if texts:
                print(time.monotonic(), len(texts) / took, flush=True)
            time.sleep(1 / BURSTS_PER_SECOND)


def texts_of(number: int, file: int, template: int) -> Iterator[bytes]:
    """The COLL line of that number, and now and then the TUNING line behind it."""
    operation = operation_line(file, template)
    yield operation
    if number % TUNING_EVERY == 0:
        tuning = b"AllReduce: %d Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}\n" % (4 * (1024 + template))
        yield operation.partition(b"AllReduce: ")[0] + tuning


def operation_line(file: int, template: int) -> bytes:
    """A line of one operation, stamped now; its opCount is the time in microseconds."""
    now_us = time.time_ns() // 1000
    stamp = datetime.fromtimestamp(now_us / 1e6, UTC).strftime("[%Y-%m-%d %H:%M:%S.%f] ")
    return (
        f"{stamp}node17:{41822 + file}:{41903 + file} [{file}] NCCL INFO AllReduce: opCount {now_us:x} "
        f"sendbuff {0x7F2A40000000 + template * 512:#x} recvbuff {0x7F2A80000000 + template * 512:#x} "
        f"count {1024 + template} datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\n"
    ).encode()


@dataclass(slots=True)
class Counted:
    """Rows that the service was given."""

    operations: int = 0

    async def deliver(self, received: Received) -> None:
        """Counts a batch."""
        self.operations += len(received.batch.operations)


@dataclass(frozen=True, slots=True)
class Usage:
    """Time and memory that a process has used since its start."""

    cpu_seconds: float
    read_bytes: int
    disk_bytes: int


def usage_of(process: int) -> Usage:
    """*Source:* proc(5): schedstat of each thread in ns, rchar and read_bytes of io."""
    threads = Path(f"/proc/{process}/task").iterdir()
    cpu_ns = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
    io = dict(row.split(": ") for row in Path(f"/proc/{process}/io").read_text().splitlines())
    return Usage(cpu_ns / 1e9, int(io["rchar"]), int(io["read_bytes"]))


async def measure(folder: Path, rate: int, given: argparse.Namespace) -> str:
    """One row of the table."""
    counted, receiver, row = Counted(), Receiver(), ""
    async with anyio.create_task_group() as tasks:
        port: int = await tasks.start(Listener(receiver, counted.deliver, ListenSettings(port=0)).run)
        agent = [sys.executable, "-m", "ncclscope", "agent", "--logs", f"{folder}/*.log"]
        writer = [sys.executable, "-m", "benchmarks.agent_budget", "--write", str(folder), "--rates", str(rate)]
        writer += [f"--files={given.files}", *(["--shuffled"] if given.shuffled else [])]
        writing = await anyio.open_process(writer, stderr=None)
        following = await anyio.open_process(
            [*agent, "--connect", f"127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            await anyio.sleep(2 * WARM_UP_SECONDS)  # it starts, too
            spent = await work(following.pid, given.seconds, counted, receiver)
            turns = await take_turns(following.pid, given.seconds)
            writing.terminate()
            assert writing.stdout is not None
            said = b"".join([part async for part in writing.stdout])
            with_agent, without = writer_rates(said, turns)
            row = f"{spent.row()} | {with_agent:,.0f} | {without:,.0f} | {with_agent / without:.3f} |"
        finally:
            for process in (writing, following):
                process.kill()
                await process.wait()
        tasks.cancel_scope.cancel()
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Time and memory that an agent used in some seconds."""

    seconds: float
    cpu_seconds: float
    rss_bytes: int
    read_bytes: int
    disk_bytes: int
    wire_bytes: int
    operations: int

    def row(self) -> str:
        """The agent's cells."""
        return (
            f"| {self.operations / self.seconds:,.0f} | {100 * self.cpu_seconds / self.seconds:.2f} "
            f"| {self.rss_bytes / 1e6:.0f} | {self.read_bytes / self.seconds / 1e3:,.0f} "
            f"| {self.disk_bytes / self.seconds / 1e3:,.0f} | {self.wire_bytes / self.seconds / 1e3:,.1f} "
            f"| {self.wire_bytes / max(1, self.operations):.1f}"
        )


async def work(process: int, seconds: float, counted: Counted, receiver: Receiver) -> Spent:
    """Lets the agent work for so long."""
    before, began = usage_of(process), time.monotonic()
    operations, wire_bytes = counted.operations, receiver.statistics().bytes_total
    await anyio.sleep(seconds)
    after, ended = usage_of(process), time.monotonic()
    return Spent(
        seconds=ended - began,
        cpu_seconds=after.cpu_seconds - before.cpu_seconds,
        rss_bytes=round(resident_mib(process) * 2**20),
        read_bytes=after.read_bytes - before.read_bytes,
        disk_bytes=after.disk_bytes - before.disk_bytes,
        wire_bytes=receiver.statistics().bytes_total - wire_bytes,
        operations=counted.operations - operations,
    )


async def take_turns(process: int, seconds: float) -> list[float]:
    """Stops the agent and lets it go on, for so long; when it did each (monotonic), the stop first."""
    turns: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for sent in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(process, sent)
            turns.append(time.monotonic())
            await anyio.sleep(TURN_SECONDS)
    return turns


def writer_rates(said: bytes, turns: Sequence[float]) -> tuple[float, float]:
    """The writer's median lines a second within bursts, with the agent and without it."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for row in said.decode().splitlines()[:-1]:
        at, rate = map(float, row.split())
        turn = bisect(turns, at)
        if 0 < turn < len(turns):
            rates[turn % 2 == 0].append(rate)
    return statistics.median(rates[True]), statistics.median(rates[False])


def main() -> None:
    """Prints the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=20)
    arguments.add_argument("--files", type=int, default=8)
    arguments.add_argument("--rates", type=int, nargs="+", default=[100, 1000, 5000, 20_000])
    arguments.add_argument("--shuffled", action="store_true", help="operations recur in no order")
    arguments.add_argument("--write", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    if given.write:
        write(Path(given.write), files=given.files, rate=given.rates[0], shuffled=given.shuffled)
    print(
        "| operations/s | CPU of a core, % | RSS, MB | read, kB/s | from disk, kB/s | wire, kB/s "
        "| wire, bytes/operation | written with the agent, lines/s | without | ratio |"
    )
    print("|---:" * 10 + "|")
    for rate in given.rates:
        with tempfile.TemporaryDirectory() as folder:
            print(anyio.run(partial(measure, Path(folder), rate, given)))


if __name__ == "__main__":
    main()
