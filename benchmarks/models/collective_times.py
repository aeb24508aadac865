"""How well the time of a collective is foretold from other sizes, and from other numbers of ranks. All of it is real.

Curves: runs of nccl-tests that nobody here made, out of place and in place, of seven sizes or more. Ranks: AllReduce
inside a node of A100 with a switch, and of V100 without one, as vTrain published them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from benchmarks.models import corpora, vtrain
from numpy.typing import NDArray

from ncclscope_models.textbook import allreduce_wire
from ncclscope_models.transfer_curve import fit_line, transfer_curve
from ncclscope_models.transfer_estimate import WIDTHS, Basis
from ncclscope_service.nccl.nccl_tests import NcclTests

_LEAST_SIZES = 7
_HELD_OUT = (1, 2, 3)

Sizes = Sequence[float]
Floats = NDArray[np.float64]


def main() -> None:
    """Prints the tables."""
    curves = nccl_tests_curves(corpora.folder("nccl_tests"))
    points = sum(len(sizes) for sizes, _ in curves)
    print(f"\n{len(curves)} curves of nccl-tests, {points} points: error of a size from the others (%)\n")
    print("| left out | n | curve median | p90 | one line (alpha-beta) median | p90 |\n|---|---|---|---|---|---|")
    print(_row("one size between others", [leave_one_out(*each) for each in curves]))
    for held in _HELD_OUT:
        found = [_beyond(*each, held) for each in curves if len(each[0]) - held >= _LEAST_SIZES - 1]
        print(_row(f"the largest {held}: error of the last", found))
    inside = [[log_error for log_error, _ in _log_errors(leave_one_out(*each))] for each in curves]
    beyond = [
        [log_error for held in _HELD_OUT for log_error, _ in _log_errors(_beyond(*each, held))]
        for each in curves
        if len(each[0]) - max(_HELD_OUT) >= _LEAST_SIZES - 1
    ]
    print("\nAllReduce in one node from one rank fewer and one more, at equal wire bytes (%)\n")
    print("| GPU | ranks | sizes | median | p90 |\n|---|---|---|---|---|")
    by_gpu: dict[str, list[list[float]]] = {"a100": [], "v100": []}
    for gpu, errors in by_gpu.items():
        times = vtrain.allreduce_times(corpora.folder("measured_runs"), gpu)
        for ranks in list(times)[1:]:
            forecast, usable = from_neighbours(times, ranks)
            off = np.abs(forecast / times[ranks][1] - 1)[usable]
            print(f"| {gpu.upper()} | {ranks} | {len(off)} | {_share(off, 0.5)} | {_share(off, 0.9)} |")
            errors.append(np.log1p(off).tolist())
    print("\nIntervals of 80 %: half-width from one half of the curves, and how much of the other half lies inside\n")
    print("| basis | forecasts | half-width (%) | covers (%) | half-width in use (%) |\n|---|---|---|---|---|")
    for basis, forecasts in ((Basis.SIZES, inside), (Basis.BEYOND_SIZES, beyond), (Basis.RANKS, by_gpu["a100"][:-1])):
        print(_interval_row(basis, forecasts))


def nccl_tests_curves(folder: Path) -> list[tuple[Sizes, Sizes]]:
    """Sizes in ascending order and seconds; of a size that was run twice the last counts."""
    found: list[tuple[Sizes, Sizes]] = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SOURCE.txt"):
        for table in NcclTests(path.name).benchmarks(path.read_text(errors="replace").splitlines()):
            for measured in ([row.out_of_place for row in table.rows], [row.in_place for row in table.rows]):
                seconds = {
                    row.message_bytes: one.time_ns / 1e9
                    for row, one in zip(table.rows, measured, strict=True)
                    if one is not None and one.time_ns > 0 and row.message_bytes > 0
                }
                if len(seconds) >= _LEAST_SIZES:
                    found.append((sorted(seconds), [seconds[size] for size in sorted(seconds)]))
    return found


def leave_one_out(sizes: Sizes, seconds: Sizes) -> list[tuple[float, float]]:
    """Errors of the curve and of one line, for each size but the first and the last."""
    found: list[tuple[float, float]] = []
    for at in range(1, len(sizes) - 1):
        others, times = [*sizes[:at], *sizes[at + 1 :]], [*seconds[:at], *seconds[at + 1 :]]
        found.append(_both(others, times, sizes[at], seconds[at]))
    return found


def _beyond(sizes: Sizes, seconds: Sizes, held: int) -> list[tuple[float, float]]:
    return [_both(sizes[:-held], seconds[:-held], sizes[-1], seconds[-1])]


def _both(sizes: Sizes, seconds: Sizes, asked: float, truth: float) -> tuple[float, float]:
    forecasts: tuple[Callable[[float], Floats], ...] = (
        transfer_curve(sizes, seconds).seconds,
        fit_line(sizes, seconds).seconds,
    )
    curve, line = (abs(float(forecast(asked)) / truth - 1) for forecast in forecasts)
    return curve, line


def from_neighbours(times: dict[int, tuple[Floats, Floats]], ranks: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Seconds of all sizes of so many ranks, and which of them both neighbours have at equal wire bytes.

    The largest number of ranks has two below it.
    """
    fewer, more = (ranks - 1, ranks + 1) if ranks + 1 in times else (ranks - 2, ranks - 1)
    sizes, _ = times[ranks]
    known: list[Floats] = []
    usable = np.ones(len(sizes), bool)
    for other in (fewer, more):
        same = sizes * allreduce_wire(1, ranks) / allreduce_wire(1, other)
        curve = transfer_curve(times[other][0].tolist(), times[other][1].tolist())
        usable &= curve.holds(same)
        known.append(curve.seconds(same))
    return known[0] + (known[1] - known[0]) * (ranks - fewer) / (more - fewer), usable


def _log_errors(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(float(np.log1p(curve)), float(np.log1p(line))) for curve, line in pairs]


def _interval_row(basis: Basis, errors: list[list[float]]) -> str:
    """Halves are of whole curves: neighbours on one are not foretold by each other."""
    halves = [np.concatenate([np.asarray(each) for each in errors[at::2]]) for at in (0, 1)]
    widths = [float(np.quantile(half, 0.8)) for half in halves]
    inside = sum(int((half <= width).sum()) for half, width in zip(halves, reversed(widths), strict=True))
    total = sum(map(len, halves))
    found = " and ".join(f"{100 * np.expm1(width):.1f}" for width in widths)
    return f"| {basis} | {total} | {found} | {100 * inside / total:.0f} | {100 * np.expm1(WIDTHS[basis]):.1f} |"


def _row(name: str, errors: list[list[tuple[float, float]]]) -> str:
    pairs = np.array([pair for each in errors for pair in each])
    cells = [_share(pairs[:, at], quantile) for at in (0, 1) for quantile in (0.5, 0.9)]
    return f"| {name} | {len(pairs)} | {' | '.join(cells)} |"


def _share(errors: Floats, quantile: float) -> str:
    return f"{100 * np.quantile(errors, quantile):.1f}"
