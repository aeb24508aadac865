"""Charts of one job: the timeline of the last seconds, and the bytes that ranks sent to each other.

The timeline has a lane for each rank and a bar for each kernel, split into waiting and transfer. A kernel waits first
and transfers then: its bar is cut at start + wait. If the wait is not known (a lone rank, a Send without its Recv) the
bar is not split.

The bytes sent by each rank to each other are a square that fits on a page: by rank, by host, or by runs of hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ncclscope_service.intake.tuning import Algorithms
from ncclscope_service.nccl.traffic import NOWHERE, Calls, Seats, TrafficSums, Way, flows
from ncclscope_service.rollup.series import operation_name
from ncclscope_service.rollup.window import MAX_OPERATIONS, Bools, Int64s
from ncclscope_service.show.communicators import MAX_RANK
from ncclscope_service.show.details import JobQuery
from ncclscope_service.store.records import Communicator
from ncclscope_wire.terms import ALGORITHMS, NO_NUMBER, NO_TIME_NS

MAX_BARS: Final = 3_000
MAX_LANES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Kernels of the last seconds that were captured; columns of equal length, one entry for each bar."""

    begin_ns: int | None
    """Reference clock: what the times count from. None if no kernel is known."""
    seconds: float
    """From `begin_ns` to the time up to which the waiting of every lane is known; less than requested if there would be
    too many bars."""
    lanes: tuple[str, ...]
    """Name of each lane: a rank, or a communicator of one rank."""
    communicators: tuple[str, ...]
    parallelisms: tuple[str | None, ...]
    """Of each of `communicators`."""
    lane: tuple[int, ...]
    communicator: tuple[int, ...]
    op: tuple[str, ...]
    start_us: tuple[float, ...]
    wait_us: tuple[float | None, ...]
    """None if it is not known how much of the bar is waiting."""
    duration_us: tuple[float, ...]
    message_bytes: tuple[int | None, ...]


def timeline_of_ranks(query: JobQuery, seconds: float) -> Timeline:
    """Of the ranks that wait least and most, MAX_LANES in all; of the first ranks if no wait is known."""
    waits = query.waits.means_of_job(query.job)
    if len(waits.ranks):
        ranks = waits.ranks[waits.most_telling(MAX_LANES)].tolist()
    else:
        known = query.operations.rank[query.is_own & (query.operations.rank >= 0)]
        ranks = np.unique(known)[:MAX_LANES].tolist()
    return _of_ranks(query, ranks, query.is_own, seconds)


def timeline_of_communicator(query: JobQuery, communicator: Communicator, seconds: float) -> Timeline:
    """Of one communicator's operations on its first MAX_LANES ranks."""
    ranks = sorted(query.ranks_of(communicator).values())[:MAX_LANES]
    return _of_ranks(query, ranks, query.operations.communicator == communicator.index, seconds)


def timeline_of_rank(query: JobQuery, rank: int, seconds: float) -> Timeline:
    """Of one rank, a lane for each of its communicators."""
    operations = query.operations
    chosen = query.is_own & (operations.rank == rank) & (operations.communicator >= 0)
    communicators = np.unique(operations.communicator[chosen])[:MAX_LANES]
    lanes = tuple(query.aliases[index] for index in communicators.tolist())
    lane = np.searchsorted(communicators, operations.communicator)
    chosen &= np.isin(operations.communicator, communicators)
    return _timeline(query, lanes, lane, chosen, seconds, do_all_move=False)


def _of_ranks(query: JobQuery, ranks: Sequence[int], chosen: Bools, seconds: float) -> Timeline:
    ordered = np.array(sorted(rank for rank in ranks if rank < MAX_RANK), np.int64)
    operations = query.operations
    chosen = chosen & np.isin(operations.rank, ordered)
    lane = np.searchsorted(ordered, operations.rank)
    return _timeline(query, tuple(str(rank) for rank in ordered.tolist()), lane, chosen, seconds, do_all_move=True)


def _timeline(
    query: JobQuery, lanes: tuple[str, ...], lane: Int64s, chosen: Bools, seconds: float, *, do_all_move: bool
) -> Timeline:
    operations = query.operations
    end = operations.kernel_ns + operations.duration_ns
    chosen = chosen & (operations.kernel_ns != NO_TIME_NS) & (operations.duration_ns > 0) & operations.starts_launch
    bars = _newest(end, chosen, MAX_BARS + 1)
    if not len(bars):
        return _empty(lanes)
    oldest = int(end[bars[0]]) if len(bars) > MAX_BARS else None
    last = _last_end(end[bars], operations.has_wait[bars], lane[bars], do_all_move=do_all_move)
    bars = bars[end[bars] <= last]
    begin = last - round(seconds * 1e9)
    if oldest is not None:  # what is older was left out, which must not look as if there were nothing
        begin = max(begin, oldest)
    bars = bars[end[bars] > begin]
    bars = bars[np.argsort(operations.kernel_ns[bars], kind="stable")]
    known = operations.communicator[bars]
    communicators, place = np.unique(known, return_inverse=True)
    of = query.store.communicators
    indices = communicators.tolist()
    waits = np.where(operations.has_wait[bars], operations.wait_ns[bars], NO_NUMBER)
    return Timeline(
        begin_ns=begin,
        seconds=(last - begin) * 1e-9,
        lanes=lanes,
        communicators=tuple(query.aliases[index] if index >= 0 else "not known" for index in indices),
        parallelisms=tuple(of[index].parallelism if index >= 0 else None for index in indices),
        lane=tuple(lane[bars].tolist()),
        communicator=tuple(place.tolist()),
        op=tuple(operation_name(code) for code in operations.op[bars].tolist()),
        start_us=_microseconds(operations.kernel_ns[bars] - begin),
        wait_us=tuple(None if wait < 0 else round(wait / 1e3, 1) for wait in waits.tolist()),
        duration_us=_microseconds(operations.duration_ns[bars]),
        message_bytes=tuple(size if size >= 0 else None for size in operations.message_bytes[bars].tolist()),
    )


_BEHIND_NS: Final = 30_000_000_000


def _last_end(ends: Int64s, is_measured: Bools, lane: Int64s, *, do_all_move: bool) -> int:
    """End of the timeline: the time up to which the waiting of every lane is known, if that is recent.

    Captures of other hosts come later, and only then it is known who waited for whom. A lane that has nothing newer
    holds the end back only if `do_all_move` (ranks do, communicators are used now and then). `ends` ascend.
    """
    newest_end = int(ends[-1])
    known: list[int] = []
    for one in np.unique(lane).tolist():
        measured = ends[(lane == one) & is_measured]
        if not len(measured):
            continue
        last = int(measured[-1])
        is_behind = do_all_move or bool((ends[(lane == one) & ~is_measured] > last).any())
        if newest_end - last < _BEHIND_NS:
            known.append(last if is_behind else newest_end)
    return min(known, default=newest_end)


def _microseconds(values: Int64s) -> tuple[float, ...]:
    return tuple(round(value / 1e3, 1) for value in values.tolist())


def _empty(lanes: tuple[str, ...]) -> Timeline:
    return Timeline(
        begin_ns=None, seconds=0.0, lanes=lanes, communicators=(), parallelisms=(), lane=(), communicator=(), op=(),
        start_us=(), wait_us=(), duration_us=(), message_bytes=(),
    )  # fmt: skip


def _newest(times: Int64s, chosen: Bools, limit: int) -> Int64s:
    """Positions of the `limit` latest of the chosen times, in ascending order of time."""
    positions = np.flatnonzero(chosen)
    order = np.argsort(times[positions], kind="stable")
    return positions[order[max(0, len(order) - limit) :]]


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
