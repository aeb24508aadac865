"""Records of an agent that are too rare for columns: one per event.

All are frozen; every field says its unit and where it comes from. None means "not known".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class SourceKind(StrEnum):
    """Kind of a file, by its content, or of what is asked instead."""

    NCCL_LOG = "nccl_log"
    NSYS = "nsys"
    NCCL_TOPOLOGY = "nccl_topology"
    INSPECTOR = "inspector"
    KINETO = "kineto"
    FLIGHT_RECORDER = "flight_recorder"
    RAS = "ras"
    """NCCL's own RAS, asked at its port; positions count answers."""
    MACHINE = "machine"
    """Counters of a host's NICs and GPUs; positions count looks that gave something."""

    @property
    def is_recording(self) -> bool:
        """Whether a file is read whole once it is finished: positions count its batches, and not bytes."""
        return self in (SourceKind.NSYS, SourceKind.KINETO)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file that is read."""

    kind: SourceKind
    name: str
    """As people and outputs see it: the path relative to what was asked for."""
    key: str
    """Identity across rename and restart: device, inode and fingerprint of the first bytes; else the path."""


class CommunicatorEventKind(StrEnum):
    """Kinds of Init, Destroy and Abort lines, and of what other sources say."""

    INIT_START = "init_start"
    INIT_COMPLETE = "init_complete"
    DESTROY = "destroy"
    ABORT = "abort"
    KNOWN = "known"
    """No line, but a recording names it, at whatever time and however often; its pointer is what the recording calls
    it by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorEvent:
    """One Init, Destroy or Abort line. Source: NCCL `src/init.cc`, forms in `docs/formats.md`."""

    kind: CommunicatorEventKind
    host: str
    pid: int
    tid: int
    line: int
    pointer: int
    """The host pointer of the communicator: of this process only, reused after Destroy."""
    rank: int
    nranks: int
    cuda_device: int | None = None
    nvml_device: int | None = None
    bus_id: int | None = None
    """domain<<20 | bus<<12 | device<<4 | function, printed in hexadecimal."""
    comm_id: int | None = None
    """Hash of the unique id, equal on all ranks (2.16 on; splits have none from 2.23 on)."""
    parent: int | None = None
    """Pointer of the parent communicator, for splits and shrinks (2.21 on)."""
    split_count: int | None = None
    """splitCount or childCount (2.24 on)."""
    color: int | None = None
    key: int | None = None
    api: str | None = None
    """The entry point that is printed (2.21 on), for instance ncclCommSplit."""
    logged_at_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSeen:
    """One version line; bare lines (up to 2.21) name no process."""

    version: str
    """For instance "2.28.3"."""
    cuda: str | None
    line: int
    host: str | None = None
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSeen:
    """One finished nsys export or trace of PyTorch's profiler: what it covers and what it lacks."""

    host: str
    host_is_recorded: bool
    """False if the export names no host and one had to be assumed."""
    start_ns: int
    """UTC ns on the host's own clock at which collection began."""
    end_ns: int
    pids: tuple[int, ...]
    """Processes with CUDA records in this export: for these, silence means that nothing ran."""
    product_version: str | None
    """Of nsys, as the next; both None for a trace of PyTorch's profiler."""
    schema_version: str | None
    nccl_kernels: int
    other_kernels: int
    graph_launches: int
    """CUDA-graph launches recorded as a whole: their kernels are not in the export."""
    missing: tuple[str, ...] = ()
    """Tables or columns that were looked for and are not there."""
    warnings: tuple[str, ...] = ()
    """Messages of nsys about lost events (severity warning or worse)."""
    gpu: str | None = None
    """CUDA's name of the GPUs of the host; None if they differ, or it is not recorded."""

    @property
    def is_of_profiler(self) -> bool:
        """Whether PyTorch's profiler made it, which is switched on in a program that runs."""
        return self.product_version is None and self.schema_version is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceGap:
    """Something of a source was lost or skipped; lowers the confidence of what is concluded over it."""

    reason: str
    """A short fixed word: "truncated", "gone", "line_too_long", "unreadable_export", ..."""
    amount: int
    """Amount in `unit`."""
    unit: str
    """"bytes", "lines", "records" or "files"."""
    detail: str = ""
    """One sentence for a person: what, where, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of a source's lines (or records) since the last batch, by what became of them."""

    understood: dict[str, int] = field(default_factory=dict[str, int])
    """By family: "operation", "init", "tuning", "version", "call", "other_nccl", ..."""
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    """By reason: "torn", "not_nccl", "unknown_nccl", "too_long", ..."""
