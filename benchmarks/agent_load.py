"""python benchmarks/agent_load.py [--seconds 15] [--files 8] [--rate 5000] [--spool]: what an agent costs its node.

A real agent process follows files that grow by so many operation lines a second in all, and sends to a service that
only counts. CPU share and memory are the agent's own, from its heartbeats, between the second and the last. The
delay is from before a line's write to the receipt of its batch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import numpy as np

from ncclscope_service.listen import Listener, ListenSettings
from ncclscope_service.receive import Received, Receiver
from ncclscope_wire.messages import AgentHealth

LINE = (
    "node17:41822:41903 [2] NCCL INFO AllReduce: opCount {number:x} sendbuff {buffer:#x} recvbuff {buffer:#x} "
    "count 1048576 datatype 9 op 0 root 0 comm 0x55d0c8b3e2a0 [nranks=8] stream 0x55d0c7f01b10\n"
)
TEMPLATES = 64
WRITES_PER_SECOND = 100
WARM_UP_SECONDS = 6
"""It starts, too."""
LAST_WORDS_SECONDS = 10


@dataclass(slots=True)
class Seen:
    """What the service was given."""

    operations: int = 0
    batches: int = 0
    delays_ns: list[int] = field(default_factory=list[int])
    written_at_ns: dict[int, int] = field(default_factory=dict[int, int])
    """Number of the last line of a write to when it was written."""

    async def deliver(self, received: Received) -> None:
        """Counts a batch, and how long its lines took."""
        now_ns = time.time_ns()
        self.operations += len(received.batch.operations)
        self.batches += 1
        for number in np.intersect1d(received.batch.operations["op_count"], list(self.written_at_ns)).tolist():
            self.delays_ns.append(now_ns - self.written_at_ns.pop(number))


class Writer:
    """Grows files evenly; they stay open, as NCCL keeps them."""

    def __init__(self, folder: Path, seen: Seen, *, files: int, rate: int) -> None:
        self._streams = [(folder / f"nccl.{number}.log").open("ab", buffering=0) for number in range(files)]
        self._seen = seen
        self._rate = rate
        self.written = 0

    async def run(self, seconds: float) -> float:
        """Writes for so long; returns how long it took."""
        began, before = time.monotonic(), self.written
        while (elapsed := time.monotonic() - began) < seconds:
            share = (round(self._rate * elapsed) - (self.written - before)) // len(self._streams)
            for stream in self._streams if share > 0 else ():
                stream.write(b"".join(self._line() for _ in range(share)))
                self._seen.written_at_ns[self.written] = time.time_ns()
            await anyio.sleep(1 / WRITES_PER_SECOND)
        return time.monotonic() - began

    def close(self) -> None:
        """Closes the files."""
        for stream in self._streams:
            stream.close()

    def _line(self) -> bytes:
        self.written += 1
        return LINE.format(number=self.written, buffer=0x7F2A40000000 + self.written % TEMPLATES * 512).encode()


async def measure(folder: Path, port: int, receiver: Receiver, seen: Seen, given: argparse.Namespace) -> str:
    """One line of the table."""
    writer = Writer(folder, seen, files=given.files, rate=given.rate)
    agent = [sys.executable, "-m", "ncclscope", "agent", "--logs", f"{folder}/*.log"]
    agent += ["--spool", f"{folder}/spool"] if given.spool else []
    async with running([*agent, "--connect", f"127.0.0.1:{port}"]):
        await writer.run(WARM_UP_SECONDS)
        before = health_of(receiver)
        bytes_before, operations_before = receiver.statistics().bytes_total, seen.operations
        seen.delays_ns.clear()
        seconds = await writer.run(given.seconds)
        writer.close()
        await anyio.sleep(1.2)
        after = health_of(receiver)
    sent_bytes = receiver.statistics().bytes_total - bytes_before
    delays = np.percentile(seen.delays_ns, [50, 99]) / 1e6
    return (
        f"| {given.rate} | {given.files} | {100 * (after.cpu_seconds - before.cpu_seconds) / seconds:.2f} "
        f"| {after.rss_bytes / 1e6:.0f} | {sent_bytes / max(1, seen.operations - operations_before):.1f} "
        f"| {delays[0]:.0f} | {delays[1]:.0f} | {writer.written - seen.operations} |"
    )


@asynccontextmanager
async def running(command: Sequence[str]) -> AsyncGenerator[None, None]:
    """A process that is ended whatever happens: anyio's own block would wait for it for ever."""
    process = await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(LAST_WORDS_SECONDS):
                await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()


def health_of(receiver: Receiver) -> AgentHealth:
    """What the agent said last."""
    health = receiver.agents()[0].health
    assert health is not None, "the agent said nothing yet"
    return health


async def main(given: argparse.Namespace) -> None:
    """Runs it and prints the table."""
    seen, receiver = Seen(), Receiver()
    print("| lines/s | files | CPU of a core, % | RSS, MB | bytes of an operation | delay p50, ms | p99, ms | lost |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        async with anyio.create_task_group() as tasks:
            port: int = await tasks.start(Listener(receiver, seen.deliver, ListenSettings(port=0)).run)
            print(await measure(Path(folder), port, receiver, seen, given))
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=15)
    arguments.add_argument("--files", type=int, default=8)
    arguments.add_argument("--rate", type=int, default=5000)
    arguments.add_argument("--spool", action="store_true", help="the agent has a spool")
    anyio.run(main, arguments.parse_args())
