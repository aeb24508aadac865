"""python benchmarks/journal.py [--seconds 5]: what the journal costs, and how long batches wait for it.

Batches of a given size are appended at a given rate to a journal on this machine's disk, with and without fdatasync.
The wait is from the append of a batch until it may be acknowledged. CPU includes the writing thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import numpy as np

from ncclscope_service.journal import Journal, JournalSettings
from ncclscope_service.journal_entry import BatchTaken
from ncclscope_service.journal_segment import read_segment

SHAPES = ((100, 5_000), (1_000, 2_500), (1_000, 25_000))
"""(batches a second, bytes of one): 10,000 operations a second are about 260 kB/s."""


@dataclass(slots=True)
class Waits:
    """When each batch was appended, and how long each waited."""

    appended_at: dict[int, float] = field(default_factory=dict[int, float])
    seconds: list[float] = field(default_factory=list[float])

    def on_kept(self, number: int) -> None:
        """All up to this one are on disk."""
        now = time.monotonic()
        for each in [each for each in self.appended_at if each <= number]:
            self.seconds.append(now - self.appended_at.pop(each))


async def measure(folder: Path, rate: int, size: int, *, sync: bool, seconds: float) -> str:
    """One line of the table."""
    waits = Waits()
    journal = Journal(folder, era="x", next_number=1, settings=JournalSettings(sync=sync), on_kept=waits.on_kept)
    payload = np.random.default_rng(1).bytes(size)
    cpu = time.process_time()
    began = time.monotonic()
    appended = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(journal.run)
        while (elapsed := time.monotonic() - began) < seconds:
            while appended < elapsed * rate:
                number = journal.append(BatchTaken(agent="agent", session="session", payload=payload, at_ns=appended))
                waits.appended_at[number] = time.monotonic()
                appended += 1
            await anyio.sleep(0.005)
        while waits.appended_at:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    journal.close()
    used = time.process_time() - cpu
    reading = _read(folder, appended)
    waited = np.percentile(waits.seconds, [50, 99]) * 1e3
    return (
        f"| {rate} | {size} | {'yes' if sync else 'no'} | {1e6 * used / appended:.0f} | {100 * used / seconds:.1f} "
        f"| {waited[0]:.0f} | {waited[1]:.0f} | {appended * size / max(reading, 1e-9) / 1e6:,.0f} |"
    )


def _read(folder: Path, appended: int) -> float:
    """CPU seconds of reading all that was written."""
    began = time.process_time()
    read = sum(len(read_segment(path.read_bytes()).records) for path in folder.glob("*.journal"))
    assert read == appended, "the journal does not give back what was written"
    return time.process_time() - began


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    print("| batches/s | bytes | fsync | CPU of a batch, us | of a core, % | wait p50, ms | p99, ms | reading, MB/s |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|")
    for rate, size in SHAPES:
        for sync in (True, False):
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                print(anyio.run(partial(measure, Path(folder), rate, size, sync=sync, seconds=given.seconds)))


if __name__ == "__main__":
    main()
