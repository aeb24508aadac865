"""Clocks that were set: a jump of the differences between ends that stays, and whose clock it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.host_ends import HostEnds
from ncclscope_wire.terms import NO_TIME_NS

Vote = tuple[int, tuple[int, ...]]
"""(the host's time just before the first operation after, the hosts of the group that saw it)."""

_STEP_NS: Final = 1_000_000.0
_PERSISTS: Final = 3
_LEAST_RUN: Final = 0.1


def find_steps(groups: Sequence[HostEnds], reference: int) -> dict[int, int]:
    """The hosts whose clock was set, with the newest time of it, by vote of the groups that they are in."""
    votes: dict[int, list[Vote]] = {}
    for group in groups:
        for host, when in _steps_of(group, reference):
            votes.setdefault(host, []).append((when, group.hosts))
    return {host: max(when for when, _ in votes[host]) for host in _guilty(votes, groups, reference)}


def _guilty(votes: Mapping[int, list[Vote]], groups: Sequence[HostEnds], reference: int) -> list[int]:
    """Hosts of which most groups saw the step; in a group of two the one that other groups accuse too."""
    groups_of = Counter(host for group in groups for host in group.hosts)
    share = {host: len(seen) / groups_of[host] for host, seen in votes.items()}
    return [host for host in votes if share[host] > 0.5 or (host != reference and share[host] == max(share.values()))]


def _steps_of(group: HostEnds, reference: int) -> list[tuple[int, int]]:
    """(host, its time just before the first operation after) for each clock of the group that was set.

    Differences are taken against the median host of the group, or the reference where there are two, so that the
    host that moved is the one that stands out.
    """
    end = group.end[(group.end != NO_TIME_NS).all(axis=1)]
    if len(end) < 2 * _PERSISTS:
        return []
    end = end[np.argsort(end.max(axis=1), kind="stable")]
    relative = (end - end[:, [0]]) - (end[0] - end[0, 0])
    detrended = relative - _trend(end[:, 0] - end[0, 0], relative)
    if len(group.hosts) == 2:
        anchor = group.hosts.index(reference) if reference in group.hosts else 0
        detrended = detrended - detrended[:, [anchor]]
    else:
        detrended = detrended - np.median(detrended, axis=1, keepdims=True)
    jumps = _jumps(detrended)
    return [(group.hosts[column], int(end[at, column])) for column, at in jumps]


def _trend(x: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.float64]:
    """The median slope over a quarter of the window, times x: one step touches only a quarter of the pairs.

    Pairs of one burst of operations lie too near each other to tell a slope.
    """
    lag = max(1, len(x) // 4)
    run = (x[lag:] - x[:-lag]).astype(np.float64)
    apart = run >= max(1.0, _LEAST_RUN * float(x.max() - x.min()))
    if not apart.any():
        return np.zeros(y.shape)
    slope = np.median((y[lag:] - y[:-lag])[apart] / run[apart, None], axis=0)
    result: NDArray[np.float64] = x.astype(np.float64)[:, None] * slope
    return result


def _jumps(values: NDArray[np.float64]) -> list[tuple[int, int]]:
    """(column, row) where the level of a column changes for good by more than 1 ms and by far more than its noise."""
    windows = np.median(np.lib.stride_tricks.sliding_window_view(values, _PERSISTS, axis=0), axis=-1)
    change = np.abs(windows[_PERSISTS:] - windows[:-_PERSISTS])
    if not len(change):
        return []
    least = _STEP_NS + 10 * 1.4826 * np.median(np.abs(np.diff(values, axis=0)), axis=0)
    found: list[tuple[int, int]] = []
    for column in np.flatnonzero(change.max(axis=0) > least).tolist():
        at = int(change[:, column].argmax()) + _PERSISTS
        before, after = float(np.median(values[:at, column])), float(np.median(values[at:, column]))
        if abs(after - before) > least[column]:
            found.append((column, at))
    return found
