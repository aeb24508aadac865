"""python -m benchmarks.pipeline [--iterations 100]: operations per second through intake, align, join and measure.

A simulated job of 8 ranks is written to disk and read into batches first; what is timed is the pipeline alone, three
times, and the median counts: the first pass of a process also imports and warms up. One more pass tells what of it are
aligning, joining and measuring, clocks included, without intake, series and detectors. Then its state is kept and
restored.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar

from benchmarks.jobs import read

from ncclscope_service.columns.table import Ids
from ncclscope_service.pipeline import Pipeline
from ncclscope_simulator import SimulationConfig, write
from ncclscope_wire.batch import Batch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_PASSES = 3


class _Timed(Pipeline):
    """Adds up the CPU time of aligning, joining and measuring."""

    own_seconds: float = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._measurement.report_operations = self._timed(self._measurement.report_operations)  # type: ignore[method-assign]
        self._measurement.process_joined = self._timed(self._measurement.process_joined)  # type: ignore[method-assign]

    def _align(self, now_ns: int, *, final: bool) -> Ids:
        return self._timed(super()._align)(now_ns, final=final)

    def _timed(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        def timed(*args: _P.args, **named: _P.kwargs) -> _T:
            began = time.process_time()
            try:
                return call(*args, **named)
            finally:
                self.own_seconds += time.process_time() - began

        return timed


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(SimulationConfig(nccl="2.28.3", iterations=given.iterations), Path(folder))
        batches = read(Path(folder))
    print("| operations | CPU s | operations/s/core | of align, join and measure alone | matched | peak RSS |")
    print("|---:|---:|---:|---:|---:|---:|")
    pipeline, times = Pipeline(), list[float]()
    for _ in range(_PASSES):
        pipeline = Pipeline()
        times.append(run(batches, pipeline))
    seconds = median(times)
    operations = pipeline.store.operations.rows
    matched = int((operations["match"] == 1).sum())
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    timed = _Timed()
    run(batches, timed)
    amount = len(operations)
    print(
        f"| {amount} | {seconds:.2f} | {amount / seconds:,.0f} | {amount / timed.own_seconds:,.0f} | {matched} "
        f"| {peak_mib:.0f} MiB |"
    )
    print("\n| state | making bytes, CPU s | restore, CPU s |\n|---:|---:|---:|")
    began = time.process_time()
    kept = pipeline.snapshot()
    made = time.process_time()
    Pipeline.restore(kept)
    after = time.process_time()
    print(f"| {len(kept) / 2**20:.0f} MiB | {made - began:.2f} | {after - made:.2f} |")


def run(batches: list[Batch], pipeline: Pipeline) -> float:
    """The CPU seconds of one pass."""
    began = time.process_time()
    for batch in batches:
        pipeline.ingest_batch(batch, agent="a", session="s", job="j")
    pipeline.finish(time.time_ns())
    return time.process_time() - began


if __name__ == "__main__":
    main()
