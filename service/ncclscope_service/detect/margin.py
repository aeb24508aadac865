"""By how much one rank leads all others in blame, and whether that is more than chance.

Ranks of a group jitter, and who is slow in one step is slow in the next: the standard error of a mean margin is widened
by sqrt((1 + phi) / (1 - phi)), phi the margin's autocorrelation, which short series underestimate: it counts as 0.5 at
least.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Blames: TypeAlias = NDArray[np.float64]
"""Occasion by rank, in ns."""
Margins: TypeAlias = NDArray[np.float64]

_WINSOR: Final = 3.0
_LEAST_PHI, _MOST_PHI = 0.5, 0.9
_LEAST_SPREAD_NS: Final = 1_000.0


def over_others(blames: Blames) -> Blames:
    """Each rank's blame less the largest of any other rank, in each occasion."""
    if blames.shape[1] < 2:
        return blames
    ordered = np.sort(blames, axis=1)
    best, second = ordered[:, -1:], ordered[:, -2:-1]
    return np.where(blames == best, blames - second, blames - best)


def firmness(margins: Margins) -> Margins:
    """The mean of margins (occasion by anything) over its standard error; winsorised at three robust spreads."""
    count = len(margins)
    middle = np.median(margins, axis=0)
    spread = np.maximum(1.4826 * np.median(np.abs(margins - middle), axis=0), _LEAST_SPREAD_NS)
    off = np.clip(margins - middle, -_WINSOR * spread, _WINSOR * spread)
    power = (off**2).sum(axis=0)
    phi = (off[1:] * off[:-1]).sum(axis=0) / np.maximum(power, _LEAST_SPREAD_NS)
    phi = np.clip(phi + 1.0 / np.sqrt(count), _LEAST_PHI, _MOST_PHI)
    deviation = np.maximum(np.sqrt(power / count), spread) * (1.0 + 2.0 / np.sqrt(count))
    firm: Margins = (middle + off.mean(axis=0)) / (deviation * np.sqrt((1 + phi) / (1 - phi) / count))
    return firm
