"""The records of a step: log lines, what the profiler and the Inspector plug-in see, truth rows.

Step -> Logs: physical lines, operations -> CorrelationIds -> Profiler: captures -> InspectorDumps -> TruthRows

CUPTI counts the API calls of a process, in their order, and kernels carry the number of their launch (correlation id).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ncclscope_simulator.capture import Capture
from ncclscope_simulator.cluster import Cluster
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.faults import Fault
from ncclscope_simulator.graphs import GraphLaunch
from ncclscope_simulator.groups import Group
from ncclscope_simulator.inspector import Dumped, InspectorDumps
from ncclscope_simulator.kineto import KinetoTraces
from ncclscope_simulator.logs import Asked, Lines, Logs
from ncclscope_simulator.profiler import Profiler
from ncclscope_simulator.runs import ComputeRun, Run, Step
from ncclscope_simulator.startup import Said
from ncclscope_simulator.truth import Row, Tally
from ncclscope_simulator.truth_rows import TruthRows


class _Call(NamedTuple):
    at_ns: int
    launched: Run | ComputeRun | GraphLaunch
    is_further: bool = False
    """Whether it launches a kernel behind a run's first."""


class CorrelationIds:
    """Counts the calls of all processes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last: dict[int, int] = defaultdict(lambda: 1000)
        """By process: the number that was given last."""

    def number(self, step: Step) -> None:
        """Gives their numbers to everything that a step launched."""
        for pid, calls in self._calls(step).items():
            for call in sorted(calls, key=lambda call: call.at_ns):
                # Event records and stream waits of PyTorch lie between two launches; nothing between plans of one.
                self._last[pid] += 1 if call.is_further else 2 + call.at_ns % 3
                if call.is_further and isinstance(call.launched, Run):
                    call.launched.further_ids.append(self._last[pid])
                else:
                    call.launched.correlation_id = self._last[pid]
        for replayed in step.everything:
            if replayed.replay is not None:
                replayed.correlation_id = replayed.replay.correlation_id

    def _calls(self, step: Step) -> dict[int, list[_Call]]:
        """By process, the launch calls of a step; what a graph runs is not called."""
        calls: dict[int, list[_Call]] = defaultdict(list)
        for launched in step.graph_launches:
            calls[self._pid(launched.rank)].append(_Call(launched.api_start_ns, launched))
        for run in step.runs:
            if run.calls_launch and run.replay is None:
                own = [_Call(run.launched_ns(nth), run, nth > 0) for nth in range(run.kernel_count)]
                calls[self._pid(run.rank)].extend(own)
        for compute in step.computes:
            if compute.replay is None:
                calls[self._pid(compute.rank)].append(_Call(compute.api_start_ns, compute))
        return calls

    def _pid(self, rank: int) -> int:
        return self._cluster.workers[rank].process.pid


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The lines and truth rows of a step; its captures are kept by node (`capture.Capture`)."""

    lines: Lines
    """Of logs and Inspector dumps."""
    operations: list[Row]
    replays: list[Row]
    plans: list[Row]
    outside: list[Row]


class Observer:
    """Observes one step after the other; captures and tally get their share."""

    def __init__(
        self,
        config: SimulationConfig,
        cluster: Cluster,
        groups: tuple[Group, ...],
        captures: list[Capture],
        tally: Tally,
    ) -> None:
        self._config, self._tally = config, tally
        self._logs = Logs(config, cluster)
        self._ids = CorrelationIds(cluster)
        self.profiler = None if config.duty == 0.0 else Profiler(config, cluster, captures)
        self._dumps = None if config.inspector is None else InspectorDumps(config, cluster, groups)
        self.traces = None if config.profiled is None else KinetoTraces(config, cluster, groups)
        """Of the PyTorch profiler, which are written when the job is over."""
        self._truth = TruthRows(config, cluster)

    def log(self, said: list[list[Said]]) -> Lines:
        """The physical lines of what each rank says outside of steps."""
        lines = self._logs.outside_steps(said)
        self._tally.count_lines(lines)
        return lines

    def observe(self, step: Step) -> Observed:
        """Everything that a step leaves behind."""
        random = np.random.default_rng([self._config.seed, step.iteration, 2])
        faults = [fault for fault in self._config.faults if fault.active(step.iteration)]
        printed = self._logs.of_step(step, faults, random)
        self._ids.number(step)
        _lose_kernels(step, faults, random)
        if self.profiler is not None:
            self.profiler.observe(step)
        if self.traces is not None:
            self.traces.observe(step)
        dumped = self._dumps.observe(step) if self._dumps is not None else Dumped({}, set())
        self._tally.count_lines(printed.lines)
        self._tally.counts["inspected_operations"] += len(dumped.written)
        self._sum_up(step, printed.asked)
        return Observed(
            lines=printed.lines | dumped.lines,
            operations=self._truth.operations(printed.asked, step, dumped.written),
            replays=self._truth.replays(step),
            plans=self._truth.plans(step),
            outside=self._truth.outside(step),
        )

    def _sum_up(self, step: Step, asked: list[Asked]) -> None:
        counts = self._tally.counts
        counts["operations"] += len(asked)
        counts["operation_lines_dropped"] += sum(each.is_lost for each in asked)
        counts["operation_lines_torn"] += sum(each.is_torn for each in asked)
        if step.graph_launches:
            counts["graph_launches"] += len(step.graph_launches)
            counts["replays"] += sum(run.launches and run.replay is not None for run in step.runs)
        counts["launches"] += sum(run.launches for run in step.runs)
        counts["kernels"] += sum(run.kernel_count for run in step.runs if run.end_ns is not None)
        ends = [end for end in step.ends_ns if end is not None]
        done = max(ends) if ends and not step.stalled else None
        self._tally.steps.append({"iteration": step.iteration, "begin_ns": min(step.begins_ns), "end_ns": done})
        self._remember_bandwidths(step)

    def _remember_bandwidths(self, step: Step) -> None:
        """Each collective once, by its first rank, but each side of Sends and Recvs."""
        for run in step.runs:
            value, launch = run.busbw_bytes_per_second, run.launch
            if value is not None and not launch.outside and (launch.peers or launch.endpoint.comm_rank == 0):
                for op in dict.fromkeys(operation.op for operation in launch.operations):
                    self._tally.bandwidth(launch.endpoint.group.comm_id, op, launch.size_bytes, value)


def _lose_kernels(step: Step, faults: list[Fault], random: np.random.Generator) -> None:
    """Draws which kernels the profiler loses: the first ones of all launches, then those behind them."""
    drop = max((fault.ratio for fault in faults if fault.kind == "drop_kernels"), default=0.0)
    if not drop:
        return
    kernels = [(run, 0) for run in step.runs]
    kernels += [(run, nth) for run in step.runs for nth in range(1, len(run.plans))]
    for (run, nth), chance in zip(kernels, random.random(len(kernels)).tolist(), strict=True):
        if chance < drop:
            run.unrecorded |= {nth}
