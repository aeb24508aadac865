"""NCCL's graphs of a job's nodes, with what its recent operations put on their links, and its rings and trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ncclscope_service.job.node_graph import (
    MAX_NAMES,
    OUTSIDE,
    ChannelEdges,
    NodeGraph,
    SeatedMachines,
    channel_edges,
    largest_with_channels,
    node_graph,
    seat_machines,
    sent_by_machine,
)
from ncclscope_service.job.traffic_calls import Places
from ncclscope_service.nccl.traffic import NOWHERE, Way
from ncclscope_service.show.details import JobQuery
from ncclscope_service.show.traffic_square import TrafficInput, recent_calls, summed


@dataclass(frozen=True, slots=True, kw_only=True)
class RingsAndTrees:
    """Those of one communicator."""

    communicator: str
    """The name that the page gives it."""
    edges: ChannelEdges


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGraphView:
    """The graphs of one job."""

    graphs: tuple[NodeGraph, ...]
    """One for each kind of node, that of the lowest rank first; bytes are those of the operations in memory."""
    kinds_known: int
    """How many kinds of nodes there are; at most four are drawn, and none of more than 1,024 parts."""
    hosts_without: tuple[str, ...]
    """Hosts of which no log has the graph: at most eight."""
    hosts_without_known: int
    assumed_ratio: float | None
    """Share of the bytes for which no line said which algorithm ran: a ring was taken. None without bytes."""
    channels: RingsAndTrees | None
    """Of the largest communicator of at most 32 ranks that printed them; None if none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGraphInput:
    """Copy of all that the view is made from, so that it can be computed beside the service's work."""

    machines: SeatedMachines
    ranks: tuple[int, ...]
    """Global ranks of these machines by place; all others are at the place behind them."""
    traffic: TrafficInput | None
    channels: RingsAndTrees | None


def node_graph_input(query: JobQuery) -> NodeGraphInput:
    """The machines to draw, and the calls of all communicators that have a rank on them."""
    known = query.store
    machines = seat_machines(known, query.job)
    ranks = tuple(rank for each in machines.machines for rank in (*each.gpus, *each.without_gpu))
    largest = largest_with_channels(known, (each for each in known.listed_communicators() if each.job == query.job))
    return NodeGraphInput(
        machines=machines,
        ranks=ranks,
        traffic=recent_calls(query, _places(query, ranks)) if ranks else None,
        channels=None
        if largest is None
        else RingsAndTrees(communicator=query.aliases[largest.index], edges=channel_edges(known, largest)),
    )


def _places(query: JobQuery, ranks: tuple[int, ...]) -> Places:
    """A place for each of these ranks, and one for all others; none in communicators that have none of them."""
    of_rank = {rank: place for place, rank in enumerate(ranks)}
    members = query.members()
    reached = {each.communicator for each in members if each.global_rank in of_rank}
    of_member = np.full(len(query.store.members), NOWHERE, np.int64)
    for member in members:
        if member.global_rank is not None and member.communicator in reached:
            of_member[member.index] = of_rank.get(member.global_rank, len(ranks))
    return Places(by="rank", names=(*map(str, ranks), "others"), of_rank=of_rank, of_member=of_member)


def node_graph_view(given: NodeGraphInput) -> NodeGraphView:
    """The pictures."""
    machines, sums = given.machines, None if given.traffic is None else summed(given.traffic)
    rank_at = (*given.ranks, OUTSIDE)
    rows: list[tuple[int, int | None, Way, int]] = []
    total, assumed = 0, 0
    for _, sender, receiver, way, amount, of_assumed, _ in () if sums is None else sums.rows():
        ends = rank_at[sender], None if receiver == NOWHERE else rank_at[receiver]
        if ends[0] != OUTSIDE or ends[1] not in {OUTSIDE, None}:
            rows.append((*ends, way, amount))
            total, assumed = total + amount, assumed + of_assumed
    sent = sent_by_machine(machines.machines, rows)
    return NodeGraphView(
        graphs=tuple(node_graph(seated, each) for seated, each in zip(machines.machines, sent, strict=True)),
        kinds_known=machines.kinds,
        hosts_without=machines.hosts_without[:MAX_NAMES],
        hosts_without_known=len(machines.hosts_without),
        assumed_ratio=assumed / total if total else None,
        channels=given.channels,
    )
