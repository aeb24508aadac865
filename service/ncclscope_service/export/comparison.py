"""Two runs side by side: what differs between them by more than each differs from itself.

A run's own noise is estimated from the run: its samples are cut in time into blocks, and the scatter of the blocks'
medians says how much the figure moves when nothing is changed. A difference counts as a change if it is more than
three times the noise of both together, and large enough to matter.
"""

# pyright: reportUnknownParameterType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportAttributeAccessIssue=false
# (pyarrow carries no types, and pyarrow.compute makes its functions as it is imported)
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.export.tables.operations_file import operation_column
from ncclscope_service.nccl.bandwidth import SIZE_CLASSES, classify
from ncclscope_wire.errors import FormatError

BLOCKS: Final = 8
MIN_IN_BLOCK: Final = 3
"""Samples without which a block's median says nothing."""

NOISE_FACTOR: Final = 3.0
MIN_RELATIVE: Final = 0.02
"""Smaller relative differences are no change, however sure they are."""

MIN_SHARE: Final = 0.01
"""The same for shares (of waiting), as a difference."""

MAX_SAMPLES: Final = 1 << 17
"""Samples of one key that are kept; beyond, every second is dropped, again and again. Sums stay exact."""

MAX_ITERATIONS: Final = 4096
"""Iterations of which operations and bytes are kept, the first."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Key by which calls of both runs are compared."""

    parallelism: str
    """Empty if it is not known."""
    op: str
    size_class: str


@dataclass(slots=True)
class Sample:
    """All calls of one key in one run."""

    operations: int = 0
    bytes: int = 0
    duration_ns: int = 0
    """Kernel time of those operations whose duration is known, each launch once."""
    by_iteration: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Iteration to operations and bytes."""
    _columns: list[Floats] = field(default_factory=list[Floats])
    _kept: int = 0
    _stride: int = 1

    def add(self, columns: Floats) -> None:
        """Adds measured launches: rows of time in ns, busbw, wait in ns, duration in ns; NaN if unknown."""
        self._columns.append(columns[:, :: self._stride])
        self._kept += self._columns[-1].shape[1]
        while self._kept > MAX_SAMPLES:
            self._stride *= 2
            self._columns = [np.concatenate(self._columns, axis=1)[:, ::2]]
            self._kept = self._columns[0].shape[1]

    def measured(self) -> Floats:
        """The launches in order of time."""
        if not self._columns:
            return np.empty((4, 0))
        found = np.concatenate(self._columns, axis=1)
        ordered: Floats = found[:, np.argsort(found[0], kind="stable")]
        return ordered


@dataclass(slots=True)
class RunFigures:
    """The figures of one run that are compared."""

    name: str
    samples: dict[Key, Sample] = field(default_factory=dict[Key, Sample])
    iteration_starts: dict[int, int] = field(default_factory=dict[int, int])
    """Iteration to the first start of any of its kernels, ns."""

    def iteration_ns(self) -> Floats:
        """Lengths of the iterations that are followed by the next one, in order."""
        starts = sorted(self.iteration_starts.items())
        return np.array([b - a for (i, a), (j, b) in pairwise(starts) if j == i + 1], dtype=float)

    @property
    def has_iterations(self) -> bool:
        """Whether any operation lies in a known iteration."""
        return any(sample.by_iteration for sample in self.samples.values())

    @property
    def duration_ns(self) -> int:
        """Kernel time of all keys."""
        return sum(sample.duration_ns for sample in self.samples.values())


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its noise."""

    value: float
    noise: float | None
    """Standard deviation over blocks of the run; 0 if the number is a count; None if there is too little data."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One measure of one key in both runs."""

    key: Key | None
    """None for the run as a whole."""
    measure: str
    this: Figure | None
    other: Figure | None
    is_change: bool
    weight: float
    """The key's share of kernel time, the larger of both runs'; 1 for the whole run."""

    @property
    def ratio(self) -> float | None:
        """This run's value over the other's; None if one is missing or the other's is 0."""
        if self.this is None or self.other is None or self.other.value == 0:
            return None
        return self.this.value / self.other.value

    @property
    def effect(self) -> float:
        """Sort key of differences: how often the value doubled or halved, times the weight."""
        ratio = self.ratio
        if ratio is None or ratio <= 0:
            return 4.0 * self.weight if self.this != self.other else 0.0
        return min(4.0, abs(math.log2(ratio))) * self.weight


def compare(this: RunFigures, other: RunFigures) -> list[Difference]:
    """All differences: changes before the rest, the whole run's before what makes it up, the largest effect first."""
    found = list(_differences(this, other))

    def order(each: Difference) -> tuple[bool, bool, float, Key, str]:
        return not each.is_change, each.key is not None, -each.effect, each.key or Key("", "", ""), each.measure

    return sorted(found, key=order)


def _differences(this: RunFigures, other: RunFigures) -> Iterator[Difference]:
    lengths = [median_with_noise(run.iteration_ns()) for run in (this, other)]
    if any(lengths):
        yield _difference(None, "iteration_ns", lengths[0], lengths[1], 1.0)
    measures = _PER_ITERATION if this.has_iterations and other.has_iterations else _TOTALS
    measures = {**measures, **_RATES}
    for key in sorted(this.samples.keys() | other.samples.keys()):
        samples = [run.samples.get(key) for run in (this, other)]
        shares = [_share(sample, run) for sample, run in zip(samples, (this, other), strict=True)]
        for measure, of in measures.items():
            figures = [None if sample is None else of(sample) for sample in samples]
            if any(figures):
                yield _difference(key, measure, figures[0], figures[1], max(shares))


def _share(sample: Sample | None, run: RunFigures) -> float:
    if sample is None:
        return 0.0
    if run.duration_ns:
        return sample.duration_ns / run.duration_ns
    return sample.operations / max(1, sum(each.operations for each in run.samples.values()))


def _difference(key: Key | None, measure: str, this: Figure | None, other: Figure | None, weight: float) -> Difference:
    return Difference(key, measure, this, other, _is_change(measure, this, other), weight)


def _is_change(measure: str, this: Figure | None, other: Figure | None) -> bool:
    if this is None or other is None:
        return measure in _COUNTS and (this is None) != (other is None)
    if this.noise is None or other.noise is None:
        return False
    difference = abs(this.value - other.value)
    enough = MIN_SHARE if measure == "wait_ratio" else MIN_RELATIVE * abs(other.value)
    return difference > max(enough, NOISE_FACTOR * math.hypot(this.noise, other.noise))


def median_with_noise(values: Floats) -> Figure | None:
    """The median, and the standard deviation of the medians of blocks in time; None without values."""
    known = values[np.isfinite(values)]
    return _with_noise(known, lambda block: float(np.median(block))) if len(known) else None


def _with_noise(values: Floats, of: Callable[[Floats], float]) -> Figure:
    """A figure of samples (along the last axis, in order of time), with the scatter of its blocks."""
    count = values.shape[-1]
    blocks = min(BLOCKS, count // MIN_IN_BLOCK)
    if blocks < 2:
        return Figure(of(values), None)
    each = [of(block) for block in np.array_split(values, blocks, axis=-1)]
    return Figure(of(values), float(np.std(each, ddof=1)))


def _busbw(sample: Sample) -> Figure | None:
    return median_with_noise(sample.measured()[1])


def _wait_ratio(sample: Sample) -> Figure | None:
    measured = sample.measured()[2:]
    known = measured[:, np.isfinite(measured).all(axis=0)]
    if not known.shape[1] or not known[1].sum() > 0:
        return None
    return _with_noise(known, lambda block: float(block[0].sum() / max(1.0, float(block[1].sum()))))


def _per_iteration(column: int) -> Callable[[Sample], Figure | None]:
    def of(sample: Sample) -> Figure | None:
        values = [amounts[column] for amounts in sample.by_iteration.values()]
        return Figure(float(np.median(values)), 0.0) if values else None

    return of


Measure = Callable[[Sample], Figure | None]

_PER_ITERATION: Final[Mapping[str, Measure]] = {
    "operations_per_iteration": _per_iteration(0),
    "bytes_per_iteration": _per_iteration(1),
}
_TOTALS: Final[Mapping[str, Measure]] = {
    "operations": lambda sample: Figure(sample.operations, None),
    "bytes": lambda sample: Figure(sample.bytes, None),
}
"""Used if iterations are not known in both runs: they may differ in length, so a difference is no change."""

_RATES: Final[Mapping[str, Measure]] = {"busbw_bytes_per_second": _busbw, "wait_ratio": _wait_ratio}
_COUNTS: Final = frozenset({*_PER_ITERATION, *_TOTALS})


_COLUMNS: Final = (
    "parallelism",
    "op",
    "message_bytes",
    "iteration",
    "launch_id",
    "start_ns",
    "start_true_ns",
    "duration_ns",
    "wait_ns",
    "busbw_bytes_per_second",
)
_UNKNOWN: Final = -(2**63)
_NOT_SIZED: Final = "not known"


def is_output_folder(path: Path) -> bool:
    """Whether an earlier `analyze` or `snapshot` wrote this folder."""
    return (path / "operations.parquet").is_file()


def figures_of_selection(selection: Selection, name: str) -> RunFigures:
    """The figures of a run in the store that are compared."""
    return _figures(name, (_chosen(OperationView(selection.store, rows)) for rows in selection.operations.slices()))


def figures_of_folder(folder: Path, name: str) -> RunFigures:
    """The figures of a run that an earlier `analyze` wrote.

    Raises:
        FormatError: its operations.parquet cannot be read, or lacks a column.
    """
    path = folder / "operations.parquet"
    try:
        with pq.ParquetFile(path) as file:
            return _figures(name, (pa.Table.from_batches([batch]) for batch in file.iter_batches(columns=_COLUMNS)))
    except (OSError, pa.ArrowException, KeyError) as error:
        raise FormatError(
            f"{path}: not the operations of an earlier run ({error}); analyze its inputs again"
        ) from error


def compare_document(this: RunFigures, other: RunFigures) -> dict[str, object]:
    """The content of the file: both runs, and every difference, changes first."""
    differences = compare(this, other)
    return {
        "this": _run(this),
        "other": _run(other),
        "changes": sum(each.is_change for each in differences),
        "compared": len(differences),
        "differences": [_difference_text(each) for each in differences],
    }


def _run(figures: RunFigures) -> dict[str, object]:
    samples, lengths = figures.samples.values(), figures.iteration_ns()
    return {
        "name": figures.name,
        "operations": sum(each.operations for each in samples),
        "bytes": sum(each.bytes for each in samples),
        "kernel_ns": figures.duration_ns or None,
        "iterations": len(figures.iteration_starts) or None,
        "iteration_ns": float(np.median(lengths)) if len(lengths) else None,
        "iteration_lengths_ns": lengths[:MAX_ITERATIONS].tolist(),
    }


def _difference_text(each: Difference) -> dict[str, object]:
    key = each.key
    return {
        "parallelism": key.parallelism or None if key else None,
        "op": key.op if key else None,
        "size_class": key.size_class if key else None,
        "measure": each.measure,
        "this": _value(each.this),
        "other": _value(each.other),
        "ratio": each.ratio,
        "this_noise": None if each.this is None else each.this.noise,
        "other_noise": None if each.other is None else each.other.noise,
        "is_change": each.is_change,
        "weight": each.weight,
    }


def _value(figure: Figure | None) -> float | None:
    return None if figure is None else figure.value


def _chosen(view: OperationView) -> pa.Table:
    kinds = {field.name: field.type for field in schema.OPERATIONS}
    return pa.Table.from_arrays(
        [operation_column(view, name).arrow(kinds[name]) for name in _COLUMNS], names=list(_COLUMNS)
    )


def _figures(name: str, tables: Iterator[pa.Table]) -> RunFigures:
    figures = RunFigures(name)
    seen = _Launches()
    for table in tables:
        _add(figures, table, seen)
    return figures


class _Launches:
    """Tells the first row of each launch over all tables; launch ids are given out in order, so a bitmap holds them."""

    def __init__(self) -> None:
        self._seen = np.zeros(1024, dtype=np.bool_)

    def first_rows(self, launches: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row is the first of its launch; rows without a launch are not."""
        is_first = np.zeros(len(launches), dtype=np.bool_)
        distinct, first = np.unique(launches, return_index=True)
        first, distinct = first[distinct >= 0], distinct[distinct >= 0]
        if not len(distinct):
            return is_first
        if distinct[-1] >= len(self._seen):
            self._seen = np.concatenate([self._seen, np.zeros(int(distinct[-1]) + 1, dtype=np.bool_)])
        is_new = ~self._seen[distinct]
        self._seen[distinct] = True
        is_first[first[is_new]] = True
        return is_first


def _add(figures: RunFigures, table: pa.Table, seen: _Launches) -> None:
    kind, op = _words(table, "parallelism"), _words(table, "op")
    numbers = {name: _integers(table, name) for name in _COLUMNS[2:-1]}
    size, duration = numbers["message_bytes"], numbers["duration_ns"]
    classes = np.where(size >= 0, classify(np.maximum(size, 0)).astype(np.int64), len(SIZE_CLASSES))
    starts = np.where(numbers["start_true_ns"] == _UNKNOWN, numbers["start_ns"], numbers["start_true_ns"])
    busbw = np.asarray(table.column("busbw_bytes_per_second").to_numpy(), dtype=np.float64)
    is_first = seen.first_rows(numbers["launch_id"]) & (duration >= 0) & (starts != _UNKNOWN)
    launches = np.stack([starts.astype(np.float64), busbw, _or_nan(numbers["wait_ns"]), _or_nan(duration)])
    keys, codes = np.unique(np.stack([kind[1], op[1], classes], axis=1), axis=0, return_inverse=True)
    codes = codes.reshape(-1)
    for place, (of_kind, of_op, of_class) in enumerate(keys.tolist()):
        mine = codes == place
        name = SIZE_CLASSES[of_class] if of_class < len(SIZE_CLASSES) else _NOT_SIZED
        sample = figures.samples.setdefault(Key(kind[0][of_kind], op[0][of_op], name), Sample())
        sample.operations += int(mine.sum())
        sample.bytes += int(np.maximum(size[mine], 0).sum())
        sample.duration_ns += int(duration[mine & is_first].sum())
        sample.add(launches[:, mine & is_first])
        _add_iterations(sample, numbers["iteration"][mine], np.maximum(size[mine], 0))
    _add_starts(figures, numbers["iteration"], starts)


def _add_iterations(sample: Sample, iterations: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    inside = (iterations >= 0) & (iterations < MAX_ITERATIONS)
    distinct, places = np.unique(iterations[inside], return_inverse=True)
    amounts = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(amounts, places, sizes[inside])
    for iteration, count, amount in zip(distinct.tolist(), np.bincount(places).tolist(), amounts.tolist(), strict=True):
        found = sample.by_iteration.setdefault(iteration, [0, 0])
        found[0] += count
        found[1] += amount


def _add_starts(figures: RunFigures, iterations: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
    known = np.flatnonzero((iterations >= 0) & (iterations < MAX_ITERATIONS) & (starts != _UNKNOWN))
    known = known[np.lexsort([starts[known], iterations[known]])]
    distinct, first = np.unique(iterations[known], return_index=True)
    for iteration, start in zip(distinct.tolist(), starts[known][first].tolist(), strict=True):
        figures.iteration_starts[iteration] = min(start, figures.iteration_starts.get(iteration, start))


def _words(table: pa.Table, name: str) -> tuple[list[str], NDArray[np.int64]]:
    """The words that occur, and the place of each row's; what is not known is the empty word."""
    column = pc.fill_null(table.column(name).cast(pa.string()), "")
    encoded = column.combine_chunks().dictionary_encode()
    encoded = encoded.chunk(0) if isinstance(encoded, pa.ChunkedArray) else encoded
    return encoded.dictionary.to_pylist(), np.asarray(encoded.indices.to_numpy(), dtype=np.int64)


def _integers(table: pa.Table, name: str) -> NDArray[np.int64]:
    return np.asarray(pc.fill_null(table.column(name).cast(pa.int64()), _UNKNOWN).to_numpy(), dtype=np.int64)


def _or_nan(values: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(values >= 0, values.astype(np.float64), np.nan)
