"""One rank's host thread and compute stream: when it calls, launches, computes, captures and replays.

The host enqueues at most a lead ahead of its GPU. Under capture it calls everything and nothing runs; a graph launch
then runs all of it without a call. Times are ns on the reference clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ncclscope_simulator.actions import Act, Action
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.graphs import INSTANTIATE_NS, LAUNCH_NS, GraphLaunch, Node, Stage, segments
from ncclscope_simulator.noise import Noise
from ncclscope_simulator.operations import Launch, Meeting
from ncclscope_simulator.runs import CALL_STEP_NS, PLAN_NS, ComputeRun, Run

_BEFORE_CALL_NS: Final = 3_000
_ENQUEUE_NS: Final = 7_000
"""Host time of one API call up to the launch."""
_API_NS: Final = 5_000
_API_SPREAD_NS: Final = 2_000
_AFTER_CALL_NS: Final = 2_000
_LAUNCH_LATENCY_NS: Final = 3_000
_COMPUTE_ENQUEUE_NS: Final = 12_000
_COMPUTE_CALL_NS: Final = 2_000
"""From where a computation is enqueued to its launch call."""
_SYNCHRONISE_NS: Final = 10_000


@dataclass(slots=True)
class _Captured:
    """The graphs of a rank, as they were captured last; actions go by their index in the program."""

    numbers: dict[int, int] = field(default_factory=dict[int, int])
    """By the action that it begins with: the graph's number."""
    ends: set[int] = field(default_factory=set[int])
    """The actions that follow on a graph."""
    calls: dict[int, Run] = field(default_factory=dict[int, Run])
    nodes: dict[int, Node] = field(default_factory=dict[int, Node])
    launches: int = 0
    """How often graphs of these were launched."""


class HostThread:
    """One rank while it goes through its programs; keeps its clocks between steps."""

    def __init__(self, config: SimulationConfig, rank: int, noise: Noise) -> None:
        self.rank = rank
        self.host_ns = self.gpu_ns = config.start_ns
        """How far the host thread and the compute stream have come."""
        self.at = 0
        """The action that comes next."""
        self.waits_for: Run | None = None
        """The run that must end before the action that comes next is over."""
        self._config, self._noise = config, noise
        self._lead_ns = int(config.launch_lead_us * 1000)
        self._iteration = 0
        self._captured = _Captured()
        self._graphs_made = 0
        self._replay: GraphLaunch | None = None
        """The graph launch that runs its actions now."""

    def begin_step(self, iteration: int) -> None:
        """Goes back to the first action, after the pauses that the step begins with."""
        self._iteration, self.at, self.waits_for = iteration, 0, None
        for fault in self._config.of_kind("pause"):
            if fault.first == iteration and fault.only in {None, self.rank}:
                self.host_ns += int(fault.seconds * 1e9)

    def end_step(self) -> None:
        """The data loader and the logging between steps."""
        self.host_ns += int(self._config.step_seconds * 0.02e9 * (1 + 0.2 * self._noise.uniform()))

    def lose_time(self, every: str) -> None:
        """Is late at a place where late ranks lose time."""
        for fault in self._config.of_kind("late_rank"):
            if fault.rank == self.rank and fault.every == every and fault.active(self._iteration):
                self.gpu_ns = max(self.gpu_ns, self.host_ns) + int(fault.ms * 1e6)

    def synchronise(self) -> None:
        """The host waits for the compute stream; a graph has no host in it."""
        if self._replay is None:
            self.host_ns = max(self.host_ns, self.gpu_ns) + _SYNCHRONISE_NS

    def wait_until(self, end_ns: int) -> None:
        """The compute stream waits for a kernel of another stream."""
        self.gpu_ns = max(self.gpu_ns, end_ns)

    def compute(self, action: Action, slowed: Callable[[int, int, int], int]) -> ComputeRun:
        """Enqueues a computation, or comes to it in a graph; `slowed` gives its length from rank, start and length."""
        took = int(action.duration_ns * self._noise.computation_factor(self.rank))
        if action.is_uneven:
            took = int(took * self._noise.expert_factor())
        if self._replay is None:
            enqueued = max(self.host_ns, self.gpu_ns - self._lead_ns)
            called, ready, node = enqueued + _COMPUTE_CALL_NS, enqueued + _COMPUTE_ENQUEUE_NS + _LAUNCH_LATENCY_NS, None
            self.host_ns = enqueued + _COMPUTE_ENQUEUE_NS
        else:
            called, ready, node = self._replay.api_start_ns, self._replay.ready_ns, self._captured.nodes[self.at]
        start = max(self.gpu_ns, ready)
        took = slowed(self.rank, start, took)
        self.gpu_ns = start + took
        return ComputeRun(
            rank=self.rank,
            api_start_ns=called,
            start_ns=start,
            end_ns=start + took,
            kernel=action.kernel,
            autograd=action.autograd,
            node=node,
            replay=self._replay,
        )

    def issue(self, action: Action) -> Run:
        """Calls NCCL, or comes to the launch in a graph."""
        if self._replay is None:
            run = self._call(action.issued, self._next_call_ns())
        else:
            run = self._replayed(action.issued, self._replay)
        run.sticks = action.sticks
        return run

    def _next_call_ns(self) -> int:
        return max(self.host_ns + _BEFORE_CALL_NS, self.gpu_ns - self._lead_ns)

    def _call(self, launch: Launch, call_ns: int) -> Run:
        """The host calls NCCL, launch by launch or under capture."""
        group_end = call_ns + (len(launch.operations) * CALL_STEP_NS if launch.grouped else 0)
        api_start = group_end + _ENQUEUE_NS
        further = PLAN_NS * (len(launch.plans) - 1) if launch.plans else 0
        api_end = api_start + further + _API_NS + int(_API_SPREAD_NS * self._noise.uniform())
        self.host_ns = api_end + _AFTER_CALL_NS
        return Run(
            launch=launch,
            rank=self.rank,
            iteration=self._iteration,
            call_ns=call_ns,
            group_end_ns=group_end,
            api_start_ns=api_start,
            api_end_ns=api_end,
            ready_ns=max(api_end + _LAUNCH_LATENCY_NS, self.gpu_ns),
        )

    def capture(self, program: list[Action]) -> list[Run]:
        """Calls everything that graphs shall hold, while nothing runs; all but the last collective of the step."""
        issues = [at for at, action in enumerate(program) if action.act is Act.ISSUE][:-1]
        self._captured = _Captured()
        for begin, end in segments(issues, self._config.graphs_per_step):
            self._capture_graph(program, begin, end)
        self.host_ns += INSTANTIATE_NS * len(self._captured.numbers)
        return list(self._captured.calls.values())

    def _capture_graph(self, program: list[Action], begin: int, end: int) -> None:
        # Ranks that share a process share its numbers.
        number = 1 + self._graphs_made * self._config.gpus + self.rank % self._config.gpus
        self._graphs_made += 1
        self._captured.numbers[begin] = number
        self._captured.ends.add(end)
        nodes = 0
        for at in range(begin, end):
            if self._capture_action(program[at], at):
                self._captured.nodes[at] = Node(number, nodes)
                nodes += 1

    def _capture_action(self, action: Action, at: int) -> bool:
        """Enqueues one action under capture; whether the graph gets a node for it."""
        if action.act is Act.COMPUTE:
            self.host_ns += _COMPUTE_ENQUEUE_NS
            return True
        if action.act is not Act.ISSUE:
            return False
        run = self._captured.calls[at] = self._call(action.issued, self.host_ns + _BEFORE_CALL_NS)
        run.stage = Stage.CAPTURED
        return run.launch.meeting is not Meeting.NOBODY

    def launch_graph(self) -> GraphLaunch | None:
        """Launches the graph that begins with the next action, or leaves the one that is over."""
        captured = self._captured
        if self.at in captured.ends:
            self._replay = None
        if self.at not in captured.numbers or self._config.stage(self._iteration) is Stage.EAGER:
            return None
        begins = self._next_call_ns()
        self._replay = GraphLaunch(
            rank=self.rank,
            graph=captured.numbers[self.at],
            replay=captured.launches // len(captured.numbers),
            api_start_ns=begins,
            api_end_ns=begins + LAUNCH_NS,
        )
        captured.launches += 1
        self.host_ns = self._replay.api_end_ns + _AFTER_CALL_NS
        return self._replay

    def _replayed(self, launch: Launch, replay: GraphLaunch) -> Run:
        return Run(
            launch=launch,
            rank=self.rank,
            iteration=self._iteration,
            call_ns=replay.api_start_ns,
            group_end_ns=replay.api_start_ns,
            api_start_ns=replay.api_start_ns,
            api_end_ns=replay.api_end_ns,
            ready_ns=max(replay.ready_ns, self.gpu_ns),
            stage=Stage.REPLAYED,
            node=self._captured.nodes.get(self.at),
            replay=replay,
            captured=self._captured.calls[self.at],
        )
