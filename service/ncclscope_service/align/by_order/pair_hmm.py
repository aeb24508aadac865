"""Pair hidden Markov model: how likely each launch is each kernel, and which pairs to give out.

A launch and a kernel come together, or only one of them is left: its partner was lost. Forward and backward sums over
all alignments give the probability of every pair. What a step is worth may depend on whether the step before it was a
kernel without a line. Many windows of one shape are worked on at once. The pairs returned are those of the alignment
with the highest expected gain.

*Source:* Durbin, Eddy, Krogh, Mitchison, "Biological Sequence Analysis", chapter 4 (pair HMMs, forward and backward
sums, posterior, maximum-accuracy alignment).
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
"""Diagonals after which sums are scaled back to about one, before they vanish or overflow."""

_OUTWEIGHS: Final = 600.0
"""Logarithm of what outweighs everything and stays within a float for the steps until values are brought back."""

SURELY: Final = 0.85
POSSIBLE: Final = 1e-6
GUESSED: Final = 0.1
"""Worth of a guess relative to its probability: less than any pair that pays its price."""
EQUAL: Final = 1e-4
"""Gains that differ by less are equal: of equal launches the first is paired."""


@dataclass(frozen=True, slots=True)
class Turns:
    """How much more or less a step is worth if the one before it was of the other side. A pair is of the launches'."""

    to_launch: Floats
    """(n, m + 1, B or 1): a launch after that number of kernels, the last of them without a line."""
    to_kernel: Floats
    """(n + 1, m, B or 1): a kernel without a line after that number of launches, if a launch came last."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the steps of an alignment, for B windows of n launches and m kernels.

    Only ratios matter: a pair is measured against losing both.
    """

    pair: Floats
    """(n, m, B): launch and kernel belong together; 0 if they cannot."""
    lost_kernel: Floats
    """(n, B): the launch stands alone."""
    lost_line: Floats
    """(n + 1, m, B): the kernel stands alone, after that number of launches."""
    joins: Floats
    """(n, B): the launch runs in the kernel of the launch before it; 0 if it cannot."""
    after: Floats | None = None
    """(m + 1, B): change of a lost kernel's worth after that number of kernels; None: everywhere the same."""
    turns: Turns | None = None
    """None: what a step is worth does not depend on the one before."""


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
class _Ahead:
    """Sums over alignments up to each cell, one anti-diagonal after the other: [d, i] belongs to cell (i, d - i).

    If steps do not depend on those before them, all but `paired` are one and the same array, which holds both
    what `launched` and what `alone` would.
    """

    launched: Floats
    """Those whose last step took a launch."""
    alone: Floats
    """Those whose last step was a kernel without a line."""
    to_launch: Floats
    """Factor on the weight of a launch that comes next."""
    to_kernel: Floats
    """The same of a kernel without a line."""
    paired: Floats
    """Those whose last step was a pair; unused if nothing can be joined."""
    log_scale: Floats
    """(diagonals, B): what the values of a diagonal were divided by."""


@dataclass(frozen=True, slots=True)
class _Behind:
    """Sums over alignments from each cell on, laid out alike."""

    launched: Floats
    """If the last step took a launch."""
    alone: Floats
    """If the last step was a kernel without a line."""
    paired: Floats
    """If the last step was a pair, whose kernel the next launch may join."""
    log_scale: Floats


@dataclass(frozen=True, slots=True)
class Ends:
    """Borders of the windows."""

    is_open: bool = False
    """The end of one side is no loss: its partners lie behind the window."""
    starts_late: float = 0.0
    """Weight of leaving out any number of launches at the front: the capture began later."""
    stops_early: float = 0.0
    """Weight of leaving out the rest of one side at the end; unused if the end is open."""


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
        # Beyond it, what is before and what is behind agree on no cell: all that is there is next to nothing.
        scale = np.exp(np.minimum(scales, _OUTWEIGHS))
        rows = slice(first, last + 1)
        here = ahead.launched[diagonal, rows] * behind.launched[diagonal, rows]
        if weights.turns is not None:
            here += ahead.alone[diagonal, rows] * behind.alone[diagonal, rows]
        passes[_cells(first, last, diagonal, kernels + 1)] = here * scale[-1]
        # What lies on the border of an open end is behind the window: no step leads on from there.
        begin, end = max(1, first + (ends.is_open and diagonal - first == kernels)), last
        if begin <= end:
            above = ahead.to_launch[diagonal - 1, begin - 1 : end] * _alone(weights, begin - 1, end, diagonal - 1)
            lost_kernels += (above * behind.launched[diagonal, begin : end + 1]).sum(axis=0) * scale[-2]
        begin, end = first, min(last, diagonal - 1, launches - ends.is_open)
        if begin <= end:
            left = ahead.to_kernel[diagonal - 1, begin : end + 1] * lost_line[_cells(begin, end, diagonal - 1, kernels)]
            lost_lines += (left * behind.alone[diagonal, begin : end + 1]).sum(axis=0) * scale[-2]
        begin, end = max(1, first), min(last, diagonal - 1)
        if begin > end:
            continue
        inner = _cells(begin - 1, end - 1, diagonal - 2, kernels)
        paired = behind.paired[diagonal, begin : end + 1]
        fresh[inner] = ahead.to_launch[diagonal - 2, begin - 1 : end] * pair[inner] * paired * scale[0]
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


def _likelihood(behind: _Behind, ends: Ends) -> tuple[Floats, Floats]:
    """Log of the sum over all alignments, and the share of those that begin where both sides begin."""
    at_corner = np.log(np.maximum(behind.launched[0, 0], TINY)) + behind.log_scale[0]
    if ends.starts_late == 0:
        return at_corner, np.ones_like(at_corner)
    diagonals = np.arange(1, behind.launched.shape[1])
    later = np.log(np.maximum(behind.launched[diagonals, diagonals], TINY)) + behind.log_scale[diagonals]
    both = np.logaddexp(at_corner, np.logaddexp.reduce(later, axis=0) + np.log(ends.starts_late))
    return both, np.exp(at_corner - both)


def _alone(weights: Weights, first: int, last: int, diagonal: int) -> Floats:
    """Weights of the launches from first to last standing alone, from the cells of a diagonal on."""
    own = weights.lost_kernel[first:last]
    if weights.after is None:
        return own
    return own * weights.after[diagonal - last + 1 : diagonal - first + 1][::-1]


def _cells(first: int, last: int, diagonal: int, width: int) -> slice:
    """The cells (i, diagonal - i), i from first to last, of a flat table that is so wide."""
    begin = first * width + diagonal - first
    step = max(1, width - 1)  # where it is one wide, a diagonal has one cell of it
    return slice(begin, begin + (last - first) * step + 1, step)


def _forward(weights: Weights, ends: Ends) -> _Ahead:
    launches, kernels, batch = weights.pair.shape
    pair, lost_line = weights.pair.reshape(-1, batch), weights.lost_line.reshape(-1, batch)
    may_join = bool(weights.joins.any())
    table = _nothing_ahead(weights, may_join=may_join)
    launched, alone, paired, log_scale = table.launched, table.alone, table.paired, table.log_scale
    launched[0, 0] = table.to_launch[0, 0] = 1.0
    _turn(table, weights, 0, 0, 0)
    for diagonal in range(1, launches + kernels + 1):
        first, last = max(0, diagonal - kernels), min(launches, diagonal)
        own = launched[diagonal]
        begin, end = max(1, first), min(last, diagonal - 1)
        if begin <= end:
            inner = own[begin : end + 1]
            cells = _cells(begin - 1, end - 1, diagonal - 2, kernels)
            np.multiply(table.to_launch[diagonal - 2, begin - 1 : end], pair[cells], out=inner)
            if (diagonal - 1) % _RESCALED == 0:
                inner *= np.exp(log_scale[diagonal - 2] - log_scale[diagonal - 1])
            if may_join:
                inner += paired[diagonal - 1, begin - 1 : end] * weights.joins[begin - 1 : end]
                paired[diagonal, begin : end + 1] = inner
        before = table.to_launch[diagonal - 1, begin - 1 : last]
        own[begin : last + 1] += before * _alone(weights, begin - 1, last, diagonal - 1)
        if first <= end:
            cells = _cells(first, end, diagonal - 1, kernels)
            alone[diagonal, first : end + 1] += table.to_kernel[diagonal - 1, first : end + 1] * lost_line[cells]
        if ends.starts_late and last == diagonal:
            own[diagonal] += ends.starts_late * _unscaled(log_scale[diagonal - 1])
        rows = slice(first, last + 1)
        separate = () if alone is launched else (alone[diagonal, rows],)
        joinable = () if paired is launched else (paired[diagonal, rows],)
        _rescale((launched[diagonal, rows], *separate, *joinable), log_scale, diagonal, diagonal - 1)
        _turn(table, weights, diagonal, first, last)
    return table


def _turn(table: _Ahead, weights: Weights, diagonal: int, first: int, last: int) -> None:
    """Works out what the next step is worth from the cells of a diagonal on."""
    if weights.turns is None:
        return
    launches, kernels, _ = weights.pair.shape
    rows = slice(first, last + 1)
    launched, alone = table.launched[diagonal, rows], table.alone[diagonal, rows]
    end = min(last, launches - 1)
    if first <= end:
        worth = _flat(weights.turns.to_launch)[_cells(first, end, diagonal, kernels + 1)]
        inner = slice(0, end - first + 1)
        table.to_launch[diagonal, first : end + 1] = launched[inner] + alone[inner] * worth
    begin = first + (diagonal - first == kernels)
    if begin <= last:
        worth = _flat(weights.turns.to_kernel)[_cells(begin, last, diagonal, kernels)]
        table.to_kernel[diagonal, begin : last + 1] = launched[begin - first :] * worth + alone[begin - first :]


def _flat(table: Floats) -> Floats:
    return table.reshape(-1, table.shape[2])


def _backward(weights: Weights, ends: Ends) -> _Behind:
    launches, kernels, batch = weights.pair.shape
    pair, lost_line = weights.pair.reshape(-1, batch), weights.lost_line.reshape(-1, batch)
    may_join = bool(weights.joins.any())
    table = _nothing_behind(weights, may_join=may_join)
    launched, alone, paired, log_scale = table.launched, table.alone, table.paired, table.log_scale
    launched[-1, launches] = alone[-1, launches] = paired[-1, launches] = 1.0
    for diagonal in range(launches + kernels - 1, -1, -1):
        first, last = max(0, diagonal - kernels), min(launches, diagonal)
        rows = slice(first, last + 1)
        # By launches and by kernels without a line separately, as what each is worth may depend on the step before.
        by_launch = np.zeros((last + 1 - first, batch))
        by_kernel = np.zeros((last + 1 - first, batch))
        begin, end = first + (diagonal - first == kernels), min(last, launches - 1)
        cells = _cells(begin, last, diagonal, kernels)
        np.multiply(alone[diagonal + 1, begin : last + 1], lost_line[cells], out=by_kernel[begin - first :])
        if begin <= end:
            ahead = paired[diagonal + 2, begin + 1 : end + 2] * pair[_cells(begin, end, diagonal, kernels)]
            if (diagonal + 1) % _RESCALED == 0:
                ahead *= np.exp(log_scale[diagonal + 2] - log_scale[diagonal + 1])
            by_launch[begin - first : end + 1 - first] += ahead
        if first <= end:
            lost = launched[diagonal + 1, first + 1 : end + 2] * _alone(weights, first, end + 1, diagonal)
            by_launch[: end + 1 - first] += lost
        np.add(by_launch, by_kernel, out=launched[diagonal, rows])
        if weights.turns is not None:
            _turn_back(table, weights, diagonal, (first, last), (by_launch, by_kernel))
        if ends.is_open or ends.stops_early:
            border = _unscaled(log_scale[diagonal + 1]) * (1.0 if ends.is_open else ends.stops_early)
            borders = (launches,) if last == launches else ()
            borders += (first,) if diagonal - first == kernels and first < launches else ()
            for row in borders:
                for values in (launched,) if alone is launched else (launched, alone):
                    values[diagonal, row] = border if ends.is_open else border + values[diagonal, row]
        if may_join:
            paired[diagonal, rows] = launched[diagonal, rows]
        if may_join and first <= end:
            joined = paired[diagonal + 1, first + 1 : end + 2] * weights.joins[first : end + 1]
            paired[diagonal, first : end + 1] += joined
        separate = () if alone is launched else (alone[diagonal, rows],)
        joinable = () if paired is launched else (paired[diagonal, rows],)
        _rescale((launched[diagonal, rows], *separate, *joinable), log_scale, diagonal, diagonal + 1)
    return table


def _turn_back(
    table: _Behind, weights: Weights, diagonal: int, rows: tuple[int, int], steps: tuple[Floats, Floats]
) -> None:
    """Fills in the sums behind the cells of a diagonal, by the step that led there."""
    assert weights.turns is not None, "only where steps depend on those before"
    launches, kernels, _ = weights.pair.shape
    (first, last), (by_launch, by_kernel) = rows, steps
    launched, alone = table.launched[diagonal], table.alone[diagonal]
    launched[first : last + 1] = by_launch
    alone[first : last + 1] = by_kernel
    begin, end = first + (diagonal - first == kernels), min(last, launches - 1)
    if begin <= last:
        worth = _flat(weights.turns.to_kernel)[_cells(begin, last, diagonal, kernels)]
        launched[begin : last + 1] += by_kernel[begin - first :] * worth
    if first <= end:
        worth = _flat(weights.turns.to_launch)[_cells(first, end, diagonal, kernels + 1)]
        alone[first : end + 1] += by_launch[: end + 1 - first] * worth


def _unscaled(log_scale: Floats) -> Floats:
    """One, beside values that were divided by so much; if they are next to nothing it outweighs them anyway."""
    scale: Floats = np.exp(np.minimum(-log_scale, _OUTWEIGHS))
    return scale


def _nothing_ahead(weights: Weights, *, may_join: bool) -> _Ahead:
    launches, kernels, batch = weights.pair.shape
    total = np.zeros((launches + kernels + 1, launches + 1, batch))
    paired = np.zeros_like(total) if may_join else total
    log_scale = np.zeros((len(total), batch))
    if weights.turns is None:
        return _Ahead(total, total, total, total, paired, log_scale)
    alone, to_launch, to_kernel = (np.zeros_like(total) for _ in range(3))
    return _Ahead(total, alone, to_launch, to_kernel, paired, log_scale)


def _nothing_behind(weights: Weights, *, may_join: bool) -> _Behind:
    launches, kernels, batch = weights.pair.shape
    total = np.zeros((launches + kernels + 1, launches + 1, batch))
    alone = total if weights.turns is None else np.zeros_like(total)
    return _Behind(total, alone, np.zeros_like(total) if may_join else total, np.zeros((len(total), batch)))


def _rescale(values: tuple[Floats, ...], log_scale: Floats, diagonal: int, before: int) -> None:
    """Keeps values near one, so that they neither vanish nor overflow however long the window is."""
    if diagonal % _RESCALED:
        log_scale[diagonal] = log_scale[before]
        return
    largest = np.maximum(np.max([own.max(axis=0) for own in values], axis=0), TINY)
    for own in values:
        np.divide(own, largest, out=own)
    log_scale[diagonal] = log_scale[before] + np.log(largest)


def most_accurate(probable: Posterior, price: float) -> tuple[Indices, Indices, Indices]:
    """Window, launch and kernel of the pairs of the alignment with the highest expected gain.

    A right pair gains one; any pair costs `price`, so that improbable ones stay out. A kernel that surely has a line
    gets one all the same, the likeliest: in a run of equal operations communicator, kind and
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
