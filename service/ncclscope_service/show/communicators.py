"""Views of communicators: bytes, bandwidth, what is expected of it, and waiting, the last minutes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.buckets import Floats, Int64s, Window
from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.job.ranks import MAX_RANK, global_ranks, hosts_of
from ncclscope_service.nccl.bandwidth import SIZE_CLASSES
from ncclscope_service.rollup.recent_sums import BUSY, DURATION, WAIT, RecentSums, ratio, series_key
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

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
    """The same, by time bucket too."""

    by_bucket: Floats
    """Shape (ranks, buckets); NaN if nothing was recorded."""


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
        self._whole = sums.whole_waits(window)
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
        """As `means_of_job`, by time bucket too."""
        return self._by_bucket(self._meant_together(job))

    def of_communicator(self, communicator: int) -> RankWaits:
        """The waits of one communicator's ranks."""
        return self._by_bucket(np.flatnonzero(self._is_known & (self._communicator_of == communicator)))

    def _by_bucket(self, members: Int64s) -> RankWaits:
        ranks, rows = np.unique(self._rank_of[members], return_inverse=True)
        rows = rows.astype(np.int64)
        waits, durations = (self._sums.waits_by_bucket(of, self._window, members, rows, len(ranks)) for of in _BOTH)
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


LATENCY_BOUND: Final = SIZE_CLASSES.index("1MiB")
"""Size classes below are limited by latency: their bandwidth says nothing."""

MAX_SHOWN: Final = 64
"""Communicators of a job on the page."""

_RECENT_BUCKETS: Final = 12
"""The last minute: what "now" means for waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorView:
    """One communicator. Bandwidths are of its main series: the operation and size class that moved most bytes."""

    alias: str
    comm_id: str
    group_name: str | None
    """As PyTorch prints it."""
    parallelism: str | None
    size: int
    hosts: int
    ranks: tuple[int, ...]
    """Global ranks that are known, ascending."""
    operations: int
    bytes: int
    ops: tuple[tuple[str, int], ...]
    """Operations by name, most frequent first."""
    main_op: str | None
    main_size_class: str | None
    busbw: float | None
    """Bytes per second, median over the last minute with data."""
    limit: float | None
    """By topology."""
    baseline: float | None
    """The best that the main series has shown."""
    is_latency_bound: bool
    """Its messages are so small that bandwidth says nothing."""
    expected: float | None
    """Bandwidth that it should have: the best that it or the median group of its kind has shown for that operation and
    size, else the limit; None while none is known, or if it is latency-bound."""
    wait_ratio: float | None
    """Wait share over the last minute."""
    busbw_history: tuple[float | None, ...]
    """By bucket of the window."""
    bytes_history: tuple[float | None, ...]
    """Logged bytes per second and bucket, over all ranks: what there is with logs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """The last minutes of all communicators, rows by communicator index."""

    busbw: Floats
    """Bytes per second by bucket, of the main series; NaN without data."""
    bytes_per_second: Floats
    """Logged, by bucket; NaN if nothing can be known."""
    wait_ratio: Floats
    """Of the last minute that was measured; NaN without data."""


def recent_of_communicators(store: Store, sums: RecentSums, window: Window, charted: Window | None = None) -> Recent:
    """The last minutes of all communicators of the store; `charted`: what the courses cover, if it is not those."""
    charted = charted or window
    return Recent(
        busbw=_busbw_history(store, sums, charted),
        bytes_per_second=_bytes_history(store, sums, charted),
        wait_ratio=recent_wait_ratio(sums, len(store.communicators), window),
    )


def main_series(store: Store) -> Int64s:
    """By communicator: position in `series` of what moved most bytes (then most operations); -1 without series."""
    series = store.series.rows
    main = np.full(len(store.communicators), -1, np.int64)
    order = np.lexsort((series["operations"], series["bytes"]))
    order = order[series["communicator"][order] >= 0]
    main[series["communicator"][order]] = order
    return main


def recent_wait_ratio(sums: RecentSums, count: int, window: Window) -> Floats:
    """By communicator: waiting over kernel time of the collectives of the last minute; NaN without.

    A group of which the last minute has none takes the whole window: captures of ten seconds in every hundred arrive
    when their time is long over.
    """
    last = Window(
        begin_ns=window.end_ns - _RECENT_BUCKETS * window.bucket_ns, bucket_ns=window.bucket_ns, buckets=_RECENT_BUCKETS
    )
    recent, whole = sums.collectives.whole(last, count), sums.collectives.whole(window, count)
    return ratio(*np.where(recent[BUSY] > 0, recent, whole))


def bytes_of_communicators(store: Store) -> NDArray[np.int64]:
    """Bytes that each has moved since the start, over all ranks."""
    series = store.series.rows
    whose = np.maximum(series["communicator"], 0)
    return np.bincount(whose, weights=series["bytes"], minlength=len(store.communicators)).astype(np.int64)


def named_by_findings(store: Store) -> frozenset[str]:
    """The `comm_id` of communicators that findings name."""
    return frozenset(each.comm_id for each in store.findings if each.comm_id)


def most_telling(
    views: Sequence[Communicator], bytes_of: NDArray[np.int64], named: frozenset[str]
) -> list[Communicator]:
    """MAX_SHOWN communicators: those that findings name, then the busiest of each kind in turn."""
    by_bytes = sorted(views, key=lambda each: (-int(bytes_of[each.index]), each.index))
    kinds = dict.fromkeys(each.parallelism for each in by_bytes)
    in_turn = zip_longest(*([each for each in by_bytes if each.parallelism == kind] for kind in kinds))
    mixed = [each for each in chain.from_iterable(in_turn) if each is not None]
    chosen = sorted(mixed, key=lambda each: each.comm_id not in named)[:MAX_SHOWN]
    return sorted(chosen, key=lambda each: each.index)


class CommunicatorViews:
    """Makes the views of chosen communicators from what was computed for all of them."""

    def __init__(self, store: Store, aliases: Aliases, recent: Recent) -> None:
        self._store = store
        self._aliases = aliases
        self._recent = recent
        self._series = store.series.rows
        self._main = main_series(store)
        self._bests = _median_bests(store, self._main)

    def view(self, communicator: Communicator) -> CommunicatorView:
        """One communicator's view."""
        index = communicator.index
        own = self._series[self._series["communicator"] == index]
        main = self._series[self._main[index]] if self._main[index] >= 0 else None
        is_small = main is not None and int(main["size_class"]) < LATENCY_BOUND
        best = math.nan if main is None else self._bests[_likeness(communicator, main)]
        return CommunicatorView(
            alias=self._aliases[index],
            comm_id=communicator.comm_id,
            group_name=communicator.name,
            parallelism=communicator.parallelism,
            size=communicator.size,
            hosts=len(hosts_of(self._store, communicator)),
            ranks=tuple(sorted(global_ranks(self._store, communicator).values())),
            operations=int(own["operations"].sum()),
            bytes=int(own["bytes"].sum()),
            ops=_operations_by_name(own),
            main_op=None if main is None else operation_name(int(main["op"])),
            main_size_class=None if main is None else size_class_name(int(main["size_class"])),
            busbw=None if main is None else four_digits(float(main["busbw"].item())),
            limit=None if main is None else four_digits(float(main["limit"].item())),
            baseline=None if main is None else four_digits(float(main["baseline"].item())),
            is_latency_bound=is_small,
            expected=None
            if main is None or is_small
            else expected_bandwidth(float(main["baseline"]), best, float(main["limit"])),
            wait_ratio=four_digits(self._recent.wait_ratio[index]),
            busbw_history=four_digits_each(self._recent.busbw[index]),
            bytes_history=four_digits_each(self._recent.bytes_per_second[index]),
        )


_Likeness: TypeAlias = tuple[str, str | None, int, int, int]


def _likeness(communicator: Communicator, main: np.void) -> _Likeness:
    """Groups that agree in it should be equally fast."""
    return communicator.job, communicator.parallelism, communicator.size, int(main["op"]), int(main["size_class"])


def _median_bests(store: Store, main: Int64s) -> dict[_Likeness, float]:
    """By kind of group, the median of what each has shown at best; NaN without."""
    series = store.series.rows
    bests: dict[_Likeness, list[float]] = defaultdict(list)
    for communicator, at in zip(store.communicators, main.tolist(), strict=True):
        if at >= 0:
            bests[_likeness(communicator, series[at])].append(float(series["baseline"][at]))
    known = {likeness: [best for best in found if not math.isnan(best)] for likeness, found in bests.items()}
    return {likeness: float(np.median(found)) if found else math.nan for likeness, found in known.items()}


def efficiencies(store: Store) -> list[float]:
    """By communicator, bus bandwidth of its main series over what is expected; NaN if unknown, or latency-bound."""
    series, main = store.series.rows, main_series(store)
    bests = _median_bests(store, main)
    found: list[float] = []
    for communicator, at in zip(store.communicators, main.tolist(), strict=True):
        expected = None
        if at >= 0 and int(series["size_class"][at]) >= LATENCY_BOUND:
            best = bests[_likeness(communicator, series[at])]
            expected = expected_bandwidth(float(series["baseline"][at]), best, float(series["limit"][at]))
        found.append(float(series["busbw"][at]) / expected if expected else math.nan)
    return found


def expected_bandwidth(own: float, of_kind: float, limit: float) -> float | None:
    """The larger of what a group and others of its kind have shown at best, else its limit; None if all are NaN."""
    known = [best for best in (own, of_kind) if not math.isnan(best)] or [limit]
    return four_digits(max(known))


def four_digits(value: float) -> float | None:
    """A number to four digits, which is what a screen can show; None for NaN."""
    return None if math.isnan(value) else float(f"{value:.4g}")


def four_digits_each(values: Floats) -> tuple[float | None, ...]:
    """A course of numbers, each to four digits."""
    return tuple(map(four_digits, values.tolist()))


def size_class_name(size_class: int) -> str:
    """The name of a size class; "unknown" outside the table."""
    return SIZE_CLASSES[size_class] if 0 <= size_class < len(SIZE_CLASSES) else "unknown"


def _operations_by_name(series: Columns) -> tuple[tuple[str, int], ...]:
    amounts = np.bincount(series["op"], weights=series["operations"]) if len(series) else np.zeros(0)
    named = [(operation_name(code), int(amount)) for code, amount in enumerate(amounts.tolist()) if amount]
    return tuple(sorted(named, key=lambda pair: -pair[1]))


def _busbw_history(store: Store, sums: RecentSums, window: Window) -> Floats:
    """All bytes that passed the bus in a bucket over the time that their transfers took, main series only."""
    main, series = main_series(store), store.series.rows
    has_main = np.flatnonzero(main >= 0)
    rows = series[main[has_main]]
    keys = series_key(rows["communicator"], rows["op"], rows["size_class"])
    return sums.bandwidth_by_bucket(window, keys, has_main, len(main))


def _first_logged(store: Store, sums: RecentSums, window: Window) -> int:
    """The bucket of the first line in the window; behind the last one without any."""
    first_ns, last_ns = sums.logged.within(window, len(store.processes))
    begins = first_ns[first_ns <= last_ns].tolist()
    history = None if window.job is None else store.job_histories.get(window.job)
    if history is not None and history.bytes.first_ns is not None:
        begins.append(max(history.bytes.first_ns, window.begin_ns))
    return int(window.bucket_of(np.array([min(begins)]))[0]) if begins else window.buckets


def _bytes_history(store: Store, sums: RecentSums, window: Window) -> Floats:
    """Bytes per second; buckets before the first line and the one that is still filling are not known."""
    count = len(store.communicators)
    taken_in = [each.index if each.absorbed_by is None else each.absorbed_by for each in store.communicators]
    into = np.array(taken_in, np.int64)
    rates = sums.bytes_by_bucket(window, np.arange(count), into, count) / window.bucket_seconds
    first = _first_logged(store, sums, window)
    rates[:, : first + 1] = np.nan
    rates[:, -1] = np.nan
    return rates
