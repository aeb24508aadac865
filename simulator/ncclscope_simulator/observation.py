"""Turns what happened in a step into what is observed of it: log lines, kernels, API calls, ranges and truth rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_simulator import log_lines
from ncclscope_simulator.capture import ApiSeen, Capture, GraphSeen, KernelSeen, RangeSeen, Windows
from ncclscope_simulator.cluster import Cluster
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.damage import Line, Written, damage
from ncclscope_simulator.faults import Fault
from ncclscope_simulator.graphs import GRAPH_LAUNCH_API, GraphLaunch, Stage
from ncclscope_simulator.groups import Endpoint
from ncclscope_simulator.inspector import Dumped, InspectorDumps
from ncclscope_simulator.nvtx_payload import nccl_domain, payload
from ncclscope_simulator.operations import Operation
from ncclscope_simulator.startup import Said
from ncclscope_simulator.timing import PLAN_NS, ComputeRun, Run, Step
from ncclscope_simulator.truth import Cell, Tally

_GROUP_STEP_NS: Final = 2_500
_COMPUTE_KERNELS: Final = {
    "gemm_forward": "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
    "gemm_backward": "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nt",
}
_COMPUTE_STREAM: Final = 7


@dataclass(slots=True)
class _Asked:
    """One operation of a step, with what the log line and the truth row say of it."""

    run: Run
    operation: Operation
    tid: int
    called_ns: int
    op_count: int
    seq: int
    coll_seq: int | None
    log: str
    nth: int
    """Which operation of its launch."""


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One kernel of a run."""

    nth: int
    number: int
    begins_ns: int
    ends_ns: int
    is_cut: bool


@dataclass(slots=True)
class Observer:
    """Keeps what NCCL and CUDA count per communicator and process: opCount, sequence, correlation ids, lines."""

    config: SimulationConfig
    cluster: Cluster
    endpoints: list[dict[int, Endpoint]]
    captures: list[Capture]
    tally: Tally
    dumps: InspectorDumps | None = None
    _windows: Windows = field(init=False)
    _correlation: dict[int, int] = field(default_factory=lambda: defaultdict(lambda: 1000))
    _line_numbers: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _launch_ids: int = 0
    _lost: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Kernels of the last step that were lost: their run, and which of its kernels."""

    def __post_init__(self) -> None:
        self._windows = Windows.of(self.config)

    def log(self, said: list[list[Said]]) -> dict[str, list[tuple[int, str]]]:
        """The physical lines of what ranks say outside of steps, by file."""
        lines: dict[str, list[Line]] = defaultdict(list)
        for worker, own in zip(self.cluster.workers, said, strict=True):
            for each in own:
                text = self._text(worker.rank, each.tid, each.at_ns, each.text)
                lines[worker.process.log_name].append(Line(each.at_ns, text, worker.process.pid))
        return {name: self._written(name, own, [], None).lines for name, own in lines.items()}

    def observe(self, step: Step) -> tuple[dict[str, list[tuple[int, str]]], list[tuple[Cell, ...]]]:
        """The physical log lines of a step by file, and its truth rows; captures and tally get their share."""
        random = np.random.default_rng([self.config.seed, step.iteration, 2])
        asked, lines = self._calls(step)
        faults = [fault for fault in self.config.faults if fault.active(step.iteration)]
        written = {name: self._written(name, own, faults, random) for name, own in sorted(lines.items())}
        places: dict[int, tuple[str, int]] = {}
        lost, torn = set[int](), set[int]()
        for name, result in written.items():
            first = self._line_numbers[name] - len(result.lines) + 1
            places.update({operation: (name, first + at) for operation, at in result.places.items()})
            lost |= result.dropped
            torn |= result.torn
        self._number_launches(step)
        drop = max((fault.ratio for fault in faults if fault.kind == "drop_kernels"), default=0.0)
        kernels = [(id(run), 0) for run in step.runs]
        kernels += [(id(run), nth) for run in step.runs for nth in range(1, len(run.plans))]
        chances = random.random(len(kernels)).tolist()
        kernels_lost = {kernel for kernel, chance in zip(kernels, chances, strict=True) if chance < drop}
        self._lost = kernels_lost
        if self.config.duty > 0.0:
            self._capture(step, kernels_lost)
        dumped = self.dumps.observe(step) if self.dumps is not None else Dumped({}, set())
        rows = self._rows(asked, step.runs, places, lost, torn, kernels_lost, dumped.written)
        self._sum_up(step, len(asked), len(lost), len(torn))
        self.tally.counts["inspected_operations"] += len(dumped.written)
        return {name: result.lines for name, result in written.items()} | dumped.lines, rows

    def _calls(self, step: Step) -> tuple[list[_Asked], dict[str, list[Line]]]:
        asked: list[_Asked] = []
        lines: dict[str, list[Line]] = defaultdict(list)
        for run in step.runs:
            if run.stage is Stage.REPLAYED:
                if run.launches and self._counts(run):
                    run.launch.endpoint.op_count += 1
                continue
            worker = self.cluster.workers[run.rank]
            own, pid = lines[worker.process.log_name], worker.process.pid
            endpoint = run.launch.endpoint
            tid = worker.autograd_tid if run.launch.autograd else worker.main_tid
            first = len(asked)
            for nth, operation in enumerate(run.launch.operations):
                at = run.call_ns + nth * _GROUP_STEP_NS
                asked.append(_asked(run, operation, tid, at, worker.process.log_name, nth))
                text = f"{operation.before_count}{endpoint.op_count:x}{operation.after_count}"
                own.append(Line(at, self._text(run.rank, tid, at, text), pid, first + nth))
            if self.config.calls:
                own.extend(
                    Line(at, self._call_text(run.rank, tid, at, text), pid) for at, text in self._call_lines(run)
                )
            for nth, tuning in enumerate(run.launch.tunings, -len(run.launch.tunings)):
                at = run.api_start_ns - 1_000 + nth * 1_000 // len(run.launch.tunings)
                own.append(Line(at, self._text(run.rank, tid, at, tuning), pid))
            if run.launches and self._counts(run):
                endpoint.op_count += max(1, len(run.plans))
        for own in lines.values():
            own.sort(key=lambda line: line.at_ns)
        return asked, lines

    def _counts(self, run: Run) -> bool:
        """Whether a launch, or a replay, moves opCount. Source: NCCL src/proxy.cc ncclProxyStart, by version."""
        traits = self.config.traits
        if self.config.stuck_op_count and not run.launch.network:
            return False
        if traits.op_count == "never" or run.launch.network:
            return traits.op_count != "never"
        if run.stage is Stage.REPLAYED:
            return traits.every_replay_counts
        beside = self.config.stage(run.iteration) is not Stage.EAGER
        # The Inspector plug-in asks for kernel events, for which every plan gets proxy work.
        if traits.op_count == "network" and self.dumps is not None:
            return True
        return traits.op_count == "plan" and (traits.counts_beside_graphs or not beside)

    def _call_lines(self, run: Run) -> list[tuple[int, str]]:
        """CALL lines of one launch. Source: NCCL src/misc/argcheck.cc, src/group.cc, src/collectives.cc."""
        lines: list[tuple[int, str]] = []
        nested = self.config.traits.nested_p2p_groups
        if run.launch.grouped:
            lines.append((run.call_ns - 1_500, "ncclGroupStart()"))
        for nth, operation in enumerate(run.launch.operations):
            at = run.call_ns + nth * _GROUP_STEP_NS
            inner = nested and operation.op in {"Send", "Recv"}
            if inner:
                lines.append((at - 200, "ncclGroupStart()"))
            lines.append((at + 300, operation.call))
            if inner:
                lines.append((at + 600, "ncclGroupEnd()"))
        if run.launch.grouped:
            lines.append((run.group_end_ns + 500, "ncclGroupEnd()"))
        return lines

    def _text(self, rank: int, tid: int, at_ns: int, text: str) -> str:
        worker = self.cluster.workers[rank]
        place = f"{worker.process.host}:{worker.process.pid}:{tid} [{worker.local_rank}] NCCL INFO {text}"
        return f"{self._stamp(worker.node, at_ns)}{place}"

    def _call_text(self, rank: int, tid: int, at_ns: int, text: str) -> str:
        worker = self.cluster.workers[rank]
        return f"{self._stamp(worker.node, at_ns)}{worker.process.host}:{worker.process.pid}:{tid} NCCL CALL {text}"

    def _stamp(self, node: int, at_ns: int) -> str:
        return log_lines.stamp(self.cluster.nodes[node].clock.host_ns(at_ns)) if self.config.stamped else ""

    def _written(
        self, name: str, lines: list[Line], faults: list[Fault], random: np.random.Generator | None
    ) -> Written:
        lines.sort(key=lambda line: line.at_ns)
        result = damage(lines, faults, random or np.random.default_rng(0))
        self._line_numbers[name] += len(result.lines)
        self.tally.counts["log_lines"] += len(result.lines)
        return result

    def _number_launches(self, step: Step) -> None:
        """Correlation ids: CUPTI counts API calls per process, in the order of the calls."""
        calls: dict[int, list[tuple[int, Run | ComputeRun | GraphLaunch, bool]]] = defaultdict(list)
        for launched in step.graph_launches:
            calls[self.cluster.workers[launched.rank].process.pid].append((launched.api_start_ns, launched, False))
        for run in step.runs:
            if run.calls_launch and run.replay is None:
                own = calls[self.cluster.workers[run.rank].process.pid]
                own.extend((run.api_start_ns + nth * PLAN_NS, run, nth > 0) for nth in range(max(1, len(run.plans))))
        for compute in (each for each in step.computes if each.replay is None):
            calls[self.cluster.workers[compute.rank].process.pid].append((compute.api_start_ns, compute, False))
        for pid, own in calls.items():
            own.sort(key=lambda call: call[0])
            for at_ns, call, is_further in own:
                # Event records and stream waits of PyTorch lie between two launches; nothing between plans of one.
                self._correlation[pid] += 1 if is_further else 2 + at_ns % 3
                if is_further and isinstance(call, Run):
                    call.further_ids.append(self._correlation[pid])
                else:
                    call.correlation_id = self._correlation[pid]
        everything: list[Run | ComputeRun] = [*step.runs, *step.computes]
        for replayed in everything:
            if replayed.replay is not None:
                replayed.correlation_id = replayed.replay.correlation_id

    def _capture(self, step: Step, lost: set[tuple[int, int]]) -> None:
        for run in step.runs:
            worker = self.cluster.workers[run.rank]
            seen = self.captures[worker.node]
            tid = worker.autograd_tid if run.launch.autograd else worker.main_tid
            if run.stage is not Stage.REPLAYED:
                if self.config.nvtx:
                    seen.ranges.extend(self._ranges(run, tid))
                if run.calls_launch:
                    seen.apis.extend(self._launch_calls(run, tid))
            if run.launches and self._shows(run):
                self._capture_kernels(run, lost)
        for compute in step.computes:
            if self._shows(compute):
                self._capture_compute(compute)
        self._capture_graphs(step)
        if self.config.nvtx:
            for worker, begins, ends in zip(self.cluster.workers, step.begins_ns, step.ends_ns, strict=True):
                text = f"iteration {step.iteration}"
                self.captures[worker.node].ranges.append(
                    RangeSeen(begins, ends, worker.rank, worker.main_tid, text, False)
                )

    def _shows(self, run: Run | ComputeRun) -> bool:
        """Whether nsys records its kernel: those of graphs only where it traces nodes."""
        return run.replay is None or self.config.cuda_graph_trace == "node"

    def _launch_calls(self, run: Run, tid: int) -> Iterator[ApiSeen]:
        traits, last = self.config.traits, len(run.correlation_ids) - 1
        for nth, number in enumerate(run.correlation_ids):
            begins = run.api_start_ns + nth * PLAN_NS
            ends = run.api_end_ns if nth == last else begins + PLAN_NS - 1_000
            yield ApiSeen(begins, ends, run.rank, tid, number, traits.launch_api, traits.launch_event_class)

    def _capture_kernels(self, run: Run, lost: set[tuple[int, int]]) -> None:
        launch, node = run.launch, None if run.node is None else run.node.id
        kernels = self.captures[self.cluster.workers[run.rank].node].kernels
        for nth, ((begins, ends), number) in enumerate(zip(run.spans(), run.correlation_ids, strict=False)):
            if (id(run), nth) in lost:
                continue
            name, grid = (run.plans[nth].kernel, run.plans[nth].grid) if run.plans else (launch.kernel, launch.grid)
            place = (run.rank, launch.endpoint.stream_id, number)
            kernels.append(KernelSeen(begins, ends, *place, name, grid, launch.block, True, node))

    def _capture_graphs(self, step: Step) -> None:
        spans = _spans(step)
        for launched in step.graph_launches:
            worker = self.cluster.workers[launched.rank]
            seen, number = self.captures[worker.node], launched.correlation_id
            times = (launched.api_start_ns, launched.api_end_ns)
            seen.apis.append(ApiSeen(*times, launched.rank, worker.main_tid, number, GRAPH_LAUNCH_API, 0))
            if self.config.cuda_graph_trace == "graph" and id(launched) in spans:
                seen.graphs.append(
                    GraphSeen(*spans[id(launched)], launched.rank, _COMPUTE_STREAM, number, launched.graph)
                )

    def _ranges(self, run: Run, tid: int) -> Iterator[RangeSeen]:
        """NCCL's NVTX ranges: one per API call; the launch lies in the call itself, of a group in ncclGroupEnd."""
        launch, rank = run.launch, run.rank
        over = run.api_end_ns + 1_000
        if not launch.grouped:
            yield self._call_range(run, launch.operations[0], run.call_ns - 1_500, over, tid)
            return
        nested = self.config.traits.nested_p2p_groups
        yield RangeSeen(run.call_ns - 2_000, run.call_ns - 1_200, rank, tid, "ncclGroupStart", True)
        for nth, operation in enumerate(launch.operations):
            at = run.call_ns + nth * _GROUP_STEP_NS
            yield self._call_range(run, operation, at - 800, at + 900, tid)
            if nested and operation.op in {"Send", "Recv"}:
                yield RangeSeen(at - 500, at - 300, rank, tid, "ncclGroupStart", True)
                yield RangeSeen(at + 500, at + 700, rank, tid, "ncclGroupEnd", True)
        yield RangeSeen(run.group_end_ns, over, rank, tid, "ncclGroupEnd", True)

    def _call_range(self, run: Run, operation: Operation, begin_ns: int, end_ns: int, tid: int) -> RangeSeen:
        content = None
        if self.config.nvtx_payload:
            worker, group = self.cluster.workers[run.rank], run.launch.endpoint.group
            content = payload(
                operation,
                group,
                version=self.config.traits.version,
                seed=self.config.seed,
                domain=nccl_domain(worker.process.pid),
            )
        return RangeSeen(begin_ns, end_ns, run.rank, tid, f"nccl{operation.op}", True, content)

    def _capture_compute(self, compute: ComputeRun) -> None:
        worker = self.cluster.workers[compute.rank]
        seen, number = self.captures[worker.node], compute.correlation_id
        tid = worker.autograd_tid if compute.autograd else worker.main_tid
        name = _COMPUTE_KERNELS[compute.kernel]
        begins = compute.api_start_ns
        if compute.replay is None:
            seen.apis.append(ApiSeen(begins, begins + 4_000, compute.rank, tid, number, "cudaLaunchKernel_v7000", 0))
        place = (compute.rank, _COMPUTE_STREAM, number)
        node = None if compute.node is None else compute.node.id
        seen.kernels.append(KernelSeen(compute.start_ns, compute.end_ns, *place, name, 512, 256, False, node))

    def replays(self, step: Step) -> list[tuple[Cell, ...]]:
        """The truth about every kernel that a graph launched in a step, after `observe`."""
        return [self._replay_row(run) for run in step.runs if run.replay is not None and run.launches]

    def _replay_row(self, run: Run) -> tuple[Cell, ...]:
        if run.replay is None or run.node is None or run.captured is None:
            raise AssertionError("a replay has a graph launch, a node and a captured call")
        worker, endpoint = self.cluster.workers[run.rank], run.launch.endpoint
        clock = self.cluster.nodes[worker.node].clock
        start, end = run.start_ns, run.end_ns
        covered = start is not None and end is not None and self._windows.covers(start)
        cut = covered and start is not None and end is not None and self._windows.cuts(start, end)
        return (
            worker.process.host,
            worker.process.pid,
            run.rank,
            endpoint.group.comm_id,
            run.iteration,
            run.captured.launch_id,
            run.replay.replay,
            run.replay.graph,
            run.node.id,
            run.correlation_id,
            run.launch.kernel,
            endpoint.stream_id,
            covered,
            cut,
            covered and (id(run), 0) in self._lost,
            clock.host_ns(start) if start is not None else None,
            clock.host_ns(end) if end is not None else None,
            start,
            end,
            _wait_ns(run),
            run.transfer_ns,
            _busbw(run),
        )

    def _rows(
        self,
        asked: list[_Asked],
        asked_runs: list[Run],
        places: dict[int, tuple[str, int]],
        lost: set[int],
        torn: set[int],
        kernels_lost: set[tuple[int, int]],
        inspected: set[tuple[int, int]],
    ) -> list[tuple[Cell, ...]]:
        rows: list[tuple[Cell, ...]] = []
        first_replays = {id(run.captured): run for run in asked_runs if run.captured is not None}
        for nth, each in enumerate(asked):
            if each.run.calls_launch and each.run.launch_id is None:
                self._launch_ids += 1
                each.run.launch_id = self._launch_ids
            run = first_replays.get(id(each.run), each.run)
            line = places[nth][1] if nth in places else None
            row = self._row(each, run, line, nth in lost, nth in torn, kernels_lost)
            rows.append((*row, (id(each.run), each.nth) in inspected))
        return rows

    def _row(
        self, each: _Asked, run: Run, line: int | None, lost: bool, torn: bool, kernels_lost: set[tuple[int, int]]
    ) -> tuple[Cell, ...]:
        operation, launch_id = each.operation, each.run.launch_id
        launch, endpoint = run.launch, run.launch.endpoint
        worker, group = self.cluster.workers[run.rank], endpoint.group
        clock = self.cluster.nodes[worker.node].clock
        start, end = run.start_ns, run.end_ns
        seen = self._kernels_seen(run)
        recorded = [each.number for each in seen if (id(run), each.nth) not in kernels_lost]
        rooted, peer = operation.op == "Broadcast", not operation.collective
        return (
            worker.process.host,
            worker.process.pid,
            each.tid,
            run.rank,
            worker.local_rank,
            group.comm_id,
            endpoint.comm_ptr,
            endpoint.comm_rank,
            group.size,
            group.parallelism,
            run.iteration,
            operation.op,
            each.op_count,
            each.seq,
            each.coll_seq,
            operation.count,
            operation.logged_dtype,
            operation.red_name,
            operation.root if rooted else None,
            operation.root if peer else None,
            operation.message_bytes,
            each.log,
            line,
            lost,
            torn,
            each.called_ns,
            launch_id,
            launch.kernel if run.launches else None,
            launch.grid if run.launches else None,
            recorded[0] if recorded else None,
            bool(seen and not recorded),
            any(each.is_cut for each in seen),
            bool(seen),
            endpoint.stream_id if run.launches else None,
            clock.host_ns(start) if start is not None else None,
            clock.host_ns(end) if end is not None else None,
            start,
            end,
            end - start if start is not None and end is not None else None,
            _wait_ns(run),
            run.transfer_ns,
            run.modelled_ns,
            _busbw(run),
            each.run.stage is Stage.CAPTURED,
            None if run.node is None else run.node.id,
        )

    def _kernels_seen(self, run: Run) -> list[_Kernel]:
        """The kernels of a run that a capture covers."""
        if not run.launches:
            return []
        return [
            _Kernel(nth, number, begins, ends, self._windows.cuts(begins, ends))
            for nth, ((begins, ends), number) in enumerate(zip(run.spans(), run.correlation_ids, strict=False))
            if self._windows.covers(begins)
        ]

    def plans(self, step: Step) -> list[tuple[Cell, ...]]:
        """The truth about every kernel of the launches of a step that took several, after `observe`."""
        rows: list[tuple[Cell, ...]] = []
        for run in step.runs:
            if not run.plans:
                continue
            worker, endpoint = self.cluster.workers[run.rank], run.launch.endpoint
            clock = self.cluster.nodes[worker.node].clock
            seen = {each.nth: each for each in self._kernels_seen(run)}
            for nth, ((begins, ends), plan) in enumerate(zip(run.spans(), run.plans, strict=False)):
                rows.append(
                    (
                        worker.process.host,
                        worker.process.pid,
                        run.rank,
                        endpoint.group.comm_id,
                        run.iteration,
                        run.launch_id,
                        nth,
                        plan.kernel,
                        plan.grid,
                        run.correlation_ids[nth],
                        endpoint.stream_id,
                        nth in seen,
                        nth in seen and seen[nth].is_cut,
                        nth in seen and (id(run), nth) in self._lost,
                        clock.host_ns(begins),
                        clock.host_ns(ends),
                    )
                )
        return rows

    def _sum_up(self, step: Step, operations: int, lost: int, torn: int) -> None:
        counts = self.tally.counts
        counts["operations"] += operations
        counts["operation_lines_dropped"] += lost
        counts["operation_lines_torn"] += torn
        if step.graph_launches:
            counts["graph_launches"] += len(step.graph_launches)
            counts["replays"] += sum(run.launches and run.replay is not None for run in step.runs)
        counts["launches"] += sum(run.launches for run in step.runs)
        counts["kernels"] += sum(max(1, len(run.plans)) for run in step.runs if run.end_ns is not None)
        ends = [end for end in step.ends_ns if end is not None]
        done = max(ends) if ends and not step.stalled else None
        self.tally.steps.append({"iteration": step.iteration, "begin_ns": min(step.begins_ns), "end_ns": done})
        for run in step.runs:
            value = _busbw(run)
            alone = run.launch.peers or run.launch.endpoint.comm_rank == 0
            if value is not None and alone:
                for op in dict.fromkeys(operation.op for operation in run.launch.operations):
                    self.tally.bandwidth(run.launch.endpoint.group.comm_id, op, run.launch.size_bytes, value)


def _asked(run: Run, operation: Operation, tid: int, at_ns: int, log: str, nth: int) -> _Asked:
    endpoint = run.launch.endpoint
    coll_seq = endpoint.coll_seq if operation.collective else None
    asked = _Asked(run, operation, tid, at_ns, endpoint.op_count, endpoint.seq, coll_seq, log, nth)
    endpoint.seq += 1
    endpoint.coll_seq += operation.collective
    return asked


def _spans(step: Step) -> dict[int, tuple[int, int]]:
    """When the first kernel of each graph launch began and its last one ended, by the launch."""
    spans: dict[int, tuple[int, int]] = {}
    everything: list[Run | ComputeRun] = [*step.runs, *step.computes]
    for run in everything:
        if run.replay is not None and run.start_ns is not None and run.end_ns is not None:
            begins, ends = spans.get(id(run.replay), (run.start_ns, run.end_ns))
            spans[id(run.replay)] = (min(begins, run.start_ns), max(ends, run.end_ns))
    return spans


def _wait_ns(run: Run) -> int | None:
    """What of the kernel's time was waiting for others."""
    if run.start_ns is None or run.end_ns is None or run.transfer_ns is None:
        return None
    return max(0, run.end_ns - run.start_ns - run.transfer_ns)


def _busbw(run: Run) -> float | None:
    if not run.transfer_ns:
        return None
    return run.launch.bus_bytes * 1e9 / run.transfer_ns
