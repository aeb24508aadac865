"""`iterations.parquet`: one row per rank and iteration. `step_budget.parquet`: where the time of each went.
`efficiency.parquet`: each measured collective against every reference that it has, in long form.
"""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ncclscope_service.columns import row_ops
from ncclscope_service.columns.group_by import distinct_together, first_positions
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.export.selection import Selection, collective_keys
from ncclscope_service.export.tables import schema
from ncclscope_service.export.tables.columns import Column, OperationView, Values, rates, words_at
from ncclscope_service.export.tables.operations_file import (
    IS_COLLECTIVE,
    IS_SEND,
    LIMIT_REFERENCES,
    collective_ids,
    operation_column,
    write_slices,
)
from ncclscope_service.job.iterations import OPERATION_COLUMNS, iteration_times
from ncclscope_service.job.step_budget import OPERATION_COLUMNS as BUDGET_COLUMNS
from ncclscope_service.job.step_budget import StepBudget, step_budget
from ncclscope_service.job.step_parts import PART_NAMES
from ncclscope_service.measure import limits
from ncclscope_service.nccl.bandwidth import classify
from ncclscope_service.store.rows import IterationBy, LimitReference
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


def write_iterations(selection: Selection, path: Path, found: Columns | None = None) -> None:
    """Writes the file, which has no rows if no iteration is known; `found`: the iterations, if computed already."""
    write_slices([iterations_table(selection, found)], schema.ITERATIONS, path)


def selected_iterations(selection: Selection) -> Columns:
    """`iteration_times.ITERATION` rows of the selected operations."""
    found = iteration_times(selection.store, _columns(selection, OPERATION_COLUMNS))
    mine: Columns = found[selection.has_process[found["process"]]]
    return mine


def selected_budget(selection: Selection, iterations: Columns) -> StepBudget:
    """Where the time of these iterations went."""
    return step_budget(selection.store, _columns(selection, BUDGET_COLUMNS), iterations)


def _columns(selection: Selection, names: Sequence[str]) -> AnyRows:
    """The selected operations with these columns at least."""
    rows, positions = selection.operations.rows, selection.operations.positions
    return rows if positions is None else rows.take(positions, *names)


def write_step_budget(selection: Selection, path: Path, budget: StepBudget) -> None:
    """Writes the file, which has no rows if kernels or computation were not recorded."""
    store, rows = selection.store, budget.rows
    processes = rows["process"].tolist()
    columns = {
        "job": [store.process_job[process] for process in processes],
        "host": [store.processes[process].host for process in processes],
        "pid": [store.processes[process].pid for process in processes],
        "rank": _or_null(rows["rank"], NO_NUMBER),
        "iteration": rows["iteration"],
        "begin_ns": rows["begin_ns"],
        "duration_ns": rows["duration_ns"],
        "part": words_at(rows["part"], PART_NAMES).arrow(pa.string()),
        "parallelism": words_at(rows["parallelism"], budget.parallelism).arrow(pa.string()),
        "part_ns": rows["ns"],
    }
    arrays = [pa.array(columns[field.name], type=field.type, from_pandas=True) for field in schema.STEP_BUDGET]
    write_slices([pa.Table.from_arrays(arrays, schema=schema.STEP_BUDGET)], schema.STEP_BUDGET, path)


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
        "outside_ns": found["outside_ns"],
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


_SERIES_LIMITS = ((LimitReference.TOPOLOGY, "limit"), (LimitReference.BASELINE, "baseline"))


_EFFICIENCY_COLUMNS = (
    *("process", "template", "member", "coll_seq", "pair_seq", "kind_seq", "message_bytes"),
    *("algorithm", "protocol", "busbw", "limit", "limit_reference"),
)
"""Columns of operations that are read."""


def write_efficiency(selection: Selection, path: Path) -> None:
    """Writes the file; it has no rows if nothing was measured or nothing has a limit."""
    write_slices(_tables(selection), schema.EFFICIENCY, path)


def _tables(selection: Selection) -> Iterator[pa.Table]:
    seen: set[int] = set()
    for rows in selection.operations.slices():
        view = OperationView(selection.store, _once_each(selection.store, rows, seen))
        yield from (table for table in _tables_of(view) if len(table))


def _once_each(store: Store, rows: AnyRows, seen: set[int]) -> Columns:
    """The measured rows with each collective once, whichever rank comes first; pairs by their Send."""
    measured = np.flatnonzero(np.isfinite(rows["busbw"]))
    view = OperationView(store, row_ops.take_columns(rows, measured, ("member", "template", "coll_seq")))
    communicators, sequences = view.communicators(), view.rows["coll_seq"]
    found = np.flatnonzero(view.is_op(IS_COLLECTIVE) & (sequences >= 0))
    first = found[first_positions(distinct_together(communicators[found], sequences[found])[1])]
    keys = collective_keys(communicators[first], sequences[first]).tolist()
    chosen = first[np.array([key not in seen for key in keys], dtype=np.bool_)]
    seen.update(keys)
    sends = np.flatnonzero(view.is_op(IS_SEND))
    return row_ops.take_columns(rows, measured[np.sort(np.concatenate([chosen, sends]))], _EFFICIENCY_COLUMNS)


def limits_by_reference(view: OperationView) -> dict[LimitReference, NDArray[np.float64]]:
    """By reference, each row's limit in bytes per second, comparable with busbw; NaN if it has none.

    The limit that stands in the operation's own row goes before the series'.
    """
    own = view.rows["limit_reference"]
    series = _series_limits(view)
    model = limits.busbw_by_model(view.store, view.rows)
    measured = limits.busbw_by_baseline(view.store, view.rows)
    found: dict[LimitReference, NDArray[np.float64]] = {}
    for reference in LimitReference:
        limit = np.where(own == reference, view.rows["limit"], np.nan)
        if reference is LimitReference.BASELINE:
            limit = np.where(np.isfinite(limit), limit, measured)
        for series_reference, name in _SERIES_LIMITS:
            if reference is series_reference:
                limit = np.where(np.isfinite(limit), limit, series[name])
        if reference is LimitReference.NCCL_MODEL:
            limit = np.where(np.isfinite(limit), limit, model)
        found[reference] = limit
    return found


def _tables_of(view: OperationView) -> Iterator[pa.Table]:
    """One table per reference."""
    arrays = {name: operation_column(view, name).arrow(pa.string()) for name in ("job", "comm_id", "op")}
    arrays["collective_id"] = collective_ids(view)
    for reference, limit in limits_by_reference(view).items():
        has_limit = np.isfinite(limit) & (limit > 0)
        of_reference = {
            "reference": words_at(np.full(len(limit), reference.value), LIMIT_REFERENCES).arrow(pa.string()),
            "limit_bytes_per_second": rates(limit).arrow(pa.float64()),
            "efficiency_ratio": rates(view.rows["busbw"] / np.where(has_limit, limit, np.nan)).arrow(pa.float64()),
        }
        table = pa.table({name: (arrays | of_reference)[name] for name in schema.EFFICIENCY.names})
        yield table.filter(pa.array(has_limit))


def _series_limits(view: OperationView) -> dict[str, NDArray[np.float64]]:
    """The limits of the series of each row; NaN if it has none."""
    series = view.store.series.rows
    keys = _series_keys(series["communicator"], series["op"], series["size_class"])
    order = np.argsort(keys)
    size_class = classify(view.rows["message_bytes"])
    codes = view.of_template(lambda templates: Column(templates["op"], np.ones(len(templates), dtype=np.bool_)))
    asked = _series_keys(view.communicators(), codes.values, size_class)
    places = np.searchsorted(keys[order], asked)
    is_found = np.append(keys[order], -1)[places] == asked
    at = np.where(is_found, np.append(order, 0)[places], len(series))
    return {name: np.append(series[name], np.nan)[at] for _, name in _SERIES_LIMITS}


def _series_keys(communicator: Values, op: Values, size_class: Values) -> NDArray[np.int64]:
    return (communicator.astype(np.int64) * 256 + op.astype(np.int64)) * 256 + size_class.astype(np.int64)
