"""Message size against bus bandwidth: a point for each communicator, operation and size of the recent collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.communicator_views import known
from ncclscope_service.rows import Communicator
from ncclscope_service.tally import operation_name
from ncclscope_service.views_of_job import JobAsked
from ncclscope_service.window import recent_collectives

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePoints:
    """A job's points, those with most bytes first."""

    points: tuple[SizePoint, ...]
    known: int
    """How many there are: `points` are all of them or the MAX_POINTS that moved most."""


def size_points(asked: JobAsked, only: Communicator | None = None) -> SizePoints:
    """The points of a job, or of one of its communicators."""
    rows = recent_collectives(asked.store)[-_LOOKED_AT:]
    indices = [
        each.index
        for each in asked.store.listed_communicators()
        if each.job == asked.job and (only is None or each.index == only.index)
    ]
    rows = rows[np.isin(rows["communicator"], indices) & np.isfinite(rows["busbw"]) & (rows["message_bytes"] > 0)]
    if not len(rows):
        return SizePoints(points=(), known=0)
    order = np.lexsort((rows["busbw"], rows["message_bytes"], rows["op"], rows["communicator"]))
    rows = rows[order]
    keys = np.stack([rows[name].astype(np.int64) for name in ("communicator", "op", "message_bytes")])
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(keys) != 0).any(axis=0)]))
    counts = np.diff(np.append(starts, len(rows)))
    moved = counts * rows["message_bytes"][starts]
    shown = np.argsort(-moved, kind="stable")[:MAX_POINTS]
    limits = _limits(asked)
    points = [_point(asked, rows, int(starts[group]), int(counts[group]), limits) for group in shown.tolist()]
    return SizePoints(points=tuple(points), known=len(starts))


Limits = dict[tuple[int, int, int], float]


def _limits(asked: JobAsked) -> Limits:
    series = asked.store.series.rows
    keys = zip(*(series[name].tolist() for name in ("communicator", "op", "size_class")), strict=True)
    return dict(zip(keys, series["limit"].tolist(), strict=True))


def _point(
    asked: JobAsked, rows: np.ndarray[tuple[int], np.dtype[np.void]], start: int, count: int, limits: Limits
) -> SizePoint:
    """One group of rows, which are sorted by bandwidth within it."""
    first = rows[start]
    index, op, size_class = int(first["communicator"]), int(first["op"]), int(first["size_class"])
    busbw = rows["busbw"][start : start + count]
    low, middle, high = (float(busbw[min(count - 1, round(share * (count - 1)))]) for share in (0.1, 0.5, 0.9))
    return SizePoint(
        communicator=asked.aliases[index],
        parallelism=asked.store.communicators[index].parallelism,
        op=operation_name(op),
        message_bytes=int(first["message_bytes"]),
        collectives=count,
        busbw=middle,
        low=low,
        high=high,
        limit=known(limits.get((index, op, size_class), float("nan"))),
    )
