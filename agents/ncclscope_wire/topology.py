"""System blocks and tuning tables, by which NCCL describes the machine, as records.

A rate is in bytes per second (NCCL prints GB/s of 10**9 bytes with one decimal, per direction).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
