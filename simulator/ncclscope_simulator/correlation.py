"""Correlation ids: CUPTI counts the API calls of a process, in their order, and kernels carry their launch's number."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from ncclscope_simulator.cluster import Cluster
from ncclscope_simulator.graphs import GraphLaunch
from ncclscope_simulator.runs import ComputeRun, Run, Step


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
