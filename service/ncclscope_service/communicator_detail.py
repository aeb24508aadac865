"""One communicator looked at closely: each operation and size against its limits, and which of its ranks waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.communicator_views import (
    CommunicatorView,
    CommunicatorViews,
    known,
    recent_of_communicators,
    size_class_name,
)
from ncclscope_service.ranks import host_of_ranks
from ncclscope_service.rows import Communicator
from ncclscope_service.size_points import SizePoints, size_points
from ncclscope_service.tally import operation_name
from ncclscope_service.views_of_job import JobAsked
from ncclscope_service.wait_map import RankWaits, WaitMap, make_wait_map
from ncclscope_service.window import bandwidth_points, ratio_by_bucket, recent_collectives
from ncclscope_wire.batch import Columns

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
    """Share of the recent collectives in which it arrived last: 1/size where nobody is late."""


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
    """What the limit by topology is of."""
    series: tuple[SeriesView, ...]
    ranks: tuple[RankOfCommunicator, ...]
    """By rank; the MAX_RANKS first of a larger one."""
    waits: WaitMap | None
    sizes: SizePoints


def communicator_detail(asked: JobAsked, communicator: Communicator, now_ns: int) -> CommunicatorDetail:
    """The view of one communicator at `now_ns`."""
    recent = recent_of_communicators(asked.store, asked.sums, asked.window)
    rows = recent_collectives(asked.store)
    rows = rows[rows["communicator"] == communicator.index]
    waits = asked.waits.of_communicator(communicator.index)
    hosts = host_of_ranks(asked.store).get(asked.job, {})
    bottleneck = communicator.bottleneck
    return CommunicatorDetail(
        now_ns=now_ns,
        window_begin_ns=asked.window.begin_ns,
        bucket_seconds=asked.window.bucket_seconds,
        summary=CommunicatorViews(asked.store, asked.aliases, recent).view(communicator),
        identity=str(communicator.identity),
        identity_confidence=communicator.identity_confidence,
        parallelism_confidence=communicator.parallelism_confidence,
        parent_comm_id=communicator.parent_comm_id,
        bottleneck=None if bottleneck is None else bottleneck.name,
        series=_series(asked, communicator, rows),
        ranks=_ranks(asked, communicator, rows, waits, hosts),
        waits=make_wait_map(waits, hosts),
        sizes=size_points(asked, communicator),
    )


def _series(asked: JobAsked, communicator: Communicator, rows: Columns) -> tuple[SeriesView, ...]:
    series = asked.store.series.rows
    own = series[series["communicator"] == communicator.index]
    own = own[np.lexsort((-own["operations"], -own["bytes"]))]
    points = bandwidth_points(rows)
    kinds = points.op * 256 + points.size_class
    shown = (own["op"].astype(np.int64) * 256 + own["size_class"])[:MAX_LINES].tolist()
    groups = np.full(len(kinds), -1, np.int64)
    for place, kind in enumerate(shown):
        groups[kinds == kind] = place
    history = ratio_by_bucket(
        groups,
        points.time_ns,
        points.busbw * points.transfer_ns,
        points.transfer_ns,
        count=len(shown),
        window=asked.window,
    )
    return tuple(
        _series_view(row, history[place].tolist() if place < len(shown) else []) for place, row in enumerate(own)
    )


def _series_view(row: np.void, history: list[float]) -> SeriesView:
    waited, of = int(row["wait_ns"]), int(row["waiting_duration_ns"])
    collectives = int(row["collectives"])
    return SeriesView(
        op=operation_name(int(row["op"])),
        size_class=size_class_name(int(row["size_class"])),
        operations=int(row["operations"]),
        bytes=int(row["bytes"]),
        busbw=known(float(row["busbw"])),
        limit=known(float(row["limit"])),
        baseline=known(float(row["baseline"])),
        wait_ratio=known(waited / of) if of > 0 else None,
        transfer_seconds=known(int(row["transfer_ns"]) * 1e-9 / collectives) if collectives else None,
        busbw_history=tuple(known(value) for value in history),
    )


def _ranks(
    asked: JobAsked, communicator: Communicator, rows: Columns, waits: RankWaits, hosts: dict[int, str]
) -> tuple[RankOfCommunicator, ...]:
    global_ranks = asked.ranks_of(communicator)
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
                wait_ratio=None if ratio is None else known(ratio),
                last_ratio=None if last is None or rank >= len(last) else known(int(last[rank]) / len(judged)),
            )
        )
    return tuple(found)
