"""The streams of the communicators: when each launch starts, and when those that belong together end.

Kernels of a communicator run in the order in which they were launched. One starts when it is ready and the stream is
free. A collective ends for nobody before everybody has started, a Send and its Recv not before both have.

Data goes over NVLink inside a node, over network cards between nodes. Simplified: without `contention` bandwidth is not
shared between groups that run at once.
"""

from __future__ import annotations

from collections import Counter, deque
from math import log2
from typing import Final

from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.contention import NETWORK, NVLINK, SharedLinks
from ncclscope_simulator.groups import Group
from ncclscope_simulator.noise import Noise
from ncclscope_simulator.operations import Meeting
from ncclscope_simulator.runs import STREAM_GAP_NS, Run


class Links:
    """The model of the links of a job, with the faults that slow them."""

    def __init__(self, config: SimulationConfig, groups: tuple[Group, ...]) -> None:
        self.config = config
        self._leaving = _leaving(config, groups)

    def collective_ns(self, group: Group, bus_bytes: float, iteration: int) -> float:
        """From the last rank's start to the end of a collective that moves `bus_bytes`."""
        if not group.spans_nodes:
            rate = 0.8 * self.config.traits.nvlink_switch
            return 6_000 + 1_500 * log2(group.size) + bus_bytes / rate
        on_nodes = Counter(rank // self.config.gpus for rank in group.members)
        cards = min(self._card(group.parallelism, node) * local for node, local in on_nodes.items())
        rate = 0.9 * cards * self._remaining(group.members, iteration)
        return 18_000 + 5_000 * log2(group.size) + bus_bytes / rate

    def pair_ns(self, group: Group, one: int, two: int, size: int, iteration: int) -> float:
        """From the later start of a Send and its Recv to their end, between two ranks."""
        nodes = {one // self.config.gpus, two // self.config.gpus}
        if len(nodes) == 1:
            return 6_000 + size / (0.75 * self.config.traits.nvlink_switch)
        card = min(self._card(group.parallelism, node) for node in nodes)
        return 14_000 + size / (0.92 * card * self._remaining((one, two), iteration))

    def _card(self, parallelism: str, node: int) -> float:
        """Bytes per ns of the network card beside each GPU, or of its share of the node's cards."""
        rate = 50.0 if self.config.traits.nvlink_switch > 300 else 25.0
        shared = self.config.contention
        return rate if shared is None else rate * min(1.0, shared.nics / self._leaving[parallelism, node])

    def _remaining(self, ranks: tuple[int, ...], iteration: int) -> float:
        """The share of the bandwidth between nodes that faults leave: a ring is as slow as its slowest card."""
        gpus = self.config.gpus
        nodes = {rank // gpus for rank in ranks}
        touching = [fault for fault in self.config.of_kind("slow_link") if fault.node in nodes]
        for fault in self.config.of_kind("slow_nic"):
            first = fault.node * gpus + fault.gpu
            if any(first <= rank < first + fault.gpus for rank in ranks):
                touching.append(fault)
        return min((fault.factor for fault in touching if fault.active(iteration)), default=1.0)


def _leaving(config: SimulationConfig, groups: tuple[Group, ...]) -> dict[tuple[str, int], int]:
    """By parallelism and node: GPUs that send out of it, of a pipeline those with a neighbour elsewhere."""
    found: dict[tuple[str, int], set[int]] = {}
    for group in groups:
        members = group.members
        for place, rank in enumerate(members):
            reached = members
            if group.parallelism == "PP":
                ring = (*members[-1:], *members, *members[:1]) if config.interleave > 1 else (rank, *members, rank)
                reached = (ring[place], ring[place + 2])
            if any(each // config.gpus != rank // config.gpus for each in reached):
                found.setdefault((group.parallelism, rank // config.gpus), set()).add(rank)
    return {key: len(ranks) for key, ranks in found.items()}


_SKEW_IN_NODE_NS: Final = 3_000
_SKEW_BETWEEN_NODES_NS: Final = 7_000


class Streams:
    """One CUDA stream for each communicator and rank, with what runs on it and waits there."""

    def __init__(self, config: SimulationConfig, groups: tuple[Group, ...], noise: Noise) -> None:
        self._config, self._noise, self._links = config, noise, Links(config, groups)
        self._shared = SharedLinks()
        self._last: dict[tuple[int, int], Run] = {}
        """By rank and group: the run that was launched last."""
        self._expected_end: dict[tuple[int, int], float] = {}
        """By rank and group: when that run ends, if the others come to it as this rank does."""
        self._met: dict[tuple[int, int], int] = {}
        """By rank and group: how many collectives have started there."""
        self._arrived: dict[tuple[int, int], list[Run]] = {}
        """By group and place among its collectives: who has started."""
        self._sends: dict[tuple[int, int, int], deque[Run]] = {}
        """By group, sender and receiver: Sends that no Recv has met."""
        self._receives: dict[tuple[int, int, int], deque[Run]] = {}

    def last(self, rank: int, group: int) -> Run | None:
        """The run that was launched last on a stream; None if there is none."""
        return self._last.get((rank, group))

    def begin_step(self, time_ns: int) -> None:
        """Nothing of the step happens before."""
        self._shared.forget_before(time_ns)

    def slowed(self, rank: int, start_ns: int, took_ns: int) -> int:
        """How long a computation takes beside what NCCL runs on its GPU."""
        shared = self._config.contention
        if shared is None:
            return took_ns
        busy_until = float(start_ns)
        for (of, group), run in self._last.items():
            if of == rank and run.launches:
                busy_until = max(busy_until, self._expected_end[of, group] if run.end_ns is None else run.end_ns)
        return took_ns + int(shared.slowdown * min(took_ns, max(0.0, busy_until - start_ns)))

    def _took(self, group: Group, ranks: tuple[int, ...], start_ns: int, alone_ns: int) -> int:
        """How long a transfer takes beside others on its links."""
        if self._config.contention is None:
            return alone_ns
        nodes = {rank // self._config.gpus for rank in ranks}
        medium = NETWORK if len(nodes) > 1 else NVLINK
        return self._shared.took(nodes, medium, group.parallelism, start_ns, alone_ns)

    def enter(self, run: Run) -> list[Run]:
        """Puts a run behind the last one of its stream; gives all runs that end by it, of whatever rank."""
        key = (run.rank, run.launch.endpoint.group.index)
        before, self._last[key] = self._last.get(key), run
        if self._config.contention is not None:
            moves = self._links.collective_ns(run.launch.endpoint.group, run.launch.bus_bytes, run.iteration)
            self._expected_end[key] = max(self._expected_end.get(key, 0.0), run.ready_ns) + moves
        if before is not None and before.end_ns is None:
            before.following = run
            return []
        return self._start(run, None if before is None else before.end_ns)

    def _start(self, run: Run, free_ns: int | None) -> list[Run]:
        """Starts a run on a stream that is free since then; None: ever since."""
        run.start_ns = run.ready_ns if free_ns is None else max(run.ready_ns, free_ns + STREAM_GAP_NS)
        ended = self._meet_peers(run) if run.launch.meeting is Meeting.PEERS else self._meet_all(run)
        return [each for over in ended for each in self._let_go(over)]

    def _let_go(self, run: Run) -> list[Run]:
        """Starts what waited for a run on its stream."""
        if run.following is None:
            return [run]
        following, run.following = run.following, None
        return [*self._start(following, run.end_ns), run]

    def _meet_all(self, run: Run) -> list[Run]:
        group = run.launch.endpoint.group
        nth = self._met.get((run.rank, group.index), 0)
        self._met[run.rank, group.index] = nth + 1
        present = self._arrived.setdefault((group.index, nth), [])
        present.append(run)
        if len(present) < group.size:
            return []
        del self._arrived[group.index, nth]
        if any(each.sticks for each in present):
            return []
        present.sort(key=lambda each: each.rank)
        self._end_together(group, present, run.iteration)
        return present

    def _end_together(self, group: Group, present: list[Run], iteration: int) -> None:
        """Ends a collective whose ranks are all there; a root's own end waits for nobody."""
        moved = max(each.launch.bus_bytes for each in present)
        factor = self._noise.transfer_factor(group.index)
        modelled = int(self._links.collective_ns(group, moved, iteration) * factor)
        apart = group.nodes if group.spans_nodes else ()
        far = {node: self._noise.uniform() * _SKEW_BETWEEN_NODES_NS for node in apart}
        meets = _meetings(present)
        modelled = self._took(group, group.members, max(meets.values()), modelled)
        for each in present:
            skew = int(self._noise.uniform() * _SKEW_IN_NODE_NS + far.get(each.rank // self._config.gpus, 0.0))
            each.end_ns = meets[each.rank] + modelled + skew
            each.modelled_ns = modelled
        transfer = _transfer_ns(present, meets)
        for each in present:
            each.transfer_ns = transfer

    def _meet_peers(self, run: Run) -> list[Run]:
        run.open_pairs = len(run.launch.peers)
        run.peers_start_ns = _started(run)
        group = run.launch.endpoint.group.index
        ended: list[Run] = []
        for peer, sends, size in run.launch.peers:
            key = (group, run.rank, peer) if sends else (group, peer, run.rank)
            ours, theirs = (self._sends, self._receives) if sends else (self._receives, self._sends)
            if not theirs.get(key):
                ours.setdefault(key, deque()).append(run)
                continue
            other = theirs[key].popleft()
            sender, receiver = (run, other) if sends else (other, run)
            self._end_pair(sender, receiver, self._through_card(sender, receiver.rank, size), group)
            ended.extend(each for each in (other, run) if not each.open_pairs)
        for each in ended:
            self._end_exchange(each)
        return ended

    def _through_card(self, sender: Run, receiver: int, size: int) -> int:
        """Bytes that go out by the sender's network card before this Send is over: those of its launch, where GPUs
        share links.
        """
        gpus = self._config.gpus
        node = sender.rank // gpus
        if self._config.contention is None or receiver // gpus == node:
            return size
        return sum(each for peer, sends, each in sender.launch.peers if sends and peer // gpus != node)

    def _end_pair(self, run: Run, other: Run, size: int, group: int) -> None:
        factor = self._noise.transfer_factor(group)
        of = run.launch.endpoint.group
        took = int(self._links.pair_ns(of, run.rank, other.rank, size, run.iteration) * factor)
        last = max(_started(run), _started(other))
        took = self._took(of, (run.rank, other.rank), last, took)
        for each in (run, other):
            each.open_pairs -= 1
            each.pair_end_ns = max(each.pair_end_ns, last + took)
            each.peers_start_ns = max(each.peers_start_ns, last)
            each.modelled_ns = max(each.modelled_ns or 0, took)

    def _end_exchange(self, run: Run) -> None:
        """Ends a run whose last pair has met."""
        skew = _SKEW_IN_NODE_NS + (_SKEW_BETWEEN_NODES_NS if run.launch.network else 0)
        run.end_ns = run.pair_end_ns + int(self._noise.uniform() * skew)
        run.transfer_ns = run.end_ns - run.peers_start_ns


def _meetings(present: list[Run]) -> dict[int, int]:
    """By rank, when its part of the transfer can begin: when all are there, or of a rooted one, it and the root."""
    starts = {each.rank: _started(each) for each in present}
    root, last = present[0].launch.root, max(starts.values())
    return {rank: last if root is None else max(start, starts[root]) for rank, start in starts.items()}


def _transfer_ns(present: list[Run], meets: dict[int, int]) -> int:
    """The shortest time that it took any rank: its kernel, or of a rooted one what follows the root's start."""
    root = present[0].launch.root
    if root is None:
        return min(_ended(each) - _started(each) for each in present)
    # The root may leave before the others have all of it: the transfer is that of those who receive.
    receivers = [each for each in present if each.rank != root] or present
    return min(_ended(each) - meets[each.rank] for each in receivers)


def _started(run: Run) -> int:
    if run.start_ns is None:
        raise AssertionError("a run that meets others has started")
    return run.start_ns


def _ended(run: Run) -> int:
    if run.end_ns is None:
        raise AssertionError("a run whose ranks have met has an end")
    return run.end_ns
