"""The methods that tables compare, each as a function from a case to pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Final, cast

import numpy as np
from benchmarks.alignment import best_possible, needleman_wunsch
from benchmarks.alignment.case import Aligner, Case, pairs_of
from benchmarks.alignment.needleman_wunsch import kernel_names, merged, operation_names
from benchmarks.alignment.score import Score, scored

from ncclscope_service.align.process_aligner import ProcessAligner
from ncclscope_service.align.records import blank_kernels, blank_operations
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


@dataclass(frozen=True, slots=True)
class Method:
    """A named way to answer a case."""

    name: str
    answer: Callable[[Case], Columns]

    def score(self, cases: Iterable[Case]) -> Score:
        """Its score over some cases."""
        return scored((case, self.answer(case)) for case in cases)


def method(name: str, align: Aligner) -> Method:
    """An aligner as a method: of a case it sees what was logged and captured."""
    return Method(name, lambda case: align(case.nccl_version, case.operations, case.kernels))


def named_aligner(text: str) -> Aligner:
    """The aligner that `module:function` names.

    Raises:
        ValueError: there is none of that name.
    """
    module, _, function = text.partition(":")
    try:
        return cast(Aligner, getattr(import_module(module), function))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"aligner {text!r} is not a module:function that can be imported: {error}") from error


_OPERATION_FIELDS = {
    "id": "id",
    "tid": "thread",
    "stream": "stream",
    "member": "communicator",
    "nranks": "ranks",
    "device": "device",
    "op": "operation",
    "data_type": "data_type",
    "count": "count",
    "root": "peer",
    "op_count": "op_count",
    "logged_at_ns": "logged_at_ns",
    "group": "group",
}
_KERNEL_FIELDS = {
    "id": "id",
    "stream_id": "stream",
    "device_id": "device",
    "correlation_id": "correlation",
    "launch_start_ns": "launched_at_ns",
    "start_ns": "start_ns",
    "end_ns": "end_ns",
    "launch_tid": "thread",
    "kernel_class": "kind",
    "data_type": "data_type",
}


def align_by_ncclscope(nccl_version: str, operations: Columns, kernels: Columns) -> Columns:
    """ncclscope's own aligner over one process, all at once; the confidence is the aligner's own."""
    aligner = ProcessAligner(nccl_version)
    aligner.ingest_operations(as_operations(operations))
    aligner.ingest_kernels(as_kernels(kernels))
    matches = aligner.align_ready(final=True)
    matches = matches[matches["kernel"] != NO_NUMBER]
    return pairs_of(matches["operation"], matches["kernel"], matches["confidence"])


def as_operations(operations: Columns) -> Columns:
    """The rows as the aligner takes them."""
    rows = blank_operations(len(operations))
    for own, name in _OPERATION_FIELDS.items():
        rows[own] = operations[name]
    rows["one_rank"] = operations["ranks"] == 1
    return rows


def as_kernels(kernels: Columns) -> Columns:
    """The rows as the aligner takes them."""
    rows = blank_kernels(len(kernels))
    for own, name in _KERNEL_FIELDS.items():
        rows[own] = kernels[name]
    return rows


WINDOW: Final = 4


def align_by_window(nccl_version: str, operations: Columns, kernels: Columns) -> Columns:
    """Baseline: the sliding-window heuristic that the thesis compares itself with, on names alone.

    *Source:* L. Borzyk, Understanding LLM Communication, 2026, section 4.3.2: it "matches the first available log entry
    within its search window". So, for each kernel in order of start: of the next `WINDOW` lines behind the last one
    taken, the first of the same name is taken, and a kernel that finds none stays alone. The size of the window is not
    printed; with 4 lines and a uniform mix its figure for lost kernels comes out (0.916), those for lost lines (0.276,
    0.256) with no size: they lie between what 3 and 4 lines give.
    """
    del nccl_version
    kernels = kernels[np.argsort(kernels["start_ns"], kind="stable")]
    found = match_names(kernel_names(kernels), operation_names(operations))
    rows, columns = np.array(found, dtype=np.intp).reshape(-1, 2).T
    return pairs_of(operations["id"][columns], kernels["id"][rows])


def match_names(kernels: list[str], lines: list[str], window: int = WINDOW) -> list[tuple[int, int]]:
    """(kernel, line) places."""
    kernels, lines = [merged(name) for name in kernels], [merged(name) for name in lines]
    pairs: list[tuple[int, int]] = []
    first = 0
    for row, name in enumerate(kernels):
        for column in range(first, min(first + window, len(lines))):
            if lines[column] == name:
                pairs.append((row, column))
                first = column + 1
                break
    return pairs


SLIDING_WINDOW: Final = method("window", align_by_window)
NEEDLEMAN_WUNSCH: Final = method("thesis", needleman_wunsch.align)
OURS: Final = method("ncclscope", align_by_ncclscope)
BOUND: Final = Method("bound", best_possible.align)
