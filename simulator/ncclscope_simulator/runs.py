"""NCCL launches, computations and graph launches of a training step, with the times at which they ran.

All times are ns on the reference clock. `call_ns` and what follows from it is the host's time, `start_ns` and `end_ns`
the GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ncclscope_simulator.graphs import GraphLaunch, Node, Stage
from ncclscope_simulator.operations import Launch, Meeting
from ncclscope_simulator.plans import Plan

CALL_STEP_NS: Final = 2_500
"""From one call of a group to the next."""
PLAN_NS: Final = 7_000
"""From one launch call of a group to the next."""
STREAM_GAP_NS: Final = 1_500
"""From the end of a kernel to the start of the next one on its stream."""


@dataclass(kw_only=True, slots=True, eq=False)
class Run:
    """One launch template as it was launched by one rank in one step."""

    launch: Launch
    rank: int
    iteration: int
    call_ns: int
    """When the (first) operation line is written."""
    group_end_ns: int
    """When ncclGroupEnd is called; of an ungrouped call, when it is made."""
    api_start_ns: int
    api_end_ns: int
    ready_ns: int
    """When the launch has arrived and the compute stream has come to it."""
    start_ns: int | None = None
    end_ns: int | None = None
    """None while it waits for others; stays None if it hangs."""
    transfer_ns: int | None = None
    """Shortest time that any rank's kernel took; of Send and Recv, its end less the last start."""
    modelled_ns: int | None = None
    """The length that the model drew for the transfer, without the skew of the ends."""
    sticks: bool = False
    """Whether its collective never ends."""
    following: Run | None = None
    """The next one on its stream, which waits for its end."""
    open_pairs: int = 0
    """Of Sends and Recvs: those that the peer has not met yet."""
    pair_end_ns: int = 0
    """When the last of those that were met ends."""
    peers_start_ns: int = 0
    """When the last of it and its peers started."""
    stage: Stage = Stage.EAGER
    node: Node | None = None
    """Its place in a CUDA graph."""
    replay: GraphLaunch | None = None
    """The graph launch that ran it."""
    captured: Run | None = None
    """Of a replay: the call that was captured."""
    correlation_id: int = 0
    """Of its first kernel. CUPTI gives it, once the step is over."""
    further_ids: list[int] = field(default_factory=list[int])
    """Correlation ids of its kernels behind the first."""
    launch_id: int | None = None
    """Its number in the truth; of a replay that of the call."""
    unrecorded: frozenset[int] = frozenset()
    """Which of its kernels the profiler loses, by their place."""

    @property
    def calls_launch(self) -> bool:
        """Whether NCCL has a kernel for it: what is captured is launched into the graph."""
        return self.launch.meeting is not Meeting.NOBODY

    @property
    def launches(self) -> bool:
        """Whether a kernel runs for it: not for the call that is captured, but for each of its replays."""
        return self.calls_launch and self.stage is not Stage.CAPTURED

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Its kernels, if they are several: while a stream is captured, plans have no bound."""
        return self.launch.plans if self.stage is Stage.EAGER else ()

    @property
    def kernel_count(self) -> int:
        """Number of kernels that it takes: at least 1."""
        return max(1, len(self.plans))

    @property
    def correlation_ids(self) -> list[int]:
        """The correlation ids of all of its kernels."""
        return [self.correlation_id, *self.further_ids]

    @property
    def wait_ns(self) -> int | None:
        """The part of its kernels' time that was spent waiting for others; None if it never ended."""
        if self.start_ns is None or self.end_ns is None or self.transfer_ns is None:
            return None
        return max(0, self.end_ns - self.start_ns - self.transfer_ns)

    @property
    def busbw_bytes_per_second(self) -> float | None:
        """Bus bandwidth of the transfer; None if there was none."""
        return self.launch.bus_bytes * 1e9 / self.transfer_ns if self.transfer_ns else None

    def called_ns(self, nth: int) -> int:
        """When the host makes its call of that place."""
        return self.call_ns + nth * CALL_STEP_NS

    def launched_ns(self, nth: int) -> int:
        """When the host launches its kernel of that place."""
        return self.api_start_ns + nth * PLAN_NS

    def spans(self) -> list[tuple[int, int]]:
        """When each of its kernels ran; none if it never ended. The first one has all the waiting."""
        if self.start_ns is None or self.end_ns is None:
            return []
        if not self.plans:
            return [(self.start_ns, self.end_ns)]
        moving = min(self.transfer_ns or 0, self.end_ns - self.start_ns)
        gap = STREAM_GAP_NS if moving > 4 * STREAM_GAP_NS * len(self.plans) else 0
        gaps = gap * (len(self.plans) - 1)
        moving -= gaps
        begins, until = self.start_ns, self.end_ns - gaps - moving
        spans: list[tuple[int, int]] = []
        for plan in self.plans[:-1]:
            until += int(plan.share * moving)
            spans.append((begins, until))
            begins = until = until + gap
        return [*spans, (begins, self.end_ns)]


@dataclass(kw_only=True, slots=True, eq=False)
class ComputeRun:
    """One computation on a rank's compute stream."""

    rank: int
    api_start_ns: int
    start_ns: int
    end_ns: int
    kernel: str
    autograd: bool
    correlation_id: int = 0
    node: Node | None = None
    replay: GraphLaunch | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """All launches and computations of one training step, with the times of each rank."""

    iteration: int
    runs: list[Run]
    """Of all ranks; of one rank in the order of its calls."""
    computes: list[ComputeRun]
    begins_ns: list[int]
    """For each rank, when its host began the step."""
    ends_ns: list[int | None]
    """For each rank, when its host was done with it; None if it hangs."""
    graph_launches: list[GraphLaunch]
    """Of all ranks; of one rank in order."""

    @property
    def everything(self) -> list[Run | ComputeRun]:
        """Launches and computations."""
        return [*self.runs, *self.computes]

    @property
    def stalled(self) -> bool:
        """Whether some rank never came to the end."""
        return None in self.ends_ns
