"""Who should talk to whom and when by a job's description, beside who does.

Expected operations become calls of each rank, which go the same way into the same matrix as observed ones: over rings
and trees that NCCL printed, by the algorithm that was seen for that communicator, operation and size, else over a ring.
What is observed is of the last iterations that are whole on all ranks. Expert groups and the rhythm of blocks are
judged by what `ncclscope_models` says of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.emission.operations import Group
from ncclscope_models.exchanges import exchanged, expected_exchanges, matrices
from ncclscope_models.expected_calls import expected_calls
from ncclscope_models.job import ELEMENT_BYTES, Job
from ncclscope_models.rank_groups import Order, groups_of, stage_of
from ncclscope_models.rhythm import Part, blocks_of, expected_blocks, rhythm
from ncclscope_service.columns.table import AnyRows
from ncclscope_service.job.plan import Plan
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
from ncclscope_service.nccl.traffic import NOWHERE, Calls, Seats, TrafficSums
from ncclscope_service.store.plan_records import PlanCell, PlanExperts, PlanPattern, PlanRhythm, PlanTraffic
from ncclscope_service.store.rows import Match
from ncclscope_service.store.tables import Store
from ncclscope_wire.terms import NO_TIME_NS, OPERATION_CODES, OPERATIONS

_NEWEST: Final = 4
"""Iterations that are looked at."""
_MOST_ROWS: Final = 1 << 20
_MOST_RANKS: Final = 4096
"""Ranks whose expected calls are made: half a second."""
_SHOWN: Final = 16
"""Pairs that differ, expert groups and ranks with a rhythm."""
_LEAST_DIFFERENCE: Final = 0.01
_EXCHANGES: Final = tuple(OPERATION_CODES[name] for name in ("Send", "Recv", "AlltoAll"))
_PAIRS: Final = tuple(OPERATION_CODES[name] for name in ("Send", "Recv"))
_COLLECTIVES: Final = tuple(OPERATION_CODES[name] for name in ("AllReduce", "AllGather", "ReduceScatter"))
_COLUMNS: Final = (*READ, "iteration", "seq", "match", "start_ns", "end_ns")

_Ranks: TypeAlias = tuple[int, ...]
"""Global ranks of a communicator, by its own."""
_Exchange: TypeAlias = tuple[Int64s, list[str], Int64s, Int64s]
"""Ranks in the group, operations, peers and counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternInput:
    """Copy of all that the pattern is made from, so that it can be computed beside the service's work."""

    job: Job
    order: Order
    places: Places
    iterations: tuple[int, ...]
    calls: tuple[MemberCalls, ...]
    seats: Mapping[int, tuple[Seats, Int64s, _Ranks]]
    """By member: of its communicator the nodes, the places, and the global ranks."""
    hosts: Mapping[int, int]
    """A number of the host of each global rank."""
    experts: Mapping[tuple[str, _Ranks], Mapping[int, _Exchange]]
    """By communicator and iteration: exchanges in the order of each rank."""
    blocks: Mapping[int, list[NDArray[np.float64]]]
    """By global rank: of each iteration the lengths of its blocks."""


def pattern_input(known: Store, job: str, described: Job, order: Order) -> PatternInput:
    """Calls of the last whole iterations of a job, from the log."""
    places = places_of(known, job)
    rows, iterations = _whole_iterations(known, places)
    sized = rows[rows["message_bytes"] > 0]
    calls = tuple(calls_of(known, sized))
    seating = Seating(known, places)
    ranks_of: dict[int, _Ranks] = {}
    seats: dict[int, tuple[Seats, Int64s, _Ranks]] = {}
    for each in known.members:
        if places.of_member[each.index] != NOWHERE:
            if each.communicator not in ranks_of:
                ranks_of[each.communicator] = _ranks_of(known, each.communicator)
            seats[each.index] = *seating.of(known.communicators[each.communicator]), ranks_of[each.communicator]
    hosts: dict[int, int] = {}
    for each in known.members:
        if each.global_rank is not None and places.of_member[each.index] != NOWHERE:
            hosts[each.global_rank] = seating.hosts[known.processes[each.process].host]
    return PatternInput(
        job=described,
        order=order,
        places=places,
        iterations=iterations,
        calls=calls,
        seats=seats,
        hosts=hosts,
        experts=_exchanges(known, described, order, rows, ranks_of),
        blocks=_blocks(known, described, order, rows, ranks_of),
    )


def pattern_of_plan(known: Store, job: str) -> PatternInput | None:
    """The same of a job that was held against the description that the service was given; None without one."""
    record = known.plans.get(job)
    if record is None or known.description is None:
        return None
    return pattern_input(known, job, known.description.job, Order(record.rank_order))


def plan_pattern(given: PatternInput) -> PlanPattern:
    """The pattern; half a second of a core at thousands of ranks.

    Raises:
        ModelError: the framework has no rules for the job's layout.
    """
    return PlanPattern(traffic=_traffic(given), experts=_experts(given), rhythm=_rhythm(given))


def patterns_of(known: Store, plans: Mapping[str, Plan]) -> dict[str, PlanPattern]:
    """The pattern of each of these jobs."""
    return {
        name: plan_pattern(pattern_input(known, name, plan.described.job, plan.explanation.order))
        for name, plan in plans.items()
    }


def _whole_iterations(known: Store, places: Places) -> tuple[AnyRows, tuple[int, ...]]:
    """Operations of the last iterations that are neither the first nor the last of any rank."""
    table = known.operations.rows
    own = np.flatnonzero((table["member"] >= 0) & (table["iteration"] >= 0) & (table["match"] != Match.LINE_LOST))
    own = own[places.of_member[table["member"][own]] != NOWHERE]
    process, iteration = table["process"][own], table["iteration"][own]
    first, last = np.full(len(known.processes), np.iinfo(np.int64).max), np.full(len(known.processes), -1)
    np.minimum.at(first, process, iteration)
    np.maximum.at(last, process, iteration)
    seen = last >= 0
    begin, end = (int(first[seen].max()) + 1, int(last[seen].min())) if seen.any() else (0, 0)
    amounts = np.bincount(np.clip(iteration - begin, -1, end - begin) + 1, minlength=2)[1:-1] if end > begin else ()
    chosen: list[int] = []
    total = 0
    for number in range(end - 1, max(begin, end - _NEWEST) - 1, -1):
        total += int(amounts[number - begin])
        if chosen and total > _MOST_ROWS:
            break
        chosen.append(number)
    rows = table.take(own[np.isin(iteration, chosen)], *_COLUMNS)
    return rows, tuple(sorted(chosen))


def _ranks_of(known: Store, communicator: int) -> _Ranks:
    """Global ranks of a communicator by its own; empty where one is not known."""
    of = known.communicators[communicator]
    members = of.members or {}
    found = [known.members[members[rank]].global_rank for rank in sorted(members)]
    return tuple(rank for rank in found if rank is not None) if len(found) == of.size and None not in found else ()


def _traffic(given: PatternInput) -> PlanTraffic:
    places, count = given.places, len(given.places.names)
    expected, routed = _expected(given)
    observed = TrafficSums(max(1, count))
    for each in given.calls:
        seats, at, _ = given.seats[each.member]
        add_calls(observed, 0, int(places.of_member[each.member]), each.calls, seats, at)
    seen = _square(observed, count)[0] // max(1, len(given.iterations))
    differing = _differing(places, expected + routed, routed, seen) if given.iterations else []
    return PlanTraffic(
        by=places.by,
        places=places.names,
        expected=_tuples(expected + routed),
        observed=_tuples(seen) if given.iterations else None,
        iterations=given.iterations,
        differing=tuple(differing[:_SHOWN]),
        differing_known=len(differing),
    )


def _expected(given: PatternInput) -> tuple[Int64s, Int64s]:
    """Bytes of an iteration by sender and receiver: those that are certain, and those that routers spread."""
    job, places = given.job, given.places
    algorithms = _algorithms(given)
    seats: dict[_Ranks, tuple[Seats, Int64s]] = {}
    for own, at, ranks in given.seats.values():
        if ranks and (ranks not in seats or seats[ranks][0].channels is None):
            seats[ranks] = own, at
    sums = TrafficSums(max(1, len(places.names)))
    for rank in sorted(places.of_rank)[:_MOST_RANKS]:
        for each in expected_calls(job, rank, given.order) if rank < job.layout.ranks else ():
            if each.ranks not in seats:
                nodes = tuple(given.hosts.get(one, -1) for one in each.ranks)
                at = np.asarray([places.of_rank.get(one, NOWHERE) for one in each.ranks], np.int64)
                seats[each.ranks] = Seats(nodes), at
            calls = Calls(
                op=each.op,
                algorithm=algorithms.get((each.ranks, each.op, each.message_bytes)),
                rank=each.ranks.index(rank),
                peer=None if each.peer is None else each.ranks.index(each.peer),
                bytes=each.message_bytes * each.lines,
            )
            add_calls(sums, int(each.is_routed), places.of_rank[rank], calls, *seats[each.ranks])
    certain, routed = _square(sums, len(places.names), kinds=2)
    return certain, routed


def _algorithms(given: PatternInput) -> dict[tuple[_Ranks, str, int], str | None]:
    """The algorithm of most calls of these ranks, operation and size."""
    found: dict[tuple[_Ranks, str, int], Counter[str | None]] = defaultdict(Counter)
    for each in given.calls:
        key = given.seats[each.member][2], each.calls.op, each.calls.bytes // each.times
        found[key][each.calls.algorithm] += each.times
    return {key: counts.most_common(1)[0][0] for key, counts in found.items()}


def _square(sums: TrafficSums, count: int, kinds: int = 1) -> NDArray[np.int64]:
    """Bytes by kind, sender and receiver, without those that go to switches."""
    found = np.zeros((kinds, count, count), np.int64)
    for kind, sender, receiver, _, amount, _, _ in sums.rows():
        if receiver != NOWHERE:
            found[kind, sender, receiver] += amount
    return found


def _differing(places: Places, expected: Int64s, routed: Int64s, seen: Int64s) -> list[PlanCell]:
    """Of senders that were seen at all."""
    allowed = _LEAST_DIFFERENCE * np.maximum(expected.sum(axis=1), seen.sum(axis=1))
    apart = np.where((routed == 0) & (seen.sum(axis=1) > 0)[:, None], np.abs(seen - expected), 0)
    at = np.argwhere(apart > allowed[:, None]).tolist()
    cells = [
        PlanCell(
            sender=places.names[i], receiver=places.names[j], expected=int(expected[i, j]), observed=int(seen[i, j])
        )
        for i, j in at
    ]
    return sorted(cells, key=lambda cell: -abs(cell.observed - cell.expected))


def _tuples(square: Int64s) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in square.tolist())


def _exchanges(
    known: Store, job: Job, order: Order, rows: AnyRows, ranks_of: Mapping[int, _Ranks]
) -> dict[tuple[str, _Ranks], dict[int, _Exchange]]:
    """All-to-alls of expert groups, as they were logged."""
    found: dict[tuple[str, _Ranks], dict[int, _Exchange]] = {}
    if not expected_exchanges(job, 0):
        return found
    table = known.operation_templates.rows
    communicator_of = np.asarray([member.communicator for member in known.members], np.int64)
    rank_of = np.asarray([-1 if member.rank is None else member.rank for member in known.members], np.int64)
    rows = rows[np.isin(table["op"][rows["template"]], _EXCHANGES)]
    communicators = communicator_of[rows["member"]]
    for index in np.unique(communicators).tolist():
        ranks = ranks_of.get(index, ())
        if not ranks or ranks[0] >= job.layout.ranks:
            continue
        if groups_of(job.layout, job.framework, ranks[0], order)[Group.EXPERT] != ranks or len(found) >= _SHOWN:
            continue
        own = rows[communicators == index]
        own = own[np.argsort(own["seq"], kind="stable")]
        by_iteration: dict[int, _Exchange] = {}
        for number in np.unique(own["iteration"]).tolist():
            part = own[own["iteration"] == number]
            templates = part["template"]
            by_iteration[number] = (
                rank_of[part["member"]],
                [OPERATIONS[op].name for op in table["op"][templates].tolist()],
                table["root"][templates].astype(np.int64),
                table["count"][templates].astype(np.int64),
            )
        found[known.communicators[index].comm_id, ranks] = by_iteration
    return found


def _experts(given: PatternInput) -> tuple[PlanExperts, ...]:
    found: list[PlanExperts] = []
    for (comm_id, ranks), by_iteration in given.experts.items():
        stage = stage_of(given.job.layout, ranks[0], given.order)
        own = {
            number: exchanged(given.job, stage, matrices(*lines, len(ranks))) for number, lines in by_iteration.items()
        }
        found.append(
            PlanExperts(
                comm_id=comm_id,
                ranks=ranks,
                iterations=tuple(own),
                expected=expected_exchanges(given.job, stage),
                exchanges=tuple(each.exchanges for each in own.values()),
                is_whole=all(each.is_whole for each in own.values()),
                imbalance=tuple(each.imbalance for each in own.values()),
            )
        )
    return tuple(found)


def _blocks(
    known: Store, job: Job, order: Order, rows: AnyRows, ranks_of: Mapping[int, _Ranks]
) -> dict[int, list[NDArray[np.float64]]]:
    """Lengths of the blocks of one rank of each stage, by iteration."""
    found: dict[int, list[NDArray[np.float64]]] = {}
    if not expected_blocks(job):
        return found
    table = known.operation_templates.rows
    whole = job.training.micro_batch * job.shape.sequence // job.layout.context
    size = whole * job.shape.hidden * ELEMENT_BYTES[job.training.precision.value]
    process_of = {
        each.global_rank: each.process
        for each in known.members
        if each.global_rank is not None and each.global_rank < job.layout.ranks and ranks_of.get(each.communicator)
    }
    by_stage = {stage_of(job.layout, rank, order): rank for rank in sorted(process_of, reverse=True)}
    for _, rank in islice(sorted(by_stage.items()), _SHOWN):
        own = rows[rows["process"] == process_of[rank]]
        tensor = groups_of(job.layout, job.framework, rank, order)[Group.TENSOR]
        is_tensor = np.asarray([ranks_of.get(each.communicator) == tensor for each in known.members], np.bool_)
        inside, ops = is_tensor[own["member"]], table["op"][own["template"]]
        parts = np.full(len(own), Part.OTHER, np.int64)
        parts[inside & np.isin(ops, _COLLECTIVES) & (own["message_bytes"] == size)] = Part.WITHIN
        parts[inside & (ops == OPERATION_CODES["Broadcast"])] = Part.BETWEEN
        parts[inside & np.isin(ops, _COLLECTIVES) & (own["message_bytes"] == 4 * whole)] = Part.BETWEEN
        parts[np.isin(ops, _PAIRS)] = Part.BETWEEN
        found[rank] = [
            _lengths(own[own["iteration"] == number], parts[own["iteration"] == number])
            for number in np.unique(own["iteration"]).tolist()
        ]
    return found


def _lengths(rows: AnyRows, parts: Int64s) -> NDArray[np.float64]:
    """From the start of a block's first kernel to the end of its last; NaN where one of them is not known."""
    blocks = blocks_of(parts)
    within = np.flatnonzero(blocks >= 0)
    count = int(blocks.max(initial=-1)) + 1
    begin, end = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    begin[blocks[within[::-1]]], end[blocks[within]] = within[::-1], within
    start_ns, end_ns = rows["start_ns"][begin], rows["end_ns"][end]
    is_known = (start_ns != NO_TIME_NS) & (end_ns != NO_TIME_NS)
    return np.where(is_known, (end_ns - start_ns).astype(np.float64), np.nan)


def _rhythm(given: PatternInput) -> tuple[PlanRhythm, ...]:
    found: list[PlanRhythm] = []
    for rank, lengths in given.blocks.items():
        own = rhythm(given.job, lengths)
        found.append(
            PlanRhythm(
                rank=rank,
                stage=stage_of(given.job.layout, rank, given.order),
                expected=own.expected,
                blocks=own.blocks,
                spread=own.spread,
                beat=own.beat,
            )
        )
    return tuple(found)
