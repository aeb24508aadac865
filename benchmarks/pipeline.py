"""python -m benchmarks.pipeline [--iterations 100] [--ranks 8] [--unstamped]: operations per second through the stages.

A simulated job is written to disk and read into batches first; what is timed is the pipeline alone, three times, and
the median counts: the first pass of a process also imports and warms up. Three more passes tell what of it are
aligning, joining and measuring, clocks included, without intake, series and detectors: the fastest counts. Three more,
in turns with these, leave everything to the careful aligners. Then its state is kept and restored. `--unstamped`:
lines have no stamps, and 1 % of the lines is lost.
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

from ncclscope_service.align.certain_pairing import CertainPairing
from ncclscope_service.columns.table import Ids
from ncclscope_service.pipeline import Pipeline
from ncclscope_simulator import SimulationConfig, write
from ncclscope_simulator.faults import parse_faults
from ncclscope_wire.batch import Batch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_PASSES = 3


class _Timed(Pipeline):
    """Adds up the CPU time of aligning, joining and measuring."""

    own_seconds: float = 0.0
    align_seconds: float = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._measurement.report_operations = self._timed(self._measurement.report_operations)  # type: ignore[method-assign]
        self._measurement.process_joined = self._timed(self._measurement.process_joined)  # type: ignore[method-assign]

    def _align(self, now_ns: int, *, final: bool) -> Ids:
        before = self.own_seconds
        operations = self._timed(super()._align)(now_ns, final=final)
        self.align_seconds += self.own_seconds - before
        return operations

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
    parser.add_argument("--ranks", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--unstamped", action="store_true")
    given = parser.parse_args()
    nodes = given.ranks // 4
    job = SimulationConfig(
        nccl="2.28.3",
        iterations=given.iterations,
        nodes=nodes,
        dp=nodes,
        timestamps=not given.unstamped,
        faults=parse_faults(["drop_lines:ratio=0.01"]) if given.unstamped else (),
    )
    with tempfile.TemporaryDirectory() as folder:
        write(job, Path(folder))
        batches = read(Path(folder))
    print("| operations | CPU s | operations/s/core | matched | peak RSS |\n|---:|---:|---:|---:|---:|")
    pipeline, times = Pipeline(), list[float]()
    for _ in range(_PASSES):
        pipeline = Pipeline()
        times.append(run(batches, pipeline))
    seconds = median(times)
    operations = pipeline.store.operations.rows
    matched = int((operations["match"] == 1).sum())
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    amount = len(operations)
    print(f"| {amount} | {seconds:.2f} | {amount / seconds:,.0f} | {matched} | {peak_mib:.0f} MiB |")
    _print_own(batches, amount)
    print("\n| state | making bytes, CPU s | restore, CPU s |\n|---:|---:|---:|")
    began = time.process_time()
    kept = pipeline.snapshot()
    made = time.process_time()
    Pipeline.restore(kept)
    after = time.process_time()
    print(f"| {len(kept) / 2**20:.0f} MiB | {made - began:.2f} | {after - made:.2f} |")


def _print_own(batches: list[Batch], amount: int) -> None:
    """Aligning, joining and measuring alone: with what is certain decided first, and by the careful aligners alone."""
    print("\n| operations/s/core | align | align, join and measure |\n|---|---:|---:|")
    pair = CertainPairing.pair
    passes: dict[str, list[_Timed]] = {"certain first": [], "careful alone": []}
    for _ in range(_PASSES):
        for name, timed in passes.items():
            CertainPairing.pair = pair if name == "certain first" else _pair_nothing  # type: ignore[method-assign, assignment]
            timed.append(_Timed())
            run(batches, timed[-1])
    CertainPairing.pair = pair  # type: ignore[method-assign]
    for name, timed in passes.items():
        align, own = min(each.align_seconds for each in timed), min(each.own_seconds for each in timed)
        print(f"| {name} | {amount / align:,.0f} | {amount / own:,.0f} |")


def _pair_nothing(*_: object, is_last: bool) -> None:
    """In place of the certain pass."""


def run(batches: list[Batch], pipeline: Pipeline) -> float:
    """The CPU seconds of one pass."""
    began = time.process_time()
    for batch in batches:
        pipeline.ingest_batch(batch, agent="a", session="s", job="j")
    pipeline.finish(time.time_ns())
    return time.process_time() - began


if __name__ == "__main__":
    main()
