"""Seconds of a transfer over its bytes, for one shape (operation, ranks, nodes): between measured sizes and beyond.

Between them a monotone curve in logarithms: it needs no model and has no overshoot (Fritsch and Carlson 1980, with the
slopes of Fritsch and Butland 1984). Beyond them `alpha + bytes / B` through the three outermost sizes, where one
protocol is in use. Waiting is no part of it: who calls gives transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEAST_SIZES: Final = 4
"""Sizes that a curve needs."""
_OUTERMOST: Final = 3

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """`alpha + bytes / B`: seconds of latency, and seconds of each byte."""

    alpha: float
    seconds_per_byte: float

    def seconds(self, transfer_bytes: ArrayLike) -> Floats:
        """At these sizes."""
        return self.alpha + np.asarray(transfer_bytes, np.float64) * self.seconds_per_byte


@dataclass(frozen=True, slots=True)
class TransferCurve:
    """A curve through points; `slopes` are its derivatives there. All in logarithms of bytes and seconds."""

    log_bytes: Floats
    log_seconds: Floats
    slopes: Floats
    below: Line
    above: Line

    def holds(self, transfer_bytes: ArrayLike) -> NDArray[np.bool_]:
        """Whether these sizes lie between measured ones."""
        asked = np.log(np.asarray(transfer_bytes, np.float64))
        inside: NDArray[np.bool_] = (asked >= self.log_bytes[0] - 1e-9) & (asked <= self.log_bytes[-1] + 1e-9)
        return inside

    def seconds(self, transfer_bytes: ArrayLike) -> Floats:
        """At these sizes, of which none is 0."""
        sizes = np.asarray(transfer_bytes, np.float64)
        x, y = self.log_bytes, self.log_seconds
        asked = np.clip(np.log(sizes), x[0], x[-1])
        at = np.clip(np.searchsorted(x, asked, side="right") - 1, 0, len(x) - 2)
        width = x[at + 1] - x[at]
        t = (asked - x[at]) / width
        inside = np.exp(
            (1 + 2 * t) * (1 - t) ** 2 * y[at]
            + t * (1 - t) ** 2 * width * self.slopes[at]
            + t**2 * (3 - 2 * t) * y[at + 1]
            + t**2 * (t - 1) * width * self.slopes[at + 1]
        )
        outside = np.where(sizes < np.exp(x[0]), self.below.seconds(sizes), self.above.seconds(sizes))
        return np.where(self.holds(sizes), inside, outside)


def transfer_curve(sizes: Sequence[float], seconds: Sequence[float]) -> TransferCurve:
    """Through points of ascending, different sizes.

    Raises:
        ValueError: There are fewer than `LEAST_SIZES`.
    """
    if len(sizes) < LEAST_SIZES:
        raise ValueError(f"a curve needs {LEAST_SIZES} sizes, not {len(sizes)}")
    x, y = np.log(np.asarray(sizes, np.float64)), np.log(np.asarray(seconds, np.float64))
    width = np.diff(x)
    secants = np.diff(y) / width
    before, after = secants[:-1], secants[1:]
    rises = before * after > 0
    weight_before, weight_after = 2 * width[1:] + width[:-1], width[1:] + 2 * width[:-1]
    slopes = np.concatenate([secants[:1], np.zeros(len(x) - 2), secants[-1:]])
    harmonic = weight_before[rises] / before[rises] + weight_after[rises] / after[rises]
    slopes[1:-1][rises] = (weight_before + weight_after)[rises] / harmonic
    return TransferCurve(
        x,
        y,
        slopes,
        below=fit_line(sizes[:_OUTERMOST], seconds[:_OUTERMOST]),
        above=fit_line(sizes[-_OUTERMOST:], seconds[-_OUTERMOST:]),
    )


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares of relative errors; neither part is negative."""
    n, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    ones, bytes_ = 1 / t, n / t
    a, b, c = float(ones @ ones), float(ones @ bytes_), float(bytes_ @ bytes_)
    d, e = float(ones.sum()), float(bytes_.sum())
    determinant = a * c - b * b
    if determinant > 1e-12 * a * c:
        alpha, per_byte = (c * d - b * e) / determinant, (a * e - b * d) / determinant
        if alpha >= 0 and per_byte >= 0:
            return Line(alpha, per_byte)
    alone = (Line(d / a, 0.0), Line(0.0, e / c))
    return min(alone, key=lambda line: float(np.square(line.seconds(n) / t - 1).sum()))
