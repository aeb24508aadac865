"""How fast the output files are written, and how large they are.

    python -m benchmarks.export_files [--operations 100000] [--only trace] [--out DIR]

A simulated job of 16 ranks on 4 hosts (TP inside a host, DP across) of about that many operations, read as `analyze`
reads it. Prints a table; seconds are of the processor.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.alignment.jobs import simulated

from ncclscope.offline import run_offline
from ncclscope_service.export.directory import WRITERS, Content
from ncclscope_service.export.selection import select
from ncclscope_service.export.tables.traffic_file import measure_traffic
from ncclscope_service.export.totals import totals
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_service.store.tables import Store
from ncclscope_simulator import SimulationConfig

OPERATIONS_PER_STEP: Final = 1_328


def simulated_run(operations: int) -> Store:
    """A job of about that many operations as `analyze` has it in memory."""
    steps = max(1, round(operations / OPERATIONS_PER_STEP))
    config = SimulationConfig(nodes=4, gpus=4, tp=4, pp=1, dp=4, iterations=steps)
    with simulated(config) as job:
        run = run_offline([job / "logs", job / "nsys"], job="benchmark", settings=PipelineSettings())
    return run.pipeline.store


def measure(operations: int, out: Path, only: str) -> None:
    """Writes every file once and prints how much processor time each took."""
    store = simulated_run(operations)
    writers = {name: write for name, write in WRITERS.items() if only in name}
    count = len(store.operations)
    begin = time.process_time()
    selection = select(store)
    content = Content(selection, totals(selection), measure_traffic(selection))
    print(f"{count:,} operations, {len(store.kernels):,} kernels; sums {time.process_time() - begin:.2f} s")
    print(f"{'file':<24}{'seconds':>9}{'operations/s':>15}{'MB':>9}{'B/operation':>13}{'peak RSS MB':>13}")
    for name, write in writers.items():
        begin = time.process_time()
        result = write(content, out / name)
        seconds = time.process_time() - begin
        size = (out / name).stat().st_size
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{name:<24}{seconds:>9.2f}{count / seconds:>15,.0f}{size / 1e6:>9.2f}{size / count:>13.1f}{peak:>13.0f}")
        if name.startswith("trace."):
            print(f"  {result} {getattr(result, 'events', 0) / seconds:,.0f} events/s")


def main() -> None:
    """Reads the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--only", default="", help="files whose name contains this")
    parser.add_argument("--out", type=Path, help="keep the files here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        measure(arguments.operations, out, arguments.only)


if __name__ == "__main__":
    main()
