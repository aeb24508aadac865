"""What NCCL's log says of communicators beside their Init lines: shape, splits, settings, how long each start took."""

from __future__ import annotations

from dataclasses import dataclass

from ncclscope_wire.fact import Fact, Name, Number, Rank, Seconds, Signed, Size, Word


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorShape(Fact):
    """Ranks and nodes of a communicator (2.20 on)."""

    communicator: Word
    rank: Rank
    nranks: Number
    nodes: Number
    local_ranks: Number
    local_rank: Rank
    mnnvl: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorSplit(Fact):
    """How a split was bootstrapped (2.18 to 2.22): ties child to parent."""

    rank: Rank
    nranks: Number
    color: Signed
    key: Signed
    previous: Rank
    next: Rank
    communicator: Word | None = None
    parent: Word | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRefused(Fact):
    """This rank takes no part in a split (2.18 on)."""

    rank: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorRevoked(Fact):
    """A stage of ncclCommRevoke (2.28.7 on)."""

    communicator: Word
    stage: Name
    """START, COMPLETE, RevokeAsync START or RevokeAsync END."""
    rank: Rank | None = None
    nranks: Rank | None = None
    result: Signed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorGrown(Fact):
    """The hash that a rank computed while a communicator grew (2.29 on)."""

    rank: Rank
    comm_hash: Word
    base_magic: Word
    nranks: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorRanks(Fact):
    """How many ranks, in builds that print it on a line of its own."""

    nranks: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorSetting(Fact):
    """One field of ncclConfig_t, or what NCCL decided for a communicator."""

    name: Name
    value: Size
    second_value: Size | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes(Fact):
    """Where the time of an initialisation went (2.22 on), seconds."""

    rank: Rank
    nranks: Number
    total_s: Seconds
    kernels_s: Seconds | None = None
    alloc_s: Seconds | None = None
    bootstrap_s: Seconds | None = None
    allgathers_s: Seconds | None = None
    topo_s: Seconds | None = None
    graphs_s: Seconds | None = None
    connections_s: Seconds | None = None
    rest_s: Seconds | None = None
    api: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapTimes(Fact):
    """Where the time of a bootstrap went (2.23 on), seconds."""

    total_s: Seconds
    create_s: Seconds
    send_s: Seconds
    recv_s: Seconds
    ring_s: Seconds
    delay_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiNodeNvlink(Fact):
    """The multi-node NVLink clique of a rank, or the state of a GPU's fabric (2.21 on)."""

    clique_id: Word
    mnnvl: Number | None = None
    clique_size: Number | None = None
    clique_rank: Rank | None = None
    nvl_domain_size: Number | None = None
    bus_id: Word | None = None
    fabric: Name | None = None
    """Cluster UUID, two hexadecimal halves."""
    state: Number | None = None
    health_mask: Word | None = None
