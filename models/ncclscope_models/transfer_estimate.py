"""How long the transfer of a collective should take, from transfers that were measured, with an interval.

The first basis that applies answers, and none where all that apply were measured to be wrong. Intervals hold 80 %:
those of a size that was itself measured are its own 10th and 90th percentile, the others get what their basis was off
by on real runs that nobody here made (`python -m benchmarks.models collective_times`). Waiting never enters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import exp, hypot, log
from typing import Final

import numpy as np

from ncclscope_models.textbook import wire_bytes
from ncclscope_models.transfer_curve import LEAST_SIZES, TransferCurve, transfer_curve

LEAST_SAMPLES: Final = 20
"""Transfers of one size from which its own percentiles are taken."""
FURTHEST_BEYOND: Final = 8.0
"""How many times the largest measured size is answered for: three doublings, as far as it was tried."""


class Basis(StrEnum):
    """From what an estimate comes, the most trusted first."""

    HISTORY = "history"
    """Transfers of this very size."""
    SIZES = "sizes"
    """Sizes below and above, by a monotone curve."""
    BEYOND_SIZES = "beyond_sizes"
    """The three largest sizes, by a line."""
    RANKS = "ranks"
    """Groups of one rank fewer and more in a node, at equal bytes on the wire. Only where a switch connects its GPUs:
    without one the number of rings changes with the ranks, and this was up to 110 % wrong on V100."""


WIDTHS: Final[Mapping[Basis, float]] = {Basis.SIZES: 0.059, Basis.BEYOND_SIZES: 0.049, Basis.RANKS: 0.017}
"""Error, as a logarithm, that four of five forecasts of a basis stay below."""


_STEP: Final = 1.1
_IN_RINGS: Final = ("AllReduce", "AllGather", "ReduceScatter")
"""Operations whose bytes on the wire say how ranks compare."""


@dataclass(frozen=True, slots=True, order=True)
class GroupShape:
    """What a transfer is of: the operation, how many ranks on how many nodes, and which kind of parallelism.

    Groups of a kind cross the network at once and share it; those of another kind may have it for themselves.
    """

    op: str
    ranks: int
    nodes: int
    parallelism: str = ""
    """"" where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTransfers:
    """Transfers of one shape and size, in seconds."""

    message_bytes: int
    low: float
    """10th percentile."""
    typical: float
    """Median."""
    high: float
    """90th percentile."""
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds that a transfer should take; four of five lie between `low` and `high`."""

    low: float
    typical: float
    high: float
    samples: int
    """Transfers of the sizes that it rests on."""
    basis: Basis
    distance: float
    """How far the size is from the nearest that was measured, as a factor, at least 1."""


class TransferTimes:
    """Transfers of a machine that were measured, by shape."""

    def __init__(self, measured: Mapping[GroupShape, Iterable[MeasuredTransfers]], *, has_switch: bool = False) -> None:
        """`has_switch`: whether a switch connects all GPUs of a node; False where that is not known."""
        self.measured: dict[GroupShape, tuple[MeasuredTransfers, ...]] = {
            shape: tuple(sorted(found, key=lambda each: each.message_bytes))
            for shape, found in sorted(measured.items())
        }
        self.has_switch = has_switch
        self._curves: dict[GroupShape, TransferCurve | None] = {}

    def estimate(self, shape: GroupShape, message_bytes: int) -> Estimate | None:
        """Of one transfer; None if no basis applies. Below the smallest measured size none does."""
        known = self.measured.get(shape, ())
        own = next((each for each in known if each.message_bytes == message_bytes), None)
        if own is not None and own.samples >= LEAST_SAMPLES:
            return Estimate(
                low=own.low, typical=own.typical, high=own.high, samples=own.samples, basis=Basis.HISTORY, distance=1.0
            )
        return self._from_sizes(shape, message_bytes) or self._from_ranks(shape, message_bytes)

    def curve(self, shape: GroupShape) -> TransferCurve | None:
        """Typical seconds by message bytes; None for a shape of too few sizes."""
        if shape not in self._curves:
            known = self.measured.get(shape, ())
            sizes, seconds = [each.message_bytes for each in known], [each.typical for each in known]
            self._curves[shape] = transfer_curve(sizes, seconds) if len(known) >= LEAST_SIZES else None
        return self._curves[shape]

    def latency_share(self, shape: GroupShape, message_bytes: float) -> float | None:
        """Share of a transfer's time that does not come from its bytes, 0 to 1; None without a curve around this size.

        Of `alpha + bytes / B` it is alpha's share, read from the slope of the curve: no line has to fit.
        """
        curve = self.curve(shape)
        if curve is None or not bool(curve.holds(message_bytes)):
            return None
        below, above = np.log(curve.seconds([message_bytes / _STEP, message_bytes * _STEP]))
        return min(1.0, max(0.0, 1 - float(above - below) / (2 * log(_STEP))))

    def _from_sizes(self, shape: GroupShape, message_bytes: int) -> Estimate | None:
        curve, known = self.curve(shape), self.measured.get(shape, ())
        if curve is None or not known[0].message_bytes <= message_bytes <= FURTHEST_BEYOND * known[-1].message_bytes:
            return None
        basis = Basis.SIZES if message_bytes <= known[-1].message_bytes else Basis.BEYOND_SIZES
        by_distance = sorted(known, key=lambda each: abs(log(each.message_bytes / message_bytes)))
        return _around(float(curve.seconds(message_bytes)), basis, by_distance[:2], message_bytes)

    def _from_ranks(self, shape: GroupShape, message_bytes: int) -> Estimate | None:
        if not self.has_switch or shape.nodes != 1 or shape.op not in _IN_RINGS:
            return None
        fewer, more = (replace(shape, ranks=shape.ranks + off) for off in (-1, 1))
        known: list[float] = []
        near: list[MeasuredTransfers] = []
        for other in (fewer, more):
            curve = self.curve(other)
            if curve is None:
                return None
            same = message_bytes * wire_bytes(shape.op, 1, shape.ranks) / wire_bytes(shape.op, 1, other.ranks)
            if not bool(curve.holds(same)):
                return None
            known.append(float(curve.seconds(same)))
            near.append(min(self.measured[other], key=lambda each: abs(log(each.message_bytes / same))))
        return _around(sum(known) / 2, Basis.RANKS, near, message_bytes)


def _around(typical: float, basis: Basis, near: list[MeasuredTransfers], message_bytes: int) -> Estimate:
    """The basis' own width and the spread of the sizes that it rests on, as errors that do not depend on each other."""
    below = max(log(each.typical / each.low) for each in near)
    above = max(log(each.high / each.typical) for each in near)
    return Estimate(
        low=typical * exp(-hypot(WIDTHS[basis], below)),
        typical=typical,
        high=typical * exp(hypot(WIDTHS[basis], above)),
        samples=sum(each.samples for each in near),
        basis=basis,
        distance=min(exp(abs(log(each.message_bytes / message_bytes))) for each in near),
    )
