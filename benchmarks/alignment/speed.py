"""Operations aligned per second on one core, with peak memory, fed in portions as captures come.

A job of 200 iterations (TP, PP and DP on three streams, two threads) is repeated; no row is kept once it was fed. Each
row of the table is measured in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "tests"))

from align_samples import Sample, training

from ncclscope_service.align.process_aligner import ProcessAligner
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

SIZES: Final = (100_000, 1_000_000, 10_000_000)
CASES: Final = (("2.21, order only", "2.21.5", False), ("2.28, stamps", "2.28.3", True))


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement."""

    operations: int
    seconds: float
    """CPU time of the aligner alone."""
    f1: float
    peak_bytes: int
    """Of the whole process, numpy and the aligner's code included."""

    @property
    def per_second(self) -> float:
        """Operations per second."""
        return self.operations / self.seconds


def print_speed(*, short: bool = False) -> None:
    """Clean and with 1 % of both sides lost, with and without stamps."""
    print("| case | lost | operations | seconds | per second | to the first | F1 | peak MiB |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for name, version, stamps in CASES:
        for loss in (0.0, 0.01):
            first: float | None = None
            for size in SIZES[:2] if short else SIZES:
                found = measured_apart(version, size, loss, stamps=stamps)
                first = first or found.per_second
                print(
                    f"| {name} | {loss:.0%} | {found.operations:,} | {found.seconds:.2f} | {found.per_second:,.0f}"
                    f" | {found.per_second / first:.2f} | {found.f1:.4f} | {found.peak_bytes >> 20} |",
                    flush=True,
                )


def measured_apart(version: str, size: int, loss: float, *, stamps: bool) -> Speed:
    """`measured` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, version, size, loss, stamps=stamps).result()


def measured(version: str, size: int, loss: float, *, stamps: bool) -> Speed:
    """Aligns about that many operations, a portion of some ten thousand after the other."""
    counts = int(version.split(".")[1]) < 27
    one = training(np.random.default_rng(3), 200, counts=counts).sample(stamps=stamps, groups=False)
    repeats = max(1, round(size / len(one.operations)))
    rng = np.random.default_rng(5)
    aligner, seconds = ProcessAligner(version), 0.0
    tally = _Tally(one, repeats)
    for operations, kernels in _portions(one, repeats, counts=counts):
        left = tally.lose(operations, kernels, rng, loss)
        begin = time.process_time()
        aligner.ingest_operations(left[0])
        aligner.ingest_kernels(left[1])
        matches = aligner.align_ready(final=False)
        seconds += time.process_time() - begin
        tally.take(matches)
    begin = time.process_time()
    matches = aligner.align_ready(final=True)
    seconds += time.process_time() - begin
    tally.take(matches)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Speed(repeats * len(one.operations), seconds, tally.f1, peak_bytes)


class _Tally:
    """Right pairs, by arithmetic on ids: one bit a row is all that is kept of what was fed."""

    def __init__(self, one: Sample, repeats: int) -> None:
        self._one = one
        self._kernels_left = np.zeros(repeats * len(one.kernels), dtype=bool)
        self._lines_left = np.zeros(repeats * len(one.operations), dtype=bool)
        self._right = self._given = 0

    def lose(
        self, operations: Columns, kernels: Columns, rng: np.random.Generator, loss: float
    ) -> tuple[Columns, Columns]:
        """What is left of a portion."""
        operations = operations[rng.random(len(operations)) >= loss]
        kernels = kernels[rng.random(len(kernels)) >= loss]
        self._lines_left[operations["id"]] = self._kernels_left[kernels["id"]] = True
        return operations, kernels

    def take(self, matches: Columns) -> None:
        """Counts what was decided."""
        found = matches[matches["kernel"] != NO_NUMBER]
        self._given += len(found)
        self._right += int(np.count_nonzero(self._kernel_of(found["operation"]) == found["kernel"]))

    @property
    def f1(self) -> float:
        """Of exact pairs."""
        kernels = self._kernel_of(np.flatnonzero(self._lines_left))
        wanted = int(np.count_nonzero(self._kernels_left[kernels[kernels != NO_NUMBER]]))
        return 2 * self._right / (self._given + wanted) if wanted else 1.0

    def _kernel_of(self, operations: NDArray[np.int64]) -> NDArray[np.int64]:
        turn, place = np.divmod(operations, len(self._one.operations))
        kernel = self._one.truth[place]
        shifted: NDArray[np.int64] = np.where(kernel == NO_NUMBER, NO_NUMBER, kernel + turn * len(self._one.kernels))
        return shifted


def _portions(one: Sample, repeats: int, *, counts: bool) -> Iterator[tuple[Columns, Columns]]:
    """The job again and again, each time later, with ids and opCounts that go on."""
    span_ns = int(one.kernels["end_ns"].max() - one.kernels["launch_start_ns"].min()) + 1_000_000
    members = one.operations["member"]
    launched = {
        member: len(np.unique(one.truth[(members == member) & (one.truth >= 0)]))
        for member in np.unique(members).tolist()
    }
    steps = np.array([launched[member] for member in members.tolist()], dtype=np.uint64)
    stamped = one.operations["logged_at_ns"] != NO_TIME_NS
    for turn in range(repeats):
        operations, kernels = one.operations.copy(), one.kernels.copy()
        operations["id"] += turn * len(operations)
        if counts:
            operations["op_count"] += np.uint64(turn) * steps
        operations["logged_at_ns"][stamped] += turn * span_ns
        kernels["id"] += turn * len(kernels)
        kernels["correlation_id"] += turn * 10 * len(kernels)
        for name in ("launch_start_ns", "start_ns", "end_ns"):
            kernels[name] += turn * span_ns
        yield operations, kernels
