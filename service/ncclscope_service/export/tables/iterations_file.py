"""`iterations.parquet`: one row per rank and iteration."""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ncclscope_service.export.selection import Selection
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.operations_file import write_slices
from ncclscope_service.job.iterations import OPERATION_COLUMNS, iteration_times
from ncclscope_service.store.rows import IterationBy
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


def write_iterations(selection: Selection, path: Path, found: Columns | None = None) -> None:
    """Writes the file, which has no rows if no iteration is known; `found`: the iterations, if computed already."""
    write_slices([iterations_table(selection, found)], schema.ITERATIONS, path)


def selected_iterations(selection: Selection) -> Columns:
    """`iteration_times.ITERATION` rows of the selected operations."""
    part = selection.operations
    fields = part.rows.dtype.fields
    assert fields is not None, "operations are structured rows"
    operations: Columns = np.empty(len(part), np.dtype([(name, fields[name][0]) for name in OPERATION_COLUMNS]))
    for name in OPERATION_COLUMNS:
        operations[name] = part.column(name)
    return iteration_times(selection.store, operations)


def iterations_table(selection: Selection, found: Columns | None = None) -> pa.Table:
    """The iterations with the columns of `schema.ITERATIONS`, by process, rank and iteration."""
    store, found = selection.store, selected_iterations(selection) if found is None else found
    names = [each.name.lower() for each in IterationBy]
    processes = found["process"].tolist()
    duration = _or_null(found["duration_ns"], NO_TIME_NS)
    columns = {
        "job": [store.process_job[process] for process in processes],
        "host": [store.processes[process].host for process in processes],
        "pid": [store.processes[process].pid for process in processes],
        "rank": _or_null(found["rank"], NO_NUMBER),
        "iteration": found["iteration"],
        "iteration_by": [names[by] if by >= 0 else None for by in found["by"].tolist()],
        "iteration_confidence": [
            _confidence(by, store.iteration_confidence.get(process))
            for by, process in zip(found["by"].tolist(), processes, strict=True)
        ],
        "begin_ns": _or_null(found["begin_ns"], NO_TIME_NS),
        "duration_ns": duration,
        "operations": found["operations"],
        "bytes": found["bytes"],
        "matched": found["matched"],
        "communication_ns": _or_null(found["communication_ns"], NO_TIME_NS),
        "exposed_ns": _or_null(found["exposed_ns"], NO_TIME_NS),
        "communication_ratio": _ratio(found, "communication_ns"),
        "exposed_ratio": _ratio(found, "exposed_ns"),
    }
    arrays = [pa.array(columns[field.name], type=field.type, from_pandas=True) for field in schema.ITERATIONS]
    return pa.Table.from_arrays(arrays, schema=schema.ITERATIONS)


def _confidence(by: int, of_period: float | None) -> float | None:
    return 1.0 if by == IterationBy.MARKS else of_period if by == IterationBy.PERIOD else None


def _or_null(values: NDArray[np.integer], unknown: int) -> pa.Array:
    return pa.array(values, mask=values == unknown)


def _ratio(found: Columns, name: str) -> NDArray[np.float64]:
    """NaN, which becomes null, if either is not known."""
    known = (found[name] != NO_TIME_NS) & (found["duration_ns"] > 0)
    ratio: NDArray[np.float64] = np.full(len(found), np.nan)
    ratio[known] = found[name][known] / found["duration_ns"][known]
    return ratio
