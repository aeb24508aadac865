"""Calls of a job's members as a traffic matrix takes them, and the places between which the bytes go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.columns.table import AnyRows
from ncclscope_service.intake.tuning import Algorithms
from ncclscope_service.nccl.traffic import NOWHERE, Calls, Seats, TrafficSums, Way, flows
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.store.records import Communicator
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import ALGORITHMS

Int64s = NDArray[np.int64]

MAX_PLACES: Final = 64
"""Rows and columns of a square."""
READ: Final = ("process", "member", "template", "coll_seq", "message_bytes", "algorithm")
"""Columns of operations (rows.OPERATION) that `calls_of` needs."""

_MAX_SIZE: Final = 1 << 20
"""A communicator that says it is larger is taken for damage of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where each rank of a job sits on a square that fits on a page."""

    by: str
    """Kind of a place: rank, host, or hosts."""
    names: tuple[str, ...]
    of_rank: Mapping[int, int]
    """By global rank."""
    of_member: Int64s
    """NOWHERE if its rank is not known, or of another job."""


def places_of(known: Store, job: str) -> Places:
    """By rank if they fit, else by host, else by runs of neighbouring hosts."""
    hosts_of_ranks: dict[int, str] = {}
    of_job: list[tuple[int, int]] = []
    for member in known.members:
        if known.process_job[member.process] == job and member.global_rank is not None:
            hosts_of_ranks[member.global_rank] = known.processes[member.process].host
            of_job.append((member.index, member.global_rank))
    hosts = sorted(set(hosts_of_ranks.values()))
    is_by_rank = len(hosts_of_ranks) <= MAX_PLACES
    run = -(-len(hosts) // MAX_PLACES) if hosts else 1
    of_host = {host: place // run for place, host in enumerate(hosts)}
    of_rank = {
        rank: place if is_by_rank else of_host[hosts_of_ranks[rank]]
        for place, rank in enumerate(sorted(hosts_of_ranks))
    }
    of_member = np.full(len(known.members), NOWHERE, np.int64)
    for index, rank in of_job:
        of_member[index] = of_rank[rank]
    if is_by_rank:
        names = tuple(str(rank) for rank in sorted(hosts_of_ranks))
        return Places(by="rank", names=names, of_rank=of_rank, of_member=of_member)
    runs = [hosts[first : first + run] for first in range(0, len(hosts), run)]
    names = tuple(each[0] if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in runs)
    return Places(by="host" if run == 1 else "hosts", names=names, of_rank=of_rank, of_member=of_member)


class Seating:
    """The nodes of communicators' ranks, and their places."""

    def __init__(self, known: Store, places: Places) -> None:
        self._store, self._places = known, places
        self.hosts = {host: index for index, host in enumerate(sorted({p.host for p in known.processes}))}
        """A number for each host's name."""
        self._known: dict[int, tuple[Seats, Int64s]] = {}

    def of(self, communicator: Communicator) -> tuple[Seats, Int64s]:
        """Seats of a communicator, and the place of each of its ranks."""
        if communicator.index not in self._known:
            known = self._store
            size = communicator.size if 0 < communicator.size <= _MAX_SIZE else 0
            nodes, at = [-1] * size, np.full(size, NOWHERE, np.int64)
            for rank, member in (communicator.members or {}).items():
                if 0 <= rank < size:
                    nodes[rank] = self.hosts[known.processes[known.members[member].process].host]
                    at[rank] = self._places.of_member[member]
            self._known[communicator.index] = Seats(tuple(nodes), known.channels.get(communicator.index)), at
        return self._known[communicator.index]


def add_calls(sums: TrafficSums, kind: int, sender: int, calls: Calls, seats: Seats, at: Int64s) -> None:
    """Adds what calls move from a place to the places `at` of their ranks; what switches get goes to NOWHERE."""
    for flow in flows(calls, seats):
        receivers = at[flow.receivers] if flow.way is Way.PEER else np.array([NOWHERE], np.int64)
        is_known = receivers != NOWHERE if flow.way is Way.PEER else np.ones(1, np.bool_)
        if is_known.any():
            sums.add(kind, sender, receivers[is_known], flow)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberCalls:
    """Calls of a member that are alike, of one buffer."""

    member: int
    calls: Calls
    """Their bytes are the sum."""
    times: int


def calls_of(known: Store, rows: AnyRows) -> list[MemberCalls]:
    """The calls of these operations, which have a member and a size; those of ranks that are not known are left out."""
    if not len(rows):
        return []
    templates = len(known.operation_templates)
    algorithm = np.maximum(Algorithms(known, [rows]).algorithms_of(rows), -1) + 1
    keys = (rows["member"].astype(np.int64) * templates + rows["template"]) * 256 + algorithm
    found, groups = np.unique(keys, return_inverse=True)
    amounts = np.bincount(groups, weights=rows["message_bytes"], minlength=len(found))
    times = np.bincount(groups, minlength=len(found))
    table = known.operation_templates.rows
    made: list[MemberCalls] = []
    for key, amount, count in zip(found.tolist(), amounts.tolist(), times.tolist(), strict=True):
        rest, named = divmod(key, 256)
        member, template = divmod(rest, templates)
        rank, root = known.members[member].rank, int(table["root"][template])
        if rank is None:
            continue
        name = ALGORITHMS[named - 1] if 0 < named <= len(ALGORITHMS) else None
        op = operation_name(int(table["op"][template]))
        calls = Calls(op=op, algorithm=name, rank=rank, peer=root if root >= 0 else None, bytes=int(amount))
        made.append(MemberCalls(member=member, calls=calls, times=count))
    return made
