"""How fast `analyze` goes from files to files, and where its time goes.

    python -m benchmarks.analyze [--steps 120] [--jobs 1 2]

A simulated job of 8 ranks (TP, PP and DP; stamped logs, exports of nsys). First the whole command, imports included,
with each number of jobs. Then its parts one after the other in one process. CPU seconds are of all processes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq
from benchmarks.jobs import read_exports, read_logs
from benchmarks.pipeline import run

from ncclscope_service.export.directory import WRITERS, content_of
from ncclscope_service.export.selection import select
from ncclscope_service.export.terminal import terminal_report
from ncclscope_service.pipeline import Pipeline
from ncclscope_simulator import SimulationConfig, write

_T = TypeVar("_T")


def whole(job: Path, out: Path, jobs: int) -> tuple[float, float]:
    """CPU and wall-clock seconds of the command."""
    before, began = os.times(), time.monotonic()
    command = [sys.executable, "-m", "ncclscope", "analyze", str(job / "logs"), str(job / "nsys")]
    subprocess.run([*command, "--out", str(out), "--jobs", str(jobs)], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return spent, time.monotonic() - began


def parts(job: Path, out: Path) -> dict[str, float]:
    """The CPU seconds of each part."""
    seconds: dict[str, float] = {}

    def timed(part: str, work: Callable[[], _T]) -> _T:
        began = time.process_time()
        done = work()
        seconds[part] = time.process_time() - began
        return done

    batches = [*timed("read logs", lambda: read_logs(job)).values()]
    batches += timed("read exports", lambda: read_exports(job)).values()
    pipeline = Pipeline()
    timed("pipeline", lambda: run([batch for found in batches for batch in found], pipeline))
    content = content_of(select(pipeline.store))
    timed("sums", lambda: (content.totals, content.traffic, content.last_operations))
    for name, write_file in WRITERS.items():
        timed(name, partial(write_file, content, out / name))
    timed("terminal", lambda: terminal_report(content.selection, content.totals))
    return seconds


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder) / "job", Path(folder) / "out"
        write(SimulationConfig(nccl="2.28.3", iterations=given.steps), job)
        spent = {jobs: whole(job, out, jobs) for jobs in given.jobs}
        operations = pq.read_metadata(out / "operations.parquet").num_rows
        print("| part | CPU s | operations/CPU s | wall s | operations/s |\n|---|---:|---:|---:|---:|")
        for jobs, (cpu, wall) in spent.items():
            rates = f"{operations / cpu:,.0f} | {wall:.2f} | {operations / wall:,.0f}"
            print(f"| all of it, --jobs {jobs} | {cpu:.2f} | {rates} |")
        for part, cpu in parts(job, out).items():
            print(f"| {part} | {cpu:.2f} | {operations / max(cpu, 1e-3):,.0f} | | |")


if __name__ == "__main__":
    main()
