"""One collective on all its ranks: when each arrived, and how long it waited for the last. It proves a late rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ncclscope_service.job.ranks import host_of_ranks
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.rollup.window import MAX_OPERATIONS, recent_collectives
from ncclscope_service.show.details import MAX_RANKS, JobQuery
from ncclscope_service.store.records import Communicator
from ncclscope_wire.terms import NO_TIME_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArrival:
    """One rank's kernel."""

    rank: int
    """In the communicator."""
    global_rank: int | None
    host: str | None
    start_us: float
    wait_us: float | None
    """For the last rank; None if it is not known."""
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCollective:
    """A collective whose kernels are in memory."""

    communicator: str
    parallelism: str | None
    op: str
    message_bytes: int | None
    coll_seq: int
    begin_ns: int
    """Reference clock: what the times count from, the first arrival."""
    last_rank: int | None
    """Rank in the communicator that came last."""
    last_global_rank: int | None
    blame_us: float
    """How much later than the last but one."""
    ranks_seen: int
    ranks: tuple[RankArrival, ...]
    """In order of rank; of a large communicator the last arriver and the MAX_RANKS first others."""


def one_collective(
    query: JobQuery, communicator: Communicator, *, sequence: int | None = None, late_rank: int | None = None
) -> OneCollective | None:
    """The collective of that number; else the one in memory in which most was lost to this global rank, or to any.

    None if it is not, or no longer, in memory.
    """
    rows = recent_collectives(query.store)
    rows = rows[(rows["communicator"] == communicator.index) & (rows["last_rank"] >= 0)]
    global_ranks = query.ranks_of(communicator)
    if sequence is not None:
        rows = rows[rows["coll_seq"] == sequence]
    elif late_rank is not None:
        own = [rank for rank, global_rank in global_ranks.items() if global_rank == late_rank]
        rows = rows[np.isin(rows["last_rank"], own)]
    for place in np.argsort(-rows["blame_ns"], kind="stable")[:8].tolist():
        ranks = _arrivals(query, communicator, int(rows["coll_seq"][place]))
        if len(ranks) < 2:  # its operations have left memory
            continue
        row = rows[place]
        begin = int(min(start for _, start, _, _ in ranks))
        last = int(row["last_rank"])
        ranks.sort(key=lambda each: (each[0] != last, each[0]))
        hosts = host_of_ranks(query.store).get(query.job, {})
        shown = sorted(ranks[:MAX_RANKS])
        return OneCollective(
            communicator=query.aliases[communicator.index],
            parallelism=communicator.parallelism,
            op=operation_name(int(row["op"])),
            message_bytes=int(row["message_bytes"]) if row["message_bytes"] >= 0 else None,
            coll_seq=int(row["coll_seq"]),
            begin_ns=begin,
            last_rank=last,
            last_global_rank=global_ranks.get(last),
            blame_us=int(row["blame_ns"]) / 1e3,
            ranks_seen=len(ranks),
            ranks=tuple(
                RankArrival(
                    rank=rank,
                    global_rank=global_ranks.get(rank),
                    host=None if (of := global_ranks.get(rank)) is None else hosts.get(of),
                    start_us=(start - begin) / 1e3,
                    wait_us=None if wait < 0 else wait / 1e3,
                    end_us=(end - begin) / 1e3,
                )
                for rank, start, wait, end in shown
            ),
        )
    return None


def _arrivals(query: JobQuery, communicator: Communicator, sequence: int) -> list[tuple[int, int, int, int]]:
    """Rank, start, wait and end of each rank's kernel, on the reference clock; wait below 0: not known."""
    rank_of = {member: rank for rank, member in (communicator.members or {}).items()}
    newest = query.store.operations.rows[-MAX_OPERATIONS:]
    at = np.flatnonzero(np.isin(newest["member"], list(rank_of)) & (newest["coll_seq"] == sequence))
    rows = newest.take(at, "member", "start_ns", "end_ns", "start_true_ns", "wait_ns", "censored")
    whole = (rows["start_true_ns"] != NO_TIME_NS) & (rows["end_ns"] != NO_TIME_NS) & ~rows["censored"]
    return [
        (rank_of[int(row["member"])], int(row["start_true_ns"]), int(row["wait_ns"]),
         int(row["start_true_ns"]) + int(row["end_ns"]) - int(row["start_ns"]))
        for row in rows[whole]
    ]  # fmt: skip
