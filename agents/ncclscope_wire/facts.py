"""What NCCL's log says beside operations: one record per line, of one type per family of like lines.

Every field is checked against its bounds where the line is read, and again where a batch is received. None
means that the line of that version does not say it. All are frozen and have the words of `Fact` in front.
Which line gives which record, of which version, is in `docs/formats.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

Number: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Counts, device numbers, channels."""
Rank: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""A rank of a communicator; -1 = none, as NCCL prints it in trees."""
Signed: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**32 - 1)]
Size: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Bytes."""
Word: TypeAlias = Annotated[int, Meta(ge=0)]
"""64 bits: a pointer, a hash, an identifier."""
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
Text: TypeAlias = Annotated[str, Meta(max_length=2048)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Where a line stands, and who wrote it."""

    line: Annotated[int, Meta(ge=0, le=2**53)]
    host: Annotated[str, Meta(max_length=256)] | None = None
    """None for lines that are not NCCL's own, and name no process."""
    pid: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    tid: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    logged_at_ns: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    file: Name | None = None
    """Source file that printed it, where the line says so (warnings, allocations)."""
    file_line: Number | None = None


# Communicators


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


# Channels, rings, trees


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


# Environment, versions, network


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSetting(Fact):
    """One variable that NCCL took from the environment."""

    variable: Name
    value: Text
    is_integer: bool
    """NCCL read it as an integer: it says so with a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionMatrix(Fact):
    """What NCCL_ALGO and NCCL_PROTO leave enabled for one function (2.24 on); 0, 1 or 2 as printed."""

    function: Name
    protocols: tuple[Number, ...]
    algorithms: tuple[Number, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSeen(Fact):
    """A version other than NCCL's own number: the git commit, the driver, a plugin's library."""

    what: Name
    """git, cuda_driver, libfabric, aws-ofi-nccl, device_plugin."""
    version: Name
    branch: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDevice:
    """One NIC, or several merged into one."""

    index: Number
    name: Text
    port: Number | None = None
    link: Name | None = None
    """IB, RoCE and what follows it, as printed."""
    address: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDevices(Fact):
    """The NICs that a network found; none is possible."""

    network: Name
    devices: tuple[NetworkDevice, ...] = ()
    relaxed_ordering: bool = False
    out_of_band: Text | None = None
    """Interface and address of the bootstrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicSeen(Fact):
    """One NIC as a network found it: its speed in Mbit/s, its place on the PCI bus."""

    network: Name
    device: Number
    name: Text
    speed_mbps: Number | None = None
    port: Number | None = None
    link: Name | None = None
    provider: Name | None = None
    pci_path: Text | None = None
    merged: Number | None = None
    """How many NICs make up this virtual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePair(Fact):
    """One connected InfiniBand queue pair."""

    device: Number
    port: Number
    queue_pair: Number
    mtu: Number
    lid: Number | None = None
    gid: Number | None = None
    ib_device: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChosen(Fact):
    """Which network a communicator uses, or the provider below it."""

    network: Name
    nics: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapAddress(Fact):
    """Interfaces and addresses of the bootstrap."""

    devices: tuple[NetworkDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDirect(Fact):
    """Whether GPUDirect RDMA is possible between a GPU and a NIC, or a NIC and the driver."""

    is_enabled: bool
    network: Name | None = None
    gpu: Name | None = None
    """As printed: bus id up to 2.23, rank up to 2.28, topology id later."""
    rank: Rank | None = None
    via: Name | None = None
    """PXN: the GPU whose NIC is used."""
    nic: Name | None = None
    nic_name: Name | None = None
    distance: Number | None = None
    limit: Number | None = None
    read: Number | None = None
    mode: Name | None = None
    means: Name | None = None
    """nvidia-peermem, DMABUF, DMA-BUF."""
    reason: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSeen(Fact):
    """What became of a plugin."""

    kind: Name
    """NET, TUNER, PROFILER, ENV, GIN, RMA, COLLNET, P2P."""
    event: Name
    """loaded, not_found, no_symbol, initialized, assigned, failed, closed, named, state."""
    name: Text | None = None
    version: Number | None = None
    library: Text | None = None
    state: Signed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAffinity(Fact):
    """The CPUs that a GPU's threads are bound to, as printed: a mask or a list."""

    gpu: Number
    cpus: Text
    gpu_cpus: Text | None = None
    allowed_cpus: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSeen(Fact):
    """A remark of the topology's discovery that is not part of the topology block."""

    step: Name
    name: Text | None = None
    value: Text | None = None
    number: Signed | None = None
    second_number: Signed | None = None
    numbers: tuple[Signed, ...] = ()


# Machinery


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyStep(Fact):
    """Proxy and service threads at work (subsystems PROXY, INIT)."""

    step: Name
    device: Number | None = None
    cpu_core: Number | None = None
    rank: Rank | None = None
    local_rank: Rank | None = None
    peer: Rank | None = None
    peer_hash: Word | None = None
    transport: Number | None = None
    number: Number | None = None
    operation: Name | None = None
    operation_id: Word | None = None
    other_operation_id: Word | None = None
    communicator: Word | None = None
    connection: Word | None = None
    pointer: Word | None = None
    size_bytes: Size | None = None
    answer_bytes: Size | None = None
    result: Signed | None = None
    is_done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen(Fact):
    """Memory that was allocated, imported or registered; bytes."""

    step: Name
    size_bytes: Size
    pointer: Word | None = None
    old_size_bytes: Size | None = None
    descriptor: Word | None = None
    communicator: Word | None = None
    device: Number | None = None
    memory_type: Number | None = None
    path: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureMarker(Fact):
    """A stream is captured into a new CUDA graph (2.9 to 2.12)."""

    graph: Size


@dataclass(frozen=True, slots=True, kw_only=True)
class RasEvent(Fact):
    """NCCL's own watcher of processes (2.24 on)."""

    event: Name
    address: Text | None = None
    peer: Signed | None = None
    peers: Number | None = None
    ranks: Number | None = None
    peer_pid: Number | None = None
    gpus: tuple[Number, ...] = ()
    is_self: bool = False
    hash: Word | None = None
    dead_hash: Word | None = None
    version: Number | None = None
    number: Number | None = None
    seconds: Seconds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFrame(Fact):
    """One frame of NCCL's call stack after an error."""

    result: Signed
    """ncclResult_t."""
    function: Name | None = None
    thread: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RmaStep(Fact):
    """One-sided operations at work (2.29 on)."""

    step: Name
    rank: Rank
    peer: Rank
    context: Number
    size_bytes: Size
    signal_mode: Number
    ready: Word
    done: Word


@dataclass(frozen=True, slots=True, kw_only=True)
class RmaPlan(Fact):
    """What of a plan of one-sided operations goes through the proxy and the copy engine (2.29 on)."""

    rank: Rank
    context: Number
    function: Number
    tasks: Number
    proxy_tasks: Number
    copy_engine_tasks: Number | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricModel(Fact):
    """NCCL's model of a symmetric kernel (2.29.7 on): blocks that saturate it, GB/s (10**9)."""

    kernel: Name
    blocks: Number
    buffer_bytes: Signed
    gb_per_s: Annotated[float, Meta(ge=0, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SymmetricBuffer(Fact):
    """A buffer of an operation that lies in a symmetric window (2.29 on)."""

    operation: Name
    size_bytes: Size
    rank: Rank
    buffer: Name
    big_offset: Word
    user_offset: Word
    pointer: Word
    window: Word


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall(Fact):
    """A call of NCCL's API (2.13 on, NCCL_DEBUG=TRACE with subsystem CALL); numbers as printed."""

    function: Name
    send_buffer: Word | None = None
    recv_buffer: Word | None = None
    count: Word | None = None
    data_type: Signed | None = None
    reduction: Signed | None = None
    root: Rank | None = None
    """Root, or the peer of Send and Recv."""
    communicator: Word | None = None
    stream: Word | None = None
    parent: Word | None = None
    color: Signed | None = None
    key: Signed | None = None
    comm_id: Word | None = None
    rank: Rank | None = None
    nranks: Number | None = None
    cuda_device: Number | None = None
    arguments: tuple[Word, ...] = ()
    """Of other calls: all their arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSeen(Fact):
    """A line of a build with TRACE=1."""

    after_ms: Annotated[float, Meta(ge=0, le=1e15)]
    """Since NCCL's debug output began."""
    function: Name


# Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFailure(Fact):
    """A CUDA call failed."""

    error: Text
    code: Signed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFailure(Fact):
    """A call of the system, of verbs or of a plugin failed."""

    call: Name
    error: Text | None = None
    code: Signed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IbCompletionError(Fact):
    """A work request on a queue pair failed; status 12 = retry exceeded: peer or cable gone."""

    status: Signed
    vendor_error: Signed
    opcode: Signed
    status_name: Name | None = None
    opcode_name: Name | None = None
    size_bytes: Signed | None = None
    peer: Text | None = None
    request: Name | None = None
    local_gid: Text | None = None
    remote_gid: Text | None = None
    nic: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IbEvent(Fact):
    """An asynchronous event of a NIC: port error, device fatal, speed change."""

    event: Text
    severity: Name
    """fatal, error, non-fatal or unknown."""
    nic: Name | None = None
    port: Number | None = None
    code: Signed | None = None
    on: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFailover(Fact):
    """A NIC was given up, or is used again (2.29.7 on)."""

    device: Number
    is_failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionTrouble(Fact):
    """A socket was closed by its peer, or could not be connected."""

    what: Name
    """closed, retries, refused."""
    peer: Text | None = None
    attempts: Number | None = None
    error: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyTrouble(Fact):
    """A proxy or service thread failed, or was told to stop."""

    what: Name
    device: Number | None = None
    operation: Name | None = None
    rank: Rank | None = None
    result: Signed | None = None
    communicator: Word | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorTrouble(Fact):
    """A communicator is aborted, or carries an asynchronous error."""

    what: Name
    communicator: Word | None = None
    result: Signed | None = None
    detected_in: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Misuse(Fact):
    """NCCL refuses what it was asked: duplicate GPU, versions that differ, a root that is none."""

    what: Name
    function: Name | None = None
    ranks: tuple[Rank, ...] = ()
    versions: tuple[Number, ...] = ()
    value: Signed | None = None
    bus_id: Word | None = None
    detail: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFailure(Fact):
    """Memory could not be had; bytes."""

    what: Name
    size_bytes: Size | None = None
    code: Signed | None = None
    detail: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryMissing(Fact):
    """A library or a symbol of it could not be opened."""

    library: Text
    symbol: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTimeout(Fact):
    """PyTorch's watchdog found a collective that took too long. *Source:* ProcessGroupNCCL.cpp."""

    rank: Rank
    sequence: Size
    operation: Name
    elements_in: Size | None = None
    """Up to PyTorch 2.0 it prints the shape instead."""
    elements_out: Size | None = None
    timeout_ms: Size
    ran_ms: Size
    group: Name | None = None
    group_id: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchProgress(Fact):
    """How far PyTorch's process group was when it dumped or failed; its own sequence numbers."""

    what: Name
    rank: Rank
    last_enqueued: Signed
    last_completed: Signed
    group: Name | None = None
    failed_at: Signed | None = None
    from_rank: Rank | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkLine(Fact):
    """A line that only one fork of NCCL prints, with its fields as printed."""

    fork: Name
    step: Name
    name: Text | None = None
    number: Signed | None = None
    second_number: Signed | None = None
    bandwidth: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    path: Name | None = None
    address: Text | None = None


FACT_TYPES: Final[Mapping[str, type[Fact]]] = MappingProxyType(
    {
        record.__name__: record
        for record in (
            CommunicatorShape,
            CommunicatorSplit,
            SplitRefused,
            CommunicatorRevoked,
            CommunicatorGrown,
            CommunicatorRanks,
            CommunicatorSetting,
            StartTimes,
            BootstrapTimes,
            MultiNodeNvlink,
            ChannelCounts,
            RingOrder,
            RingNeighbours,
            TreeNeighbours,
            ChannelLink,
            Connected,
            ThreadThresholds,
            GraphFound,
            GraphChannel,
            NvlsSupport,
            NvlsBuffers,
            EnvironmentSetting,
            FunctionMatrix,
            BuildSeen,
            NetworkDevices,
            NicSeen,
            QueuePair,
            NetworkChosen,
            BootstrapAddress,
            GpuDirect,
            PluginSeen,
            CpuAffinity,
            MachineSeen,
            ProxyStep,
            MemorySeen,
            CaptureMarker,
            RasEvent,
            CallFrame,
            RmaStep,
            RmaPlan,
            ApiCall,
            SymmetricModel,
            SymmetricBuffer,
            TraceSeen,
            CudaFailure,
            CallFailure,
            IbCompletionError,
            IbEvent,
            PortFailover,
            ConnectionTrouble,
            ProxyTrouble,
            CommunicatorTrouble,
            Misuse,
            MemoryFailure,
            LibraryMissing,
            TorchTimeout,
            TorchProgress,
            ForkLine,
        )
    }
)
"""Every record, by its name on the wire."""
