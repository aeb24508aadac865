"""What NCCL, its plug-ins and PyTorch say of failures."""

from __future__ import annotations

from dataclasses import dataclass

from ncclscope_wire.fact import Fact, Name, Number, Rank, Signed, Size, Text, Word


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
