"""The rhythm of a rank's step: a block of tensor-parallel operations for each micro-batch forward, and one backward.

A block ends where something else comes: what is sent to another stage, the batch, or the cross-entropy. So a step of a
stage has 2 m blocks, each as long as in the step before. Source: Li et al., Analyzing Communication Predictability in
LLM Training, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.job import Job

MOST_SPREAD: Final = 0.1
"""Of a block's length over iterations, relative to its median."""


class Part(IntEnum):
    """What an operation is to a block."""

    OTHER = 0
    """Neither: gradients, parameters, statistics."""
    WITHIN = 1
    BETWEEN = 2


class Beat(StrEnum):
    """Verdict on a rank."""

    PERIODIC = "periodic"
    COUNTED = "as many blocks as expected, their lengths not recorded"
    UNEVEN = "blocks change their length from step to step"
    OTHER_BLOCKS = "not as many blocks as expected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Blocks of one rank, over several iterations."""

    expected: int
    blocks: tuple[int, ...]
    """Of each iteration."""
    spread: float | None
    """Median over the blocks of how their length scatters over iterations, relative to the length; None: not known."""
    beat: Beat


def expected_blocks(job: Job) -> int:
    """Blocks of a step on each rank; 0 where none can be told: without tensor parallel, with experts, and with model
    chunks, of which one goes forward and another backward before anything is sent.
    """
    if job.layout.tensor == 1 or job.layout.chunks > 1 or job.shape.experts is not None:
        return 0
    return 2 * job.micro_batches


def blocks_of(parts: NDArray[np.integer]) -> NDArray[np.int64]:
    """The block of each operation (`Part`) of a rank's iteration, in order; -1 outside of blocks."""
    within, between = parts == Part.WITHIN, parts == Part.BETWEEN
    gaps = np.cumsum(between)
    found = np.full(len(parts), -1, np.int64)
    found[within] = np.unique(gaps[within], return_inverse=True)[1]
    return found


def rhythm(job: Job, lengths: Sequence[NDArray[np.float64]]) -> Rhythm:
    """The verdict; `lengths`: of each iteration the length of each of its blocks, NaN where it is not known."""
    expected = expected_blocks(job)
    blocks = tuple(map(len, lengths))
    if not blocks or set(blocks) != {expected}:
        return Rhythm(expected=expected, blocks=blocks, spread=None, beat=Beat.OTHER_BLOCKS)
    spread = _spread(np.stack(lengths))
    if spread is None:
        return Rhythm(expected=expected, blocks=blocks, spread=None, beat=Beat.COUNTED)
    beat = Beat.PERIODIC if spread <= MOST_SPREAD else Beat.UNEVEN
    return Rhythm(expected=expected, blocks=blocks, spread=spread, beat=beat)


def _spread(lengths: NDArray[np.float64]) -> float | None:
    """Iterations x blocks: of each block that was seen whole three times, the median deviation as a sigma."""
    scatter: list[float] = []
    for column in lengths.T:
        own = column[np.isfinite(column) & (column > 0)]
        if len(own) >= 3:
            middle = float(np.median(own))
            scatter.append(1.4826 * float(np.median(np.abs(own - middle))) / middle)
    return float(np.median(scatter)) if scatter else None
