"""Lines of host against host, and the offsets and drifts of all hosts that fit them best.

A host may share no group with the reference, so hosts and lines form a graph; over it, weighted least squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.observations import Band, HostEnds, Times
from ncclscope_service.columns import robust_line
from ncclscope_wire.terms import NO_TIME_NS

_Floats = NDArray[np.float64]

_MANY_SHORT: Final = 200
"""This many short operations need no help of longer ones."""
_KEPT_RATE_SIGMA: Final = 0.5e-6
"""How far a drift may have wandered within a minute, or been estimated wrongly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """Lines of host against host at one instant, by position of the hosts."""

    first: NDArray[np.intp]
    second: NDArray[np.intp]
    at_ns: Times
    """On the first host's clock."""
    lines: robust_line.Lines


@dataclass(slots=True)
class Solution:
    """Clocks of all hosts by position: offsets at one instant in ns, rates against the reference, and their sigmas."""

    offset: _Floats
    rate: _Floats
    offset_sigma: _Floats
    rate_sigma: _Floats
    known: NDArray[np.bool_]
    """False if nothing ties the host to the reference."""


def edges_of(group: HostEnds, index: dict[int, int], kept_rates: Mapping[int, float]) -> Edges | None:
    """Lines through the end differences of a group, against its host that was seen most; None with under two ends.

    `kept_rates`: of all hosts before a clock was set recently, which does not change how it runs.
    """
    seen = group.end != NO_TIME_NS
    anchor = int(seen.sum(axis=0).argmax())
    usable = seen[:, anchor]
    if usable.sum() < 2:
        return None
    at = int(group.end[usable, anchor].max())
    x = np.where(usable, group.end[:, anchor] - at, 0).astype(np.float64)
    together = seen & usable[:, None]
    y = np.where(together, group.end - group.end[:, [anchor]], 0)
    origins = np.array([_typical(y[:, host], together[:, host]) for host in range(y.shape[1])], dtype=np.int64)
    rates = np.array([kept_rates.get(host, np.nan) for host in group.hosts])
    prior = robust_line.SlopePrior(rates - rates[anchor], _KEPT_RATE_SIGMA)
    lines = _fit(x, np.where(together, y - origins, 0).astype(np.float64), together, group.length_class(), prior)
    others = np.flatnonzero((np.arange(len(group.hosts)) != anchor) & lines.known)
    return Edges(
        first=np.full(len(others), index[group.hosts[anchor]], dtype=np.intp),
        second=np.array([index[group.hosts[other]] for other in others], dtype=np.intp),
        at_ns=np.full(len(others), at, dtype=np.int64),
        lines=replace(lines, at_zero=lines.at_zero + origins).take(others),
    )


def two_way_edge(first: int, second: int, at_ns: int, found: Band) -> Edges:
    """The line in the middle of a band, as sure as the band is narrow."""
    lines = robust_line.Lines(
        at_zero=np.array([found.offset_ns]),
        slope=np.array([found.rate]),
        at_zero_sigma=np.array([max(found.half_width_ns, 1.0)]),
        slope_sigma=np.array([max(found.rate_sigma, 1e-12)]),
        known=np.ones(1, np.bool_),
    )
    return Edges(
        first=np.array([first], np.intp), second=np.array([second], np.intp), at_ns=np.array([at_ns]), lines=lines
    )


def solve(edges: Sequence[Edges], hosts: int, reference: int, origin: int) -> Solution:
    """Offsets at `origin` of the reference clock and rates of all hosts."""
    solution = Solution(
        offset=np.zeros(hosts), rate=np.zeros(hosts), offset_sigma=np.zeros(hosts), rate_sigma=np.zeros(hosts),
        known=np.arange(hosts) == reference,
    )  # fmt: skip
    if not edges:
        return solution
    first = np.concatenate([edge.first for edge in edges])
    second = np.concatenate([edge.second for edge in edges])
    at = np.concatenate([edge.at_ns for edge in edges])
    lines = robust_line.Lines.joined([edge.lines for edge in edges])
    solution.known = _reached(first, second, hosts, reference)
    usable = solution.known[first]
    first, second, at, lines = first[usable], second[usable], at[usable], lines.take(np.flatnonzero(usable))
    free = np.flatnonzero(solution.known & (np.arange(hosts) != reference))
    if not len(free):
        return solution
    rates = _LeastSquares(first, second, lines.slope_sigma, free, hosts)
    solution.rate, solution.rate_sigma = rates.solve(lines.slope), rates.sigma()
    behind = (origin - at).astype(np.float64)
    spread = np.hypot(lines.at_zero_sigma, lines.slope_sigma * behind)
    offsets = _LeastSquares(first, second, spread, free, hosts)
    for _ in range(3):  # an edge's line is placed on its first host's clock, whose own offset is being solved for
        solution.offset = offsets.solve(lines.at_zero + lines.slope * (behind + solution.offset[first]))
    solution.offset_sigma = offsets.sigma()
    return solution


def _fit(
    x: _Floats,
    y: _Floats,
    seen: NDArray[np.bool_],
    length_class: NDArray[np.int64],
    prior: robust_line.SlopePrior,
) -> robust_line.Lines:
    """Ends spread with the length of the operation, so long ones count less: by a rule while short ones abound.

    Where short ones are few, longer ones count by how much they are really seen to scatter.
    """
    weight: _Floats = 1.0 / (0.25 + np.exp2(2.0 * length_class))
    lines = robust_line.fit(x, y, seen, weight, prior)
    if np.count_nonzero(length_class == 0) >= _MANY_SHORT or not length_class.any():
        return lines
    residual = np.abs(y - lines.at_zero - lines.slope * x[:, None])
    scatter = [_scatter(residual[seen & (length_class == each)[:, None]]) for each in range(length_class.max() + 1)]
    # never more than the short ones, whose bias is the least
    weight = np.minimum(1.0, (scatter[0] / np.asarray(scatter)) ** 2)[length_class]
    return robust_line.fit(x, y, seen, weight, prior)


def _scatter(residual: _Floats) -> float:
    """How far these lie from their lines; a few do not tell it by themselves."""
    values = residual[residual > 0]  # the anchor's own are 0
    return float(robust_line.expected_scale(1.4826 * np.median(values) if len(values) else 0.0, len(values)))


def _typical(values: NDArray[np.int64], seen: NDArray[np.bool_]) -> int:
    chosen = np.sort(values[seen])
    return int(chosen[len(chosen) // 2]) if len(chosen) else 0


def _reached(first: NDArray[np.intp], second: NDArray[np.intp], hosts: int, reference: int) -> NDArray[np.bool_]:
    reached: NDArray[np.bool_] = np.arange(hosts) == reference
    while True:
        wider = reached.copy()
        wider[second[reached[first]]] = True
        wider[first[reached[second]]] = True
        if (wider == reached).all():
            return reached
        reached = wider


class _LeastSquares:
    """v[second] - v[first] = values, 0 for all hosts that are not `free`: solved for any values with these sigmas."""

    def __init__(
        self, first: NDArray[np.intp], second: NDArray[np.intp], sigmas: _Floats, free: NDArray[np.intp], hosts: int
    ) -> None:
        self._first, self._second, self._free, self._hosts = first, second, free, hosts
        self._variance = np.maximum(sigmas, 1e-12) ** 2
        self._weights = 1.0 / self._variance
        self._weights /= self._weights.max(initial=1e-300)
        laplacian = np.zeros((hosts, hosts))
        for one, other in ((first, second), (second, first)):
            np.add.at(laplacian, (one, one), self._weights)
            np.add.at(laplacian, (one, other), -self._weights)
        self._inverse = np.linalg.inv(laplacian[np.ix_(free, free)])

    def solve(self, values: _Floats) -> _Floats:
        """The solution by host."""
        right = np.zeros(self._hosts)
        np.add.at(right, self._second, self._weights * values)
        np.add.at(right, self._first, -self._weights * values)
        result = np.zeros(self._hosts)
        result[self._free] = self._inverse @ right[self._free]
        return result

    def sigma(self) -> _Floats:
        """Its sigma by host."""
        sigma = np.zeros(self._hosts)
        sigma[self._free] = np.sqrt(np.maximum(np.diag(self._inverse), 0.0) * float(self._variance.min()))
        return sigma
