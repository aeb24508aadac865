"""Bounds on the errors of the hosts' clocks from causality, and how many operations contradict estimated clocks.

No rank of an N-to-N collective ends before every rank has started. With S and E the start and end of hosts i and j on
clocks that are off by d_i and d_j, E_j - d_j >= S_i - d_i, so d_j - d_i <= E_j - S_i. Such bounds are edges of a graph;
the tightest bound that all of them imply is the shortest path, and bounds that contradict each other form a negative
cycle. That is not an error of the solver but news: a clock was set, or operations were matched wrongly.

An operation of m hosts is m^2 such edges, but all of them lead over one moment, the latest start: a star of 2m edges
through a node of its own, which says exactly the same. So a solution costs (operations x hosts) a round, and takes as
many rounds as the longest shortest path has steps: few, as communicators overlap.

To check estimated clocks, every kept operation is put on the corrected clocks. One in which a rank ends before another
has started, by more than 3 sigma, is a violation: the share of these gates everything that compares ranks. The bounds
on the remaining error of each clock are solved again for each estimate, because each estimate removes another drift;
the window limits how many bounds there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.clock.host_graph import Solution
from ncclscope_service.clock.observations import HostEnds, HostMessages, Times
from ncclscope_service.store.rows import SAME_HOST_SIGMA_NS
from ncclscope_wire.terms import NO_TIME_NS

OTHER_HOST_SIGMA_NS: Final = 10_000.0
"""As `SAME_HOST_SIGMA_NS`, between hosts."""
VIOLATION_LIMIT: Final = 0.001
"""Share of operations that contradict causality beyond which nothing that compares ranks should be believed."""

_LEAST_OPERATIONS: Final = 100
_LEAST_VIOLATIONS: Final = 3
_MISJOINED_LIMIT: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCheck:
    """How well the last estimate explains the operations it was checked on."""

    operations: int = 0
    violations: int = 0
    """Operations in which, on the corrected clocks, a rank ends before another has started, beyond 3 sigma."""
    misjoined: int = 0
    """Further operations whose ends do not coincide, each off by another time: numbers that slipped, and no clock."""
    suspects: tuple[int, ...] = ()
    """Hosts whose causality bounds contradict each other, worst first."""

    @property
    def violation_ratio(self) -> float | None:
        """Violations per operation; None if none could be checked."""
        return self.violations / self.operations if self.operations else None

    @property
    def is_trusted(self) -> bool:
        """Whether ranks of different hosts may be compared; yes if too little was seen to judge."""
        ratio = self.violation_ratio
        is_violated = (
            ratio is not None
            and self.operations >= _LEAST_OPERATIONS
            and self.violations >= _LEAST_VIOLATIONS
            and ratio > VIOLATION_LIMIT
        )
        return not is_violated and not self.suspects and not self.is_misjoined

    @property
    def is_misjoined(self) -> bool:
        """Whether too many operations were joined wrongly for clocks to rest on the others."""
        return self.operations >= _LEAST_OPERATIONS and self.misjoined > _MISJOINED_LIMIT * self.operations


_Floats = NDArray[np.float64]

_ROUNDING_NS: Final = 1e-3
"""A path is shorter only if by more than what sums of floats may differ by."""
_CELLS_AT_ONCE: Final = 2**21
"""Operations x hosts x hosts that are compared in one go: 16 MiB of floats."""
_CELLS_TO_ACCUSE: Final = 2**26
"""The same in all, when contradicting hosts are looked for; beyond it every n-th operation is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where the clock error of each host lies, relative to the reference. All bounds infinite if inconsistent."""

    lo_ns: _Floats
    hi_ns: _Floats
    inconsistent: tuple[int, ...]
    """Hosts of which two bounds contradict each other, worst first; empty if a solution exists."""


@dataclass(frozen=True, slots=True)
class _Star:
    """K operations of some hosts: K x len(members); -inf and inf where a host was not seen."""

    members: NDArray[np.intp]
    latest_start: _Floats
    end: _Floats
    """Earliest end of the host's ranks, slack included."""


@dataclass(slots=True)
class Bounds:
    """Bounds on the clock errors of a number of hosts, by position; without any bound everything is allowed."""

    hosts: int
    _stars: list[_Star] = field(default_factory=list[_Star])
    _ways: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """By (sender, receiver): the most by which the receiver's error may exceed the sender's."""

    def add_collectives(
        self, members: NDArray[np.intp], latest_start_ns: _Floats, earliest_end_ns: _Floats, slack_ns: _Floats
    ) -> None:
        """N-to-N operations of the hosts `members`.

        Times are K x len(members), one row per operation, from any common origin, NaN if a host was not seen; per
        host the latest start and the earliest end of its ranks. `slack_ns` (K) is added to each bound: what drift that
        was not removed may amount to.
        """
        if not len(slack_ns):
            return
        # a host's own GPUs may contradict each other by a microsecond or two: that says nothing of its clock
        end = np.fmax(earliest_end_ns, latest_start_ns) + slack_ns[:, None]
        self._stars.append(
            _Star(members, np.where(np.isnan(end), -np.inf, latest_start_ns), np.where(np.isnan(end), np.inf, end))
        )

    def add_messages(self, sender: int, receiver: int, sent_ns: _Floats, received_ns: _Floats) -> None:
        """No Recv ends before its Send began; slack is part of `received_ns`."""
        if len(sent_ns):
            tightest = float((received_ns - sent_ns).min())
            self._ways[sender, receiver] = min(tightest, self._ways.get((sender, receiver), np.inf))

    def solve(self, reference: int) -> Interval:
        """The interval of each host's clock error relative to `reference` that all bounds together allow."""
        ways = self._edges()
        upper = np.full(self.hosts, np.inf)
        upper[reference] = 0.0
        lower = upper.copy()
        for _ in range(self.hosts + 1):
            next_upper, next_lower = self._forward(upper, ways), self._backward(lower, ways)
            changed = (next_upper < upper - _ROUNDING_NS).any() or (next_lower < lower - _ROUNDING_NS).any()
            upper, lower = next_upper, next_lower
            if (upper + lower < -_ROUNDING_NS * self.hosts).any():
                break
            if not changed:
                return Interval(lo_ns=-lower, hi_ns=upper, inconsistent=())
        unbounded = np.full(self.hosts, np.inf)
        return Interval(lo_ns=-unbounded, hi_ns=unbounded, inconsistent=_contradicting(self._dense()))

    def _edges(self) -> tuple[NDArray[np.intp], NDArray[np.intp], _Floats]:
        pairs = np.array(list(self._ways), np.intp).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1], np.array(list(self._ways.values()), np.float64)

    def _forward(self, reached: _Floats, ways: tuple[NDArray[np.intp], NDArray[np.intp], _Floats]) -> _Floats:
        """Paths from the reference, one step longer."""
        shorter = reached.copy()
        for star in self._stars:
            moment = (reached[star.members] - star.latest_start).min(axis=1)
            shorter[star.members] = np.minimum(shorter[star.members], (moment[:, None] + star.end).min(axis=0))
        np.minimum.at(shorter, ways[1], reached[ways[0]] + ways[2])
        return shorter

    def _backward(self, reached: _Floats, ways: tuple[NDArray[np.intp], NDArray[np.intp], _Floats]) -> _Floats:
        """Paths to the reference, one step longer."""
        shorter = reached.copy()
        for star in self._stars:
            moment = (reached[star.members] + star.end).min(axis=1)
            found = (moment[:, None] - star.latest_start).min(axis=0)
            shorter[star.members] = np.minimum(shorter[star.members], found)
        np.minimum.at(shorter, ways[0], reached[ways[1]] + ways[2])
        return shorter

    def _dense(self) -> _Floats:
        """[i, j]: the most by which the error of j may exceed that of i; for accusing hosts, which is seldom needed."""
        bounds = np.full((self.hosts, self.hosts), np.inf)
        cells = sum(star.end.shape[0] * star.end.shape[1] ** 2 for star in self._stars)
        stride = -(-cells // _CELLS_TO_ACCUSE) or 1
        for star in self._stars:
            index = np.ix_(star.members, star.members)
            bounds[index] = np.minimum(bounds[index], _pairs(star.latest_start[::stride], star.end[::stride]))
        for (sender, receiver), most in self._ways.items():
            bounds[sender, receiver] = min(bounds[sender, receiver], most)
        np.fill_diagonal(bounds, 0.0)
        return bounds


def _pairs(latest_start: _Floats, end: _Floats) -> _Floats:
    tightest = np.full((end.shape[1], end.shape[1]), np.inf)
    rows_at_once = max(1, _CELLS_AT_ONCE // max(1, end.shape[1] ** 2))
    for begin in range(0, len(end), rows_at_once):
        part = slice(begin, begin + rows_at_once)
        gaps = end[part, None, :] - latest_start[part, :, None]
        np.minimum(tightest, gaps.min(axis=0, initial=np.inf), out=tightest)
    return tightest


def _contradicting(bounds: _Floats) -> tuple[int, ...]:
    """The hosts that contradict others most; all if no pair alone does."""
    both_ways = bounds + bounds.T
    conflict = np.where(both_ways < 0, both_ways, 0.0).sum(axis=1)
    order = np.argsort(conflict, kind="stable")
    found = [int(host) for host in order if conflict[host] < 0]
    if not found:  # a longer cycle: no pair alone is to blame
        return tuple(range(len(bounds)))
    alone = [host for host in found if conflict[host] < 1.5 * conflict[found[1]]] if len(found) > 1 else found
    return tuple(alone or found)


_OUTLIER_MADS: Final = 8.0
_MISALIGNED_FLOOR_NS: Final = 20_000.0
_FIFTH_OF_NORMAL: Final = 0.253
"""Sigmas within which a fifth of a normal distribution lies."""
_WIDEST_NS: Final = 100_000.0
"""Ends that coincide never spread further, whatever their scatter says."""
_OF_LEVEL: Final = 0.8
_SIGMAS: Final = 3.0


def certify(
    groups: Iterable[HostEnds],
    ways: Mapping[tuple[int, int], HostMessages],
    index: Mapping[int, int],
    solution: Solution,
    *,
    origin: int,
    reference: int,
) -> tuple[Interval, ClockCheck]:
    """Where each clock's error lies by position, and the check. `index` gives the position of each host number."""
    bounds = Bounds(len(index))
    sigma = np.maximum(solution.offset_sigma, OTHER_HOST_SIGMA_NS)
    sigma[reference] = SAME_HOST_SIGMA_NS
    operations = violations = misjoined = 0
    for group in groups:
        members = np.array([index[host] for host in group.hosts], dtype=np.intp)
        if not solution.known[members].all():
            continue
        true_end, since = corrected(group.end, members, solution, origin)
        earliest, _ = corrected(group.earliest_end, members, solution, origin)
        latest, _ = corrected(group.latest_start, members, solution, origin)
        checkable = (~np.isnan(earliest)).sum(axis=1) >= 2
        off = _deviations(true_end)
        aligned = _are_aligned(off)
        is_of_clock = aligned | _is_one_level(off, aligned, group.end.max(axis=1))
        operations += int(checkable.sum())
        violations += int((checkable & is_of_clock & _violates(latest, earliest, sigma[members])).sum())
        misjoined += int((checkable & ~is_of_clock).sum())
        sound = checkable & aligned
        slack = _SIGMAS * float(solution.rate_sigma[members].max()) * since
        bounds.add_collectives(members, latest[sound], earliest[sound], slack[sound])
    for (sender, receiver), way in ways.items():
        _bound_messages(bounds, index[sender], index[receiver], way, solution, sigma, origin)
    interval = bounds.solve(reference)
    hosts = list(index)
    suspects = tuple(hosts[position] for position in interval.inconsistent)
    return interval, ClockCheck(operations=operations, violations=violations, misjoined=misjoined, suspects=suspects)


def corrected(
    times: Times, members: NDArray[np.intp], solution: Solution, origin: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times from `origin` on the reference clock (NaN unseen), and how far each operation lies from it."""
    offset = np.rint(solution.offset[members])
    known = times != NO_TIME_NS
    local = np.where(known, times - origin - offset.astype(np.int64), 0).astype(np.float64)
    true = (local + (offset - solution.offset[members])) / (1.0 + solution.rate[members])
    found = np.where(known, true, np.nan)
    return found, np.abs(np.where(known, true, 0.0)).max(axis=1, initial=0.0)


def _violates(
    latest_start: NDArray[np.float64], earliest_end: NDArray[np.float64], sigma: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """K: some host ends before another has started, by more than the clocks of both may be off."""
    ends, starts = np.nan_to_num(earliest_end, nan=np.inf), np.nan_to_num(latest_start, nan=-np.inf)
    tolerance = _SIGMAS * np.hypot(sigma[ends.argmin(axis=1)], sigma[starts.argmax(axis=1)])
    violates: NDArray[np.bool_] = ends.min(axis=1) - starts.max(axis=1) < -tolerance
    return violates


def _bound_messages(
    bounds: Bounds, sender: int, receiver: int, way: HostMessages, solution: Solution, sigma: _Floats, origin: int
) -> None:
    """No Recv ends before its Send began: a bound in one direction.

    Messages that contradict clocks which other operations agree on were joined wrongly.
    """
    members = np.array([sender, receiver], np.intp)
    if not solution.known[members].all():
        return
    times, since = corrected(np.stack([way.sent, way.received], axis=1), members, solution, origin)
    slack = _SIGMAS * float(solution.rate_sigma[members].max()) * since
    sent, received = times[:, 0], times[:, 1] + slack
    sound = received - sent >= -_SIGMAS * float(np.hypot(*sigma[members]))
    bounds.add_messages(sender, receiver, sent[sound], received[sound])


def _deviations(true_end: _Floats) -> _Floats:
    """K x H: how far each host's end lies from the middle one, NaN if it was not seen."""
    count = (~np.isnan(true_end)).sum(axis=1)
    filled = np.sort(np.where(np.isnan(true_end), np.inf, true_end), axis=1)
    middle = filled[np.arange(len(filled)), np.maximum(count - 1, 0) // 2]
    with np.errstate(invalid="ignore"):
        return np.asarray(true_end - middle[:, None], np.float64)


def _are_aligned(deviations: _Floats) -> NDArray[np.bool_]:
    """False for operations whose ends do not coincide: they were joined wrongly, and their bounds are worthless.

    Ends spread as those do that coincide best: half of all operations may be joined wrongly.
    """
    off = np.nan_to_num(np.abs(deviations), nan=0.0, posinf=0.0).max(axis=1, initial=0.0)
    if not len(off):
        return np.zeros(0, dtype=np.bool_)
    spread = min(float(np.percentile(off, 20)) / _FIFTH_OF_NORMAL, _WIDEST_NS)
    aligned: NDArray[np.bool_] = off <= _OUTLIER_MADS * spread + _MISALIGNED_FLOOR_NS
    return aligned


def _is_one_level(deviations: _Floats, aligned: NDArray[np.bool_], when: Times) -> NDArray[np.bool_]:
    """The operations that are not aligned, if their hosts are off by as much from one to the next: a clock is wrong.

    Numbers that slipped are off by the time between two calls, which varies.
    """
    others = np.flatnonzero(~aligned)
    result = np.zeros(len(aligned), np.bool_)
    if len(others) > _LEAST_VIOLATIONS:
        in_order = deviations[others[np.argsort(when[others], kind="stable")]]
        changes = np.nan_to_num(np.abs(np.diff(in_order, axis=0)), nan=0.0, posinf=0.0).max(axis=1)
        result[others] = (changes <= _MISALIGNED_FLOOR_NS).mean() >= _OF_LEVEL
    return result
