"""How many launches are missing before a kernel, by the correlation ids that were used up since the kernel before.

Every call of the CUDA API takes one, so a program that repeats takes about as many for each launch of a kind: a gap
as wide as two launches hides one. What each kind takes, and how much that scatters, is learnt from pairs; where it
scatters as much as gaps do by chance, the gaps say little.

*Source:* CUPTI, `CUpti_ActivityAPI.correlationId` (one number per API call of a process, in the order of the calls).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_service.pair_hmm import Floats
from ncclscope_service.recurring import Recurring
from ncclscope_wire.batch import Columns

_MOST: Final = 12
"""Missing launches that are told apart."""

_ENOUGH: Final = 64.0
"""Pairs after which kinds of launches are known; before, kernels of one lane and class are taken for one kind."""

_QUANTILE: Final = 0.4
"""Of the gaps before such kernels: most hide nothing."""

_PRIOR: Final = 2.0
"""Launches that the mean of all kinds weighs in that of each."""

_MEMORY: Final = 4000.0
"""Pairs after which older ones count less."""

_LEAST_SCATTER: Final = 0.05
_ASTRAY: Final = 1e-4
"""Density of gaps that no number of missing launches explains: something else was called there."""

_LEAST, _GREATEST = 0.003, 20.0
"""Expected missing launches, at least and at most."""


@dataclass(frozen=True, slots=True)
class MissingKernels:
    """Launches that are expected to have a line and no kernel, under several answers to how many kernels are lost."""

    amount: Floats
    """(m + 1, B): before each kernel and behind the last."""
    log_likelihood: Floats
    """(B,): of the gaps."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """What pairs say that launches take."""

    sums: Floats
    """Weight, and sum of the ids taken, of each kind."""
    scatter: Floats
    """Sum of squared deviations, and of what was expected."""

    @property
    def means(self) -> Floats:
        """Ids that one launch of each kind takes."""
        weight, total = self.sums[:, 0], self.sums[:, 1]
        overall = total.sum() / max(float(weight.sum()), 1e-9)
        means: Floats = (total + _PRIOR * overall) / (weight + _PRIOR)
        return means

    @property
    def variance(self) -> float:
        """Of the ids a launch takes, over their mean."""
        return max(float(self.scatter[0] / max(self.scatter[1], 1e-9)), _LEAST_SCATTER)


@dataclass(slots=True)
class KernelGaps:
    """What the correlation ids of one thread's kernels say of missing launches."""

    _kinds: Recurring = field(default_factory=Recurring)
    _sums: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    _scatter: Floats = field(default_factory=lambda: np.zeros(2))
    _last_id: int | None = None
    """Of the kernel before the next window."""

    def missing(
        self, launches: Columns, kernels: Columns, pairs: Floats | None, kernels_lost: Floats, lines_lost: float
    ) -> MissingKernels:
        """Launches missing in a window.

        `pairs` (n, m): how likely each pair is so far; None: nothing is known. `kernels_lost` (B): the share of lost
        kernels, under several answers; `lines_lost` of lines.
        """
        widths = self._widths(kernels)
        taken, own = self._expected(launches, kernels, widths, pairs)
        chances = _chances(widths, own, taken, kernels_lost)
        likely = chances.sum(axis=1, keepdims=True)
        chances /= likely
        expected = np.tensordot(chances, np.arange(_MOST), axes=(1, 0)) * (1 - lines_lost)
        behind = kernels_lost / (1 - kernels_lost)
        expected[np.isnan(widths)] = behind
        amount = np.clip(np.concatenate([expected, behind[None]]), _LEAST, _GREATEST)
        return MissingKernels(amount, np.log(likely[~np.isnan(widths), 0]).sum(axis=0))

    def learn(self, launches: Columns, kernels: Columns, pairs: Floats, kernels_lost: float) -> None:
        """Takes in a decided window, of which no later one begins before its end."""
        if len(kernels) == 0:
            return
        widths = self._widths(kernels)
        taken = self._with(launches, kernels, widths, pairs, kernels_lost)
        fading = min(1.0, _MEMORY / max(float(taken.sums[:, 0].sum()), 1.0))
        self._sums, self._scatter = taken.sums * fading, taken.scatter * fading
        self._last_id = int(kernels["correlation_id"][-1])

    def _widths(self, kernels: Columns) -> Floats:
        """Ids since the kernel before; NaN where that is not known."""
        ids = kernels["correlation_id"].astype(np.float64)
        return np.diff(ids, prepend=np.nan if self._last_id is None else float(self._last_id))

    def _expected(
        self, launches: Columns, kernels: Columns, widths: Floats, pairs: Floats | None
    ) -> tuple[_Taken, Floats]:
        """What kinds take, and each kernel's own launch."""
        rough = _rough(kernels, widths)
        if pairs is None and float(self._sums[:, 0].sum()) < _ENOUGH:
            return self._first(widths, rough), rough
        if pairs is None:
            return _Taken(self._sums, self._scatter), rough
        taken = self._with(launches, kernels, widths, pairs, 0.1)
        return taken, self._own(launches, pairs, taken, rough)

    def _own(self, launches: Columns, pairs: Floats, taken: _Taken, rough: Floats) -> Floats:
        """By which launches each kernel may be; what is left by its lane and class."""
        sure = np.minimum(pairs.sum(axis=0), 1.0)
        means = taken.means[self._kinds.number(launches)]
        own: Floats = pairs.T @ means + (1 - sure) * rough
        return own

    def _with(self, launches: Columns, kernels: Columns, widths: Floats, pairs: Floats, kernels_lost: float) -> _Taken:
        """With what these pairs say: the gaps before them count as far as they hide nothing."""
        kinds = self._kinds.number(launches)
        self._grow()
        rough = _rough(kernels, widths)
        known = _Taken(self._sums, self._scatter)
        if float(self._sums[:, 0].sum()) < _ENOUGH:
            known, own = self._first(widths, rough), rough
        else:
            own = self._own(launches, pairs, known, rough)
        chances = _chances(widths, own, known, np.array([kernels_lost]))[:, :, 0]
        alone = chances[:, 0] / chances.sum(axis=1)
        alone[np.isnan(widths)] = 0.0
        widths = np.nan_to_num(widths)
        weights = pairs * alone
        sums = self._sums.copy()
        np.add.at(sums, kinds, np.stack([weights.sum(axis=1), weights @ widths], axis=1))
        means = _Taken(sums, self._scatter).means[kinds]
        squares = weights @ widths**2 - 2 * means * (weights @ widths) + means**2 * weights.sum(axis=1)
        more = np.array([squares.sum(), (weights.sum(axis=1) * means).sum()])
        return _Taken(sums, self._scatter + more)

    def _first(self, widths: Floats, rough: Floats) -> _Taken:
        """Before anything is known: the scatter of those gaps that are no wider than the usual one and a half."""
        near = widths < 1.5 * rough
        away = np.where(near, widths - rough, 0.0)
        mean = float(rough[near].sum())
        count = float(np.count_nonzero(near))
        return _Taken(np.array([[count, mean]]), np.array([float((away**2).sum()), max(mean, 1e-9)]))

    def _grow(self) -> None:
        missing = len(self._kinds) - len(self._sums)
        if missing > 0:
            self._sums = np.concatenate([self._sums, np.zeros((missing, 2))])


def _rough(kernels: Columns, widths: Floats) -> Floats:
    """What a kernel's launch takes, by the lane and class of kernels alone."""
    rough: Floats = np.full(len(kernels), np.nanquantile(widths, _QUANTILE) if np.isfinite(widths).any() else 1.0)
    keys = kernels["lane"].astype(np.int64) << 8 | kernels["kernel_class"]
    for key in np.unique(keys).tolist():
        mine = (keys == key) & np.isfinite(widths)
        if np.count_nonzero(mine) >= 4:
            rough[keys == key] = np.quantile(widths[mine], _QUANTILE)
    np.maximum(rough, 1.0, out=rough)
    return rough


def _chances(widths: Floats, own: Floats, taken: _Taken, kernels_lost: Floats) -> Floats:
    """(m, _MOST, B): how likely each gap is, and that so many launches are missing in it.

    A launch takes a gamma-distributed number of ids, so that several take one of the same kind.
    """
    mean = float(taken.sums[:, 1].sum() / max(taken.sums[:, 0].sum(), 1e-9))
    variance = taken.variance
    amounts = np.arange(_MOST)
    shape = (own[:, None] + amounts * mean) / variance
    wide = np.maximum(np.nan_to_num(widths, nan=1.0), 0.5)[:, None]
    log_density = (shape - 1) * np.log(wide / variance) - wide / variance - np.log(variance) - _log_gamma(shape)
    density = np.exp(log_density) + _ASTRAY
    chances: Floats = density[:, :, None] * (1 - kernels_lost) * kernels_lost ** amounts[:, None]
    return chances


def _log_gamma(values: Floats) -> Floats:
    """Stirling's series, after one step up so that it holds for small values too."""
    above = values + 1
    series: Floats = (above - 0.5) * np.log(above) - above + 0.5 * np.log(2 * np.pi) + 1 / (12 * above)
    series -= np.log(values)
    return series
