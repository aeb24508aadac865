"""The bytes that ranks of one job sent to each other: a square that fits on a page, by rank, host, or runs of hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.intake.tuning import Algorithms
from ncclscope_service.nccl.traffic import NOWHERE, Calls, Seats, TrafficSums, Way, flows
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.rollup.window import MAX_OPERATIONS, Int64s
from ncclscope_service.show.details import JobQuery
from ncclscope_service.store.records import Communicator
from ncclscope_wire.terms import ALGORITHMS

MAX_PLACES: Final = 64
"""Rows and columns of the square."""

_MAX_SIZE: Final = 1 << 20
"""A communicator that says it is larger is taken for damage of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficView:
    """Bytes that the operations in memory put on the links."""

    by: str
    """Kind of a place: rank, host, or hosts."""
    places: tuple[str, ...]
    bytes: tuple[tuple[int, ...], ...]
    """A row for each sender, a column for each receiver, in the order of `places`."""
    to_switches: tuple[int, ...]
    """By sender: bytes into switches that reduce or multicast, which have no one receiver."""
    assumed_ratio: float | None
    """Share of the bytes for which no line said which algorithm ran: a ring was taken. None without bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where each member of the job's communicators sits on the square."""

    by: str
    names: tuple[str, ...]
    of_member: Int64s
    """NOWHERE if it is not known, or of another job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficInput:
    """Copy of all that the view is made from, so that it can be computed beside the service's work."""

    places: _Places
    calls: tuple[tuple[int, Calls], ...]
    """Member and calls."""
    seats: Mapping[int, tuple[Seats, Int64s]]
    """By member: the nodes of its communicator's ranks, and their places on the square."""


def traffic_input(query: JobQuery) -> TrafficInput:
    """Calls of a job's recent operations; a rank whose log is missing sends nothing here."""
    places = _places(query)
    hosts = {host: index for index, host in enumerate(sorted({p.host for p in query.store.processes}))}
    of_communicator: dict[int, tuple[Seats, Int64s]] = {}
    seats: dict[int, tuple[Seats, Int64s]] = {}
    calls = tuple(_calls(query, places))
    for member, _ in calls:
        communicator = query.store.communicators[query.store.members[member].communicator]
        if communicator.index not in of_communicator:
            of_communicator[communicator.index] = _seats(query, communicator, places, hosts)
        seats[member] = of_communicator[communicator.index]
    return TrafficInput(places=places, calls=calls, seats=seats)


def traffic_view(given: TrafficInput) -> TrafficView:
    """The square: half a second of one core at 4,096 ranks."""
    places = given.places
    sums = TrafficSums(max(1, len(places.names)))
    for member, calls in given.calls:
        seats, at = given.seats[member]
        for flow in flows(calls, seats):
            receivers = at[flow.receivers] if flow.way is Way.PEER else np.array([NOWHERE], np.int64)
            is_known = receivers != NOWHERE if flow.way is Way.PEER else np.ones(1, np.bool_)
            if is_known.any():
                sums.add(0, int(places.of_member[member]), receivers[is_known], flow)
    return _view(places, sums)


def _view(places: _Places, sums: TrafficSums) -> TrafficView:
    count = len(places.names)
    square = np.zeros((count, count), np.int64)
    switched = np.zeros(count, np.int64)
    total, assumed = 0, 0
    for _, sender, receiver, _, amount, of_assumed, _ in sums.rows():
        if receiver == NOWHERE:
            switched[sender] += amount
        else:
            square[sender, receiver] += amount
        total, assumed = total + amount, assumed + of_assumed
    return TrafficView(
        by=places.by,
        places=places.names,
        bytes=tuple(tuple(row) for row in square.tolist()),
        to_switches=tuple(switched.tolist()),
        assumed_ratio=assumed / total if total else None,
    )


def _places(query: JobQuery) -> _Places:
    """By rank if they fit, else by host, else by runs of neighbouring hosts."""
    members = [each for each in query.members() if each.global_rank is not None]
    ranks = sorted({each.global_rank for each in members if each.global_rank is not None})
    hosts = sorted({query.store.processes[each.process].host for each in members})
    run = -(-len(hosts) // MAX_PLACES) if hosts else 1
    of_member = np.full(len(query.store.members), NOWHERE, np.int64)
    of_rank = {rank: place for place, rank in enumerate(ranks)}
    of_host = {host: place // run for place, host in enumerate(hosts)}
    is_by_rank = len(ranks) <= MAX_PLACES
    for each in members:
        assert each.global_rank is not None
        host = query.store.processes[each.process].host
        of_member[each.index] = of_rank[each.global_rank] if is_by_rank else of_host[host]
    if is_by_rank:
        return _Places(by="rank", names=tuple(str(rank) for rank in ranks), of_member=of_member)
    names = [hosts[first : first + run] for first in range(0, len(hosts), run)]
    texts = tuple(each[0] if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in names)
    return _Places(by="host" if run == 1 else "hosts", names=texts, of_member=of_member)


def _seats(query: JobQuery, communicator: Communicator, places: _Places, hosts: dict[str, int]) -> tuple[Seats, Int64s]:
    """The nodes of a communicator's ranks, and their places on the square."""
    size = communicator.size if 0 < communicator.size <= _MAX_SIZE else 0
    nodes, at = [-1] * size, np.full(size, NOWHERE, np.int64)
    for rank, member in (communicator.members or {}).items():
        if 0 <= rank < size:
            nodes[rank] = hosts[query.store.processes[query.store.members[member].process].host]
            at[rank] = places.of_member[member]
    return Seats(tuple(nodes), query.store.channels.get(communicator.index)), at


def _calls(query: JobQuery, places: _Places) -> list[tuple[int, Calls]]:
    """Calls of a member that are alike, summed: (member, calls)."""
    store = query.store
    newest = store.operations.rows[-MAX_OPERATIONS:]
    chosen = np.flatnonzero((newest["member"] >= 0) & (newest["message_bytes"] > 0))
    chosen = chosen[places.of_member[newest["member"][chosen]] != NOWHERE]
    rows = newest.take(chosen, "process", "member", "template", "coll_seq", "message_bytes", "algorithm")
    if not len(rows):
        return []
    templates = len(store.operation_templates)
    algorithm = np.maximum(Algorithms(store, [rows]).algorithms_of(rows), -1) + 1
    keys = (rows["member"].astype(np.int64) * templates + rows["template"]) * 256 + algorithm
    found, groups = np.unique(keys, return_inverse=True)
    amounts = np.bincount(groups, weights=rows["message_bytes"], minlength=len(found))
    table = store.operation_templates.rows
    made: list[tuple[int, Calls]] = []
    for key, amount in zip(found.tolist(), amounts.tolist(), strict=True):
        rest, named = divmod(key, 256)
        member, template = divmod(rest, templates)
        rank, root = store.members[member].rank, int(table["root"][template])
        if rank is None:
            continue
        name = ALGORITHMS[named - 1] if 0 < named <= len(ALGORITHMS) else None
        op = operation_name(int(table["op"][template]))
        made.append(
            (member, Calls(op=op, algorithm=name, rank=rank, peer=root if root >= 0 else None, bytes=int(amount)))
        )
    return made
