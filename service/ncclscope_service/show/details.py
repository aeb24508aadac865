"""Answers about one job beside the overview: bandwidth by message size, one communicator, one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from ncclscope_service.columns.buckets import Bools, Window, window_until
from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.job.ranks import host_of_ranks
from ncclscope_service.measure.expected_times import JobEstimator
from ncclscope_service.measure.latency_advice import advice_text, latency_advice
from ncclscope_service.rollup.recent_sums import RecentSums, series_key
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.rollup.window import RecentOperations, recent_collectives, recent_operations
from ncclscope_service.show.communicators import (
    LATENCY_BOUND,
    CommunicatorView,
    CommunicatorViews,
    RankWaits,
    Waits,
    bytes_of_communicators,
    expected_bandwidth,
    four_digits,
    four_digits_each,
    most_telling,
    named_by_findings,
    recent_of_communicators,
    size_class_name,
)
from ncclscope_service.show.steps import window_of_job
from ncclscope_service.store.records import Communicator, Member
from ncclscope_service.store.tables import Store, version_of
from ncclscope_wire.batch import Columns


@dataclass(frozen=True, kw_only=True)
class JobQuery:
    """One job of a store at one time."""

    store: Store
    aliases: Aliases
    job: str
    now_ns: int
    window: Window
    """The last minutes."""
    charted: Window
    """What charts over time cover: those, or the job since its start."""
    sums: RecentSums

    @cached_property
    def operations(self) -> RecentOperations:
        """The newest operations, for answers that need each of them."""
        return recent_operations(self.store)

    @cached_property
    def waits(self) -> Waits:
        """Waits of all ranks, over the window."""
        return Waits(self.store, self.sums, self.window)

    def over_the_whole_job(self) -> JobQuery:
        """The same with charts since the start of the job."""
        return replace(self, charted=window_of_job(self.store, self.sums, self.job, self.now_ns))

    @property
    def is_own(self) -> Bools:
        """Which of `operations` are the job's."""
        belongs = np.array([name == self.job for name in self.store.process_job] or [False], np.bool_)
        return belongs[self.operations.process]

    def communicator(self, alias: str) -> Communicator | None:
        """The communicator of a short name; None if the job has none of that name."""
        own = (each for each in self.store.listed_communicators() if each.job == self.job)
        return next((each for each in own if self.aliases[each.index] == alias), None)

    def members(self) -> list[Member]:
        """All members of the job's communicators."""
        return [each for each in self.store.members if self.store.process_job[each.process] == self.job]

    def ranks_of(self, communicator: Communicator) -> dict[int, int]:
        """Communicator rank to global rank, if both are known."""
        found = {rank: self.store.members[index].global_rank for rank, index in (communicator.members or {}).items()}
        return {rank: global_rank for rank, global_rank in found.items() if global_rank is not None}


def query_job(
    store: Store, aliases: Aliases, job: str, now_ns: int, *, sums: RecentSums | None = None
) -> JobQuery | None:
    """A query about a job; None if there is no job of that name. Gives communicators their short names.

    `sums`: those of this store; computed if not given.
    """
    if job not in store.process_job and all(each.job != job for each in store.communicators):
        return None
    aliases.update(store.communicators, store.members)
    sums = sums or RecentSums.of_store(store, now_ns)
    window = window_until(now_ns)
    return JobQuery(store=store, aliases=aliases, job=job, now_ns=now_ns, window=window, charted=window, sums=sums)


MAX_POINTS: Final = 400

_LOOKED_AT: Final = 60_000
"""Newest collectives of all jobs: keeps one answer below a tenth of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoint:
    """One communicator's launches of one operation and size."""

    communicator: str
    parallelism: str | None
    op: str
    message_bytes: int
    collectives: int
    busbw: float
    """Bytes per second, median."""
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""
    limit: float | None
    """By topology."""
    expected: float | None
    """What it should reach by what was measured of transfers like these, of the calibration or else of this job."""
    expected_low: float | None
    """Four of five should lie between this and `expected_high`."""
    expected_high: float | None
    basis: str | None
    """From what `expected` comes: "history", "sizes" and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoints:
    """A job's points, those with most bytes first."""

    points: tuple[SizePoint, ...]
    known: int
    """How many there are: `points` are all of them or the MAX_POINTS that moved most."""
    advice: tuple[str, ...]
    """Of transfers that are bound by latency: what would be faster."""


def size_points(query: JobQuery, only: Communicator | None = None) -> SizePoints:
    """The points of a job, or of one of its communicators."""
    newest = recent_collectives(query.store)[-_LOOKED_AT:]
    indices = [
        each.index
        for each in query.store.listed_communicators()
        if each.job == query.job and (only is None or each.index == only.index)
    ]
    own = np.isin(newest["communicator"], indices)
    rows = newest[own & np.isfinite(newest["busbw"]) & (newest["message_bytes"] > 0)]
    if not len(rows):
        return SizePoints(points=(), known=0, advice=())
    order = np.lexsort((rows["busbw"], rows["message_bytes"], rows["op"], rows["communicator"]))
    rows = rows[order]
    keys = np.stack([rows[name].astype(np.int64) for name in ("communicator", "op", "message_bytes")])
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(keys) != 0).any(axis=0)]))
    counts = np.diff(np.append(starts, len(rows)))
    moved = counts * rows["message_bytes"][starts]
    shown = np.argsort(-moved, kind="stable")[:MAX_POINTS]
    limits = _limits(query)
    # Groups of one shape expect the same, so of one communicator too the rows of all are needed.
    estimator = JobEstimator(query.store, query.job, newest)
    points = [
        _point(query, rows, int(starts[group]), int(counts[group]), limits, estimator) for group in shown.tolist()
    ]
    advice = latency_advice(query.store, query.job, newest) if only is None else []
    return SizePoints(points=tuple(points), known=len(starts), advice=tuple(map(advice_text, advice)))


Limits = dict[tuple[int, int, int], float]


def _limits(query: JobQuery) -> Limits:
    series = query.store.series.rows
    keys = zip(*(series[name].tolist() for name in ("communicator", "op", "size_class")), strict=True)
    return dict(zip(keys, series["limit"].tolist(), strict=True))


def _point(
    query: JobQuery,
    rows: np.ndarray[tuple[int], np.dtype[np.void]],
    start: int,
    count: int,
    limits: Limits,
    estimator: JobEstimator,
) -> SizePoint:
    """One group of rows, which are sorted by bandwidth within it."""
    first = rows[start]
    index, op, size_class = int(first["communicator"]), int(first["op"]), int(first["size_class"])
    busbw = rows["busbw"][start : start + count]
    low, middle, high = (float(busbw[min(count - 1, round(share * (count - 1)))]) for share in (0.1, 0.5, 0.9))
    communicator = query.store.communicators[index]
    expected = estimator.expected_busbw(communicator, op, int(first["message_bytes"]))
    return SizePoint(
        communicator=query.aliases[index],
        parallelism=communicator.parallelism,
        op=operation_name(op),
        message_bytes=int(first["message_bytes"]),
        collectives=count,
        busbw=middle,
        low=low,
        high=high,
        limit=four_digits(limits.get((index, op, size_class), float("nan"))),
        expected=None if expected is None else four_digits(expected.typical),
        expected_low=None if expected is None else four_digits(expected.low),
        expected_high=None if expected is None else four_digits(expected.high),
        basis=None if expected is None else expected.basis,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthOfCommunicator:
    """One communicator, as in its `CommunicatorView`."""

    alias: str
    busbw_history: tuple[float | None, ...]
    bytes_history: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthView:
    """How the bandwidth of a job's communicators went, of those that the overview has."""

    now_ns: int
    window_begin_ns: int
    bucket_seconds: float
    communicators: tuple[BandwidthOfCommunicator, ...]


def bandwidth_view(query: JobQuery) -> BandwidthView:
    """The last minutes, or the job since its start."""
    store, charted = query.store, query.charted
    recent = recent_of_communicators(store, query.sums, query.window, charted)
    own = [each for each in store.listed_communicators() if each.job == query.job]
    return BandwidthView(
        now_ns=query.now_ns,
        window_begin_ns=charted.begin_ns,
        bucket_seconds=charted.bucket_seconds,
        communicators=tuple(
            BandwidthOfCommunicator(
                alias=query.aliases[each.index],
                busbw_history=four_digits_each(recent.busbw[each.index]),
                bytes_history=four_digits_each(recent.bytes_per_second[each.index]),
            )
            for each in most_telling(own, bytes_of_communicators(store), named_by_findings(store))
        ),
    )


MAX_LINES: Final = 8
"""Operations and sizes with a course of their own: those that moved most bytes."""

MAX_RANKS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesView:
    """One operation and size class."""

    op: str
    size_class: str
    operations: int
    """Since the start, over all ranks."""
    bytes: int
    busbw: float | None
    """Bytes per second, median over the last minute with data."""
    limit: float | None
    """By topology."""
    baseline: float | None
    """The best that it has shown."""
    is_latency_bound: bool
    expected: float | None
    """Its best, else its limit; None if it is latency-bound."""
    wait_ratio: float | None
    """Since the start."""
    transfer_seconds: float | None
    """Mean of a collective, since the start."""
    busbw_history: tuple[float | None, ...]
    """By bucket of the window; empty for those beyond MAX_LINES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOfCommunicator:
    """One rank."""

    rank: int
    """In the communicator."""
    global_rank: int | None
    host: str | None
    wait_ratio: float | None
    """Over the window."""
    last_ratio: float | None
    """Share of the recent collectives in which it arrived last: 1/size if nobody is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorDetail:
    """Everything that the page shows of one communicator."""

    now_ns: int
    window_begin_ns: int
    bucket_seconds: float
    summary: CommunicatorView
    identity: str
    identity_confidence: float
    parallelism_confidence: float
    parent_comm_id: str | None
    bottleneck: str | None
    """The link that sets the limit by topology."""
    series: tuple[SeriesView, ...]
    ranks: tuple[RankOfCommunicator, ...]
    """By rank; the MAX_RANKS first of a larger one."""
    sizes: SizePoints


def communicator_detail(query: JobQuery, communicator: Communicator) -> CommunicatorDetail:
    """The view of one communicator."""
    recent = recent_of_communicators(query.store, query.sums, query.window, query.charted)
    rows = recent_collectives(query.store)
    rows = rows[rows["communicator"] == communicator.index]
    waits = query.waits.of_communicator(communicator.index)
    hosts = host_of_ranks(query.store).get(query.job, {})
    bottleneck = communicator.bottleneck
    return CommunicatorDetail(
        now_ns=query.now_ns,
        window_begin_ns=query.charted.begin_ns,
        bucket_seconds=query.charted.bucket_seconds,
        summary=CommunicatorViews(query.store, query.aliases, recent).view(communicator),
        identity=str(communicator.identity),
        identity_confidence=communicator.identity_confidence,
        parallelism_confidence=communicator.parallelism_confidence,
        parent_comm_id=communicator.parent_comm_id,
        bottleneck=None if bottleneck is None else bottleneck.name,
        series=_series(query, communicator),
        ranks=_ranks_of_communicator(query, communicator, rows, waits, hosts),
        sizes=size_points(query, communicator),
    )


def _series(query: JobQuery, communicator: Communicator) -> tuple[SeriesView, ...]:
    series = query.store.series.rows
    own = series[series["communicator"] == communicator.index]
    own = own[np.lexsort((-own["operations"], -own["bytes"]))]
    shown = own[:MAX_LINES]
    keys = series_key(shown["communicator"], shown["op"], shown["size_class"])
    history = query.sums.bandwidth_by_bucket(query.charted, keys, np.arange(len(shown)), len(shown))
    return tuple(
        _series_view(row, history[place].tolist() if place < len(shown) else []) for place, row in enumerate(own)
    )


def _series_view(row: np.void, history: list[float]) -> SeriesView:
    waited, of = int(row["wait_ns"]), int(row["waiting_duration_ns"])
    collectives = int(row["collectives"])
    is_small = int(row["size_class"]) < LATENCY_BOUND
    best, limit = float(row["baseline"]), float(row["limit"])
    return SeriesView(
        op=operation_name(int(row["op"])),
        size_class=size_class_name(int(row["size_class"])),
        operations=int(row["operations"]),
        bytes=int(row["bytes"]),
        busbw=four_digits(float(row["busbw"])),
        limit=four_digits(float(row["limit"])),
        baseline=four_digits(float(row["baseline"])),
        is_latency_bound=is_small,
        expected=None if is_small else expected_bandwidth(best, best, limit),
        wait_ratio=four_digits(waited / of) if of > 0 else None,
        transfer_seconds=four_digits(int(row["transfer_ns"]) * 1e-9 / collectives) if collectives else None,
        busbw_history=tuple(four_digits(value) for value in history),
    )


def _ranks_of_communicator(
    query: JobQuery, communicator: Communicator, rows: Columns, waits: RankWaits, hosts: dict[int, str]
) -> tuple[RankOfCommunicator, ...]:
    global_ranks = query.ranks_of(communicator)
    ratio_of = dict(zip(waits.ranks.tolist(), waits.mean_ratio.tolist(), strict=True))
    judged = rows["last_rank"][rows["last_rank"] >= 0]
    last = np.bincount(judged, minlength=max(1, communicator.size)) if len(judged) else None
    found: list[RankOfCommunicator] = []
    for rank in sorted(communicator.members or {})[:MAX_RANKS]:
        global_rank = global_ranks.get(rank)
        ratio = None if global_rank is None else ratio_of.get(global_rank)
        found.append(
            RankOfCommunicator(
                rank=rank,
                global_rank=global_rank,
                host=None if global_rank is None else hosts.get(global_rank),
                wait_ratio=None if ratio is None else four_digits(ratio),
                last_ratio=None if last is None or rank >= len(last) else four_digits(int(last[rank]) / len(judged)),
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorOfRank:
    """A communicator that the rank is in."""

    alias: str
    parallelism: str | None
    size: int
    rank: int | None
    """Its rank there."""
    operations: int
    """In memory."""
    kernel_seconds: float
    """Of those of which the wait is known."""
    wait_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDetail:
    """Everything that the page shows of one rank."""

    now_ns: int
    window_begin_ns: int
    bucket_seconds: float
    rank: int
    is_inferred: bool
    """No line gave its number: it was derived from its process's place."""
    host: str
    pid: int
    local_rank: int | None
    cuda_device: int | None
    version: str | None
    """Of NCCL."""
    communicators: tuple[CommunicatorOfRank, ...]
    wait_ratio: float | None
    """In groups that are meant to arrive together, over the window."""
    median_wait_ratio: float | None
    """Of the median rank of the job."""
    place: int | None
    """1 = it waits least of all."""
    ranks_known: int
    wait_history: tuple[float | None, ...]
    """Of this rank, by bucket of the window."""
    median_wait_history: tuple[float | None, ...]
    """Of the median rank."""


def rank_detail(query: JobQuery, rank: int) -> RankDetail | None:
    """The view of one global rank; None if the job has no such rank."""
    members = [each for each in query.members() if each.global_rank == rank]
    if not members:
        return None
    first, store = members[0], query.store
    waits = query.waits.of_job(query.job)
    courses = waits if query.charted == query.window else Waits(store, query.sums, query.charted).of_job(query.job)
    position = np.flatnonzero(waits.ranks == rank)
    place = np.flatnonzero(courses.ranks == rank)
    own = courses.by_bucket[place[0]] if len(place) else np.full(query.charted.buckets, np.nan)
    ratio = float(waits.mean_ratio[position[0]]) if len(position) else float("nan")
    return RankDetail(
        now_ns=query.now_ns,
        window_begin_ns=query.charted.begin_ns,
        bucket_seconds=query.charted.bucket_seconds,
        rank=rank,
        is_inferred=first.global_rank_is_inferred,
        host=store.processes[first.process].host,
        pid=store.processes[first.process].pid,
        local_rank=first.local_rank,
        cuda_device=first.cuda_device,
        version=version_of(store, first.process),
        communicators=_communicators_of_rank(query, rank, members),
        wait_ratio=four_digits(ratio),
        median_wait_ratio=four_digits(float(np.median(waits.mean_ratio))) if len(waits.ranks) else None,
        place=int((waits.mean_ratio < ratio).sum()) + 1 if len(position) else None,
        ranks_known=len(waits.ranks),
        wait_history=four_digits_each(own),
        median_wait_history=tuple(four_digits(_median(column)) for column in courses.by_bucket.T),
    )


def _median(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else float("nan")


def _communicators_of_rank(query: JobQuery, rank: int, members: list[Member]) -> tuple[CommunicatorOfRank, ...]:
    operations = query.operations
    own = query.is_own & (operations.rank == rank)
    found: list[CommunicatorOfRank] = []
    for member in members:
        communicator = query.store.communicators[member.communicator]
        if communicator.absorbed_by is not None:
            continue
        chosen = own & (operations.communicator == communicator.index)
        judged = chosen & operations.has_wait
        duration, wait = int(operations.duration_ns[judged].sum()), int(operations.wait_ns[judged].sum())
        found.append(
            CommunicatorOfRank(
                alias=query.aliases[communicator.index],
                parallelism=communicator.parallelism,
                size=communicator.size,
                rank=member.rank,
                operations=int(np.count_nonzero(chosen)),
                kernel_seconds=duration * 1e-9,
                wait_ratio=four_digits(wait / duration) if duration else None,
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.kernel_seconds, -each.operations, each.alias)))
