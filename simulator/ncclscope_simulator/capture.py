"""Events that the profiler of each node sees, until they are written to an export; and when exports begin and end."""

from __future__ import annotations

from dataclasses import dataclass, field

from ncclscope_simulator.config import SimulationConfig


@dataclass(frozen=True, slots=True)
class KernelSeen:
    """One kernel execution; times in ns on the reference clock."""

    start_ns: int
    end_ns: int
    rank: int
    stream_id: int
    correlation_id: int
    name: str
    """Base name; the export adds the argument list of NCCL's."""
    grid: int
    block: int
    nccl: bool
    node_id: int | None = None
    """Its node, if a CUDA graph launched it."""
    outside: str = ""
    """Qualified name, if a library other than NCCL launched it."""


@dataclass(frozen=True, slots=True)
class GraphSeen:
    """One graph launch, recorded as a whole."""

    start_ns: int
    end_ns: int
    rank: int
    stream_id: int
    correlation_id: int
    graph: int


@dataclass(frozen=True, slots=True)
class ApiSeen:
    """One launch call of the CUDA API."""

    start_ns: int
    end_ns: int
    rank: int
    tid: int
    correlation_id: int
    name: str
    event_class: int


@dataclass(frozen=True, slots=True)
class RangeSeen:
    """One NVTX push/pop range; end None: still open when the job was last seen."""

    start_ns: int
    end_ns: int | None
    rank: int
    tid: int
    text: str
    nccl: bool
    """In NCCL's domain, as a registered string; else in the default domain."""
    payload: bytes | None = None
    """The column binaryData of NVTX_EVENTS."""


@dataclass(slots=True)
class Capture:
    """The events that were seen on one node and are not exported yet."""

    kernels: list[KernelSeen] = field(default_factory=list[KernelSeen])
    apis: list[ApiSeen] = field(default_factory=list[ApiSeen])
    ranges: list[RangeSeen] = field(default_factory=list[RangeSeen])
    graphs: list[GraphSeen] = field(default_factory=list[GraphSeen])

    def take(self, begins_ns: int, ends_ns: int) -> Capture:
        """The events that began in a window, in order of start; earlier ones are dropped: nsys never saw them begin."""
        taken = Capture(
            kernels=sorted((k for k in self.kernels if begins_ns <= k.start_ns < ends_ns), key=_start_and_rank),
            apis=sorted((a for a in self.apis if begins_ns <= a.start_ns < ends_ns), key=_start_and_rank),
            ranges=sorted((r for r in self.ranges if begins_ns <= r.start_ns < ends_ns), key=_start_and_rank),
            graphs=sorted((g for g in self.graphs if begins_ns <= g.start_ns < ends_ns), key=_start_and_rank),
        )
        self.kernels = [k for k in self.kernels if k.start_ns >= ends_ns]
        self.apis = [a for a in self.apis if a.start_ns >= ends_ns]
        self.ranges = [r for r in self.ranges if r.start_ns >= ends_ns]
        self.graphs = [g for g in self.graphs if g.start_ns >= ends_ns]
        return taken


def _start_and_rank(seen: KernelSeen | ApiSeen | RangeSeen | GraphSeen) -> tuple[int, int]:
    return seen.start_ns, seen.rank


@dataclass(frozen=True, slots=True)
class Windows:
    """When the profiler records, on the reference clock: the same on all nodes."""

    start_ns: int
    period_ns: int | None
    duty: float

    @classmethod
    def of(cls, config: SimulationConfig) -> Windows:
        """The windows that a configuration asks for."""
        return cls(config.start_ns, config.chunk_ns, config.duty)

    def window(self, index: int) -> tuple[int, int | None]:
        """(begin, end) of an export; end None: the job's end."""
        if self.period_ns is None:
            return self.start_ns, None
        begins = self.start_ns + index * self.period_ns
        return begins, begins + int(self.period_ns * self.duty)

    def covers(self, true_ns: int) -> bool:
        """Whether a kernel that starts then is recorded."""
        return self.index_at(true_ns) is not None

    def cuts(self, start_ns: int, end_ns: int) -> bool:
        """Whether a recorded kernel was still running when its export ended."""
        index = self.index_at(start_ns)
        ends = None if index is None else self.window(index)[1]
        return ends is not None and end_ns > ends

    def index_at(self, true_ns: int) -> int | None:
        """The export that records at a time; None: none does."""
        if self.duty == 0.0 or true_ns < self.start_ns:
            return None
        if self.period_ns is None:
            return 0
        index = (true_ns - self.start_ns) // self.period_ns
        ends = self.window(index)[1]
        return index if ends is None or true_ns < ends else None
