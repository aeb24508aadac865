"""What NCCL Inspector told, and how far it agrees with kernels: for `summary.json`, the report and the terminal."""

from __future__ import annotations

import numpy as np

from ncclscope_service.export.selection import Selection
from ncclscope_service.rows import SIZE_CLASSES
from ncclscope_service.tally import operation_name
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import SourceKind


def has_inspector(selection: Selection) -> bool:
    """Whether any dump of NCCL Inspector was read."""
    is_left = selection.store.left.kinds[SourceKind.INSPECTOR] > 0
    return is_left or any(state.source.kind is SourceKind.INSPECTOR for state in selection.store.sources)


def inspector_document(selection: Selection) -> dict[str, object] | None:
    """The section of the summary; None where no dump was read."""
    if not has_inspector(selection):
        return None
    series = _series(selection)
    counts = selection.store.inspector_records
    outcomes = {
        what: sum(amount for (job, each), amount in counts.items() if each == what and job in selection.jobs)
        for what in ("with_operation", "without_operation", "not_gpu_timed")
    }
    compared, ratio = _compared(series)
    return {
        "records": int(series["inspected"].sum()),
        **outcomes,
        "compared": compared,
        "busbw_ratio": ratio,
        "series": inspector_rows(selection),
    }


def inspector_rows(selection: Selection) -> list[dict[str, object]]:
    """What was told of each communicator, operation and size class, longest first; None where not known."""
    rows: list[dict[str, object]] = []
    for each in _series(selection):
        communicator = selection.store.communicators[int(each["communicator"])]
        compared, ratio = _compared(each.reshape(1))
        size_class = int(each["size_class"])
        rows.append(
            {
                "communicator": communicator.comm_id,
                "parallelism": communicator.parallelism,
                "op": operation_name(int(each["op"])),
                "size_class": SIZE_CLASSES[size_class] if size_class < len(SIZE_CLASSES) else None,
                "records": int(each["inspected"]),
                "duration_ns": int(each["inspected_ns"]),
                "busbw": float(each["busbw"]) if np.isfinite(each["busbw"]) else None,
                "compared": compared,
                "busbw_ratio": ratio,
            }
        )
    return sorted(rows, key=lambda row: -int(str(row["duration_ns"])))


def _series(selection: Selection) -> Columns:
    series = selection.store.series.rows
    ours = np.isin(series["communicator"], [communicator.index for communicator in selection.communicators])
    found: Columns = series[ours & (series["inspected"] > 0)]
    return found


def _compared(series: Columns) -> tuple[int, float | None]:
    """Operations of which both are known, and Inspector's apparent busbw over the kernels'."""
    inspected_ns = int(series["compared_inspected_ns"].sum())
    ratio = int(series["compared_kernel_ns"].sum()) / inspected_ns if inspected_ns else None
    return int(series["compared"].sum()), ratio
