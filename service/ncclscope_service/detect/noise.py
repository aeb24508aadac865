"""The noise of a series of levels, as its past shows it, and how much a window speaks for a loss beyond it.

A level is modelled as autoregressive, what is new in each window with the tails of Student's t with four degrees of
freedom: rare far outliers belong to healthy series and say little. Source: Lange, Little, Taylor 1989, "Robust
statistical modeling using the t distribution".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_FREEDOM: Final = 4
_QUARTILE: Final = 0.7407
"""Half of Student's t with four degrees of freedom lies within."""
_SCALE_OF_SPREAD: Final = math.sqrt(0.5)
"""Scale of Student's t with four degrees of freedom, for a standard deviation of 1."""
_WINSOR: Final = 4.0
_LEAST_SPREAD: Final = 0.02
_MOST_PHI: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What a baseline says."""

    middle: float
    """Its median."""
    spread: float
    """By how much single windows deviate."""
    phi: float
    """Autocorrelation from one window to the next."""
    scale: float
    """Of Student's t of what is new in a window: its deviation less phi times the last one's."""

    @property
    def sigma(self) -> float:
        """The spread for sums of windows, which autocorrelation makes wider."""
        return max(self.spread, _LEAST_SPREAD) * math.sqrt((1 + self.phi) / (1 - self.phi))


def noise_of(baseline: NDArray[np.float64]) -> Noise:
    """The noise of a healthy past, oldest window first, stated wider the less of it there is.

    Deviations are winsorised at four MAD; the spread is that of those, as the MAD alone understates how far a series
    with heavy tails wanders. Short series underestimate their autocorrelation, which counts for more therefore.
    """
    few = 1.0 / math.sqrt(len(baseline))
    middle = float(np.median(baseline))
    mad = 1.4826 * float(np.median(np.abs(baseline - middle)))
    off = np.clip(baseline - middle, -_WINSOR * max(mad, 1e-9), _WINSOR * max(mad, 1e-9))
    power = float((off**2).sum())
    phi = float((off[1:] * off[:-1]).sum()) / power if power > 0 else 0.0
    phi = min(max(phi + few, 0.0), _MOST_PHI)
    new = float(np.median(np.abs(off[1:] - phi * off[:-1]))) / _QUARTILE
    least = _LEAST_SPREAD * _SCALE_OF_SPREAD * math.sqrt(1 - phi**2)
    return Noise(
        middle=middle,
        spread=(1 + few) * max(mad, math.sqrt(power / len(off))),
        phi=phi,
        scale=max((1 + few) * new, least),
    )


def evidence(new: float, shift: float) -> float:
    """Log-likelihood ratio of a shift down by so much against none, of what is new in a window; both in scales.

    What lies deeper than the shift counts as if it lay there, else a collapse would speak less clearly than a loss.
    """
    new = max(new, -shift)
    return (_FREEDOM + 1) / 2 * math.log((_FREEDOM + new * new) / (_FREEDOM + (new + shift) ** 2))
