"""The map of waiting: global ranks by time, the share of kernel time that each waited for others.

A late rank is the one row that does *not* wait while all others do; a slow link is a block that waits less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.rows import Communicator
from ncclscope_service.window import Int64s, RecentOperations, Window, ratio_by_bucket

MAX_ROWS: Final = 128
"""Ranks on the map. Where there are more, those that wait least and those that wait most are shown."""

MAX_RANK: Final = 1 << 20
"""Global ranks from here on are taken for damage of a line and left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitMap:
    """One job's map; rows by rank, columns by time bucket of the overview."""

    ranks: tuple[int, ...]
    hosts: tuple[str | None, ...]
    """Of each of `ranks`."""
    ranks_known: int
    """How many ranks have a known wait: the map shows all of them or the most telling ones."""
    mean_ratio: tuple[float | None, ...]
    """Of each of `ranks`, over the whole window."""
    percent: tuple[tuple[int | None, ...], ...]
    """Wait in percent of kernel time, a row for each of `ranks`; None where nothing was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits:
    """Wait of every rank of a job over the window."""

    ranks: Int64s
    """Global ranks with a known wait, ascending."""
    mean_ratio: NDArray[np.float64]
    by_bucket: NDArray[np.float64]
    """Shape (ranks, buckets); NaN where nothing was recorded."""

    def most_telling(self, limit: int) -> Int64s:
        """Positions of the ranks that wait least and of those that wait most, in order of rank.

        `limit` in all, one half each: the late ranks are among the former, those who wait for them among the latter.
        """
        order = np.argsort(self.mean_ratio, kind="stable")
        if len(order) <= limit:
            return np.sort(order)
        return np.sort(np.concatenate([order[: limit - limit // 2], order[len(order) - limit // 2 :]]))


_SPANS_STAGES: Final = frozenset({"PP", "EMBEDDING"})


def rank_waits(
    operations: RecentOperations,
    of_job: NDArray[np.bool_],
    window: Window,
    communicators: Sequence[Communicator],
) -> RankWaits:
    """The waits of a job's ranks in groups that are meant to arrive together; `of_job` chooses its operations.

    Ranks of different pipeline stages wait for each other by design: in a job with a pipeline, groups that span stages
    (PP, EMBEDDING, WORLD) would hide everything else, and are left out unless there is nothing else.
    """
    chosen = of_job & operations.has_wait & (operations.rank >= 0) & (operations.rank < MAX_RANK)
    chosen &= window.holds(operations.kernel_ns)
    together = chosen & ~_spans_stages(operations, of_job, communicators)
    chosen = together if together.any() else chosen
    ranks, groups = np.unique(operations.rank[chosen], return_inverse=True)
    times, waits, durations = (
        column[chosen] for column in (operations.kernel_ns, operations.wait_ns, operations.duration_ns)
    )
    by_bucket = ratio_by_bucket(groups.astype(np.int64), times, waits, durations, count=len(ranks), window=window)
    whole = np.bincount(groups, weights=durations, minlength=len(ranks))
    mean_ratio = np.bincount(groups, weights=waits, minlength=len(ranks)) / whole
    return RankWaits(ranks=ranks, mean_ratio=mean_ratio, by_bucket=by_bucket)


def _spans_stages(
    operations: RecentOperations, of_job: NDArray[np.bool_], communicators: Sequence[Communicator]
) -> NDArray[np.bool_]:
    kinds = np.array([each.parallelism or "" for each in communicators] + [""])  # the last: not known
    of_operations = kinds[operations.communicator]
    spans = np.isin(of_operations, sorted(_SPANS_STAGES))
    if (spans & of_job).any():
        spans |= of_operations == "WORLD"
    return spans


def host_waits(waits: RankWaits, host_of_rank: Mapping[int, str]) -> list[tuple[str, float]]:
    """Each host with the mean wait of its ranks, by name; ranks on hosts that are not known are left out."""
    ratios: dict[str, list[float]] = {}
    for rank, ratio in zip(waits.ranks.tolist(), waits.mean_ratio.tolist(), strict=True):
        if rank in host_of_rank:
            ratios.setdefault(host_of_rank[rank], []).append(ratio)
    return [(host, math.fsum(of_host) / len(of_host)) for host, of_host in sorted(ratios.items())]


def make_wait_map(waits: RankWaits, host_of_rank: Mapping[int, str]) -> WaitMap | None:
    """The map of a job; None where no wait is known, which is always so with logs only."""
    if not len(waits.ranks):
        return None
    shown = waits.most_telling(MAX_ROWS)
    ranks = waits.ranks[shown].tolist()
    return WaitMap(
        ranks=tuple(ranks),
        hosts=tuple(host_of_rank.get(rank) for rank in ranks),
        ranks_known=len(waits.ranks),
        mean_ratio=tuple(round(ratio, 4) for ratio in waits.mean_ratio[shown].tolist()),
        percent=tuple(_percents(row) for row in waits.by_bucket[shown]),
    )


def _percents(ratios: NDArray[np.float64]) -> tuple[int | None, ...]:
    return tuple(None if math.isnan(ratio) else round(ratio * 100) for ratio in ratios.tolist())
