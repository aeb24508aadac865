"""The sections of `summary.json` on iterations and on the signatures of groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from ncclscope_service.export.selection import Selection
from ncclscope_service.export.signatures import op_name
from ncclscope_service.export.totals import Totals
from ncclscope_service.iteration_times import summarise
from ncclscope_service.rows import IterationBy
from ncclscope_service.signature import Signature
from ncclscope_wire.batch import Columns

_MEDIANS: Final = (
    "sizes",
    "median_bytes",
    "largest_bytes",
    "operations_per_iteration",
    "bytes_per_iteration",
    "burstiness",
    "period_ns",
    "active_ratio",
    "bursts_per_iteration",
    "burst_ns",
    "pause_ns",
)
"""Of a signature, what is given as the median over communicators."""


def iterations_document(selection: Selection, sums: Totals) -> dict[str, dict[str, object] | None]:
    """By job: how long iterations last, how much of that is communication, and what told them."""
    store, found = selection.store, sums.iterations
    job_of = np.asarray(store.process_job, dtype=object)
    jobs = job_of[found["process"]] if len(found) else np.empty(0, dtype=object)
    return {job: _iterations_of(found[jobs == job], store.iteration_confidence) for job in selection.jobs}


def _iterations_of(found: Columns, confidence: Mapping[int, float]) -> dict[str, object] | None:
    if not len(found):
        return None
    of, by = summarise(found), found["by"]
    sure = [confidence[process] for process in np.unique(found["process"]).tolist() if process in confidence]
    return {
        "iterations": of.iterations,
        "median_ns": of.median_ns,
        "p90_ns": of.p90_ns,
        "communication_ratio": of.communication_ratio,
        "exposed_ratio": of.exposed_ratio,
        "operations_by": {each.name.lower(): int(found["operations"][by == each].sum()) for each in IterationBy},
        "period_confidence": float(np.median(sure)) if sure else None,
    }


def signatures_document(selection: Selection, sums: Totals) -> list[dict[str, object]]:
    """By job and parallelism: the medians of the communicators' signatures, most operations first."""
    together: dict[tuple[str, str | None], list[Signature]] = {}
    for each in selection.communicators:
        if each.index in sums.signatures and each.size > 1:
            together.setdefault((each.job, each.parallelism), []).append(sums.signatures[each.index])
    by_operations = sorted(
        together.items(), key=lambda item: -sum(row[1] for signature in item[1] for row in signature.mix)
    )
    return [
        {"job": job, "parallelism": kind, "communicators": len(found), **_signature(found)}
        for (job, kind), found in by_operations
    ]


def _signature(found: list[Signature]) -> dict[str, object]:
    mix: Counter[str | None] = Counter()
    moved: Counter[str | None] = Counter()
    for of in found:
        for code, operations, size in of.mix:
            mix[op_name(code)] += operations
            moved[op_name(code)] += size
    middle = {name: [value for of in found if (value := getattr(of, name)) is not None] for name in _MEDIANS}
    return {
        "operation_mix": [{"op": op, "operations": amount, "bytes": moved[op]} for op, amount in mix.most_common()],
        **{name: float(np.median(values)) if values else None for name, values in middle.items()},
    }
