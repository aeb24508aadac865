"""Baseline: the sliding-window heuristic that the thesis compares itself with.

*Source:* L. Borzyk, Understanding LLM Communication, 2026, section 4.3.2: it "matches the first available log entry
within its search window". So, for each kernel in order of start: of the next `WINDOW` lines behind the last one taken,
the first of the same name is taken, and a kernel that finds none stays alone. The size of the window is not printed;
with 4 lines and a uniform mix its figure for lost kernels comes out (0.916), those for lost lines (0.276, 0.256) with
no size: they lie between what 3 and 4 lines give.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from benchmarks.alignment.case import pairs_of
from benchmarks.alignment.needleman_wunsch import kernel_names, merged, operation_names

from ncclscope_wire.batch import Columns

WINDOW: Final = 4


def align(nccl_version: str, operations: Columns, kernels: Columns) -> Columns:
    """One process on names alone."""
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
