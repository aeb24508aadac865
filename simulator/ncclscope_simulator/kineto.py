"""Traces of the PyTorch profiler: what it records of some iterations of each rank, as Kineto writes it.

Shape of events and words as in real traces of PyTorch 2.3 to 2.11: a call of a process group is noted as
`record_param_comms`, its kernel repeats the arguments and has the External id of the note. The kernel of a group of
Sends and Recvs is launched when the group ends, outside of the notes.
Source: Kineto libkineto/src/output_json.cpp; PyTorch torch/csrc/profiler/util.cpp saveNcclMeta.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ncclscope_simulator.cluster import Cluster, Worker
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.graphs import Stage
from ncclscope_simulator.groups import Group
from ncclscope_simulator.kernel_names import demangled_name
from ncclscope_simulator.operations import Launch, Operation
from ncclscope_simulator.profiler import COMPUTE_API_NS, COMPUTE_KERNELS, COMPUTE_STREAM, launch_calls, nccl_kernels
from ncclscope_simulator.runs import ComputeRun, Run, Step

_CALLS: Final = {
    "AllReduce": "allreduce",
    "AllGather": "_allgather_base",
    "ReduceScatter": "_reduce_scatter_base",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AlltoAll": "all_to_allv",
    "Gather": "gather",
    "Scatter": "scatter",
    "Send": "send",
    "Recv": "recv",
}
_TYPES: Final = {
    "int8": "Char",
    "int64": "Long",
    "float16": "Half",
    "float32": "Float",
    "bfloat16": "BFloat16",
}
_MOST_RANKS: Final = 30
"""Ranks of a group that arguments list in full. Source: torch/csrc/profiler/util.cpp kTruncatLength."""
_HOUR_NS: Final = 3_600_000_000_000

Event = dict[str, object]


@dataclass(slots=True)
class KinetoTraces:
    """Collects the events of each rank; times are of its host's clock."""

    config: SimulationConfig
    cluster: Cluster
    groups: tuple[Group, ...]
    _events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    _identities: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Last External id by rank."""
    _sequences: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    """Collectives of a rank in a group since the job began."""

    def observe(self, step: Step) -> None:
        """Sees a step whose launches have their correlation ids."""
        is_recorded = _is_recorded(self.config, step.iteration)
        for run in sorted(step.runs, key=lambda run: run.call_ns):
            if run.stage is Stage.EAGER:
                self._see_run(run, is_recorded=is_recorded)
        if not is_recorded:
            return
        for compute in step.computes:
            self._see_compute(compute)
        for worker, begins, ends in zip(self.cluster.workers, step.begins_ns, step.ends_ns, strict=True):
            if ends is not None:
                name = f"ProfilerStep#{step.iteration}"
                self._add(worker, "user_annotation", name, begins, ends, worker.main_tid, {})

    def write(self, folder: Path) -> int:
        """Writes a trace for each rank and gives their number."""
        for rank, events in self._events.items():
            worker = self.cluster.workers[rank]
            host, pid = worker.process.host, worker.process.pid
            times = [(event["ts"], event["dur"]) for event in events]
            begins = min(ts for ts, _ in times if isinstance(ts, float))
            ends = max(ts + dur for ts, dur in times if isinstance(ts, float) and isinstance(dur, float))
            span = {
                "ph": "X",
                "cat": "Trace",
                "ts": begins,
                "dur": ends - begins,
                "pid": "Spans",
                "tid": "PyTorch Profiler",
            }
            head = {
                "schemaVersion": 1,
                "deviceProperties": [],
                "distributedInfo": self._distributed(rank),
                "displayTimeUnit": "ms",
                "baseTimeNanoseconds": self._base_ns(),
                "traceEvents": [*events, {**span, "name": "PyTorch Profiler (0)", "args": {"Op count": 0}}],
                "traceName": f"{host}.json",
            }
            path = folder / f"{host}_{pid}.{self.config.start_ns // 1_000_000}.pt.trace.json"
            path.write_text(json.dumps(head, indent=1), encoding="utf-8")
        return len(self._events)

    def _base_ns(self) -> int:
        return self.config.start_ns // _HOUR_NS * _HOUR_NS

    def _distributed(self, rank: int) -> Event:
        groups = [
            {
                "pg_name": str(group.index),
                "pg_desc": "default_pg" if group.index == 0 else group.parallelism.lower(),
                "backend_config": "cuda:nccl",
                "pg_size": group.size,
                "ranks": list(group.members),
            }
            for group in self.groups
            if rank in group.members
        ]
        return {
            "backend": "nccl",
            "rank": rank,
            "world_size": self.config.world,
            "pg_count": len(groups),
            "pg_config": groups,
            "nccl_version": self.config.traits.text,
        }

    def _add(
        self,
        worker: Worker,
        kind: str,
        name: str,
        begins_ns: int,
        ends_ns: int,
        tid: int,
        arguments: Event,
        *,
        pid: int | None = None,
    ) -> None:
        host_ns = self.cluster.nodes[worker.node].clock.host_ns
        begins, ends = host_ns(begins_ns), host_ns(ends_ns)
        self._events[worker.rank].append(
            {
                "ph": "X",
                "cat": kind,
                "name": name,
                "pid": worker.process.pid if pid is None else pid,
                "tid": tid,
                "ts": (begins - self._base_ns()) / 1000,
                "dur": (ends - begins) / 1000,
                "args": arguments,
            }
        )

    def _see_run(self, run: Run, *, is_recorded: bool) -> None:
        worker, group = self.cluster.workers[run.rank], run.launch.endpoint.group
        tid = worker.calling_tid(autograd=run.launch.autograd)
        identity, arguments = 0, Event()
        calls = [] if run.launch.outside else list(_calls(run.launch))
        for nth, (name, operation, elements) in enumerate(calls):
            self._identities[run.rank] += 1
            identity = self._identities[run.rank]
            arguments = self._arguments(run, group, name, operation, elements)
            if is_recorded:
                at = run.called_ns(nth)
                ends = run.api_end_ns if len(calls) == 1 else at + 1_500
                self._add(worker, "cpu_op", "record_param_comms", at, ends, tid, {"External id": identity, **arguments})
        if not is_recorded:
            return
        if len(calls) != 1:
            identity, arguments = 0, Event()
        if run.calls_launch:
            for api in launch_calls(run, tid, self.config.traits):
                called: Event = {"External id": identity, "correlation": api.correlation_id}
                self._add(worker, "cuda_runtime", api.name.partition("_v")[0], api.start_ns, api.end_ns, tid, called)
        if run.launches:
            for kernel in nccl_kernels(run):
                where: Event = {"device": worker.local_rank, "context": 1, "stream": kernel.stream_id}
                launched: Event = {
                    "External id": identity,
                    "queued": 0,
                    **where,
                    "correlation": kernel.correlation_id,
                    "registers per thread": 96,
                    "shared memory": 87568,
                    "grid": [kernel.grid, 1, 1],
                    "block": [kernel.block, 1, 1],
                    **arguments,
                }
                name = demangled_name(self.config.traits, kernel.name)
                if kernel.outside:
                    name = f"void {kernel.outside}<8, 768>(int4*)"
                self._add(
                    worker,
                    "kernel",
                    name,
                    kernel.start_ns,
                    kernel.end_ns,
                    kernel.stream_id,
                    launched,
                    pid=worker.local_rank,
                )

    def _see_compute(self, compute: ComputeRun) -> None:
        worker, number = self.cluster.workers[compute.rank], compute.correlation_id
        tid = worker.calling_tid(autograd=compute.autograd)
        called: Event = {"External id": 0, "correlation": number}
        self._add(
            worker,
            "cuda_runtime",
            "cudaLaunchKernel",
            compute.api_start_ns,
            compute.api_start_ns + COMPUTE_API_NS,
            tid,
            called,
        )
        shape: Event = {
            "device": worker.local_rank,
            "stream": COMPUTE_STREAM,
            "grid": [512, 1, 1],
            "block": [256, 1, 1],
        }
        name = COMPUTE_KERNELS[compute.kernel]
        self._add(
            worker,
            "kernel",
            name,
            compute.start_ns,
            compute.end_ns,
            COMPUTE_STREAM,
            {**called, **shape},
            pid=worker.local_rank,
        )

    def _arguments(self, run: Run, group: Group, name: str, operation: Operation, elements: tuple[int, int]) -> Event:
        listed = list(group.members)
        text = json.dumps(listed)
        if len(listed) > _MOST_RANKS:
            text = f"[{', '.join(map(str, listed[: _MOST_RANKS - 1]))}, ..., {listed[-1]}]"
        if operation.collective or name == _CALLS["AlltoAll"]:
            self._sequences[run.rank, group.index] += 1
        found: Event = {
            "Collective name": name,
            "In msg nelems": elements[0],
            "Out msg nelems": elements[1],
            "Group size": group.size,
            "dtype": _TYPES[operation.dtype.name],
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": str(group.index),
            "Process Group Description": "default_pg" if group.index == 0 else group.parallelism.lower(),
            "Process Group Ranks": text,
            "Seq": self._sequences[run.rank, group.index],
        }
        if name in ("send", "recv"):
            found["Dst Rank" if name == "send" else "Src Rank"] = group.members[operation.root]
        return found


def _is_recorded(config: SimulationConfig, iteration: int) -> bool:
    first, last = config.profiled or (0, -1)
    return first <= iteration <= last


def _calls(launch: Launch) -> Iterator[tuple[str, Operation, tuple[int, int]]]:
    """The calls of PyTorch, with elements in and out. The Sends and Recvs of an all-to-all are one call."""
    size = launch.endpoint.group.size
    operations = launch.operations
    if launch.endpoint.group.parallelism == "EP" and not operations[0].collective:
        sent, received = (
            sum(each.message_bytes // each.dtype.bytes for each in operations if each.op == op)
            for op in ("Send", "Recv")
        )
        yield _CALLS["AlltoAll"], operations[0], (sent, received)
        return
    for operation in operations:
        whole = operation.message_bytes // operation.dtype.bytes
        going_in = whole // size if operation.op in ("AllGather", "Gather") else whole
        coming_out = whole // size if operation.op in ("ReduceScatter", "Scatter") else whole
        yield _CALLS[operation.op], operation, (going_in, coming_out)
