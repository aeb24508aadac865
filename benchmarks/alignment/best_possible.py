"""The bound: what the best of all methods reaches on one process's two sequences, loss rates and mix known.

Where operations are drawn one by one from known shares, and lines and kernels are lost one by one with known rates,
the two observed sequences come from a pair hidden Markov model (R. Durbin et al., Biological Sequence Analysis, 1998,
chapter 4). Each operation of symbol s shows as

    line and kernel   (1-a)(1-b) p(s)        line only   (1-a) b p(s)
    kernel only       a (1-b) p(s)           neither     a b

with the rates a of lines and b of kernels. Forward and backward sums over *all* alignments give the exact posterior
probability of every pair: all that the two sequences tell. A method's expected F1 is a function of these numbers and of
its answers, so no method, however clever, is expected to beat the answers that are best under them. Two are computed:

- `align`: the best answer that keeps the order, by dynamic programming over posterior - F/2, where F is the F1 reached
  (C. Do et al., ProbCons, 2005, for maximum expected accuracy; Z. Lipton et al., Thresholding classifiers to maximize
  F1 score, 2014, for the threshold). This is the bound that tables print, scored against the truth like any method.
- `ceiling`: the expected F1 of any set of pairs at all, with no rule of one line to one kernel. Only slightly higher.

It is an estimate in three ways. F1 of a case is a ratio: its expectation is taken as the ratio of expectations. The
length of the true sequence is taken as unknown, as it is in real captures. And a *program* is not drawn: it repeats
itself, and its ranks do the same, which a method may learn; `drawn` scenarios hide that on purpose, except that the
ranks of one job could be aligned with each other, which no method here does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from benchmarks.alignment.case import Case, Loss, pairs_of
from numpy.typing import NDArray

from ncclscope_wire.batch import Columns

Floats = NDArray[np.float64]
Symbols = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bound:
    """What an exact method knows and answers."""

    pairs: Columns
    """The best answers that keep the order, confidence their posterior."""
    expected_f1: float
    ceiling: float
    """Expected F1 of the best set of pairs without any rule."""


def align(case: Case) -> Columns:
    """The best answers to a case of drawn operations."""
    return bound(case).pairs


def bound(case: Case) -> Bound:
    """The posterior of a case, and the best answers under it.

    Raises:
        ValueError: the case's operations were not drawn.
    """
    if not case.shares:
        raise ValueError(f"{case.name}: without the shares of its symbols there is no bound")
    kernels = case.launched()
    posterior = pair_posterior(case.kernel_symbols(), case.operation_symbols(), np.array(case.shares), case.loss)
    rows, columns, reached = best_in_order(posterior)
    pairs = pairs_of(case.operations["id"][columns], kernels["id"][rows], posterior[rows, columns])
    return Bound(pairs, reached, _best_unruled(posterior))


def pair_posterior(kernels: Symbols, lines: Symbols, shares: Floats, loss: Loss) -> Floats:
    """Probability of each pair (kernel, line), of symbols drawn with `shares` and lost with `loss`."""
    with np.errstate(divide="ignore"):
        visible = -np.log1p(-loss.lines * loss.kernels)
        both = visible + np.log1p(-loss.lines) + np.log1p(-loss.kernels)
        kernel_only = visible + np.log(loss.lines) + np.log1p(-loss.kernels) + np.log(shares[kernels])
        line_only = visible + np.log1p(-loss.lines) + np.log(loss.kernels) + np.log(shares[lines])
        pair = np.where(kernels[:, None] == lines[None, :], both + np.log(shares[kernels])[:, None], -np.inf)
    forward = _sums(pair, kernel_only, line_only)
    backward = _sums(pair[::-1, ::-1], kernel_only[::-1], line_only[::-1])[::-1, ::-1]
    posterior: Floats = np.exp(forward[:-1, :-1] + pair + backward[1:, 1:] - forward[-1, -1])
    return posterior


def best_in_order(posterior: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp], float]:
    """Rows and columns of the pairs in order whose expected F1 is highest, and that F1 (by Dinkelbach's iteration)."""
    wanted = float(posterior.sum())
    reached = 0.0
    while True:
        rows, columns = _heaviest_in_order(posterior - reached / 2)
        higher = 2 * float(posterior[rows, columns].sum()) / (len(rows) + wanted) if wanted else 1.0
        if higher <= reached + 1e-9:
            return rows, columns, higher
        reached = higher


def _sums(pair: Floats, kernel_only: Floats, line_only: Floats) -> Floats:
    """Log of the summed weight of all alignments up to each cell, along its anti-diagonals."""
    height, width = pair.shape
    total = np.full((height + 1, width + 1), -np.inf)
    total[0, 0] = 0.0
    total[1:, 0], total[0, 1:] = np.cumsum(kernel_only), np.cumsum(line_only)
    for diagonal in range(2, height + width + 1):
        rows = np.arange(max(1, diagonal - width), min(height, diagonal - 1) + 1)
        columns = diagonal - rows
        alone = np.logaddexp(
            total[rows - 1, columns] + kernel_only[rows - 1], total[rows, columns - 1] + line_only[columns - 1]
        )
        total[rows, columns] = np.logaddexp(total[rows - 1, columns - 1] + pair[rows - 1, columns - 1], alone)
    return total


def _heaviest_in_order(weights: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The pairs, ascending in both, of which the sum of weights is highest."""
    height, width = weights.shape
    best = np.zeros((height + 1, width + 1))
    for row in range(height):
        best[row + 1, 1:] = np.maximum.accumulate(np.maximum(best[row, 1:], best[row, :-1] + weights[row]))
    rows: list[int] = []
    columns: list[int] = []
    row, column = height, width
    while row and column:
        if best[row, column] == best[row - 1, column]:
            row -= 1
        elif best[row, column] == best[row, column - 1]:
            column -= 1
        else:
            row, column = row - 1, column - 1
            rows.append(row)
            columns.append(column)
    return np.array(rows[::-1], dtype=np.intp), np.array(columns[::-1], dtype=np.intp)


def _best_unruled(posterior: Floats) -> float:
    likeliest = np.sort(posterior, axis=None)[::-1]
    wanted = float(likeliest.sum())
    reached = 2 * np.cumsum(likeliest) / (np.arange(1, len(likeliest) + 1) + wanted)
    return float(reached.max()) if len(likeliest) else 1.0
