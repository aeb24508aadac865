"""Straight lines through noisy columns with outliers, all columns at once.

A Theil-Sen line over a dozen bin medians starts iteratively reweighted least squares with Huber's weights
(k = 1.345 sigma); beyond 6 MAD a point has no say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]
_HUBER: Final = 1.345
_CUT: Final = 6.0
_ROUNDS: Final = 8
_BINS: Final = 12
_LEAST_SCALE: Final = 1.0
"""Residuals below 1 ns are rounding."""
_STILL: Final = 0.5
"""Lines that move less, in ns anywhere, are done."""
_STEEPEST: Final = 1e-3
"""The lines are of clocks: none that works is off by more (Linux slews by 500 ppm at most, `man adjtimex`)."""
_LEAST_RUN: Final = 0.25
"""Points of one burst lie so near each other that their slope is noise: pairs must lie this share of all apart."""
_EXPECTED_SCALE: Final = 5_000.0
_EXPECTED_POINTS: Final = 10.0
"""How far ends scatter usually, in ns, and its weight in points: a line through four points passes two of them exactly,
and is not as sure as that looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """One line per column: y = at_zero + slope * x."""

    at_zero: _Floats
    slope: _Floats
    at_zero_sigma: _Floats
    slope_sigma: _Floats
    known: NDArray[np.bool_]
    """False if a column has no two points apart in x: its line means nothing."""

    def take(self, columns: NDArray[np.intp]) -> Lines:
        """The lines of these columns."""
        return Lines(
            at_zero=self.at_zero[columns],
            slope=self.slope[columns],
            at_zero_sigma=self.at_zero_sigma[columns],
            slope_sigma=self.slope_sigma[columns],
            known=self.known[columns],
        )

    @staticmethod
    def joined(parts: Sequence[Lines]) -> Lines:
        """All lines of all parts, in order."""
        return Lines(
            at_zero=np.concatenate([part.at_zero for part in parts]),
            slope=np.concatenate([part.slope for part in parts]),
            at_zero_sigma=np.concatenate([part.at_zero_sigma for part in parts]),
            slope_sigma=np.concatenate([part.slope_sigma for part in parts]),
            known=np.concatenate([part.known for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class SlopePrior:
    """Prior of the slope of each column; NaN for none."""

    slope: _Floats
    sigma: float


def fit(x: _Floats, y: _Floats, seen: NDArray[np.bool_], weight: _Floats, prior: SlopePrior | None = None) -> Lines:
    """Robust lines through the columns of `y` (K x C) over `x` (K), of the points `seen`, weighted by `weight` (K).

    Sigmas are those of weighted least squares with the residuals' robust scale, which few points do not tell by
    themselves; they know nothing of a bias that all points share.
    """
    at_zero, slope = _first_guess(x, y, seen)
    prior = prior or SlopePrior(np.full(y.shape[1], np.nan), 1.0)
    is_told = ~np.isnan(prior.slope)
    told = np.where(is_told, prior.slope, 0.0)
    slope = np.where(is_told, told, slope)
    at_zero = np.where(is_told, _masked_median(y - slope * x[:, None], seen), at_zero)
    base = np.where(seen, weight[:, None], 0.0)
    scale = np.full(y.shape[1], _LEAST_SCALE)
    weights, reach = base, float(np.abs(x).max(initial=0.0))
    for _ in range(_ROUNDS):
        residual = np.where(seen, y - at_zero - slope * x[:, None], 0.0)
        scale = np.maximum(_masked_median(np.abs(residual), seen) * 1.4826, _LEAST_SCALE)
        scale = np.where(is_told, expected_scale(scale, seen.sum(axis=0)), scale)
        far = np.abs(residual) / scale
        # a weight of w means that the point's sigma is scale / sqrt(w): Huber's bend and the cut are in its own units
        weights = base * np.where(far <= _HUBER, 1.0, _HUBER / np.maximum(far, _HUBER)) * (far <= _CUT)
        before = at_zero, slope
        pull = np.where(is_told, (scale / prior.sigma) ** 2, 0.0)
        at_zero, slope = _weighted(x, y, weights, at_zero, slope, pull, told)
        if (np.abs(slope) > _STEEPEST).any():
            slope = np.clip(slope, -_STEEPEST, _STEEPEST)
            at_zero = _masked_median(y - slope * x[:, None], seen)
        moved = np.abs(at_zero - before[0]) + np.abs(slope - before[1]) * reach
        if not (moved > _STILL).any():
            break
    pull = np.where(is_told, 1.0 / prior.sigma**2, 0.0)
    return _with_sigmas(x, weights, at_zero, slope, scale, pull)


def _weighted(
    x: _Floats, y: _Floats, weights: _Floats, at_zero: _Floats, slope: _Floats, pull: _Floats, told: _Floats
) -> tuple[_Floats, _Floats]:
    """One round. `pull`: the weight of the prior slope, `told`; 0 if the points alone decide."""
    total = weights.sum(axis=0)
    safe = np.where(total > 0, total, 1.0)
    mean_x = (weights * x[:, None]).sum(axis=0) / safe
    mean_y = (weights * y).sum(axis=0) / safe
    off_x = x[:, None] - mean_x
    spread = (weights * off_x**2).sum(axis=0)
    held = spread + pull
    new_slope = ((weights * off_x * (y - mean_y)).sum(axis=0) + pull * told) / np.where(held > 0, held, 1.0)
    usable = (total > 0) & (held > 0)
    return np.where(usable, mean_y - new_slope * mean_x, at_zero), np.where(usable, new_slope, slope)


def _with_sigmas(
    x: _Floats, weights: _Floats, at_zero: _Floats, slope: _Floats, scale: _Floats, pull: _Floats
) -> Lines:
    """`pull`: one over the variance of the slope's prior; 0 without one."""
    total = weights.sum(axis=0)
    squares = (weights**2).sum(axis=0)
    effective = total**2 / np.where(squares > 0, squares, 1.0)
    scale = expected_scale(scale, effective)
    safe = np.where(total > 0, total, 1.0)
    mean_x = (weights * x[:, None]).sum(axis=0) / safe
    variance_x = (weights * (x[:, None] - mean_x) ** 2).sum(axis=0) / safe
    known = ((effective >= 2) & (variance_x > 0)) | ((effective >= 1) & (pull > 0))
    slope_sigma = 1.0 / np.sqrt(np.where(known, effective * variance_x / scale**2 + pull, 1.0))
    mean_sigma = scale / np.sqrt(np.where(known, effective, 1.0))
    return Lines(
        at_zero=at_zero,
        slope=slope,
        at_zero_sigma=np.hypot(mean_sigma, slope_sigma * mean_x),
        slope_sigma=slope_sigma,
        known=known,
    )


def expected_scale(scale: _Floats | float, points: NDArray[np.number] | int) -> _Floats:
    """The scale of `points`, taken together with the usual one."""
    pooled = np.sqrt((points * np.square(scale) + _EXPECTED_POINTS * _EXPECTED_SCALE**2) / (points + _EXPECTED_POINTS))
    return np.asarray(pooled, np.float64)


def _first_guess(x: _Floats, y: _Floats, seen: NDArray[np.bool_]) -> tuple[_Floats, _Floats]:
    """Theil-Sen over bin medians: a third of the points may be wrong."""
    order = np.argsort(x, kind="stable")
    parts = [part for part in np.array_split(order, min(_BINS, len(order))) if len(part)]
    middles = np.array([np.median(x[part]) for part in parts])
    levels = np.array([_masked_median(y[part], seen[part]) for part in parts])
    present = np.array([seen[part].any(axis=0) for part in parts])
    one, other = np.triu_indices(len(parts), 1)
    run = middles[other] - middles[one]
    apart = (run > 0) & (run >= _LEAST_RUN * (middles.max() - middles.min()))
    good = apart[:, None] & present[one] & present[other]
    rise = (levels[other] - levels[one]) / np.where(run > 0, run, 1.0)[:, None]
    slope = np.clip(_masked_median(rise, good), -_STEEPEST, _STEEPEST)
    return _masked_median(y - slope * x[:, None], seen), slope


def _masked_median(values: _Floats, seen: NDArray[np.bool_]) -> _Floats:
    """Lower median of each column over the rows seen; 0 if there are none."""
    if not len(values):
        return np.zeros(values.shape[1])
    ordered = np.sort(np.where(seen, values, np.inf), axis=0)
    count = seen.sum(axis=0)
    middle = ordered[np.maximum(count - 1, 0) // 2, np.arange(values.shape[1])]
    return np.where(count > 0, middle, 0.0)
