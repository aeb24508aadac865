"""The truth of a step: a row per operation, per kernel of a graph, per kernel of a launch that took several.

Built once the step was observed: launches have their correlation ids, operations their lines.
"""

from __future__ import annotations

from dataclasses import dataclass

from ncclscope_simulator.capture import Windows
from ncclscope_simulator.cluster import Cluster
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.graphs import Stage
from ncclscope_simulator.logs import Asked
from ncclscope_simulator.operations import Operation
from ncclscope_simulator.runs import Run, Step
from ncclscope_simulator.truth import Row


@dataclass(frozen=True, slots=True)
class _Covered:
    """One kernel that ran while the profiler recorded."""

    nth: int
    """Number of the kernel in its launch, from 0."""
    correlation_id: int
    is_cut: bool
    is_lost: bool


class TruthRows:
    """Makes the rows of one step after the other; numbers the launches of the job."""

    def __init__(self, config: SimulationConfig, cluster: Cluster) -> None:
        self._cluster, self._windows = cluster, Windows.of(config)
        self._launches = 0

    def operations(self, asked: list[Asked], step: Step, inspected: set[tuple[int, int]]) -> list[Row]:
        """One row per operation, of a captured one with the kernel of its graph's first replay.

        `inspected`: (id of the run, number of the operation in it) of those that the Inspector plug-in has dumped.
        """
        first_replays = {id(run.captured): run for run in step.runs if run.captured is not None}
        rows: list[Row] = []
        for each in asked:
            if each.run.calls_launch and each.run.launch_id is None:
                self._launches += 1
                each.run.launch_id = self._launches
            ran = first_replays.get(id(each.run), each.run)
            rows.append({**self._call(each), **self._kernel(ran), "inspected": (id(each.run), each.nth) in inspected})
        return rows

    def replays(self, step: Step) -> list[Row]:
        """One row per kernel that a graph launched."""
        return [self._replay(run) for run in step.runs if run.replay is not None and run.launches]

    def plans(self, step: Step) -> list[Row]:
        """One row per kernel of each launch that took several; none of those that never ended."""
        return [row for run in step.runs if run.plans for row in self._plans(run)]

    def outside(self, step: Step) -> list[Row]:
        """One row per kernel of another library than NCCL."""
        return [
            {
                **self._place(run),
                "kernel": run.launch.outside,
                "correlation_id": run.correlation_id,
                "stream_id": run.launch.endpoint.stream_id,
                "covered": bool(self._covered(run)),
                **self._times(run),
            }
            for run in step.runs
            if run.launch.outside and run.launches
        ]

    def _call(self, asked: Asked) -> Row:
        """The columns of the call that was asked for, and of its line in the log."""
        run, operation = asked.run, asked.operation
        worker, endpoint = self._cluster.workers[run.rank], run.launch.endpoint
        return {
            **self._place(run),
            "tid": asked.tid,
            "local_rank": worker.local_rank,
            "comm_ptr": endpoint.comm_ptr,
            "comm_rank": endpoint.comm_rank,
            "comm_size": endpoint.group.size,
            "parallelism": endpoint.group.parallelism,
            "op_count": asked.op_count,
            "seq": asked.seq,
            "coll_seq": asked.coll_seq,
            **_arguments(operation),
            "log_file": asked.log,
            "log_line": asked.line,
            "line_lost": asked.is_lost,
            "line_torn": asked.is_torn,
            "called_ns": asked.called_ns,
            "launch_id": run.launch_id,
            "captured": run.stage is Stage.CAPTURED,
        }

    def _kernel(self, run: Run) -> Row:
        """The columns of the kernel that ran for it, and of its records in the profiler."""
        launch, covered = run.launch, self._covered(run)
        recorded = [each.correlation_id for each in covered if not each.is_lost]
        length = run.end_ns - run.start_ns if run.start_ns is not None and run.end_ns is not None else None
        return {
            "kernel": launch.kernel if run.launches else None,
            "grid": launch.grid if run.launches else None,
            "kernel_correlation_id": recorded[0] if recorded else None,
            "kernel_lost": bool(covered and not recorded),
            "kernel_cut": any(each.is_cut for each in covered),
            "covered": bool(covered),
            "stream_id": launch.endpoint.stream_id if run.launches else None,
            **self._times(run),
            "duration_ns": length,
            "modelled_transfer_ns": run.modelled_ns,
            "graph_node_id": None if run.node is None else run.node.id,
        }

    def _replay(self, run: Run) -> Row:
        if run.replay is None or run.node is None or run.captured is None:
            raise AssertionError("a replay has a graph launch, a node and a captured call")
        covered = self._covered(run)
        return {
            **self._place(run),
            "launch_id": run.captured.launch_id,
            "replay": run.replay.replay,
            "graph": run.replay.graph,
            "graph_node_id": run.node.id,
            "correlation_id": run.correlation_id,
            "kernel": run.launch.kernel,
            "stream_id": run.launch.endpoint.stream_id,
            "covered": bool(covered),
            "cut": any(each.is_cut for each in covered),
            "lost": any(each.is_lost for each in covered),
            **self._times(run),
        }

    def _plans(self, run: Run) -> list[Row]:
        clock = self._cluster.nodes[self._cluster.workers[run.rank].node].clock
        covered = {each.nth: each for each in self._covered(run)}
        return [
            {
                **self._place(run),
                "launch_id": run.launch_id,
                "plan": nth,
                "kernel": plan.kernel,
                "grid": plan.grid,
                "correlation_id": run.correlation_ids[nth],
                "stream_id": run.launch.endpoint.stream_id,
                "covered": nth in covered,
                "cut": nth in covered and covered[nth].is_cut,
                "lost": nth in covered and covered[nth].is_lost,
                "start_ns": clock.host_ns(begins),
                "end_ns": clock.host_ns(ends),
            }
            for nth, ((begins, ends), plan) in enumerate(zip(run.spans(), run.plans, strict=False))
        ]

    def _place(self, run: Run) -> Row:
        process = self._cluster.workers[run.rank].process
        return {
            "host": process.host,
            "pid": process.pid,
            "rank": run.rank,
            "comm_id": run.launch.endpoint.group.comm_id,
            "iteration": run.iteration,
        }

    def _times(self, run: Run) -> Row:
        """By the host's clock and by the reference clock, and what became of the time."""
        clock = self._cluster.nodes[self._cluster.workers[run.rank].node].clock
        return {
            "start_ns": None if run.start_ns is None else clock.host_ns(run.start_ns),
            "end_ns": None if run.end_ns is None else clock.host_ns(run.end_ns),
            "start_true_ns": run.start_ns,
            "end_true_ns": run.end_ns,
            "wait_ns": run.wait_ns,
            "transfer_ns": run.transfer_ns,
            "busbw_bytes_per_second": run.busbw_bytes_per_second,
        }

    def _covered(self, run: Run) -> list[_Covered]:
        """The kernels of a run that began while the profiler recorded."""
        if not run.launches:
            return []
        return [
            _Covered(nth, number, self._windows.cuts(begins, ends), nth in run.unrecorded)
            for nth, ((begins, ends), number) in enumerate(zip(run.spans(), run.correlation_ids, strict=False))
            if self._windows.covers(begins)
        ]


def _arguments(operation: Operation) -> Row:
    """The arguments of the call; the root is a collective's, the peer that of Send and Recv."""
    return {
        "op": operation.op,
        "count": operation.count,
        "dtype": operation.logged_dtype,
        "red_op": operation.red_name,
        "root": operation.root if operation.op == "Broadcast" else None,
        "peer": None if operation.collective else operation.root,
        "message_bytes": operation.message_bytes,
    }
