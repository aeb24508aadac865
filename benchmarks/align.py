"""Operations aligned per second on one core, and exact-pair F1 under losses, beside a global Needleman-Wunsch.

    python benchmarks/align.py            # up to 1e6 operations
    python benchmarks/align.py --full     # up to 3e6

The baseline is that of a published thesis tool: names only, match 5, mismatch -15, gap -5 growing by 0.3 of itself
with the length of the run, weights 1 (AllReduce), 2 (other collectives), 0.5 (Send, Recv), run bonus 1.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(_ROOT / part) for part in ("agents", "service", "tests")]

from align_samples import Sample, align_whole, f1, lose, training  # noqa: E402

from ncclscope_service.align import ProcessAligner  # noqa: E402
from ncclscope_service.kernel_name import KernelClass, operation_class  # noqa: E402
from ncclscope_wire.batch import Columns  # noqa: E402
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS  # noqa: E402

_BLOCK = 65_536


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--full", action="store_true", help="up to 3e6 operations")
    arguments = parser.parse_args()
    sizes = (100_000, 300_000, 1_000_000, 3_000_000) if arguments.full else (100_000, 300_000, 1_000_000)
    print_speed(sizes)
    print_quality()


def print_speed(sizes: tuple[int, ...]) -> None:
    """Operations per second, clean and with 1 % of both sides lost, with and without stamps, in blocks of 65,536."""
    print(f"{'case':<34}{'operations':>12}{'seconds':>10}{'per second':>14}{'F1':>9}{'RSS MiB':>9}")
    for name, version, stamps in (("2.21, order only", "2.21.5", False), ("2.28, stamps", "2.28.3", True)):
        for loss in (0.0, 0.01):
            for size in sizes:
                sample = lose(_large(size, version, stamps=stamps), np.random.default_rng(5), lines=loss, kernels=loss)
                begin = time.process_time()
                matches = _align_in_blocks(version, sample)
                seconds = time.process_time() - begin
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                case = f"{name}, {loss:.0%} lost"
                amount = len(sample.operations)
                score = f1(sample, matches)
                print(f"{case:<34}{amount:>12,}{seconds:>10.2f}{amount / seconds:>14,.0f}{score:>9.4f}{memory:>9}")


def print_quality() -> None:
    """Exact-pair F1 of this aligner and of the baseline, by what is lost, on a job with three streams."""
    print()
    print(f"{'lost':<28}{'baseline':>10}{'order':>10}{'stamps':>10}")
    for lines, kernels in ((0.0, 0.0), (0.0, 0.2), (0.2, 0.0), (0.2, 0.2)):
        scores = np.zeros(3)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            recorder = training(rng, 12, counts=False)
            plain, stamped = (recorder.sample(stamps=stamps, groups=True) for stamps in (False, True))
            losses = {"lines": lines, "kernels": kernels}
            plain = lose(plain, np.random.default_rng(seed), **losses)
            stamped = lose(stamped, np.random.default_rng(seed), **losses)
            scores += (
                baseline_f1(plain),
                f1(plain, align_whole("2.28.3", plain)),
                f1(stamped, align_whole("2.28.3", stamped)),
            )
        baseline, order, stamps_score = scores / 3
        print(f"{f'{lines:.0%} lines, {kernels:.0%} kernels':<28}{baseline:>10.3f}{order:>10.3f}{stamps_score:>10.3f}")


def _large(size: int, version: str, *, stamps: bool) -> Sample:
    """A job of about that many operations: 200 iterations, repeated."""
    one = training(np.random.default_rng(3), 200, counts=version < "2.27").sample(stamps=stamps, groups=False)
    repeats = max(1, round(size / len(one.operations)))
    operations, kernels = np.tile(one.operations, repeats), np.tile(one.kernels, repeats)
    turn = np.repeat(np.arange(repeats), len(one.operations))
    kernel_turn = np.repeat(np.arange(repeats), len(one.kernels))
    span_ns = int(one.kernels["end_ns"].max() - one.kernels["launch_start_ns"].min()) + 1_000_000
    operations["id"] += turn * len(one.operations)
    for member in np.unique(one.operations["member"]).tolist():
        of_member = operations["member"] == member
        launched = np.unique(one.truth[(one.operations["member"] == member) & (one.truth >= 0)])
        if version < "2.27":
            operations["op_count"][of_member] += (turn[of_member] * len(launched)).astype(np.uint64)
    stamped = operations["logged_at_ns"] != NO_TIME_NS
    operations["logged_at_ns"][stamped] += (turn * span_ns)[stamped]
    kernels["id"] += kernel_turn * len(one.kernels)
    kernels["correlation_id"] += kernel_turn * 10 * len(one.kernels)
    for name in ("launch_start_ns", "start_ns", "end_ns"):
        kernels[name] += kernel_turn * span_ns
    truth = np.tile(one.truth, repeats)
    truth[truth >= 0] += (turn * len(one.kernels))[truth >= 0]
    return Sample(operations, kernels, truth)


def _align_in_blocks(version: str, sample: Sample) -> Columns:
    aligner = ProcessAligner(version)
    decided = []
    for begin in range(0, max(len(sample.operations), len(sample.kernels)), _BLOCK):
        aligner.feed_operations(sample.operations[begin : begin + _BLOCK])
        aligner.feed_kernels(sample.kernels[begin : begin + _BLOCK])
        decided.append(aligner.advance(final=False))
    decided.append(aligner.advance(final=True))
    return np.concatenate(decided)


def baseline_f1(sample: Sample) -> float:
    """The thesis's method on all of a process, names only: one operation to one kernel."""
    operations = sample.operations
    names = np.array([int(operation_class(op)) for op in operations["op"].tolist()])
    kernels = sample.kernels["kernel_class"].astype(np.int64)
    rows, columns = _global_alignment(kernels, names)
    right = np.count_nonzero(sample.truth[operations["id"][columns]] == sample.kernels["id"][rows])
    wanted = np.count_nonzero(sample.truth[operations["id"]] != NO_NUMBER)
    return 2 * right / (len(rows) + wanted)


def _weights(classes: NDArray[np.int64]) -> NDArray[np.float64]:
    weights = np.full(len(classes), 2.0)
    weights[classes == KernelClass.ALL_REDUCE] = 1.0
    weights[classes == KernelClass.SEND_RECV] = 0.5
    return weights


def _global_alignment(kernels: NDArray[np.int64], names: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Needleman-Wunsch with the thesis's scores, cell by cell: its gap grows with the run that led to the cell."""
    own, other = _weights(kernels), _weights(names)
    height, width = len(kernels), len(names)
    score = np.zeros((height + 1, width + 1))
    step = np.zeros((height + 1, width + 1), dtype=np.int8)
    gaps = np.zeros((2, width + 1), dtype=np.int64)
    for column in range(1, width + 1):
        score[0, column], step[0, column], gaps[0, column] = -5 * column, 2, column
    for row in range(1, height + 1):
        score[row, 0], step[row, 0], gaps[1, 0] = -5 * row, 1, row
        for column in range(1, width + 1):
            same = kernels[row - 1] == names[column - 1]
            pair = 5 * own[row - 1] if same else -7.5 * (own[row - 1] + other[column - 1])
            pair += score[row - 1, column - 1] + (1 if same and step[row - 1, column - 1] == 0 else 0)
            up = score[row - 1, column] - 5 * (1 + 0.3 * gaps[0, column])
            left = score[row, column - 1] - 5 * (1 + 0.3 * gaps[1, column - 1])
            best = max(pair, up, left)
            score[row, column] = best
            step[row, column] = 0 if best == pair else 1 if best == up else 2
            gaps[1, column] = 0 if best == pair else 1 + (gaps[0, column] if best == up else gaps[1, column - 1])
        gaps[0] = gaps[1]
    return _traced(step, kernels, names)


def _traced(
    step: NDArray[np.int8], kernels: NDArray[np.int64], names: NDArray[np.int64]
) -> tuple[list[int], list[int]]:
    rows: list[int] = []
    columns: list[int] = []
    row, column = len(kernels), len(names)
    while row > 0 and column > 0:
        if step[row, column] == 0:
            row, column = row - 1, column - 1
            if kernels[row] == names[column]:
                rows.append(row)
                columns.append(column)
        elif step[row, column] == 1:
            row -= 1
        else:
            column -= 1
    return rows, columns


if __name__ == "__main__":
    main()
