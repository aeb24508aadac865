"""The bytes that ranks of one job sent to each other: a square that fits on a page, by rank, host, or runs of hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ncclscope_service.job.traffic_calls import (
    READ,
    Int64s,
    MemberCalls,
    Places,
    Seating,
    add_calls,
    calls_of,
    places_of,
)
from ncclscope_service.nccl.traffic import NOWHERE, Seats, TrafficSums
from ncclscope_service.rollup.window import MAX_OPERATIONS
from ncclscope_service.show.details import JobQuery


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
class TrafficInput:
    """Copy of all that the view is made from, so that it can be computed beside the service's work."""

    places: Places
    calls: tuple[MemberCalls, ...]
    seats: Mapping[int, tuple[Seats, Int64s]]
    """By member: the nodes of its communicator's ranks, and their places on the square."""


def traffic_input(query: JobQuery) -> TrafficInput:
    """Calls of a job's recent operations; a rank whose log is missing sends nothing here."""
    return recent_calls(query, places_of(query.store, query.job))


def recent_calls(query: JobQuery, places: Places) -> TrafficInput:
    """Recent calls of the members that have a place."""
    known = query.store
    newest = known.operations.rows[-MAX_OPERATIONS:]
    chosen = np.flatnonzero((newest["member"] >= 0) & (newest["message_bytes"] > 0))
    chosen = chosen[places.of_member[newest["member"][chosen]] != NOWHERE]
    calls = tuple(calls_of(known, newest.take(chosen, *READ)))
    seating = Seating(known, places)
    seats = {each.member: seating.of(known.communicators[known.members[each.member].communicator]) for each in calls}
    return TrafficInput(places=places, calls=calls, seats=seats)


def traffic_view(given: TrafficInput) -> TrafficView:
    """The square: half a second of one core at 4,096 ranks."""
    return _view(given.places, summed(given))


def summed(given: TrafficInput) -> TrafficSums:
    """Bytes that the calls send from place to place."""
    sums = TrafficSums(max(1, len(given.places.names)))
    for each in given.calls:
        add_calls(sums, 0, int(given.places.of_member[each.member]), each.calls, *given.seats[each.member])
    return sums


def _view(places: Places, sums: TrafficSums) -> TrafficView:
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
