"""How right findings, and pairs of line and kernel, are at the confidence that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.rows import Match
from ncclscope_wire.terms import NO_NUMBER

Told = NDArray[np.float64]
"""Rows of (confidence, 1 if right)."""
HEADER: Final = """\
| mode | findings | mean confidence | right | error | pairs | mean confidence | right | error | in step | error |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""
_PAIRED: Final = ("line", "start_ns", "confidence")


class Truth(NamedTuple):
    """Of operations whose line was written and whose kernel was recorded whole."""

    started_ns: dict[tuple[str, int], int]
    """By log and line: when its kernel started, on its host's clock."""
    places: dict[tuple[str, int], int]
    """By log and line: how many lines of its step come before it."""


def truth_of(folder: Path) -> Truth:
    """The files that the simulator wrote of a job."""
    names = ("log_file", "log_line", "start_ns", "kernel_cut", "line_lost", "iteration")
    rows = pq.read_table(folder / "truth" / "operations.parquet", columns=list(names)).to_pydict()
    begins: dict[tuple[str, int], int] = {}
    started, places = dict[tuple[str, int], int](), dict[tuple[str, int], int]()
    for log, line, start, is_cut, is_lost, step in sorted(
        row for row in zip(*(rows[name] for name in names), strict=True) if row[0] is not None and row[1] is not None
    ):
        if not is_lost:
            places[log, line] = line - begins.setdefault((log, step), line)
            if start is not None and not is_cut:
                started[log, line] = start
    return Truth(started, places)


def pairs_of(pipeline: Pipeline, truth: Truth) -> Told:
    """Rows of (confidence, 1 if right, 1 if right or right but for whole steps) of the pairs that a pipeline made."""
    table = pipeline.store.operations.rows[:]
    rows = table[(table["match"] == Match.MATCHED) & (table["kernel"] != NO_NUMBER)]
    logs = [pipeline.store.sources[source].source.name for source in rows["source"].tolist()]
    of_kernels: dict[tuple[str, int], set[int]] = {}
    for (log, line), start in truth.started_ns.items():
        of_kernels.setdefault((log, start), set()).add(truth.places[log, line])
    told: list[tuple[float, bool, bool]] = []
    for log, line, start, confidence in zip(logs, *(rows[name].tolist() for name in _PAIRED), strict=True):
        if (log, line) in truth.started_ns:
            in_step = truth.places[log, line] in of_kernels.get((log, start), ())
            told.append((confidence, truth.started_ns[log, line] == start, in_step))
    return np.asarray(told, np.float64).reshape(-1, 3)


_BINS: Final = np.array([0.0, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.995, 1.01])


def reliability(said: Told) -> list[str]:
    """How many, their mean confidence, the share that is right, and the expected calibration error."""
    if not len(said):
        return ["0", "-", "-", "-"]
    return [f"{len(said):,}", *(f"{value:.3f}" for value in (*said.mean(axis=0), calibration_error(said)))]


def calibration_error(said: Told) -> float:
    """Mean distance of confidence and share that is right, by bins of confidence, weighted by what is in them."""
    place = np.digitize(said[:, 0], _BINS)
    amounts = np.bincount(place)
    confidence, right = (np.bincount(place, said[:, column]) for column in (0, 1))
    used = amounts > 0
    return float(np.abs(confidence[used] - right[used]).sum() / len(said))


def row(name: str, said: Told, pairs: Told) -> str:
    """A row of the table: findings, and pairs with a third column, 1 if right but for whole steps."""
    cells = [name, *reliability(said), *reliability(pairs[:, :2]), *reliability(pairs[:, [0, 2]])[2:]]
    return f"| {' | '.join(cells)} |"
