"""The parts of a step of a GPU, and the rows that say how long each lasts."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

from ncclscope_service.columns import row_ops
from ncclscope_wire.batch import Columns


class Part(IntEnum):
    """Part of a step; outputs print its lower-case name."""

    COMPUTATION = 0
    HIDDEN = 1
    EXPOSED_TRANSFER = 2
    EXPOSED_WAIT = 3
    """Waiting that none of the next three explains."""
    BUBBLE = 4
    """Waiting that a pipeline of equal stages asks for."""
    IMBALANCE = 5
    """Waiting that it asks for since its stages are not equal."""
    LATE = 6
    """Waiting that ends on a rank which a finding names as late."""
    EXPOSED = 7
    """Not known whether waiting or transfer."""
    IDLE = 8


PART_NAMES: Final = tuple(part.name.lower() for part in Part)

STEP_PART: Final = np.dtype(
    [
        ("process", "<i4"),
        ("rank", "<i4"),  # global; NO_NUMBER
        ("iteration", "<i4"),
        ("begin_ns", "<i8"),  # of the step on the GPU, host's clock
        ("duration_ns", "<i8"),  # of the step: the sum of its parts
        ("part", "<u1"),  # Part
        ("parallelism", "<i4"),  # index into the names; NO_NUMBER: communication that is not told apart, or none
        ("ns", "<i8"),  # above 0
    ]
)
"""A part of a step of one rank."""


def in_order(rows: Columns) -> Columns:
    """STEP_PART rows by process, iteration, part and parallelism, without those of no time."""
    some = row_ops.filter_rows(rows, rows["ns"] > 0)
    found: Columns = some[np.lexsort([some[name] for name in ("parallelism", "part", "iteration", "process")])]
    return found
