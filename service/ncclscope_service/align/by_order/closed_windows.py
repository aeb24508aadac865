"""Small windows between two places where nothing is in doubt, decided many at once.

The pair hidden Markov model of `pair_hmm`, closed at both ends, in a band around the straight line: an alignment that
strays far loses many launches and many kernels, which is next to impossible if losses are few. Cell (i, k) of a
band that reaches `width` to either side stands behind launch i and kernel i + k - width.

Every alignment of a window takes each launch once and has as many lost kernels more than lost lines as it has
launches more than kernels. So weights can be spread over the steps as is convenient: a pair is worth 1, a launch
without a kernel all that both losses are worth beside the pair, and a kernel without a line again 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ncclscope_service.align.by_order.open_window import Pairs
from ncclscope_service.align.by_order.pair_hmm import EQUAL, GUESSED, POSSIBLE, SURELY, TINY, Floats
from ncclscope_service.align.by_order.resync import Compatible, Symbols

_PRICE: Final = 0.45
"""Least worth of a pair that is returned."""

_MARGIN: Final = 3
_WIDE_MARGIN: Final = 5
_NARROWEST: Final = 4
_WIDENED: Final = 4
"""Margin of a band beyond the gap, its least width, and the factor by which it grows."""

_HIDES_LITTLE: Final = 0.1
"""The wider margin is for windows that would be expected to hide more losses of both sides, were all launches alike."""

_CELLS: Final = 500_000
"""Cells that are worked on at once."""

_RESCALED: Final = 8
"""Rows after which sums are brought back near one."""


@dataclass(frozen=True, slots=True)
class ClosedWindow:
    """Items between two places where nothing is in doubt."""

    launches: range
    kernels: range
    reach: int
    """How far from the straight line both sides were found to agree again."""
    rates: tuple[float, float]
    """Shares of kernels and of lines that are lost, as known there."""

    @property
    def width(self) -> int:
        """How far the band reaches to either side."""
        launches, (kernels_lost, lines_lost) = len(self.launches), self.rates
        hides_little = launches * launches * kernels_lost * lines_lost < _HIDES_LITTLE
        margin = _MARGIN if hides_little else _WIDE_MARGIN
        width = _NARROWEST
        while width < self.reach + margin:
            width *= _WIDENED
        return width


@dataclass(frozen=True, slots=True)
class _Batch:
    """Windows of one width, the longest first, so that row i concerns the first `amounts[i]` of them."""

    width: int
    lengths: NDArray[np.intp]
    """Launches of each window."""
    amounts: NDArray[np.intp]
    """How many windows have a launch of each index, and 0."""
    ends: NDArray[np.intp]
    """Where in the band each window ends."""
    fits: Floats
    """(launches, band, windows): 1 if launch and kernel may belong together."""
    lost: Floats
    """(launches, windows): what a launch without a kernel is worth."""


@dataclass(frozen=True, slots=True)
class Items:
    """Symbols of the items of both sides, and which may belong together."""

    launches: Symbols
    kernels: Symbols
    compatible: Compatible


@dataclass(frozen=True, slots=True)
class _Stretches:
    """The stretch of one side that each window holds."""

    first: NDArray[np.intp]
    amount: NDArray[np.intp]

    @classmethod
    def from_ranges(cls, ranges: Iterable[range]) -> _Stretches:
        first, amount = np.array([(each.start, len(each)) for each in ranges]).T
        return cls(first, amount)


def decide_closed(windows: Sequence[ClosedWindow], items: Items) -> Iterator[Pairs]:
    """The pairs of windows, as indices of items."""
    for width in sorted({window.width for window in windows}):
        alike = [window for window in windows if window.width == width]
        alike.sort(key=lambda window: -len(window.launches))
        while alike:
            amount = max(1, _CELLS // (len(alike[0].launches) * (2 * width + 1)))
            yield _decide(alike[:amount], width, items)
            alike = alike[amount:]


def _decide(windows: Sequence[ClosedWindow], width: int, items: Items) -> Pairs:
    launches = _Stretches.from_ranges(window.launches for window in windows)
    kernels = _Stretches.from_ranges(window.kernels for window in windows)
    batch = _batch(launches, kernels, width, items, np.array([window.rates for window in windows]))
    pairs = _pairs(batch)
    window, launch, place = _most_accurate(batch, pairs)
    kernel = launch + place - width + kernels.first[window]
    return Pairs.one_by_one(launch + launches.first[window], kernel, pairs[launch, place, window])


def _batch(launches: _Stretches, kernels: _Stretches, width: int, items: Items, rates: NDArray[np.float64]) -> _Batch:
    """Windows of these launches and kernels, at these rates (windows, 2)."""
    rows = np.arange(launches.amount[0])[:, None]
    columns = np.arange(-width, launches.amount[0] + width)[:, None]
    # One more symbol stands for what is outside of a window, and fits nothing.
    table = np.pad(items.compatible, (0, 1))
    is_launch = rows < launches.amount
    left = np.where(is_launch, items.launches.take(launches.first + rows, mode="clip"), len(table) - 1)
    is_inside = (columns >= 0) & (columns < kernels.amount)
    right = np.where(is_inside, items.kernels.take(kernels.first + columns, mode="clip"), table.shape[1] - 1)
    fits = table.ravel().take((left * table.shape[1])[:, None, :] + _banded(right, width))
    share = _share_that_fits(left, right, table, kernels.amount)
    return _Batch(
        width,
        launches.amount,
        np.append(np.count_nonzero(is_launch, axis=1), 0),
        kernels.amount - launches.amount + width,
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
    """Sums over all alignments from each cell on, and the logarithm of their scale."""
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
    """Window, launch and place in the band of the pairs that `pair_hmm.most_accurate` would return."""
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
    """Worth of each pair; if the kernel surely has a line, a guess is better than nothing."""
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
