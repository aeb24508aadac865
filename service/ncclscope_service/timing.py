"""Where an operation's duration and measures are from: a kernel of nsys, NCCL Inspector, or nothing."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.rows import Match, TimingSource
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

A_GUESS: Final = 0.5
"""Confidence up to which a match is called a guess: it is shown, and nothing is measured by it."""


def has_kernel(operations: Columns) -> NDArray[np.bool_]:
    """Which operations (rows.OPERATION) have a kernel by which they are measured."""
    certain: NDArray[np.bool_] = (operations["match"] == Match.MATCHED) & (operations["confidence"] > A_GUESS)
    return certain


def timing_sources(operations: Columns) -> NDArray[np.int8]:
    """The TimingSource of each; NO_NUMBER where none is known. A kernel that is a guess gives way to Inspector."""
    sources = np.where(operations["match"] == Match.MATCHED, np.int8(TimingSource.KERNEL), np.int8(NO_NUMBER))
    inspected = (operations["inspected_ns"] != NO_TIME_NS) & ~has_kernel(operations)
    return np.where(inspected, np.int8(TimingSource.INSPECTOR), sources)


def durations_ns(operations: Columns) -> NDArray[np.int64]:
    """Duration by that source; NO_TIME_NS where it is not known, as of a kernel that the capture cut."""
    start, end = operations["start_ns"], operations["end_ns"]
    is_whole = (start != NO_TIME_NS) & (end != NO_TIME_NS) & ~operations["censored"]
    of_kernel = np.where(is_whole, np.where(is_whole, end, 0) - np.where(is_whole, start, 0), np.int64(NO_TIME_NS))
    is_inspected = timing_sources(operations) == TimingSource.INSPECTOR
    return np.where(is_inspected, operations["inspected_ns"], of_kernel)


def timing_confidences(operations: Columns) -> NDArray[np.float32]:
    """How sure it is that the duration is this operation's; NaN where there is none."""
    sources = timing_sources(operations)
    known = np.where(sources == TimingSource.KERNEL, operations["confidence"], operations["inspected_confidence"])
    return np.where(sources == NO_NUMBER, np.float32(np.nan), known.astype(np.float32))
