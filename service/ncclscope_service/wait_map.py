"""The map of waiting: global ranks by time, the share of kernel time that each waited for others.

A late rank is the one row that does *not* wait while all others do; a slow link is a block that waits less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.recent_sums import DURATION, WAIT, RecentSums, ratio
from ncclscope_service.store import Store
from ncclscope_service.window import Floats, Int64s, Window
from ncclscope_wire.terms import NO_NUMBER

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


_SPANS_STAGES: Final = ("EMBEDDING", "PP")
_BOTH: Final = (WAIT, DURATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeans:
    """Wait of every rank of a job over the window."""

    ranks: Int64s
    """Global ranks with a known wait, ascending."""
    mean_ratio: Floats

    def most_telling(self, limit: int) -> Int64s:
        """Positions of the ranks that wait least and of those that wait most, in order of rank.

        `limit` in all, one half each: the late ranks are among the former, those who wait for them among the latter.
        """
        order = np.argsort(self.mean_ratio, kind="stable")
        if len(order) <= limit:
            return np.sort(order)
        return np.sort(np.concatenate([order[: limit - limit // 2], order[len(order) - limit // 2 :]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits(RankMeans):
    """The same, and its course."""

    by_bucket: Floats
    """Shape (ranks, buckets); NaN where nothing was recorded."""


class Waits:
    """The waits of all ranks of a store over a window; members whose global rank is not known are left out."""

    def __init__(self, store: Store, sums: RecentSums, window: Window) -> None:
        self._sums = sums
        self._window = window
        self._codes = {job: code for code, job in enumerate(dict.fromkeys(store.process_job))}
        codes = np.array([self._codes[job] for job in store.process_job], np.int64)
        self._job_of = codes[np.array([each.process for each in store.members], np.int64)]
        self._communicator_of = np.array([each.communicator for each in store.members], np.int64)
        self._kind_of = np.array([each.parallelism or "" for each in store.communicators])[self._communicator_of]
        self._rank_of = np.array(
            [NO_NUMBER if each.global_rank is None else each.global_rank for each in store.members], np.int64
        )
        self._whole = sums.waits.whole(window, len(self._rank_of))
        self._is_known = (self._whole[DURATION] > 0) & (self._rank_of >= 0) & (self._rank_of < MAX_RANK)

    def means_of_job(self, job: str) -> RankMeans:
        """The waits of a job's ranks in groups that are meant to arrive together.

        Ranks of different pipeline stages wait for each other by design: in a job with a pipeline, groups that span
        stages (PP, EMBEDDING, WORLD) would hide everything else, and are left out unless there is nothing else.
        """
        members = self._meant_together(job)
        ranks, rows = np.unique(self._rank_of[members], return_inverse=True)
        waits, durations = (
            np.bincount(rows, weights=self._whole[of, members], minlength=len(ranks)).astype(np.float64) for of in _BOTH
        )
        return RankMeans(ranks=ranks, mean_ratio=ratio(waits, durations))

    def of_job(self, job: str) -> RankWaits:
        """As `means_of_job`, with their course."""
        return self._with_course(self._meant_together(job))

    def of_communicator(self, communicator: int) -> RankWaits:
        """The waits of one communicator's ranks."""
        return self._with_course(np.flatnonzero(self._is_known & (self._communicator_of == communicator)))

    def _with_course(self, members: Int64s) -> RankWaits:
        ranks, rows = np.unique(self._rank_of[members], return_inverse=True)
        rows = rows.astype(np.int64)
        waits, durations = (self._sums.waits.by_bucket(of, self._window, members, rows, len(ranks)) for of in _BOTH)
        means = ratio(waits.sum(axis=1), durations.sum(axis=1))
        return RankWaits(ranks=ranks, mean_ratio=means, by_bucket=ratio(waits, durations))

    def _meant_together(self, job: str) -> Int64s:
        own = self._job_of == self._codes.get(job, NO_NUMBER)
        spans = np.isin(self._kind_of, _SPANS_STAGES)
        if (spans & own & (self._sums.of_member()[: len(own)] > 0)).any():
            spans |= self._kind_of == "WORLD"
        known = own & self._is_known
        together = known & ~spans
        return np.flatnonzero(together if together.any() else known)


def host_waits(waits: RankMeans, host_of_rank: Mapping[int, str]) -> list[tuple[str, float]]:
    """Each host with the mean wait of its ranks, by name; ranks on hosts that are not known are left out."""
    ratios: dict[str, list[float]] = {}
    for rank, mean in zip(waits.ranks.tolist(), waits.mean_ratio.tolist(), strict=True):
        if rank in host_of_rank:
            ratios.setdefault(host_of_rank[rank], []).append(mean)
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


def _percents(ratios: Floats) -> tuple[int | None, ...]:
    return tuple(None if math.isnan(ratio) else round(ratio * 100) for ratio in ratios.tolist())
