"""Decides small dirty windows, many at once: those between two places where nothing is in doubt.

The pair hidden Markov model of `pair_hmm`, closed at both ends, in a band around the straight line: an alignment that
strays far loses many launches and many kernels, which is next to impossible where losses are few. Cell (i, k) of a
band that reaches `width` to either side stands behind launch i and kernel i + k - width.

Every alignment of a window takes each launch once and has as many lost kernels more than lost lines as it has
launches more than kernels. So weights can be spread over the steps as is convenient: a pair is worth 1, a launch
without a kernel all that both losses are worth beside the pair, and a kernel without a line again 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ncclscope_service.accurate import EQUAL, GUESSED, POSSIBLE, SURELY
from ncclscope_service.dirty import Found
from ncclscope_service.pair_hmm import TINY, Floats

_PRICE: Final = 0.45
"""What a pair must be worth to be given out."""

_MARGIN: Final = 3
_WIDE_MARGIN: Final = 5
_NARROWEST: Final = 4
_WIDENED: Final = 4
"""A band reaches so far beyond what makes both sides agree again, and at least so far; then so many times as far."""

_HIDES_LITTLE: Final = 0.1
"""The wider margin is for windows that would be expected to hide more losses of both sides, were all launches alike."""

_CELLS: Final = 500_000
"""Cells that are worked on at once."""

_RESCALED: Final = 8
"""Rows after which sums are brought back near one."""


@dataclass(frozen=True, slots=True)
class SmallWindow:
    """Items between two places where nothing is in doubt."""

    launches: tuple[int, int]
    """The first item, and that behind the last."""
    kernels: tuple[int, int]
    reach: int
    """How far from the straight line both sides were found to agree again."""
    rates: tuple[float, float]
    """Shares of kernels and of lines that are lost, as known there."""

    @property
    def width(self) -> int:
        """How far the band reaches to either side."""
        launches, (kernels_lost, lines_lost) = self.launches[1] - self.launches[0], self.rates
        hides_little = launches * launches * kernels_lost * lines_lost < _HIDES_LITTLE
        margin = _MARGIN if hides_little else _WIDE_MARGIN
        width = _NARROWEST
        while width < self.reach + margin:
            width *= _WIDENED
        return width


@dataclass(frozen=True, slots=True)
class _Batch:
    """Windows of one width, the longest first: what is done for a launch is done for the first so many of them."""

    width: int
    lengths: NDArray[np.intp]
    """Launches of each window."""
    amounts: NDArray[np.intp]
    """How many windows have a launch of each index, and 0."""
    ends: NDArray[np.intp]
    """Where in the band each window ends."""
    fits: Floats
    """(launches, band, windows): 1 where launch and kernel may belong together."""
    lost: Floats
    """(launches, windows): what a launch without a kernel is worth."""


def decide_small(
    windows: Sequence[SmallWindow], left: NDArray[np.int32], right: NDArray[np.int32], compatible: NDArray[np.bool_]
) -> Iterator[Found]:
    """The pairs of windows, as indices of `left` and `right`, which hold the symbols of the items."""
    for width in sorted({window.width for window in windows}):
        alike = [window for window in windows if window.width == width]
        alike.sort(key=lambda window: window.launches[0] - window.launches[1])
        while alike:
            longest = alike[0].launches[1] - alike[0].launches[0]
            amount = max(1, _CELLS // (longest * (2 * width + 1)))
            yield _decide(alike[:amount], width, (left, right), compatible)
            alike = alike[amount:]


def _decide(
    windows: Sequence[SmallWindow],
    width: int,
    symbols: tuple[NDArray[np.int32], NDArray[np.int32]],
    compatible: NDArray[np.bool_],
) -> Found:
    first_launch, launches = np.array([(one.launches[0], one.launches[1] - one.launches[0]) for one in windows]).T
    first_kernel, kernels = np.array([(one.kernels[0], one.kernels[1] - one.kernels[0]) for one in windows]).T
    rates = np.array([one.rates for one in windows])
    batch = _batch((first_launch, launches), (first_kernel, kernels), width, symbols, compatible, rates)
    pairs = _pairs(batch)
    window, launch, place = _most_accurate(batch, pairs)
    kernel = launch + place - width + first_kernel[window]
    return Found.one_by_one(launch + first_launch[window], kernel, pairs[launch, place, window])


def _batch(
    left: tuple[NDArray[np.intp], NDArray[np.intp]],
    right: tuple[NDArray[np.intp], NDArray[np.intp]],
    width: int,
    symbols: tuple[NDArray[np.int32], NDArray[np.int32]],
    compatible: NDArray[np.bool_],
    rates: NDArray[np.float64],
) -> _Batch:
    """Windows of these first launches and kernels, and so many of each, at these rates (windows, 2)."""
    (first_launch, launches), (first_kernel, kernels) = left, right
    rows = np.arange(launches[0])[:, None]
    columns = np.arange(-width, launches[0] + width)[:, None]
    # One more symbol stands for what is outside of a window, and fits nothing.
    table = np.pad(compatible, (0, 1))
    own = np.where(rows < launches, symbols[0].take(first_launch + rows, mode="clip"), len(compatible))
    is_inside = (columns >= 0) & (columns < kernels)
    other = np.where(is_inside, symbols[1].take(first_kernel + columns, mode="clip"), compatible.shape[1])
    fits = table.ravel().take((own * table.shape[1])[:, None, :] + _banded(other, width))
    share = _share_that_fits(own, other, table, kernels)
    return _Batch(
        width,
        launches,
        np.append(np.count_nonzero(rows < launches, axis=1), 0),
        kernels - launches + width,
        fits.astype(np.float64),
        rates.prod(axis=1) * np.where(share > 0, share, 1.0),
    )


def _banded(columns: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """(launches, band, windows) of (kernels from -width on to width behind the last launch, windows)."""
    column, window = columns.strides
    shape = len(columns) - 2 * width, 2 * width + 1, columns.shape[1]
    return as_strided(columns, shape, (column, column, window), writeable=False)


def _share_that_fits(
    left: NDArray[np.int32], right: NDArray[np.int32], table: NDArray[np.bool_], kernels: NDArray[np.intp]
) -> Floats:
    """(launches, windows): the share of its window's kernels that each launch may be."""
    launch_symbols, kernel_symbols = table.shape
    windows = np.arange(right.shape[1])
    amounts = np.bincount((right + windows * kernel_symbols).ravel(), minlength=len(windows) * kernel_symbols)
    fitting = table @ (amounts.reshape(len(windows), kernel_symbols) / kernels[:, None]).T
    share: Floats = fitting[np.minimum(left, launch_symbols - 1), windows]
    return share


def _forward(batch: _Batch) -> tuple[Floats, Floats]:
    """Sums over all alignments up to each cell, and the logarithm of what those of each row were divided by."""
    launches, band, windows = batch.fits.shape
    sums, scales = np.zeros((launches + 1, band, windows)), np.zeros((launches + 1, windows))
    sums[0, batch.width :] = 1.0
    for row in range(launches):
        amount = batch.amounts[row]
        before, own = sums[row, :, :amount], sums[row + 1, :, :amount]
        np.multiply(before, batch.fits[row, :, :amount], out=own)
        own[:-1] += before[1:] * batch.lost[row, :amount]
        np.add.accumulate(own, axis=0, out=own)
        scales[row + 1] = scales[row]
        if row % _RESCALED == 0:
            scales[row + 1, :amount] += _rescaled(own)
    return sums, scales


def _rescaled(own: Floats) -> Floats:
    largest = np.maximum(own.max(axis=0), TINY)
    own /= largest
    logarithms: Floats = np.log(largest)
    return logarithms


def _backward(batch: _Batch) -> tuple[Floats, Floats]:
    """Sums over all alignments from each cell on, likewise."""
    launches, band, windows = batch.fits.shape
    sums, scales = np.zeros((launches + 1, band, windows)), np.zeros((launches + 1, windows))
    for row in range(launches - 1, -1, -1):
        amount, begun = batch.amounts[row], batch.amounts[row + 1]
        if amount > begun:
            # These end behind this launch: kernels that are left then have lost their lines.
            sums[row + 1, :, begun:amount] = np.arange(band)[:, None] <= batch.ends[begun:amount]
        after, own = sums[row + 1, :, :amount], sums[row, :, :amount]
        np.multiply(after, batch.fits[row, :, :amount], out=own)
        own[1:] += after[:-1] * batch.lost[row, :amount]
        np.add.accumulate(own[::-1], axis=0, out=own[::-1])
        scales[row] = scales[row + 1]
        if row % _RESCALED == 0:
            scales[row, :amount] += _rescaled(own)
    return sums, scales


def _pairs(batch: _Batch) -> Floats:
    """(launches, band, windows): the probability of each pair."""
    (ahead, scales), (behind, scaled) = _forward(batch), _backward(batch)
    every = np.arange(batch.fits.shape[2])
    whole = ahead[batch.lengths, batch.ends, every]
    likelihood = np.log(np.maximum(whole, TINY)) + scales[batch.lengths, every]
    pairs = ahead[:-1] * batch.fits
    pairs *= behind[1:]
    pairs *= np.exp(scales[:-1] + scaled[1:] - likelihood)[:, None]
    return pairs


def _most_accurate(batch: _Batch, pairs: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Window, launch and place in the band of the pairs that `pair_hmm.most_accurate` would give out."""
    gain = _gains(batch, pairs)
    launches, band, windows = pairs.shape
    value = np.zeros((launches + 1, band, windows))
    for row in range(launches):
        amount = batch.amounts[row]
        before, best = value[row, :, :amount], value[row + 1, :, :amount]
        np.add(before, gain[row, :, :amount], out=best)
        np.maximum(best[:-1], before[1:], out=best[:-1])
        np.maximum.accumulate(best, axis=0, out=best)
    return _traced(batch, value)


def _gains(batch: _Batch, pairs: Floats) -> Floats:
    """What each pair is worth: a guess, where it is sure that the kernel has a line, is better than nothing."""
    launches, band, windows = pairs.shape
    of_kernel = np.zeros((launches + band - 1, windows))
    for row in range(launches):
        of_kernel[row : row + band] += pairs[row]
    column, window = of_kernel.strides
    has_line = as_strided(of_kernel, pairs.shape, (column, column, window), writeable=False) >= SURELY
    has_line &= pairs > POSSIBLE
    gain: Floats = pairs - _PRICE
    np.maximum(gain, GUESSED * pairs, out=gain, where=has_line)
    return gain


def _traced(batch: _Batch, value: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """The way back through the highest values; of equal launches the first is paired."""
    launches, band, windows = len(value) - 1, value.shape[1], value.shape[2]
    places = np.arange(band, dtype=np.int16)[:, None]
    # Kernels behind the leftmost place that is worth as much are no pair of this launch.
    rises = np.concatenate([np.ones((launches, 1, windows), bool), value[1:, 1:] > value[1:, :-1] + EQUAL], axis=1)
    leftmost = np.maximum.accumulate(np.where(rises, places, np.int16(0)), axis=1)
    is_pair = np.ones((launches, band, windows), bool)
    np.greater(value[1:, :-1], value[:-1, 1:] + EQUAL, out=is_pair[:, :-1])
    reached = np.zeros((launches, windows), dtype=np.intp)
    at, every = batch.ends.copy(), np.arange(windows)
    for row in range(launches - 1, -1, -1):
        amount = batch.amounts[row]
        here = leftmost[row, at[:amount], every[:amount]]
        reached[row, :amount] = here
        at[:amount] = here + ~is_pair[row, here, every[:amount]]
    rows = np.arange(launches)[:, None]
    pairs = is_pair[rows, reached, every] & (every < batch.amounts[:-1, None])
    window, launch = np.nonzero(pairs.T)
    return window, launch, reached[launch, window]
