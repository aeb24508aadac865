"""What causality says of clocks that were estimated: how many operations contradict them, and how far off they may be.

Every kept operation is put on the corrected clocks. One in which a rank ends before another has started, by more than
3 sigma, is a violation: the share of these gates everything that compares ranks. The bounds that the operations set
on what is left of each clock's error are solved anew for each estimate (`causality.py`), as the drift that is taken
out of them is another one; the window bounds how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.causality import Bounds, Interval
from ncclscope_service.clock_check import OTHER_HOST_SIGMA_NS, SAME_HOST_SIGMA_NS, ClockCheck
from ncclscope_service.clock_graph import Solution
from ncclscope_service.host_ends import HostEnds, Times
from ncclscope_service.host_messages import HostMessages
from ncclscope_wire.terms import NO_TIME_NS

_OUTLIER_MADS: Final = 8.0
_MISALIGNED_FLOOR_NS: Final = 20_000.0
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
    operations = violations = 0
    for group in groups:
        members = np.array([index[host] for host in group.hosts], dtype=np.intp)
        if not solution.known[members].all():
            continue
        true_end, since = corrected(group.end, members, solution, origin)
        earliest, _ = corrected(group.earliest_end, members, solution, origin)
        latest, _ = corrected(group.latest_start, members, solution, origin)
        checkable = (~np.isnan(earliest)).sum(axis=1) >= 2
        operations += int(checkable.sum())
        violations += int((checkable & _violates(latest, earliest, sigma[members])).sum())
        sound = checkable & _is_aligned(true_end)
        slack = _SIGMAS * float(solution.rate_sigma[members].max()) * since
        bounds.add_collectives(members, latest[sound], earliest[sound], slack[sound])
    for (sender, receiver), way in ways.items():
        _bound_messages(bounds, index[sender], index[receiver], way, solution, origin)
    interval = bounds.solve(reference)
    hosts = list(index)
    suspects = tuple(hosts[position] for position in interval.inconsistent)
    return interval, ClockCheck(operations=operations, violations=violations, suspects=suspects)


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
    bounds: Bounds, sender: int, receiver: int, way: HostMessages, solution: Solution, origin: int
) -> None:
    """No Recv ends before its Send began: a bound in one direction."""
    members = np.array([sender, receiver], np.intp)
    if not solution.known[members].all():
        return
    times, since = corrected(np.stack([way.sent, way.received], axis=1), members, solution, origin)
    slack = _SIGMAS * float(solution.rate_sigma[members].max()) * since
    bounds.add_messages(sender, receiver, times[:, 0], times[:, 1] + slack)


def _is_aligned(true_end: NDArray[np.float64]) -> NDArray[np.bool_]:
    """False for operations whose ends do not coincide: they were matched wrongly, and their bounds are worthless."""
    count = (~np.isnan(true_end)).sum(axis=1)
    filled = np.sort(np.where(np.isnan(true_end), np.inf, true_end), axis=1)
    middle = filled[np.arange(len(filled)), np.maximum(count - 1, 0) // 2]
    with np.errstate(invalid="ignore"):
        off = np.nan_to_num(np.abs(true_end - middle[:, None]), nan=0.0, posinf=0.0).max(axis=1, initial=0.0)
    if not len(off):
        return np.zeros(0, dtype=np.bool_)
    limit = _OUTLIER_MADS * 1.4826 * float(np.median(off)) + _MISALIGNED_FLOOR_NS
    aligned: NDArray[np.bool_] = off <= limit
    return aligned
