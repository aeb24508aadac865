"""When everything of a training step happens, on the reference clock: hosts, compute streams, NCCL kernels.

Each rank goes through its program as far as it can: its host thread enqueues, its compute stream computes and waits
for NCCL's kernels. A kernel that ends lets those ranks go on that waited for it.

    program -> HostThread -> Run -> Streams: start, meet the other ranks, end -> whoever waits goes on -> Step

Simplified: without `contention` computation is not slowed by communication, and a host that waits for a kernel which
never starts enqueues nothing ahead.
"""

from __future__ import annotations

from collections import deque

from ncclscope_simulator.actions import Act, Action
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.graphs import Stage
from ncclscope_simulator.groups import Group
from ncclscope_simulator.host_thread import HostThread
from ncclscope_simulator.noise import Noise
from ncclscope_simulator.runs import Run, Step
from ncclscope_simulator.streams import Streams


class Timeline:
    """Runs the programs of all ranks, one step at a time; keeps clocks and streams between steps."""

    def __init__(self, config: SimulationConfig, groups: tuple[Group, ...]) -> None:
        self._config = config
        self._noise = Noise(config, len(groups))
        self._streams = Streams(config, groups, self._noise)
        self._hosts = [HostThread(config, rank, self._noise) for rank in range(config.world)]
        self._ready: deque[HostThread] = deque()
        """Ranks that can go on, in their turn."""

    def begin_at(self, rank: int, host_ns: int) -> None:
        """Says when a rank's start-up was over."""
        self._hosts[rank].host_ns = self._hosts[rank].gpu_ns = host_ns

    @property
    def next_ns(self) -> int:
        """When the first rank begins the next step: nothing of it happens earlier."""
        return min(host.host_ns for host in self._hosts)

    def run_step(self, iteration: int, programs: list[list[Action]]) -> Step:
        """Everything of the next step. A rank that hangs leaves the others waiting; call no further step then."""
        self._noise.begin_step(iteration)
        for host in self._hosts:
            host.begin_step(iteration)
        begins = [host.host_ns for host in self._hosts]
        self._streams.begin_step(min(begins))
        step = Step(iteration=iteration, runs=[], computes=[], begins_ns=begins, ends_ns=[], graph_launches=[])
        if self._config.stage(iteration) is Stage.CAPTURED:
            for host in self._hosts:
                step.runs.extend(host.capture(programs[host.rank]))
        self._ready.extend(self._hosts)
        while self._ready:
            host = self._ready.popleft()
            self._go(host, programs[host.rank], step)
        for host in self._hosts:
            step.ends_ns.append(host.host_ns if host.at == len(programs[host.rank]) else None)
        for host in self._hosts:
            host.end_step()
        return step

    def _go(self, host: HostThread, program: list[Action], step: Step) -> None:
        """Runs a rank until it must wait for others, hangs or is done."""
        stop = self._stop(host.rank, len(program), step.iteration)
        while host.at < stop:
            run = host.waits_for or self._act(host, program[host.at], step)
            host.waits_for = None
            if run is not None:
                if run.end_ns is None:
                    host.waits_for = run
                    return
                host.wait_until(run.end_ns)
            host.at += 1

    def _stop(self, rank: int, actions: int, iteration: int) -> int:
        """The action that a rank never comes to: one in the middle if it hangs, else none of its own."""
        for fault in self._config.faults:
            hangs = fault.kind == "hang" and fault.how != "inside" and fault.rank == rank
            if (hangs or fault.kind == "kill") and fault.first <= iteration:
                return actions // 2
        return actions

    def _act(self, host: HostThread, action: Action, step: Step) -> Run | None:
        """Does one action; gives the run that the compute stream has to wait for."""
        launched = host.launch_graph()
        if launched is not None:
            step.graph_launches.append(launched)
        if action.act is Act.COMPUTE:
            step.computes.append(host.compute(action, self._streams.slowed))
        elif action.act is Act.ISSUE:
            return self._issue(host, action, step)
        elif action.act is Act.WAIT:
            return self._streams.last(host.rank, action.group)
        elif action.act is Act.SYNCHRONISE:
            host.synchronise()
        else:
            host.lose_time(action.every)
        return None

    def _issue(self, host: HostThread, action: Action, step: Step) -> Run | None:
        run = host.issue(action)
        step.runs.append(run)
        if not run.launches:
            return None
        for ended in self._streams.enter(run):
            if self._hosts[ended.rank].waits_for is ended:
                self._ready.append(self._hosts[ended.rank])
        return run if action.blocking else None
