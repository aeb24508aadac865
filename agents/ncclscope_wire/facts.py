"""Facts: what NCCL's log says beside operations. One record per line, one type per family of lines.

The service uses four groups. Channels (rings and trees) give the traffic over each link. Settings are compared
between the ranks of a job. Troubles become findings. Groups name communicators. The agent counts all other lines by
family and sends nothing of them.

Every field is checked against its bounds where the line is read and again where a batch is received. None means that
this version of NCCL does not print it. `docs/formats.md` says which line gives which record.
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
"""A number of bytes."""
Word: TypeAlias = Annotated[int, Meta(ge=0)]
"""64 bits: a pointer, a hash, an identifier."""
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
Text: TypeAlias = Annotated[str, Meta(max_length=2048)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Place and writer of a line."""

    line: Annotated[int, Meta(ge=0, le=2**53)]
    host: Annotated[str, Meta(max_length=256)] | None = None
    """None for lines that are not NCCL's own, and name no process."""
    pid: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    tid: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    logged_at_ns: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOrder(Fact):
    """The order of ranks in a ring; printed by rank 0 only."""

    channel: Number
    ranks: tuple[Number, ...]
    is_cut: bool = False
    """NCCL itself left out the rest: `...` from 2.23 on; before, 20 ranks may be all or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNeighbours(Fact):
    """The neighbours of one rank in a ring (2.10 on)."""

    channel: Number
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
class EnvironmentSetting(Fact):
    """One variable that NCCL took from the environment."""

    variable: Name
    value: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSeen(Fact):
    """A version other than NCCL's own number: the git commit, the driver, a plugin's library."""

    what: Name
    """git, cuda_driver, libfabric, aws-ofi-nccl, device_plugin."""
    version: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSeen(Fact):
    """Outcome of loading a plug-in."""

    kind: Name
    """NET, TUNER, PROFILER, ENV, GIN, RMA, COLLNET, P2P."""
    event: Name
    """loaded, not_found, no_symbol, initialized, assigned, failed or named."""
    name: Text | None = None
    library: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkChosen(Fact):
    """Network that a communicator uses, or the provider below it."""

    network: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDevices(Fact):
    """Network cards that NCCL found and may use, one at least; of merged ones NCCL counts all together as one."""

    network: Name
    """IB, Socket, FastSocket."""
    devices: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=64)]
    """Name and port as NCCL prints them, without the link layer; of merged ones joined by `+`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDirect(Fact):
    """Whether GPUDirect RDMA is possible between a GPU and a NIC, or a NIC and the driver."""

    is_enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFailure(Fact):
    """A CUDA call failed."""

    error: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class IbCompletionError(Fact):
    """A work request on a queue pair failed; status 12 = retry exceeded: peer or cable gone."""

    status: Signed
    status_name: Name | None = None
    peer: Text | None = None
    nic: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbsFailure(Fact):
    """A call of InfiniBand verbs failed without which NCCL cannot use a NIC."""

    call: Name
    """`ibv_modify_qp` (a queue pair could not be connected), `ibv_reg_mr`, ..."""
    error: Text | None = None
    """The text of errno."""
    nic: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IbEvent(Fact):
    """An asynchronous event of a NIC: port error, device fatal, speed change."""

    event: Text
    severity: Name
    """fatal, error, non-fatal or unknown."""
    nic: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFailover(Fact):
    """A NIC was given up, or is used again (2.29.7 on)."""

    device: Number
    is_failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionTrouble(Fact):
    """A socket was closed by its peer, or could not be connected."""

    what: Name
    """One of closed, retries and refused."""
    peer: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyTrouble(Fact):
    """A proxy or service thread failed, or was asked to stop."""

    what: Name
    text: Text | None = None
    """The whole message."""
    operation: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorTrouble(Fact):
    """A communicator is aborted, or carries an asynchronous error."""

    what: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Misuse(Fact):
    """NCCL refuses what it was asked: duplicate GPU, versions that differ, a root that is none."""

    what: Name
    ranks: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFailure(Fact):
    """Memory could not be had; bytes."""

    what: Name
    size_bytes: Size | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathNotUsed(Fact):
    """A faster path that was asked for could not be set up; NCCL goes on without it, and slower."""

    path: Name
    """CollNet: reductions in the switches (SHARP)."""
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class OfiFailure(Fact):
    """libfabric (EFA, Slingshot) failed under aws-ofi-nccl."""

    what: Name
    """One of "register memory" and "complete a request"."""
    code: Signed | None = None
    """libfabric's error number; negative as `fi_mr_regattr` returns it."""
    error: Text | None = None
    """The provider's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWarning(Fact):
    """A warning of NCCL or of a plug-in that has no record of its own, as printed."""

    text: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchGroup(Fact):
    """A process group of PyTorch, as one of its ranks was set up. *Source:* ProcessGroupNCCL.cpp, with
    TORCH_CPP_LOG_LEVEL=INFO.

    The line names no host and no pid; `tid` is the thread that logged, if PyTorch was built with glog.
    """

    rank: Rank
    """In the group."""
    global_rank: Rank | None = None
    group_id: Name | None = None
    """Number of the group in its process."""
    group_uid: Name | None = None
    """Name of the group that is equal on all its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCommunicator(Fact):
    """A communicator that a process group of PyTorch created. *Source:* as of `TorchGroup`.

    `communicator` is the pointer that NCCL's own lines of that process name.
    """

    communicator: Word
    rank: Rank
    """In the group, which is the rank of the communicator."""
    global_rank: Rank | None = None
    """From the `[rankN]:` in front of the line, if it is there."""
    device: Number | None = None
    """CUDA ordinal."""
    group: Name | None = None
    group_id: Name | None = None
    group_uid: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup(Fact):
    """A process group of PyTorch with its ranks, as a trace of the profiler lists it. *Source:* PyTorch
    `torch/csrc/profiler/util.cpp:saveNcclMeta`.
    """

    description: Annotated[str, Meta(max_length=128)]
    group_ranks: tuple[Number, ...]
    """Global ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTimeout(Fact):
    """PyTorch's watchdog found a collective that took too long. *Source:* ProcessGroupNCCL.cpp."""

    rank: Rank
    sequence: Size
    operation: Name
    timeout_ms: Size
    global_rank: Rank | None = None
    group: Name | None = None
    group_id: Name | None = None
    group_uid: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchProgress(Fact):
    """Progress of PyTorch's process group when it dumped or failed; its own sequence numbers."""

    what: Name
    rank: Rank
    last_enqueued: Signed
    last_completed: Signed
    global_rank: Rank | None = None
    group: Name | None = None
    group_id: Name | None = None
    group_uid: Name | None = None
    failed_at: Signed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFailure(Fact):
    """A program of the job failed or was killed: said by Python, by a launcher or by a scheduler.

    `pid` may be known without the host; no line says both.
    """

    what: Name
    """One of out of memory, exception, killed and exited."""
    text: Text
    """As printed, without what is in front."""
    global_rank: Rank | None = None


Pid: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RasMissing(Fact):
    """Ranks that NCCL's RAS does not reach, or that left a communicator that others are still in. *Source:* NCCL
    `src/ras/client_support.cc`.
    """

    state: Name
    """dead, unresponsive, or left (the process answers, and has no such communicator)."""
    communicator: Word = 0
    """Its hash; 0: whole processes."""
    size: Number = 0
    """Of the communicator; 0: not known."""
    ranks_missing: Number
    ranks: tuple[Rank, ...] = ()
    """In the communicator; -1 of a whole process. The first 64; so are the next three, which go with them."""
    global_ranks: tuple[Rank, ...] = ()
    """-1: not known."""
    nodes: tuple[Text, ...] = ()
    """Addresses."""
    pids: tuple[Pid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RasBehind(Fact):
    """Ranks that have launched less of an operation than others of their communicator, for several answers of NCCL's
    RAS. *Source:* as of `RasMissing`.
    """

    communicator: Word
    size: Number = 0
    operation: Name
    """ "collective" from 2.24 to 2.26, which count all together."""
    launched: Size
    others: Size
    ranks_behind: Number
    ranks: tuple[Rank, ...] = ()
    global_ranks: tuple[Rank, ...] = ()
    nodes: tuple[Text, ...] = ()
    pids: tuple[Pid, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCondition(Fact):
    """A NIC or GPU of a host is not as it could be; `logged_at_ns`: since when, or when that was over."""

    device: Name
    """mlx5_2 port 1, GPU 3."""
    what: Name
    """Kind of condition; one of a device and kind replaces the last one."""
    text: Text
    """Ends a sentence that begins with the device."""
    gpu_bus_id: Word | None = None
    """As NCCL writes it, of a GPU."""
    is_fault: bool = False
    """Wants a finding of its own; others are evidence only."""
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord(Fact):
    """How far one rank came in one process group, by a dump of PyTorch's Flight Recorder. *Source:* PyTorch
    `torch/csrc/distributed/c10d/FlightRecorder.hpp`. `logged_at_ns`: when it made the call that is shown.
    """

    global_rank: Rank
    group: Name
    """As PyTorch names it on all of its ranks."""
    description: Annotated[str, Meta(max_length=128)] = ""
    group_ranks: tuple[Number, ...] = ()
    """Global ranks; empty if the dump does not list them."""
    last_enqueued: Size
    """Number of the newest collective in the group."""
    last_completed: Signed
    """-1: none."""
    sequence: Size
    """Of the first that did not complete, else the newest; so are the fields that follow."""
    operation: Name
    state: Name
    sizes: Text = ""
    stack: tuple[Text, ...] = ()
    """Innermost frame first."""


MACHINE: Final[tuple[type[Fact], ...]] = (MachineCondition,)
"""What an agent reads of its host's counters."""
CHANNELS: Final[tuple[type[Fact], ...]] = (
    RingOrder,
    RingNeighbours,
    TreeNeighbours,
)
"""Rings and trees."""
SETTINGS: Final[tuple[type[Fact], ...]] = (
    EnvironmentSetting,
    BuildSeen,
    PluginSeen,
    NetworkChosen,
    NetworkDevices,
    GpuDirect,
    PathNotUsed,
)
"""Environment, configuration, build and machine: a job wants them equal on its ranks."""
TROUBLES: Final[tuple[type[Fact], ...]] = (
    CudaFailure,
    IbCompletionError,
    VerbsFailure,
    IbEvent,
    PortFailover,
    ConnectionTrouble,
    ProxyTrouble,
    CommunicatorTrouble,
    Misuse,
    MemoryFailure,
    OfiFailure,
    OtherWarning,
    TorchTimeout,
    TorchProgress,
    ProgramFailure,
    RasMissing,
    RasBehind,
    FlightRecord,
)
"""Failures that NCCL, its plug-ins, PyTorch, Python, launchers and schedulers report."""
GROUPS: Final[tuple[type[Fact], ...]] = (
    TorchGroup,
    TorchCommunicator,
    ProcessGroup,
)
"""Names that PyTorch gives to the communicators of NCCL's lines."""

FACT_TYPES: Final[Mapping[str, type[Fact]]] = MappingProxyType(
    {record.__name__: record for record in (*CHANNELS, *SETTINGS, *TROUBLES, *GROUPS, *MACHINE)}
)
"""Every record by its name on the wire."""
