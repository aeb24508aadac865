"""Noise of healthy series: autoregressive, with the tails of Student's t or of a Gaussian."""

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
