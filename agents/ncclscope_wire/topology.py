"""System blocks and tuning tables, by which NCCL describes the machine, as records; their parts travel as lists.

A rate is in bytes per second (NCCL prints GB/s of 10**9 bytes with one decimal, per direction).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from ncclscope_wire.errors import ProtocolError

_System: TypeAlias = Annotated[int, Meta(ge=0, le=255)]
_Local: TypeAlias = Annotated[int, Meta(ge=0, le=2**56 - 1)]
_Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Rate: TypeAlias = Annotated[int, Meta(ge=0, le=10**18)]
_Index: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Process: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Line: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
_Latency: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
_Name: TypeAlias = Annotated[str, Meta(max_length=64)]


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


class TopologyNode(NamedTuple):
    """One node of a system block. (kind, system, local) names it within its block."""

    kind: NodeKind
    system: _System
    """Machine of a multi-node NVLink domain; 0 elsewhere and if none is printed."""
    local: _Local
    """GPU, PCI, NIC: bus id, domain<<20 | bus<<12 | device<<4 | function; CPU: NUMA node; NET: device number."""
    rank: _Rank | None = None
    """GPU: rank in the communicator whose block this is; None if it is not printed (2.30: below a DEV)."""
    bytes_per_second: _Rate | None = None
    """NET: speed of the port."""
    text: Annotated[str, Meta(max_length=1024)] = ""
    """Text in brackets behind the name, else ""."""


class TopologyLink(NamedTuple):
    """One direction of a link."""

    start: _Index
    """Index into the block's nodes."""
    end: _Index
    kind: LinkKind
    bytes_per_second: _Rate


class TopologyPath(NamedTuple):
    """One cell of the path lines: NCCL's own best path between two nodes."""

    start: _Index
    """Index into the block's nodes."""
    end: _Index
    hops: _Index
    bytes_per_second: _Rate
    kind: _Name
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
    pid: _Process | None
    tid: _Process | None
    line: _Line
    """First line of the block."""
    nodes: tuple[TopologyNode, ...]
    links: tuple[TopologyLink, ...]
    """Every link once per direction that was printed."""
    paths: tuple[TopologyPath, ...] = ()

    @property
    def spans_hosts(self) -> bool:
        """Whether it is a block over several hosts, which multi-node NVLink joins: bus ids repeat in it."""
        return len({node.system for node in self.nodes if node.kind is NodeKind.GPU}) > 1


class TuningCell(NamedTuple):
    """One cell of a tuning table: what NCCL expects of a function with an algorithm and a protocol."""

    function: _Name
    """"AllReduce", ..."""
    algorithm: _Name
    """As in terms.ALGORITHMS ("TREE", "RING", ...), or as printed for one not known."""
    protocol: _Name
    """As in terms.PROTOCOLS."""
    latency_us: _Latency
    bytes_per_second: _Rate
    """Algorithm bandwidth: message size per time; 0 = not available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTableSeen:
    """The tuning table that rank 0 of a communicator prints. Source: NCCL `src/graph/tuning.cc:ncclTopoTuneModel`."""

    host: str
    pid: _Process
    tid: _Process
    line: _Line
    cells: tuple[TuningCell, ...]
    max_threads: tuple[tuple[_Name, _Name, _Index], ...] = ()
    """(algorithm, protocol, threads)."""


def check_ends(seen: TopologySeen) -> None:
    """Raises ProtocolError if a link or a path ends at a node that is not there."""
    ends = [end for link in seen.links for end in link[:2]] + [end for path in seen.paths for end in path[:2]]
    if ends and max(ends) >= len(seen.nodes):
        raise ProtocolError(f"batch: a topology of {len(seen.nodes)} nodes has a link to node {max(ends)}")
