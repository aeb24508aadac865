"""System blocks and tuning tables, by which NCCL describes the machine, as records.

A rate is in bytes per second (NCCL prints GB/s of 10**9 bytes with one decimal, per direction).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from ncclscope_wire.errors import ProtocolError


class NodeKind(StrEnum):
    """Types of the nodes of a system block, as printed. Source: NCCL `src/graph/topo.cc:topoNodeTypeStr`."""

    GPU = "GPU"
    PCI = "PCI"
    NVS = "NVS"
    """An NVSwitch; NCCL makes one node of all switches."""
    CPU = "CPU"
    """One NUMA node."""
    NIC = "NIC"
    NET = "NET"
    """A port of a network card."""
    GIN = "GIN"
    RMA = "RMA"
    DEV = "DEV"
    CXB = "CXB"


class LinkKind(StrEnum):
    """Types of links, as printed. Source: NCCL `src/graph/topo.cc:topoLinkTypeStr`."""

    LOC = "LOC"
    NVL = "NVL"
    C2C = "C2C"
    PCI = "PCI"
    SYS = "SYS"
    NET = "NET"


class TopologyOrigin(StrEnum):
    """Origin of a topology."""

    LOG = "log"
    XML = "xml"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyNode:
    """One node of a system block. (kind, system, local) names it within its block."""

    kind: NodeKind
    system: int
    """Machine of a multi-node NVLink domain; 0 elsewhere and if none is printed."""
    local: int
    """GPU, PCI, NIC: bus id, domain<<20 | bus<<12 | device<<4 | function; CPU: NUMA node; NET: device number."""
    rank: int | None = None
    """GPU: rank in the communicator whose block this is; None if it is not printed (2.30: below a DEV)."""
    bytes_per_second: int | None = None
    """NET: speed of the port."""
    text: str = ""
    """Text in brackets behind the name, else ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyLink:
    """One direction of a link."""

    start: int
    """Index into the block's nodes."""
    end: int
    kind: LinkKind
    bytes_per_second: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyPath:
    """One cell of the path lines: NCCL's own best path between two nodes."""

    start: int
    """Index into the block's nodes."""
    end: int
    hops: int
    bytes_per_second: int
    kind: str
    """Type of the path, as printed: LOC, NVL, NVB, C2C, PIX, PXB, P2C, PXN, PHB, SYS, NET, DIS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologySeen:
    """One system block (`=== System ... ===` to `====`) with its path lines, or one topology file.

    *Source:* NCCL `src/graph/topo.cc:ncclTopoPrint`, `src/graph/paths.cc:ncclTopoPrintPaths`; forms in
    `docs/internals/topology.md`.
    """

    origin: TopologyOrigin
    host: str | None
    """None for a file, which names no host."""
    pid: int | None
    tid: int | None
    line: int
    """First line of the block."""
    nodes: tuple[TopologyNode, ...]
    links: tuple[TopologyLink, ...]
    """Every link once per direction that was printed."""
    paths: tuple[TopologyPath, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningCell:
    """One cell of a tuning table: what NCCL expects of a function with an algorithm and a protocol."""

    function: str
    """"AllReduce", ..."""
    algorithm: str
    """As in terms.ALGORITHMS ("TREE", "RING", ...), or as printed for one not known."""
    protocol: str
    """As in terms.PROTOCOLS."""
    latency_us: float
    bytes_per_second: int
    """Algorithm bandwidth: message size per time; 0 = not available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTableSeen:
    """The tuning table that rank 0 of a communicator prints. Source: NCCL `src/graph/tuning.cc:ncclTopoTuneModel`."""

    host: str
    pid: int
    tid: int
    line: int
    cells: tuple[TuningCell, ...]
    max_threads: tuple[tuple[str, str, int], ...] = ()
    """(algorithm, protocol, threads)."""


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
