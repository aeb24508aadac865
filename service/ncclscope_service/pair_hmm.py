"""How likely each launch is each kernel, and the pairs that are worth most: a pair hidden Markov model.

A launch and a kernel come together, or only one of them is left: its partner was lost. Forward and backward sums over
all alignments give the probability of every pair; the pairs that are given out are those of the alignment with the
highest expected number of right pairs. Many windows of one shape are worked on at once.

*Source:* Durbin, Eddy, Krogh, Mitchison, "Biological Sequence Analysis", chapter 4 (pair HMMs, posterior and
maximum-accuracy alignment).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

TINY: Final = 1e-300
_RESCALED: Final = 8
"""Diagonals after which sums are brought back near one: what so many steps are worth neither vanishes nor overflows."""

_OUTWEIGHS: Final = 600.0
"""Logarithm of what outweighs everything and stays within a float for the steps until values are brought back."""

SURELY: Final = 0.85
POSSIBLE: Final = 1e-6
GUESSED: Final = 0.1
"""What a guess is worth beside what is probable: less than any pair that pays its price."""
EQUAL: Final = 1e-4
"""Gains that differ by less are equal: of equal launches the first is paired."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What each step of an alignment is worth, for B windows of n launches and m kernels.

    Only ratios matter: a pair is measured against losing both.
    """

    pair: Floats
    """(n, m, B): launch and kernel belong together; 0 where they cannot."""
    lost_kernel: Floats
    """(n, B): the launch stands alone."""
    lost_line: Floats
    """(n + 1, m, B): the kernel stands alone, after so many launches."""
    joins: Floats
    """(n, B): the launch runs in the kernel of the launch before it; 0 where it cannot."""
    after: Floats | None = None
    """(m + 1, B): how much more or less a lost kernel is worth after so many kernels; None: everywhere the same."""


@dataclass(frozen=True, slots=True)
class Posterior:
    """Probabilities, given both sequences."""

    fresh: Floats
    """(n, m, B): that the kernel is the launch's, and of no launch before it."""
    joined: Floats
    """(n, m, B): that the kernel is the launch's, and that of the launch before it."""
    passes: Floats
    """(n + 1, m + 1, B): that what is before a cell pairs only with what is before it, and alike behind it."""
    lost_kernels: Floats
    """(B,): expected number of launches whose kernel is missing."""
    lost_lines: Floats
    """(B,): expected number of kernels whose line is missing."""
    log_likelihood: Floats
    """(B,)"""
    starts: Floats
    """(B,): that the window begins where both sides begin."""


@dataclass(frozen=True, slots=True)
class _Table:
    """Sums over alignments, one anti-diagonal after the other: total[d, i] belongs to cell (i, d - i)."""

    total: Floats
    paired: Floats
    """Those whose last step was a pair; of no meaning where nothing can be joined."""
    log_scale: Floats
    """(diagonals, B): what the values of a diagonal were divided by."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What lies before and behind the windows."""

    is_open: bool = False
    """The end of one side is no loss: its partners lie behind the window."""
    starts_late: float = 0.0
    """What it is worth to leave any number of launches out at the front: the capture began later."""
    stops_early: float = 0.0
    """What it is worth to leave the rest of one side out at the end; of no meaning where the end is open."""


CLOSED: Final = Ends()


def posterior(weights: Weights, ends: Ends = CLOSED) -> Posterior:
    """Probabilities of all pairs, cells and losses.

    Costs O(B n m) in n + m steps over arrays; n and m must be at least 2.
    """
    ahead = _forward(weights, ends)
    behind = _backward(weights, ends)
    launches, kernels, batch = weights.pair.shape
    fresh, joined = np.zeros((launches * kernels, batch)), np.zeros((launches * kernels, batch))
    passes = np.zeros(((launches + 1) * (kernels + 1), batch))
    lost_kernels, lost_lines = np.zeros(batch), np.zeros(batch)
    likelihood, starts = _likelihood(behind, ends)
    pair, lost_line = weights.pair.reshape(-1, batch), weights.lost_line.reshape(-1, batch)
    may_join = bool(weights.joins.any())
    for diagonal in range(launches + kernels + 1):
        first, last = max(0, diagonal - kernels), min(launches, diagonal)
        scales = ahead.log_scale[max(0, diagonal - 2) : diagonal + 1] + behind.log_scale[diagonal] - likelihood
        scale = np.exp(scales)
        here = ahead.total[diagonal, first : last + 1] * scale[-1]
        passes[_cells(first, last, diagonal, kernels + 1)] = here * behind.total[diagonal, first : last + 1]
        # What lies on the border of an open end is behind the window: no step leads on from there.
        begin, end = max(1, first + (ends.is_open and diagonal - first == kernels)), last
        if begin <= end:
            above = ahead.total[diagonal - 1, begin - 1 : end] * _alone(weights, begin - 1, end, diagonal - 1)
            lost_kernels += (above * behind.total[diagonal, begin : end + 1]).sum(axis=0) * scale[-2]
        begin, end = first, min(last, diagonal - 1, launches - ends.is_open)
        if begin <= end:
            left = ahead.total[diagonal - 1, begin : end + 1] * lost_line[_cells(begin, end, diagonal - 1, kernels)]
            lost_lines += (left * behind.total[diagonal, begin : end + 1]).sum(axis=0) * scale[-2]
        begin, end = max(1, first), min(last, diagonal - 1)
        if begin > end:
            continue
        inner = _cells(begin - 1, end - 1, diagonal - 2, kernels)
        paired = behind.paired[diagonal, begin : end + 1]
        fresh[inner] = ahead.total[diagonal - 2, begin - 1 : end] * pair[inner] * paired * scale[0]
        if may_join:
            above = ahead.paired[diagonal - 1, begin - 1 : end] * weights.joins[begin - 1 : end]
            joined[inner] = above * paired * scale[-2]
    return Posterior(
        fresh.reshape(launches, kernels, batch),
        joined.reshape(launches, kernels, batch),
        passes.reshape(launches + 1, kernels + 1, batch),
        lost_kernels,
        lost_lines,
        likelihood,
        starts,
    )


def log_likelihood(weights: Weights, ends: Ends = CLOSED) -> Floats:
    """(B,): log of the sum over all alignments."""
    return _likelihood(_backward(weights, ends), ends)[0]


def _likelihood(behind: _Table, ends: Ends) -> tuple[Floats, Floats]:
    """Log of the sum over all alignments, and the share of those that begin where both sides begin."""
    at_corner = np.log(np.maximum(behind.total[0, 0], TINY)) + behind.log_scale[0]
    if ends.starts_late == 0:
        return at_corner, np.ones_like(at_corner)
    diagonals = np.arange(1, behind.total.shape[1])
    later = np.log(np.maximum(behind.total[diagonals, diagonals], TINY)) + behind.log_scale[diagonals]
    both = np.logaddexp(at_corner, np.logaddexp.reduce(later, axis=0) + np.log(ends.starts_late))
    return both, np.exp(at_corner - both)


def _alone(weights: Weights, first: int, last: int, diagonal: int) -> Floats:
    """What it is worth that the launches from first to last stand alone, from the cells of a diagonal on."""
    own = weights.lost_kernel[first:last]
    if weights.after is None:
        return own
    return own * weights.after[diagonal - last + 1 : diagonal - first + 1][::-1]


def _cells(first: int, last: int, diagonal: int, width: int) -> slice:
    """The cells (i, diagonal - i), i from first to last, of a flat table that is so wide."""
    begin = first * width + diagonal - first
    return slice(begin, begin + (last - first) * (width - 1) + 1, width - 1)


def _forward(weights: Weights, ends: Ends) -> _Table:
    launches, kernels, batch = weights.pair.shape
    pair, lost_line = weights.pair.reshape(-1, batch), weights.lost_line.reshape(-1, batch)
    may_join = bool(weights.joins.any())
    table = _empty(launches, kernels, batch, may_join=may_join)
    total, paired, log_scale = table.total, table.paired, table.log_scale
    total[0, 0] = 1.0
    for diagonal in range(1, launches + kernels + 1):
        first, last = max(0, diagonal - kernels), min(launches, diagonal)
        own = total[diagonal]
        begin, end = max(1, first), min(last, diagonal - 1)
        if begin <= end:
            inner = own[begin : end + 1]
            cells = _cells(begin - 1, end - 1, diagonal - 2, kernels)
            np.multiply(total[diagonal - 2, begin - 1 : end], pair[cells], out=inner)
            if (diagonal - 1) % _RESCALED == 0:
                inner *= np.exp(log_scale[diagonal - 2] - log_scale[diagonal - 1])
            if may_join:
                inner += paired[diagonal - 1, begin - 1 : end] * weights.joins[begin - 1 : end]
                paired[diagonal, begin : end + 1] = inner
        own[begin : last + 1] += total[diagonal - 1, begin - 1 : last] * _alone(weights, begin - 1, last, diagonal - 1)
        if first <= end:
            cells = _cells(first, end, diagonal - 1, kernels)
            own[first : end + 1] += total[diagonal - 1, first : end + 1] * lost_line[cells]
        if ends.starts_late and last == diagonal:
            own[diagonal] += ends.starts_late * _unscaled(log_scale[diagonal - 1])
        _rescale(table, diagonal, diagonal - 1, first, last)
    return table


def _backward(weights: Weights, ends: Ends) -> _Table:
    """total: what lies behind a cell is worth; paired: the same where the last step was a pair, which may be joined."""
    launches, kernels, batch = weights.pair.shape
    pair, lost_line = weights.pair.reshape(-1, batch), weights.lost_line.reshape(-1, batch)
    may_join = bool(weights.joins.any())
    table = _empty(launches, kernels, batch, may_join=may_join)
    total, paired, log_scale = table.total, table.paired, table.log_scale
    total[-1, launches] = paired[-1, launches] = 1.0
    for diagonal in range(launches + kernels - 1, -1, -1):
        first, last = max(0, diagonal - kernels), min(launches, diagonal)
        own = total[diagonal]
        begin, end = first + (diagonal - first == kernels), min(last, launches - 1)
        cells = _cells(begin, last, diagonal, kernels)
        own[begin : last + 1] = total[diagonal + 1, begin : last + 1] * lost_line[cells]
        if begin <= end:
            ahead = paired[diagonal + 2, begin + 1 : end + 2] * pair[_cells(begin, end, diagonal, kernels)]
            if (diagonal + 1) % _RESCALED == 0:
                ahead *= np.exp(log_scale[diagonal + 2] - log_scale[diagonal + 1])
            own[begin : end + 1] += ahead
        if first <= end:
            own[first : end + 1] += total[diagonal + 1, first + 1 : end + 2] * _alone(weights, first, end + 1, diagonal)
        if ends.is_open or ends.stops_early:
            border = _unscaled(log_scale[diagonal + 1]) * (1.0 if ends.is_open else ends.stops_early)
            borders = (launches,) if last == launches else ()
            borders += (first,) if diagonal - first == kernels and first < launches else ()
            for row in borders:
                own[row] = border if ends.is_open else border + own[row]
        if may_join:
            paired[diagonal, first : last + 1] = own[first : last + 1]
        if may_join and first <= end:
            joined = paired[diagonal + 1, first + 1 : end + 2] * weights.joins[first : end + 1]
            paired[diagonal, first : end + 1] += joined
        _rescale(table, diagonal, diagonal + 1, first, last)
    return table


def _unscaled(log_scale: Floats) -> Floats:
    """One, beside values that were divided by so much; where they are next to nothing it outweighs them anyway."""
    scale: Floats = np.exp(np.minimum(-log_scale, _OUTWEIGHS))
    return scale


def _empty(launches: int, kernels: int, batch: int, *, may_join: bool) -> _Table:
    """Where nothing can be joined, `paired` is not told apart from `total`."""
    diagonals = launches + kernels + 1
    total = np.zeros((diagonals, launches + 1, batch))
    return _Table(total, np.zeros_like(total) if may_join else total, np.zeros((diagonals, batch)))


def _rescale(table: _Table, diagonal: int, before: int, first: int, last: int) -> None:
    """Keeps values near one, so that they neither vanish nor overflow however long the window is."""
    if diagonal % _RESCALED:
        table.log_scale[diagonal] = table.log_scale[before]
        return
    own = table.total[diagonal, first : last + 1]
    largest = np.maximum(own.max(axis=0), TINY)
    own /= largest
    if table.paired is not table.total:
        table.paired[diagonal, first : last + 1] /= largest
    table.log_scale[diagonal] = table.log_scale[before] + np.log(largest)


def most_accurate(probable: Posterior, price: float) -> tuple[Indices, Indices, Indices]:
    """Window, launch and kernel of the pairs of the alignment with the highest expected gain.

    A right pair gains one; any pair costs `price`, so that what is improbable stays out. A kernel of which it is sure
    that its line is there gets one all the same, the likeliest: in a run of equal operations communicator, kind and
    size are right then, and the probability says that the pair is a guess. Ascending in each window.
    """
    launches, kernels, batch = probable.fresh.shape
    together = probable.fresh + probable.joined
    has_line = (together.sum(axis=0) >= SURELY) & (together > POSSIBLE)
    gain = np.where(has_line, np.maximum(together - price, GUESSED * together), together - price)
    joining = np.maximum(probable.joined - price, 0.0)
    value = np.zeros((launches + 1, kernels + 1, batch))
    for row in range(launches):
        best = value[row + 1]
        np.add(value[row, :-1], gain[row], out=best[1:])
        np.maximum(best[1:], value[row, 1:] + joining[row], out=best[1:])
        np.maximum.accumulate(best, axis=0, out=best)
    return _traced(value, joining)


def _traced(value: Floats, joining: Floats) -> tuple[Indices, Indices, Indices]:
    launches, kernels, batch = joining.shape
    at = np.full(batch, kernels, dtype=np.intp)
    windows = np.arange(batch)
    found: list[tuple[Indices, int, Indices]] = []
    for row in range(launches - 1, -1, -1):
        # The leftmost column that is worth as much: kernels behind it are no pair of this row.
        wanted = value[row + 1][at, windows]
        at = (value[row + 1] >= wanted - EQUAL).argmax(axis=0)
        column = np.maximum(at - 1, 0)
        above = value[row][at, windows]
        pairs = (at > 0) & (wanted > above + EQUAL)
        gained = joining[row][column, windows]
        joins = pairs & (gained > 0) & (wanted <= above + gained + EQUAL)
        if pairs.any():
            found.append((windows[pairs], row, column[pairs]))
        at = np.where(pairs & ~joins, at - 1, at)
    if not found:
        nothing = np.empty(0, dtype=np.intp)
        return nothing, nothing, nothing
    found.reverse()
    window = np.concatenate([each[0] for each in found])
    launch = np.concatenate([np.full(len(each[0]), each[1], dtype=np.intp) for each in found])
    kernel = np.concatenate([each[2] for each in found])
    order = np.argsort(window, kind="stable")
    return window[order], launch[order], kernel[order]
