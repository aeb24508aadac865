"""How soon a loss can be found at best: by a rule that knows the noise and the loss, and needs no baseline.

That rule is the CUSUM of exact log-likelihood ratios of what is new in each window: autoregressive noise betrays a loss
by all of it in its first window and by (1 - phi) of it in the next ones. None with as few false alarms has a shorter
delay in the worst case (Moustakides 1998, "Quickest detection of abrupt changes for a class of random processes",
after Lorden 1971 and Moustakides 1986). Its height is set by simulation to a rate of false alarms.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

FREEDOM: Final = 4

Series = NDArray[np.float64]
"""Window by series."""


def noise(random: np.random.Generator, length: int, columns: int, phi: float, *, heavy: bool = True) -> Series:
    """Autoregressive columns of unit variance."""
    fresh: Series = (
        random.standard_t(FREEDOM, (length, columns)) / np.sqrt(FREEDOM / (FREEDOM - 2))
        if heavy
        else random.normal(size=(length, columns))
    )
    fresh *= np.sqrt(1 - phi**2)
    values: Series = np.empty((length, columns))
    value: Series = np.zeros(columns)
    for row in range(length):
        value = phi * value + fresh[row]
        values[row] = value
    return values


_WINDOWS, _COLUMNS, _ROUNDS = 20_000, 500, 4
_BLOCK: Final = 500
"""Windows in which two false alarms would be one: they come a thousand times more seldom."""
_BEFORE, _AFTER = 100, 200


def least_delays(loss: float, cv: float, phi: float, alarms_per_window: float, trials: int) -> NDArray[np.int64]:
    """Windows until the best rule finds a loss in heavy-tailed noise, of each trial in which it does."""
    shift = float(-np.log1p(-loss)) / cv
    height = _height(shift, phi, alarms_per_window)
    values = noise(np.random.default_rng(7), _BEFORE + _AFTER, trials, phi)
    values[_BEFORE:] -= shift
    found = _cusum(values, shift, phi)[_BEFORE - 1 :] >= height
    delays: NDArray[np.int64] = found.argmax(axis=0)[found.any(axis=0)] + 1
    return delays


def _height(shift: float, phi: float, alarms_per_window: float) -> float:
    """That which healthy noise exceeds so often."""
    highest = [
        _cusum(noise(np.random.default_rng([11, turn]), _WINDOWS + 1, _COLUMNS, phi), shift, phi)
        .reshape(-1, _BLOCK, _COLUMNS)
        .max(axis=1)
        .ravel()
        for turn in range(_ROUNDS)
    ]
    alarms = round(alarms_per_window * _ROUNDS * _WINDOWS * _COLUMNS)
    return float(np.sort(np.concatenate(highest))[-alarms])


def _cusum(values: Series, shift: float, phi: float) -> Series:
    """Of each window but the first, for a loss whose time is not known."""
    new = values[1:] - phi * values[:-1]
    scale = np.sqrt((1 - phi**2) * (FREEDOM - 2) / FREEDOM)
    begins, goes_on = _ratio(new / scale, shift / scale), _ratio(new / scale, (1 - phi) * shift / scale)
    sums: Series = np.empty_like(new)
    last: Series = np.zeros(new.shape[1])
    for row in range(len(new)):
        last = np.maximum(np.maximum(last + goes_on[row], begins[row]), 0.0)
        sums[row] = last
    return sums


def _ratio(new: Series, shift: float) -> Series:
    """Log-likelihood ratio of a shift down by so much, in scales of Student's t."""
    ratio: Series = (FREEDOM + 1) / 2 * np.log((FREEDOM + new**2) / (FREEDOM + (new + shift) ** 2))
    return ratio
