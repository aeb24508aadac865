"""Bounds on clock errors from causality: no rank of an N-to-N collective ends before every rank has started.

With S and E the start and end of hosts i and j on clocks that are off by d_i and d_j, E_j - d_j >= S_i - d_i, so
d_j - d_i <= E_j - S_i. The smallest such bound over many operations is an edge i -> j of a graph; the tightest
bound that all of them imply is the shortest path, and bounds that contradict each other form a negative cycle.
That is not an error of the solver but news: a clock stepped, or operations were matched wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Bounds = NDArray[np.float64]
"""[i, j]: the most by which the clock error of host j may exceed that of host i, in ns; inf where not bound."""

_CELLS_AT_ONCE: Final = 2**21
"""Operations x hosts x hosts that are compared in one go: 16 MiB of floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where the clock error of each host lies, relative to the reference. All bounds infinite where inconsistent."""

    lo_ns: NDArray[np.float64]
    hi_ns: NDArray[np.float64]
    inconsistent: tuple[int, ...]
    """Hosts of which two bounds contradict each other, worst first; empty where a solution exists."""


def no_bounds(hosts: int) -> Bounds:
    """Bounds that allow everything; a clock agrees with itself."""
    bounds = np.full((hosts, hosts), np.inf)
    np.fill_diagonal(bounds, 0.0)
    return bounds


def tighten(
    bounds: Bounds,
    members: NDArray[np.intp],
    latest_start_ns: NDArray[np.float64],
    earliest_end_ns: NDArray[np.float64],
    slack_ns: NDArray[np.float64],
) -> None:
    """Tightens `bounds` in place by N-to-N operations of the hosts `members`.

    Times are K x len(members), one row per operation, from any common origin, NaN where a host was not seen; per
    host the latest start and the earliest end of its ranks. `slack_ns` (K) is added to each bound: what drift that
    was not removed may amount to. O(K x hosts^2); equal to adding all pairs, which for these operations is exact.
    """
    tightest = np.full((len(members), len(members)), np.inf)
    rows_at_once = max(1, _CELLS_AT_ONCE // max(1, len(members) ** 2))
    for begin in range(0, len(slack_ns), rows_at_once):
        part = slice(begin, begin + rows_at_once)
        gaps = earliest_end_ns[part, None, :] - latest_start_ns[part, :, None] + slack_ns[part, None, None]
        np.minimum(tightest, np.where(np.isnan(gaps), np.inf, gaps).min(axis=0, initial=np.inf), out=tightest)
    np.fill_diagonal(tightest, 0.0)
    index = np.ix_(members, members)
    bounds[index] = np.minimum(bounds[index], tightest)


def solve(bounds: Bounds, reference: int) -> Interval:
    """The interval of each host's clock error relative to `reference` that all bounds together allow.

    Bellman-Ford by whole rows: O(hosts^2) a round, rounds = length of the longest shortest path (few, as
    communicators overlap).
    """
    hosts = len(bounds)
    from_reference, ends_first = _shortest(bounds, reference)
    to_reference, ends_second = _shortest(bounds.T, reference)
    if ends_first and ends_second:
        return Interval(lo_ns=-to_reference, hi_ns=from_reference, inconsistent=())
    return Interval(lo_ns=np.full(hosts, -np.inf), hi_ns=np.full(hosts, np.inf), inconsistent=_contradicting(bounds))


def _shortest(bounds: Bounds, source: int) -> tuple[NDArray[np.float64], bool]:
    distances = np.full(len(bounds), np.inf)
    distances[source] = 0.0
    for _ in range(len(bounds)):
        shorter = np.minimum(distances, (distances[:, None] + bounds).min(axis=0))
        if np.array_equal(shorter, distances):
            return distances, True
        distances = shorter
    return distances, False


def _contradicting(bounds: Bounds) -> tuple[int, ...]:
    both_ways = bounds + bounds.T
    conflict = np.where(both_ways < 0, both_ways, 0.0).sum(axis=1)
    order = np.argsort(conflict, kind="stable")
    found = [int(host) for host in order if conflict[host] < 0]
    if not found:  # a longer cycle: no pair alone is to blame
        return tuple(range(len(bounds)))
    alone = [host for host in found if conflict[host] < 1.5 * conflict[found[1]]] if len(found) > 1 else found
    return tuple(alone or found)
