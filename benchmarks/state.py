"""python -m benchmarks.state [--gigabytes 1]: for how long work stands still while the state is written.

A service's state of that size (operations, kernels and strings) is written by a process of its own, as the service
does, while work goes on that changes 5,000 of the newest 30 % of rows in a slice. Beside it, what a copy takes that a
thread could write instead: into memory that is asked for meanwhile, and into memory that was made ready beforehand.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import anyio
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ncclscope_service.kept import Kept
from ncclscope_service.persistence import Persistence, PersistenceSettings
from ncclscope_service.pipeline import PipelineSettings
from ncclscope_service.state_classes import classes_of
from ncclscope_service.state_writer import Writer

_AT_ONCE: Final = 100_000
_STRINGS: Final = 200_000
_SLICE_ROWS: Final = 5_000
_PAUSE_SECONDS: Final = 0.01
_ALONE_SECONDS: Final = 5.0


@dataclass(slots=True)
class Slices:
    """Work in slices, as a service's passes are."""

    kept: Kept
    at: int = 0
    seconds: list[float] = field(default_factory=list[float])

    def work(self) -> None:
        """One slice."""
        began = time.perf_counter()
        rows = self.kept.pipeline.store.operations.rows
        oldest = len(rows) * 7 // 10
        places = oldest + (self.at + np.arange(_SLICE_ROWS)) % (len(rows) - oldest)
        rows["finished"][places] ^= True
        self.at += _SLICE_ROWS
        self.seconds.append(time.perf_counter() - began)

    async def while_(self, goes_on: Callable[[], bool]) -> str:
        """Works until then; gives the columns of the table."""
        self.seconds.clear()
        before = resource.getrusage(resource.RUSAGE_SELF)
        while goes_on():
            self.work()
            await anyio.sleep(_PAUSE_SECONDS)
        after = resource.getrusage(resource.RUSAGE_SELF)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        slices = 1e3 * np.percentile(self.seconds, [50, 99, 100])
        cpu = 1e3 * spent / len(self.seconds)
        return f"{slices[0]:.1f} | {slices[1]:.1f} | {slices[2]:.0f} | {cpu:.1f} |"


def fill(kept: Kept, size: int) -> None:
    """Gives the state so many bytes."""
    store = kept.pipeline.store
    while store.table_bytes() < size:
        for table in (store.operations, store.kernels):
            table.append(np.zeros(_AT_ONCE, table.dtype))
    for number in range(_STRINGS):
        store.strings.index_of(f"what {number} is called")


def copied(kept: Kept, *, is_ready: bool) -> float:
    """The seconds of a copy of the state; `is_ready`: the memory for it is there before."""
    room = np.empty(2 * kept.pipeline.store.table_bytes() if is_ready else 0, np.uint8)
    room.fill(0)
    began = time.perf_counter()
    writer = Writer(classes_of(Kept.__module__), ())
    writer.node(kept, "Kept")
    end, copies = 0, list[NDArray[np.uint8]]()
    for each in writer.arrays:
        begin, end = end, end + len(each)
        copies.append(room[begin:end] if is_ready else np.empty(len(each), np.uint8))
        copies[-1][:] = np.frombuffer(each, np.uint8)
    return time.perf_counter() - began


async def measure(folder: Path, size: int) -> None:
    """Prints the tables."""
    persistence = Persistence(folder, PersistenceSettings())
    kept = persistence.open(PipelineSettings(), {}, lambda _: None, 1)
    fill(kept, size)
    pa.array(range(1000))  # its threads are there, as in a service
    slices = Slices(kept)
    print("| | slice of work, ms: median | p99 | most | CPU of one, ms |\n|---|---:|---:|---:|---:|")
    until = time.monotonic() + _ALONE_SECONDS
    print(f"| nothing beside it | {await slices.while_(lambda: time.monotonic() < until)}")
    pauses = list[float]()
    for turn in ("first", "second"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(persistence.write_state, kept)
            written = persistence.health().state_seconds
            print(
                f"| a state is written, {turn} time | "
                f"{await slices.while_(lambda: persistence.health().state_seconds == written)}"  # noqa: B023
            )
        health = persistence.health()
        assert not health.trouble, health.trouble
        pauses.append(health.pause_seconds or 0.0)
        print(f"|  | (in {health.state_seconds or 0.0:.1f} s) | | | |")
    fresh, ready = (copied(kept, is_ready=is_ready) for is_ready in (False, True))
    mib = (persistence.health().state_bytes or 0) / 2**20
    pause = max(pauses)
    print("\n| state | stands still for a process, ms | for a copy, ms | times | with memory made ready, ms | times |")
    print("|---:|---:|---:|---:|---:|---:|")
    print(
        f"| {mib:,.0f} MiB | {' '.join(f'{1e3 * each:.0f}' for each in pauses)} "
        f"| {1e3 * fresh:,.0f} | {fresh / pause:.0f} | {1e3 * ready:,.0f} | {ready / pause:.0f} |"
    )
    persistence.journal.close()
    persistence.release()


def main() -> None:
    """Fills a state, and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        anyio.run(measure, Path(folder), round(given.gigabytes * 2**30))


if __name__ == "__main__":
    main()
