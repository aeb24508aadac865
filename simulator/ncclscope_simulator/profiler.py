"""The events that nsys records of a step on each node: launch calls, kernels, graph launches and NVTX ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ncclscope_simulator.capture import ApiSeen, Capture, GraphSeen, KernelSeen, RangeSeen
from ncclscope_simulator.cluster import Cluster
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.graphs import GRAPH_LAUNCH_API, GraphLaunch, Stage
from ncclscope_simulator.groups import Endpoint
from ncclscope_simulator.nvtx_payload import WITH_HASH, member_payload, nccl_domain, payload
from ncclscope_simulator.operations import Operation
from ncclscope_simulator.runs import PLAN_NS, ComputeRun, Run, Step
from ncclscope_simulator.version import Traits

COMPUTE_KERNELS: Final = {
    "gemm_forward": "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn",
    "gemm_backward": "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nt",
}
_COMPUTE_API: Final = "cudaLaunchKernel_v7000"
COMPUTE_API_NS: Final = 4_000
COMPUTE_STREAM: Final = 7


class Profiler:
    """Puts what it sees of each step into the captures of the nodes."""

    def __init__(self, config: SimulationConfig, cluster: Cluster, captures: list[Capture]) -> None:
        self._config, self._cluster, self._captures = config, cluster, captures
        self._traces_nodes = config.cuda_graph_trace == "node"
        """Whether kernels of graphs are recorded, in place of each graph launch as a whole."""

    def observe(self, step: Step) -> None:
        """Sees a step whose launches have their correlation ids."""
        for run in step.runs:
            if run.stage is not Stage.REPLAYED:
                self._see_call(run)
            if run.launches and self._shows(run):
                self._captures[self._node(run.rank)].kernels.extend(nccl_kernels(run))
        for compute in step.computes:
            if self._shows(compute):
                self._see_compute(compute)
        self._see_graph_launches(step)
        if self._config.nvtx:
            self._see_iteration(step)

    def see_communicators(
        self, function: str, endpoints: Sequence[Mapping[int, Endpoint]], at_ns: Sequence[int]
    ) -> None:
        """Sees all ranks make (`ncclCommInitRankConfig`) or destroy their communicators, each group at its time.

        Only NCCL's payloads tell which, so without them nothing is seen.
        """
        config = self._config
        if not config.nvtx or not config.nvtx_payload or config.traits.version < WITH_HASH:
            return
        for worker, own in zip(self._cluster.workers, endpoints, strict=True):
            for index, endpoint in own.items():
                parent = own.get(-1 if endpoint.group.parent is None else endpoint.group.parent)
                name = "ncclCommSplit" if parent is not None and function == "ncclCommInitRankConfig" else function
                content = member_payload(
                    name,
                    endpoint.group,
                    endpoint.comm_rank,
                    parent,
                    worker.local_rank,
                    seed=config.seed,
                    domain=nccl_domain(worker.process.pid),
                )
                begins = at_ns[index] + 7_000 * worker.rank
                self._captures[worker.node].ranges.append(
                    RangeSeen(begins, begins + 5_000_000, worker.rank, worker.main_tid, name, True, content)
                )

    def _node(self, rank: int) -> int:
        return self._cluster.workers[rank].node

    def _shows(self, run: Run | ComputeRun) -> bool:
        return run.replay is None or self._traces_nodes

    def _see_call(self, run: Run) -> None:
        worker = self._cluster.workers[run.rank]
        seen, tid = self._captures[worker.node], worker.calling_tid(autograd=run.launch.autograd)
        if self._config.nvtx and not run.launch.outside:
            seen.ranges.extend(self._nccl_ranges(run, tid))
        if run.calls_launch:
            seen.apis.extend(launch_calls(run, tid, self._config.traits))

    def _nccl_ranges(self, run: Run, tid: int) -> Iterator[RangeSeen]:
        """NCCL's NVTX ranges: one per API call; the launch lies in the call itself, of a group in ncclGroupEnd."""
        launch, rank = run.launch, run.rank
        over = run.api_end_ns + 1_000
        if not launch.grouped:
            yield self._call_range(run, launch.operations[0], run.call_ns - 1_500, over, tid)
            return
        nested = self._config.traits.nested_p2p_groups
        yield RangeSeen(run.call_ns - 2_000, run.call_ns - 1_200, rank, tid, "ncclGroupStart", True)
        for nth, operation in enumerate(launch.operations):
            at = run.called_ns(nth)
            yield self._call_range(run, operation, at - 800, at + 900, tid)
            if nested and not operation.collective:
                yield RangeSeen(at - 500, at - 300, rank, tid, "ncclGroupStart", True)
                yield RangeSeen(at + 500, at + 700, rank, tid, "ncclGroupEnd", True)
        yield RangeSeen(run.group_end_ns, over, rank, tid, "ncclGroupEnd", True)

    def _call_range(self, run: Run, operation: Operation, begin_ns: int, end_ns: int, tid: int) -> RangeSeen:
        content = None
        if self._config.nvtx_payload:
            content = payload(
                operation,
                run.launch.endpoint.group,
                version=self._config.traits.version,
                seed=self._config.seed,
                domain=nccl_domain(self._cluster.workers[run.rank].process.pid),
            )
        return RangeSeen(begin_ns, end_ns, run.rank, tid, f"nccl{operation.op}", True, content)

    def _see_compute(self, compute: ComputeRun) -> None:
        worker = self._cluster.workers[compute.rank]
        seen, rank, number = self._captures[worker.node], compute.rank, compute.correlation_id
        if compute.replay is None:
            tid = worker.calling_tid(autograd=compute.autograd)
            called, over = compute.api_start_ns, compute.api_start_ns + COMPUTE_API_NS
            seen.apis.append(ApiSeen(called, over, rank, tid, number, _COMPUTE_API, 0))
        name, node = COMPUTE_KERNELS[compute.kernel], None if compute.node is None else compute.node.id
        place = (rank, COMPUTE_STREAM, number)
        seen.kernels.append(KernelSeen(compute.start_ns, compute.end_ns, *place, name, 512, 256, False, node))

    def _see_graph_launches(self, step: Step) -> None:
        spans = _graph_spans(step)
        for launched in step.graph_launches:
            worker = self._cluster.workers[launched.rank]
            seen, rank, number = self._captures[worker.node], launched.rank, launched.correlation_id
            called, over = launched.api_start_ns, launched.api_end_ns
            seen.apis.append(ApiSeen(called, over, rank, worker.main_tid, number, GRAPH_LAUNCH_API, 0))
            if not self._traces_nodes and launched in spans:
                seen.graphs.append(GraphSeen(*spans[launched], rank, COMPUTE_STREAM, number, launched.graph))

    def _see_iteration(self, step: Step) -> None:
        text = f"iteration {step.iteration}"
        for worker, begins, ends in zip(self._cluster.workers, step.begins_ns, step.ends_ns, strict=True):
            seen = RangeSeen(begins, ends, worker.rank, worker.main_tid, text, False)
            self._captures[worker.node].ranges.append(seen)


def launch_calls(run: Run, tid: int, version: Traits) -> Iterator[ApiSeen]:
    """The launch calls of a run, one per kernel."""
    last = len(run.correlation_ids) - 1
    for nth, number in enumerate(run.correlation_ids):
        begins = run.launched_ns(nth)
        ends = run.api_end_ns if nth == last else begins + PLAN_NS - 1_000
        yield ApiSeen(begins, ends, run.rank, tid, number, version.launch_api, version.launch_event_class)


def nccl_kernels(run: Run) -> Iterator[KernelSeen]:
    """The kernels of a run that the profiler does not lose."""
    launch, node = run.launch, None if run.node is None else run.node.id
    for nth, ((begins, ends), number) in enumerate(zip(run.spans(), run.correlation_ids, strict=False)):
        if nth not in run.unrecorded:
            name, grid = (run.plans[nth].kernel, run.plans[nth].grid) if run.plans else (launch.kernel, launch.grid)
            place = (run.rank, launch.endpoint.stream_id, number)
            nccl = not launch.outside
            yield KernelSeen(begins, ends, *place, name, grid, launch.block, nccl, node, launch.outside)


def _graph_spans(step: Step) -> dict[GraphLaunch, tuple[int, int]]:
    """When the first kernel of each graph launch began and its last one ended."""
    spans: dict[GraphLaunch, tuple[int, int]] = {}
    for run in step.everything:
        if run.replay is not None and run.start_ns is not None and run.end_ns is not None:
            begins, ends = spans.get(run.replay, (run.start_ns, run.end_ns))
            spans[run.replay] = (min(begins, run.start_ns), max(ends, run.end_ns))
    return spans
