"""python -m benchmarks.spool_cost [--seconds 40] [--files 8] [--rate 5000]: what a spool costs an agent.

Two agents follow the same files at the same time, one with a spool and one without, each with a service of its own that
only counts. The share of a core is the agents' own, from their heartbeats. Then both services go away for `--away`
seconds, and the table says how fast the agent with the spool has handed over what it kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import anyio
from benchmarks.agent_load import WARM_UP_SECONDS, Seen, Writer, health_of, running

from ncclscope_service.listen import Listener, ListenSettings
from ncclscope_service.receive import Receiver

HAND_OVER_SECONDS = 60
"""An agent that has not handed over by then never does."""


class Side:
    """One agent's service."""

    def __init__(self) -> None:
        self.receiver = Receiver()
        self.seen = Seen()
        self.port = 0
        self._scope = anyio.CancelScope()

    async def start(self, tasks: anyio.abc.TaskGroup) -> None:
        """Serves, on the port that it had."""
        self.port = await tasks.start(self._serve)

    def stop(self) -> None:
        """Is away."""
        self._scope.cancel()

    async def _serve(self, *, task_status: anyio.abc.TaskStatus[int]) -> None:
        with anyio.CancelScope() as self._scope:
            await Listener(self.receiver, self.seen.deliver, ListenSettings(port=self.port)).run(
                task_status=task_status
            )


async def measure(folder: Path, sides: tuple[Side, Side], given: argparse.Namespace, tasks: anyio.abc.TaskGroup) -> str:
    """One line of the table."""
    logs = folder / "logs"
    logs.mkdir()
    writer = Writer(logs, Seen(), files=given.files, rate=given.rate)
    agent = [sys.executable, "-m", "ncclscope", "agent", "--logs", f"{logs}/*.log", "--retry-seconds", "0.25"]
    connects = [["--connect", f"127.0.0.1:{side.port}"] for side in sides]
    spool = ["--spool", f"{folder}/spool"]
    async with running([*agent, *connects[0]]), running([*agent, *connects[1], *spool]):
        await writer.run(WARM_UP_SECONDS)
        while any(not side.receiver.agents() or side.receiver.agents()[0].health is None for side in sides):
            await writer.run(1)  # on a busy machine they start slowly
        before = [health_of(side.receiver).cpu_seconds for side in sides]
        seconds = await writer.run(given.seconds)
        await anyio.sleep(1.2)
        after = [health_of(side.receiver) for side in sides]
        shares = [100 * (now.cpu_seconds - then) / seconds for now, then in zip(after, before, strict=True)]
        kept, rate = await outage(writer, sides[1], given, tasks)
        writer.close()
    return (
        f"| {given.rate} | {given.files} | {shares[0]:.2f} | {shares[1]:.2f} | {_more(shares):+.0f} "
        f"| {after[0].rss_bytes / 1e6:.0f} | {after[1].rss_bytes / 1e6:.0f} | {kept} | {rate:,.0f} |"
    )


def _more(shares: list[float]) -> float:
    """By what the second is more than the first, in percent."""
    return 100 * (shares[1] / shares[0] - 1)


async def outage(
    writer: Writer, side: Side, given: argparse.Namespace, tasks: anyio.abc.TaskGroup
) -> tuple[int, float]:
    """Operations that were kept while the service was away, and how many of them a second it got afterwards."""
    side.stop()
    kept = side.seen.operations
    await writer.run(given.away)
    kept = writer.written - kept
    await side.start(tasks)
    began = time.monotonic()
    while side.seen.operations < writer.written:  # (what counts is not ours to change)
        if time.monotonic() - began > HAND_OVER_SECONDS:
            missing = writer.written - side.seen.operations
            raise SystemExit(
                f"{missing} of {writer.written} operations have not come {HAND_OVER_SECONDS} s after the outage"
            )
        await anyio.sleep(0.01)
    return kept, kept / (time.monotonic() - began)


async def main(given: argparse.Namespace) -> None:
    """Runs it and prints the table."""
    print(
        "| lines/s | files | CPU of a core without, % | with, % | more, % | RSS without, MB | with, MB "
        "| operations kept | handed over per second |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        async with anyio.create_task_group() as tasks:
            sides = Side(), Side()
            for side in sides:
                await side.start(tasks)
            print(await measure(Path(folder), sides, given, tasks))
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=40)
    arguments.add_argument("--away", type=float, default=20)
    arguments.add_argument("--files", type=int, default=8)
    arguments.add_argument("--rate", type=int, default=5000)
    anyio.run(main, arguments.parse_args())
