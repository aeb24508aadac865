"""Topologies and tuning tables as they travel: plain lists in the place of a map for each small record.

A block of eight GPUs has some 200 records, and every rank sends one per communicator: field names in each
would make most of the bytes at a job's start.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from ncclscope_wire.errors import ProtocolError
from ncclscope_wire.topology import (
    LinkKind,
    NodeKind,
    TopologyLink,
    TopologyNode,
    TopologyOrigin,
    TopologyPath,
    TopologySeen,
    TuningCell,
    TuningTableSeen,
)

_System: TypeAlias = Annotated[int, Meta(ge=0, le=255)]
_Local: TypeAlias = Annotated[int, Meta(ge=0, le=2**56 - 1)]
_Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Rate: TypeAlias = Annotated[int, Meta(ge=0, le=10**18)]
_Index: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Process: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Line: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
_Latency: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
_Name: TypeAlias = Annotated[str, Meta(max_length=64)]

_Node: TypeAlias = tuple[NodeKind, _System, _Local, _Rank | None, _Rate | None, Annotated[str, Meta(max_length=1024)]]
_Link: TypeAlias = tuple[_Index, _Index, LinkKind, _Rate]
_Path: TypeAlias = tuple[_Index, _Index, _Index, _Rate, _Name]
_Cell: TypeAlias = tuple[_Name, _Name, _Name, _Latency, _Rate]
_Threads: TypeAlias = tuple[_Name, _Name, _Index]


class TopologyMap(Struct, frozen=True, kw_only=True):
    """A TopologySeen as it travels."""

    origin: TopologyOrigin
    host: str | None
    pid: _Process | None
    tid: _Process | None
    line: _Line
    nodes: tuple[_Node, ...]
    links: tuple[_Link, ...]
    paths: tuple[_Path, ...] = ()


class TuningTableMap(Struct, frozen=True, kw_only=True):
    """A TuningTableSeen as it travels."""

    host: str
    pid: _Process
    tid: _Process
    line: _Line
    cells: tuple[_Cell, ...]
    max_threads: tuple[_Threads, ...] = ()


def packed_topology(seen: TopologySeen) -> TopologyMap:
    """The topology in the form in which it travels."""
    return TopologyMap(
        origin=seen.origin,
        host=seen.host,
        pid=seen.pid,
        tid=seen.tid,
        line=seen.line,
        nodes=tuple(
            (node.kind, node.system, node.local, node.rank, node.bytes_per_second, node.text) for node in seen.nodes
        ),
        links=tuple((link.start, link.end, link.kind, link.bytes_per_second) for link in seen.links),
        paths=tuple((path.start, path.end, path.hops, path.bytes_per_second, path.kind) for path in seen.paths),
    )


def unpacked_topology(sent: TopologyMap) -> TopologySeen:
    """The record of a map.

    Raises:
        ProtocolError: a link or path ends at a node that is not there.
    """
    ends = [index for start, end, _, _ in sent.links for index in (start, end)]
    ends += [index for start, end, _, _, _ in sent.paths for index in (start, end)]
    if ends and max(ends) >= len(sent.nodes):
        raise ProtocolError(f"batch: a topology of {len(sent.nodes)} nodes has a link to node {max(ends)}")
    return TopologySeen(
        origin=sent.origin,
        host=sent.host,
        pid=sent.pid,
        tid=sent.tid,
        line=sent.line,
        nodes=tuple(
            TopologyNode(kind=kind, system=system, local=local, rank=rank, bytes_per_second=rate, text=text)
            for kind, system, local, rank, rate, text in sent.nodes
        ),
        links=tuple(
            TopologyLink(start=start, end=end, kind=kind, bytes_per_second=rate)
            for start, end, kind, rate in sent.links
        ),
        paths=tuple(
            TopologyPath(start=start, end=end, hops=hops, bytes_per_second=rate, kind=kind)
            for start, end, hops, rate, kind in sent.paths
        ),
    )


def packed_table(seen: TuningTableSeen) -> TuningTableMap:
    """The tuning table in the form in which it travels."""
    return TuningTableMap(
        host=seen.host,
        pid=seen.pid,
        tid=seen.tid,
        line=seen.line,
        cells=tuple(
            (cell.function, cell.algorithm, cell.protocol, cell.latency_us, cell.bytes_per_second)
            for cell in seen.cells
        ),
        max_threads=seen.max_threads,
    )


def unpacked_table(sent: TuningTableMap) -> TuningTableSeen:
    """The tuning table that was sent."""
    return TuningTableSeen(
        host=sent.host,
        pid=sent.pid,
        tid=sent.tid,
        line=sent.line,
        cells=tuple(
            TuningCell(
                function=function, algorithm=algorithm, protocol=protocol, latency_us=latency, bytes_per_second=rate
            )
            for function, algorithm, protocol, latency, rate in sent.cells
        ),
        max_threads=sent.max_threads,
    )
