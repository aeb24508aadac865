"""What NCCL's log says of its own work: proxies, memory, captures, RAS, calls, one-sided operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ncclscope_wire.fact import Fact, Name, Number, Rank, Seconds, Signed, Size, Text, Word


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
