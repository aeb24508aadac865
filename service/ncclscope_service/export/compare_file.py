"""`compare.json`: this run beside another, read from its operations or from the files of an earlier `analyze`."""

# pyright: reportUnknownParameterType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportAttributeAccessIssue=false
# (pyarrow carries no types, and pyarrow.compute makes its functions as it is imported)

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ncclscope_service.export.comparison import MAX_ITERATIONS, Difference, Figure, Key, RunFigures, Sample, compare
from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.columns import OperationView
from ncclscope_service.export.tables.operations_file import operation_column
from ncclscope_service.nccl.bandwidth import SIZE_CLASSES, classify
from ncclscope_wire.errors import FormatError

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
        raise FormatError(f"{path}: not the operations of an earlier run ({error}); analyze its inputs anew") from error


def compare_document(this: RunFigures, other: RunFigures) -> dict[str, object]:
    """The content of the file: both runs, and every difference, changes first."""
    differences = compare(this, other)
    return {
        "this": _run(this),
        "other": _run(other),
        "changes": sum(each.is_change for each in differences),
        "compared": len(differences),
        "differences": [_difference(each) for each in differences],
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


def _difference(each: Difference) -> dict[str, object]:
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
