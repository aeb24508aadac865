"""When everything of a training step happens, on the reference clock: hosts, compute streams, NCCL kernels.

Each rank has a host thread that enqueues at most a lead ahead of its GPU, a compute stream, and one CUDA stream per
communicator, on which kernels run in order. A kernel starts when it is launched, the compute stream has reached it
and the stream is free; a collective ends for nobody before everybody has started.

Simplified: bandwidth is not shared between groups that run at once, computation is not slowed by communication, and
a host that waits for a kernel which never starts enqueues nothing ahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import log2
from typing import Final

import numpy as np

from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.faults import Fault
from ncclscope_simulator.graphs import INSTANTIATE_NS, LAUNCH_NS, GraphLaunch, Node, Stage, segments
from ncclscope_simulator.groups import Group
from ncclscope_simulator.operations import Launch, Meeting
from ncclscope_simulator.plans import Plan
from ncclscope_simulator.program import Act, Action

_ENQUEUE_NS: Final = 7_000
"""Host time of one API call up to the launch."""
_GROUP_STEP_NS: Final = 2_500
_API_NS: Final = 5_000
PLAN_NS: Final = 7_000
"""From one launch call of a group to the next."""
_LAUNCH_LATENCY_NS: Final = 3_000
_STREAM_GAP_NS: Final = 1_500
_COMPUTE_ENQUEUE_NS: Final = 12_000
_SYNCHRONISE_NS: Final = 10_000
_SKEW_IN_NODE_NS: Final = 3_000
_SKEW_BETWEEN_NODES_NS: Final = 7_000
_BLOCK: Final = 4096


@dataclass(slots=True, eq=False)
class Run:
    """One launch template as it was launched by one rank in one step. Times in ns on the reference clock."""

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
    previous: Run | None
    """The run before it on the same stream."""
    start_ns: int | None = None
    end_ns: int | None = None
    """None while it waits for others; stays None where it hangs."""
    transfer_ns: int | None = None
    """Shortest time that any rank's kernel took; of Send and Recv, its end less the last start."""
    modelled_ns: int | None = None
    """What the model drew for the transfer, without the skew of the ends."""
    sticks: bool = False
    """Whether its collective never ends."""
    following: Run | None = None
    open_pairs: int = 0
    pair_end_ns: int = 0
    peers_start_ns: int = 0
    correlation_id: int = 0
    stage: Stage = Stage.EAGER
    node: Node | None = None
    """Its place in a CUDA graph."""
    replay: GraphLaunch | None = None
    """The graph launch that ran it."""
    captured: Run | None = None
    """Of a replay: the call that was captured."""
    launch_id: int | None = None
    """Its number in the truth; of a replay that of the call."""
    further_ids: list[int] = field(default_factory=list[int])
    """Correlation ids of its kernels behind the first."""

    @property
    def launches(self) -> bool:
        """Whether a kernel runs for it: not for the call that is captured, but for each of its replays."""
        return self.calls_launch and self.stage is not Stage.CAPTURED

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Its kernels, where they are several: while a stream is captured, plans have no bound."""
        return self.launch.plans if self.stage is Stage.EAGER else ()

    @property
    def correlation_ids(self) -> list[int]:
        """Those of all of its kernels."""
        return [self.correlation_id, *self.further_ids]

    def spans(self) -> list[tuple[int, int]]:
        """When each of its kernels ran; none where it never ended. The first one has all the waiting."""
        if self.start_ns is None or self.end_ns is None:
            return []
        if not self.plans:
            return [(self.start_ns, self.end_ns)]
        moving = min(self.transfer_ns or 0, self.end_ns - self.start_ns)
        gaps = _STREAM_GAP_NS if moving > 4 * _STREAM_GAP_NS * len(self.plans) else 0
        moving -= gaps * (len(self.plans) - 1)
        begins, spans = self.start_ns, list[tuple[int, int]]()
        until = self.end_ns - gaps * (len(self.plans) - 1) - moving
        for nth, plan in enumerate(self.plans):
            until += int(plan.share * moving)
            spans.append((begins, until if nth < len(self.plans) - 1 else self.end_ns))
            begins = until = until + gaps
        return spans

    @property
    def calls_launch(self) -> bool:
        """Whether NCCL has a kernel for it: what is captured is launched into the graph."""
        return self.launch.meeting is not Meeting.NOBODY


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
    """What one training step brought."""

    iteration: int
    runs: list[Run]
    """Of all ranks; of one rank in the order of its calls."""
    computes: list[ComputeRun]
    begins_ns: list[int]
    """For each rank, when its host began the step."""
    ends_ns: list[int | None]
    """For each rank, when its host was done with it; None where it hangs."""
    graph_launches: list[GraphLaunch]
    """Of all ranks; of one rank in order."""

    @property
    def stalled(self) -> bool:
        """Whether some rank never came to the end."""
        return None in self.ends_ns


@dataclass(slots=True)
class _Pair:
    size: int
    first: Run | None = None


@dataclass(slots=True)
class _Place:
    """Where a rank is in its program."""

    host_ns: int
    gpu_ns: int
    at: int = 0
    waits_for: Run | None = None
    replay: GraphLaunch | None = None
    """The graph launch that runs its actions now."""


@dataclass(slots=True)
class _Captured:
    """The graphs of one rank, as they were captured last."""

    calls: dict[int, Run] = field(default_factory=dict[int, Run])
    """By the index of its action: each call."""
    nodes: dict[int, Node] = field(default_factory=dict[int, Node])
    begins: dict[int, int] = field(default_factory=dict[int, int])
    """By the index of the action that it begins with: the graph's number."""
    ends: set[int] = field(default_factory=set[int])
    replays: int = 0


@dataclass(slots=True)
class Timeline:
    """Runs the programs of all ranks, one step at a time; keeps clocks and streams between steps."""

    config: SimulationConfig
    programs: list[list[Action]]
    groups: tuple[Group, ...]
    wrong_programs: dict[tuple[int, int], list[Action]] = field(default_factory=dict[tuple[int, int], "list[Action]"])
    """By rank and step: what it does in place of its program."""
    _places: list[_Place] = field(init=False)
    _tails: list[dict[int, Run]] = field(init=False)
    _arrived: dict[tuple[int, int], list[Run]] = field(init=False)
    _calls: list[dict[int, int]] = field(init=False)
    _pairs: dict[tuple[int, int, int], tuple[deque[_Pair], deque[_Pair]]] = field(init=False)
    _runs: list[Run] = field(init=False)
    _computes: list[ComputeRun] = field(init=False)
    _normal: list[float] = field(init=False)
    _uniform: list[float] = field(init=False)
    _drawn: int = field(init=False, default=0)
    _iteration: int = field(init=False, default=0)
    _slowness: list[float] = field(init=False)
    """By rank: how its computation deviates in this step, in units of its spread."""
    _congestion: list[float] = field(init=False)
    """The same by group."""
    _uneven: list[float] = field(init=False)
    _ready: deque[int] = field(init=False)
    _captured: list[_Captured] = field(init=False)
    _graphs: list[int] = field(init=False)
    """For each rank, how many graphs it has captured."""
    _graph_launches: list[GraphLaunch] = field(init=False)

    def __post_init__(self) -> None:
        ranks = range(len(self.programs))
        self._places = [_Place(self.config.start_ns, self.config.start_ns) for _ in ranks]
        self._tails = [{} for _ in ranks]
        self._calls = [{} for _ in ranks]
        self._arrived, self._pairs = {}, {}
        self._slowness, self._congestion = [0.0 for _ in ranks], [0.0 for _ in self.groups]
        self._captured, self._graphs = [_Captured() for _ in ranks], [0 for _ in ranks]
        self._graph_launches = []

    def begin_at(self, rank: int, host_ns: int) -> None:
        """Says when a rank's start-up was over."""
        self._places[rank].host_ns = self._places[rank].gpu_ns = host_ns

    @property
    def next_ns(self) -> int:
        """When the first rank begins the next step: nothing of it happens earlier."""
        return min(place.host_ns for place in self._places)

    def run_step(self, iteration: int) -> Step:
        """Everything of the next step. A rank that hangs leaves the others waiting; call no further step then."""
        random = np.random.default_rng([self.config.seed, iteration, 1])
        self._normal, self._uniform = random.standard_normal(_BLOCK).tolist(), random.random(_BLOCK).tolist()
        self._iteration, self._runs, self._computes = iteration, [], []
        self._vary(iteration)
        self._graph_launches = []
        for fault in self.config.of_kind("pause"):
            if fault.first == iteration:
                for rank, place in enumerate(self._places):
                    place.host_ns += int(fault.seconds * 1e9) * (fault.only in {None, rank})
        begins = [place.host_ns for place in self._places]
        self._ready = deque(range(len(self.programs)))
        stops = self._stops(iteration)
        for place in self._places:
            place.at, place.waits_for = 0, None
        if self.config.stage(iteration) is Stage.CAPTURED:
            for rank in range(len(self.programs)):
                self._capture(rank)
        while self._ready:
            rank = self._ready.popleft()
            self._go(rank, stops.get(rank, len(self.programs[rank])))
        ended = zip(self._places, self.programs, range(len(self.programs)), strict=True)
        done = [place.at >= len(program) and rank not in stops for place, program, rank in ended]
        ends = [place.host_ns if over else None for place, over in zip(self._places, done, strict=True)]
        for place in self._places:  # The data loader and the logging between steps.
            place.host_ns += int(self.config.step_seconds * 0.02e9 * (1 + 0.2 * self._random()))
        return Step(
            iteration=iteration,
            runs=self._runs,
            computes=self._computes,
            begins_ns=begins,
            ends_ns=ends,
            graph_launches=self._graph_launches,
        )

    def _capture(self, rank: int) -> None:
        """Calls everything that graphs shall hold, while nothing runs; all but the last collective of the step."""
        program, place = self.programs[rank], self._places[rank]
        issues = [at for at, action in enumerate(program) if action.act is Act.ISSUE][:-1]
        made = self._captured[rank] = _Captured()
        for begin, end in segments(issues, self.config.graphs_per_step):
            # Ranks that share a process share its numbers.
            made.begins[begin] = 1 + self._graphs[rank] * self.config.gpus + rank % self.config.gpus
            self._graphs[rank] += 1
            made.ends.add(end)
            for at in range(begin, end):
                self._capture_action(rank, place, at, made)
        place.host_ns += INSTANTIATE_NS * len(made.begins)

    def _capture_action(self, rank: int, place: _Place, at: int, made: _Captured) -> None:
        action = self.programs[rank][at]
        graph = next(reversed(made.begins.values()))
        if action.act is Act.COMPUTE:
            place.host_ns += _COMPUTE_ENQUEUE_NS
        elif action.act is Act.ISSUE and action.launch is not None:
            run = made.calls[at] = self._call(rank, place, action.launch, place.host_ns + 3_000)
            run.stage = Stage.CAPTURED
            if action.launch.meeting is Meeting.NOBODY:
                return
        else:
            return
        made.nodes[at] = Node(graph, sum(node.graph == graph for node in made.nodes.values()))

    def _call(self, rank: int, place: _Place, launch: Launch, call: int) -> Run:
        """The host calls NCCL, launch by launch or under capture."""
        group_end = call + (len(launch.operations) * _GROUP_STEP_NS if launch.grouped else 0)
        api_start = group_end + _ENQUEUE_NS
        further = PLAN_NS * (len(launch.plans) - 1) if launch.plans else 0
        api_end = api_start + further + _API_NS + int(2_000 * self._random())
        run = Run(
            launch=launch,
            rank=rank,
            iteration=self._iteration,
            call_ns=call,
            group_end_ns=group_end,
            api_start_ns=api_start,
            api_end_ns=api_end,
            ready_ns=max(api_end + _LAUNCH_LATENCY_NS, place.gpu_ns),
            previous=None,
        )
        self._runs.append(run)
        place.host_ns = api_end + 2_000
        return run

    def _enter_graph(self, rank: int, place: _Place) -> None:
        """Launches the graph that begins with the next action, or leaves the one that is over."""
        made = self._captured[rank]
        if place.at in made.ends:
            place.replay = None
        if place.at not in made.begins or self.config.stage(self._iteration) is Stage.EAGER:
            return
        begins = max(place.host_ns + 3_000, place.gpu_ns - int(self.config.launch_lead_us * 1000))
        place.replay = GraphLaunch(
            rank=rank,
            graph=made.begins[place.at],
            replay=made.replays // len(made.begins),
            api_start_ns=begins,
            api_end_ns=begins + LAUNCH_NS,
        )
        made.replays += 1
        self._graph_launches.append(place.replay)
        place.host_ns = place.replay.api_end_ns + 2_000

    def _replay(self, rank: int, place: _Place, launch: Launch, replay: GraphLaunch) -> Run:
        made = self._captured[rank]
        run = Run(
            launch=launch,
            rank=rank,
            iteration=self._iteration,
            call_ns=replay.api_start_ns,
            group_end_ns=replay.api_start_ns,
            api_start_ns=replay.api_start_ns,
            api_end_ns=replay.api_end_ns,
            ready_ns=max(replay.ready_ns, place.gpu_ns),
            previous=None,
            stage=Stage.REPLAYED,
            node=made.nodes.get(place.at),
            replay=replay,
            captured=made.calls[place.at],
        )
        self._runs.append(run)
        return run

    def _stops(self, iteration: int) -> dict[int, int]:
        """Ranks that hang in this step, with the action at which they stop: in the middle."""
        hangs = [fault for fault in self.config.of_kind("hang") if fault.first <= iteration and fault.how != "inside"]
        if any(fault.first <= iteration for fault in self.config.of_kind("kill")):
            return {rank: len(program) // 2 for rank, program in enumerate(self.programs)}
        return {fault.rank: len(self.programs[fault.rank]) // 2 for fault in hangs}

    def _vary(self, iteration: int) -> None:
        """Draws what this step's ranks, groups and experts deviate by, where that is correlated or uneven."""
        if not self.config.noise_correlation and not self.config.imbalance:
            return
        random, kept = np.random.default_rng([self.config.seed, iteration, 2]), self.config.noise_correlation
        fresh = (1 - kept**2) ** 0.5 / 2**0.5  # Student's t of 4 degrees has the variance 2
        for values in (self._slowness, self._congestion):
            drawn = random.standard_t(4, len(values)).tolist()
            values[:] = [kept * value + fresh * new for value, new in zip(values, drawn, strict=True)]
        self._uneven = np.exp(self.config.imbalance * random.standard_normal(_BLOCK)).tolist()

    def _go(self, rank: int, stop: int) -> None:
        """Runs a rank until it must wait for others, or is done."""
        place, program = self._places[rank], self.wrong_programs.get((rank, self._iteration), self.programs[rank])
        if place.waits_for is not None:
            if place.waits_for.end_ns is None:
                return
            place.gpu_ns = max(place.gpu_ns, place.waits_for.end_ns)
            place.waits_for = None
            place.at += 1
        while place.at < stop:
            self._enter_graph(rank, place)
            waits_for = self._act(rank, place, program[place.at])
            if waits_for is not None:
                place.waits_for = waits_for
                return
            place.at += 1

    def _act(self, rank: int, place: _Place, action: Action) -> Run | None:
        """Does one action; gives the run that must end before the rank can go on."""
        act = action.act
        if act is Act.COMPUTE:
            self._compute(rank, place, action)
        elif act is Act.ISSUE:
            run = self._issue(rank, place, action)
            if run is not None and action.blocking:
                if run.end_ns is None:
                    return run
                place.gpu_ns = max(place.gpu_ns, run.end_ns)
        elif act is Act.WAIT:
            tail = self._tails[rank].get(action.group)
            if tail is not None and tail.end_ns is None:
                return tail
            place.gpu_ns = max(place.gpu_ns, 0 if tail is None or tail.end_ns is None else tail.end_ns)
        elif act is Act.SYNCHRONISE:
            if place.replay is not None:
                return None
            place.host_ns = max(place.host_ns, place.gpu_ns) + _SYNCHRONISE_NS
        else:
            self._lose_time(rank, place, action)
        return None

    def _lose_time(self, rank: int, place: _Place, action: Action) -> None:
        for fault in self.config.faults:
            if (
                fault.kind == "late_rank"
                and fault.rank == rank
                and fault.every == action.every
                and fault.active(self._iteration)
            ):
                place.gpu_ns = max(place.gpu_ns, place.host_ns) + int(fault.ms * 1e6)

    def _compute(self, rank: int, place: _Place, action: Action) -> None:
        replay = place.replay
        if replay is None:
            place.host_ns = max(place.host_ns, place.gpu_ns - int(self.config.launch_lead_us * 1000))
            start = max(place.gpu_ns, place.host_ns + _COMPUTE_ENQUEUE_NS + _LAUNCH_LATENCY_NS)
        else:
            start = max(place.gpu_ns, replay.ready_ns)
        deviation = self._slowness[rank] if self.config.noise_correlation else self._noise()
        end = start + int(action.duration_ns * max(0.1, 1.0 + self.config.compute_cv * deviation))
        if action.is_uneven:
            self._drawn += 1
            end = start + int((end - start) * self._uneven[self._drawn % _BLOCK])
        self._computes.append(
            ComputeRun(
                rank=rank,
                api_start_ns=place.host_ns + 2_000 if replay is None else replay.api_start_ns,
                start_ns=start,
                end_ns=end,
                kernel=action.kernel,
                autograd=action.autograd,
                node=None if replay is None else self._captured[rank].nodes[place.at],
                replay=replay,
            )
        )
        if replay is None:
            place.host_ns += _COMPUTE_ENQUEUE_NS
        place.gpu_ns = end

    def _issue(self, rank: int, place: _Place, action: Action) -> Run | None:
        """Enqueues a launch; None where NCCL launches nothing."""
        launch = action.launch
        if launch is None:
            raise AssertionError("an ISSUE action carries a launch")
        if place.replay is not None:
            run = self._replay(rank, place, launch, place.replay)
        else:
            called = max(place.host_ns + 3_000, place.gpu_ns - int(self.config.launch_lead_us * 1000))
            run = self._call(rank, place, launch, called)
        if not run.launches:
            return None
        run.sticks = action.sticks
        self._enter_stream(run)
        return run

    def _enter_stream(self, run: Run) -> None:
        tails, group = self._tails[run.rank], run.launch.endpoint.group.index
        before = tails.get(group)
        tails[group] = run
        if before is not None and before.end_ns is None:
            run.previous, before.following = before, run
        self._start(run, None if before is None else before.end_ns)

    def _start(self, run: Run, stream_free_ns: int | None) -> None:
        """Starts a run whose predecessors are over."""
        if run.previous is not None and run.previous.end_ns is None:
            return
        free = run.ready_ns if stream_free_ns is None else stream_free_ns + _STREAM_GAP_NS
        run.start_ns = max(run.ready_ns, free)
        run.previous = None
        if run.launch.meeting is Meeting.PEERS:
            self._meet_peers(run)
        else:
            self._meet_all(run)

    def _meet_all(self, run: Run) -> None:
        group = run.launch.endpoint.group
        calls = self._calls[run.rank]
        nth = calls.get(group.index, 0)
        calls[group.index] = nth + 1
        key = (group.index, nth)
        present = self._arrived.setdefault(key, [])
        present.append(run)
        if len(present) < group.size:
            return
        del self._arrived[key]
        if any(each.sticks for each in present):
            return
        present.sort(key=lambda each: each.rank)
        self._end_together(group, present)
        for each in present:
            self._ended(each)

    def _end_together(self, group: Group, present: list[Run]) -> None:
        starts = {each.rank: _known(each.start_ns) for each in present}
        launch = max((each.launch for each in present), key=lambda each: each.bus_bytes)
        deviation = self._congestion[group.index] if self.config.noise_correlation else self._noise()
        modelled = int(self._collective_ns(group, launch) * max(0.5, 1.0 + self.config.bandwidth_cv * deviation))
        far = {node: self._random() * _SKEW_BETWEEN_NODES_NS for node in group.nodes} if group.spans_nodes else {}
        root = present[0].launch.root
        last = max(starts.values())
        for each in present:
            start = starts[each.rank]
            meets = last if root is None else max(start, starts[root])
            skew = int(self._random() * _SKEW_IN_NODE_NS + far.get(each.rank // self.config.gpus, 0.0))
            each.end_ns = meets + modelled + skew
            each.modelled_ns = modelled
        if root is None:
            transfer = min(_known(each.end_ns) - starts[each.rank] for each in present)
        else:
            # The root may leave before the others have all of it: the transfer is that of those who receive.
            receivers = [each for each in present if each.rank != root] or present
            transfer = min(_known(each.end_ns) - max(starts[each.rank], starts[root]) for each in receivers)
        for each in present:
            each.transfer_ns = transfer

    def _meet_peers(self, run: Run) -> None:
        run.open_pairs = len(run.launch.peers)
        run.peers_start_ns = _known(run.start_ns)
        group = run.launch.endpoint.group.index
        ended: list[Run] = []
        for peer, sends, size in run.launch.peers:
            key = (group, run.rank, peer) if sends else (group, peer, run.rank)
            waiting_sends, waiting_receives = self._pairs.setdefault(key, (deque(), deque()))
            ours, theirs = (waiting_sends, waiting_receives) if sends else (waiting_receives, waiting_sends)
            if not theirs:
                ours.append(_Pair(size, run))
                continue
            other = theirs.popleft().first
            if other is None:
                raise AssertionError("a waiting pair has its first run")
            self._end_pair(run, other, size, group)
            ended.extend(each for each in (other, run) if not each.open_pairs)
        for each in dict.fromkeys(ended):
            self._end_exchange(each)
        for each in dict.fromkeys(ended):
            self._ended(each)

    def _end_pair(self, run: Run, other: Run, size: int, group: int) -> None:
        one, two = _known(run.start_ns), _known(other.start_ns)
        deviation = self._congestion[group] if self.config.noise_correlation else self._noise()
        took = int(self._pair_ns(run.rank, other.rank, size) * max(0.5, 1.0 + self.config.bandwidth_cv * deviation))
        for each in (run, other):
            each.open_pairs -= 1
            each.pair_end_ns = max(each.pair_end_ns, max(one, two) + took)
            each.peers_start_ns = max(each.peers_start_ns, one, two)
            each.modelled_ns = max(each.modelled_ns or 0, took)

    def _end_exchange(self, run: Run) -> None:
        skew = _SKEW_IN_NODE_NS + (_SKEW_BETWEEN_NODES_NS if run.launch.network else 0)
        run.end_ns = run.pair_end_ns + int(self._random() * skew)
        run.transfer_ns = run.end_ns - run.peers_start_ns

    def _ended(self, run: Run) -> None:
        """Lets go on whoever waited for a run."""
        if run.following is not None:
            following, run.following = run.following, None
            self._start(following, run.end_ns)
        if self._places[run.rank].waits_for is run:
            self._ready.append(run.rank)

    def _collective_ns(self, group: Group, launch: Launch) -> float:
        if not group.spans_nodes:
            rate = 0.8 * self.config.traits.nvlink_switch
            return 6_000 + 1_500 * log2(group.size) + launch.bus_bytes / rate
        local = min(sum(rank // self.config.gpus == node for rank in group.members) for node in group.nodes)
        rate = 0.9 * self._nic() * local * self._link_factor(group.members)
        return 18_000 + 5_000 * log2(group.size) + launch.bus_bytes / rate

    def _pair_ns(self, one: int, two: int, size: int) -> float:
        nodes = (one // self.config.gpus, two // self.config.gpus)
        if nodes[0] == nodes[1]:
            return 6_000 + size / (0.75 * self.config.traits.nvlink_switch)
        return 14_000 + size / (0.92 * self._nic() * self._link_factor((one, two)))

    def _nic(self) -> float:
        """Bytes per ns of the one network card beside each GPU."""
        return 50.0 if self.config.traits.nvlink_switch > 300 else 25.0

    def _link_factor(self, ranks: tuple[int, ...]) -> float:
        """What is left of the bandwidth between nodes: a ring is as slow as its slowest card."""
        gpus = self.config.gpus
        nodes = {rank // gpus for rank in ranks}
        touching: list[Fault] = [fault for fault in self.config.of_kind("slow_link") if fault.node in nodes]
        for fault in self.config.of_kind("slow_nic"):
            first = fault.node * gpus + fault.gpu
            if any(first <= rank < first + fault.gpus for rank in ranks):
                touching.append(fault)
        return min((fault.factor for fault in touching if fault.active(self._iteration)), default=1.0)

    def _noise(self) -> float:
        self._drawn += 1
        return self._normal[self._drawn % _BLOCK]

    def _random(self) -> float:
        self._drawn += 1
        return self._uniform[self._drawn % _BLOCK]


def _known(time_ns: int | None) -> int:
    if time_ns is None:
        raise AssertionError("a run that met the others has started")
    return time_ns
