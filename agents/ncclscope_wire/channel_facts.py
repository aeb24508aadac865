"""What NCCL's log says of channels: rings, trees, links with their transport, and what was found for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ncclscope_wire.fact import Fact, Name, Number, Rank, Signed, Size, Text, Word


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelCounts(Fact):
    """How many channels a communicator has, by use."""

    collective: Number
    p2p: Number
    p2p_per_peer: Number
    collnet: Number | None = None
    nvls: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOrder(Fact):
    """The order of ranks in a ring; printed by rank 0 only."""

    channel: Number
    ranks: tuple[Number, ...]
    channels: Number | None = None
    is_cut: bool = False
    """NCCL itself left out the rest: `...` from 2.23 on; before, 20 ranks may be all or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNeighbours(Fact):
    """The neighbours of one rank in a ring (2.10 on)."""

    channel: Number
    previous: Rank
    rank: Rank
    next: Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """One rank's place in one tree; -1 = none."""

    channel: Number
    up: Rank
    rank: Rank
    down: tuple[Rank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNeighbours(Fact):
    """The places of one rank in the trees of its channels.

    Up to 2.7 a channel has two trees, one each way, and two nodes.
    """

    nodes: tuple[TreeNode, ...]
    is_nvls: bool = False
    is_cut: bool = False
    """The line met NCCL's limit of 1,023 bytes; the last, partial node is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLink(Fact):
    """Over which transport a channel reaches a peer."""

    channel: Number
    from_rank: Rank
    transport: Name
    """P2P, SHM, NET or COLLNET."""
    how: Text
    """What follows the transport, as printed: `IPC/read`, `direct pointer`, `IB/0/GDRDMA`."""
    to_rank: Rank | None = None
    connection: Number | None = None
    direction: Name | None = None
    """send or receive; None where the line says both ends."""
    from_device: Word | None = None
    to_device: Word | None = None
    devices_are_bus_ids: bool | None = None
    """Up to 2.18.1 the brackets hold bus ids, from 2.18.3 NVML numbers; None where the digits fit both."""
    network: Name | None = None
    network_device: Number | None = None
    proxy_rank: Rank | None = None
    """PXN: the rank whose NIC is used (2.12 on)."""
    gpu_direct: bool | None = None
    """Whether GPUDirect RDMA is used; None for transports that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected(Fact):
    """All rings, trees or the like of a communicator are connected."""

    what: Name
    pxn: Number | None = None
    gdr: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadThresholds(Fact):
    """Bytes per thread below which fewer threads are used; per algorithm, for LL, LL128 and Simple."""

    rows: tuple[tuple[Signed, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFound(Fact):
    """What the search for one kind of graph found: its channels and their bandwidth, GB/s (10**9) each."""

    pattern: Number
    """1 balanced tree, 2 split tree, 3 tree, 4 ring, 5 NVLS, 6 CollNet direct."""
    cross_nic: Number
    channels: Number
    intra_gb_per_s: Annotated[float, Meta(ge=0, le=1e6)]
    inter_gb_per_s: Annotated[float, Meta(ge=0, le=1e6)]
    intra_path: Name
    inter_path: Name
    same_channels: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphChannel(Fact):
    """One channel of the graph in front of it: GPUs by rank (up to 2.27.3) or topology id, NICs around them."""

    channel: Number
    nodes: tuple[Name, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlsSupport(Fact):
    """Whether NVLink SHARP can be used on a device (2.17 on)."""

    is_available: bool
    device: Number
    channels: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlsBuffers(Fact):
    """A step of setting up NVLink SHARP; sizes in bytes."""

    step: Name
    rank: Rank | None = None
    nranks: Number | None = None
    heads: Number | None = None
    communicator: Word | None = None
    size_bytes: Size | None = None
    per_rank_bytes: Size | None = None
    total_bytes: Size | None = None
    device: Number | None = None
