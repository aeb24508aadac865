"""The offset of two hosts that only send to each other: from both directions of their messages.

A Recv cannot end before its Send began. On the hosts' own clocks that bounds their difference from one side, messages
the other way from the other side; a pipeline has both, as activations go forward and gradients come back. With the
drift taken out, the quickest message of each way leaves a band that holds the truth; its middle is the estimate,
right where both ways take equally long, and half its width is what that assumption may be wrong by.

Source: two-way time transfer (NTP, RFC 5905 section 8), the line between two hulls of Duda et al. 1987.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_DRIFT: Final = 400e-6
"""No two clocks of machines that work drift apart faster: crystals are good for 100 ppm each, and more when warm."""

_ROUNDS: Final = 12
_STEPS: Final = 33
_LEAST: Final = 3
"""Messages of each way without which nothing is said."""


@dataclass(frozen=True, slots=True)
class Band:
    """Where the second clock minus the first lies, as a line over the time of the first."""

    offset_ns: float
    """At x = 0."""
    rate: float
    half_width_ns: float
    rate_sigma: float


def band(
    forward_x: NDArray[np.float64],
    forward_ns: NDArray[np.float64],
    backward_x: NDArray[np.float64],
    backward_ns: NDArray[np.float64],
) -> Band | None:
    """The middle of the widest band between both ways' bounds; None with fewer than three messages of a way.

    `forward_ns`: end of the Recv on the second host minus begin of the Send on the first, each on its own clock: at
    least the offset. `backward_ns`: end of the Recv on the first minus begin of the Send on the second: at least minus
    the offset. `x`: when, ns on the first clock from any origin. A negative width means that the bounds contradict
    each other: a clock was set, or messages were joined wrongly.
    """
    if min(len(forward_x), len(backward_x)) < _LEAST:
        return None
    low, high, rate = -MOST_DRIFT, MOST_DRIFT, 0.0
    for _ in range(_ROUNDS):  # the width is concave in the rate: look around the best of each round more closely
        rates = np.linspace(low, high, _STEPS)
        widths = _closest(forward_x, forward_ns, rates) + _closest(backward_x, backward_ns, -rates)
        best = int(widths.argmax())
        low, high, rate = rates[max(0, best - 1)], rates[min(_STEPS - 1, best + 1)], rates[best]
    above = float(_closest(forward_x, forward_ns, np.array([rate]))[0])
    below = float(_closest(backward_x, backward_ns, np.array([-rate]))[0])
    span = float(max(forward_x.max(), backward_x.max()) - min(forward_x.min(), backward_x.min()))
    half = (above + below) / 2
    return Band((above - below) / 2, float(rate), half, abs(half) / span if span > 0 else MOST_DRIFT)


def _closest(x: NDArray[np.float64], bounds: NDArray[np.float64], rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """By rate: the tightest bound once that drift is taken out."""
    closest: NDArray[np.float64] = (bounds[None, :] - rates[:, None] * x[None, :]).min(axis=1)
    return closest
