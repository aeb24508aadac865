"""One rank looked at closely: where it runs, what it belongs to, and how long it waits beside all others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ncclscope_service.communicator_views import known
from ncclscope_service.rows import Member
from ncclscope_service.version_of import version_of
from ncclscope_service.views_of_job import JobAsked


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
    """No line said its number: it was told from where its process sits."""
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


def rank_detail(asked: JobAsked, rank: int, now_ns: int) -> RankDetail | None:
    """The view of one global rank at `now_ns`; None where the job has no such rank."""
    members = [each for each in asked.members() if each.global_rank == rank]
    if not members:
        return None
    first, store = members[0], asked.store
    waits = asked.waits.of_job(asked.job)
    position = np.flatnonzero(waits.ranks == rank)
    own = waits.by_bucket[position[0]] if len(position) else np.full(asked.window.buckets, np.nan)
    ratio = float(waits.mean_ratio[position[0]]) if len(position) else float("nan")
    return RankDetail(
        now_ns=now_ns,
        window_begin_ns=asked.window.begin_ns,
        bucket_seconds=asked.window.bucket_seconds,
        rank=rank,
        is_inferred=first.global_rank_is_inferred,
        host=store.processes[first.process].host,
        pid=store.processes[first.process].pid,
        local_rank=first.local_rank,
        cuda_device=first.cuda_device,
        version=version_of(store, first.process),
        communicators=_communicators(asked, rank, members),
        wait_ratio=known(ratio),
        median_wait_ratio=known(float(np.median(waits.mean_ratio))) if len(waits.ranks) else None,
        place=int((waits.mean_ratio < ratio).sum()) + 1 if len(position) else None,
        ranks_known=len(waits.ranks),
        wait_history=tuple(known(value) for value in own.tolist()),
        median_wait_history=tuple(known(_median(column)) for column in waits.by_bucket.T),
    )


def _median(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else float("nan")


def _communicators(asked: JobAsked, rank: int, members: list[Member]) -> tuple[CommunicatorOfRank, ...]:
    operations = asked.operations
    own = asked.is_own & (operations.rank == rank)
    found: list[CommunicatorOfRank] = []
    for member in members:
        communicator = asked.store.communicators[member.communicator]
        if communicator.absorbed_by is not None:
            continue
        chosen = own & (operations.communicator == communicator.index)
        judged = chosen & operations.has_wait
        duration, wait = int(operations.duration_ns[judged].sum()), int(operations.wait_ns[judged].sum())
        found.append(
            CommunicatorOfRank(
                alias=asked.aliases[communicator.index],
                parallelism=communicator.parallelism,
                size=communicator.size,
                rank=member.rank,
                operations=int(np.count_nonzero(chosen)),
                kernel_seconds=duration * 1e-9,
                wait_ratio=known(wait / duration) if duration else None,
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.kernel_seconds, -each.operations, each.alias)))
