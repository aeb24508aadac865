"""One rank of a small training job with the communication of a large one: `python -m benchmarks.real_run.workload`.

Tensor parallelism with sequence parallelism (AllReduce, AllGather, ReduceScatter), pipeline stages (Sends and Recvs,
grouped and alone), experts (all-to-all), sharded and plain data parallelism (coalesced AllGathers, ReduceScatter,
AllReduce), control (one element, Broadcast, barrier), and with `--graph` an AllReduce replayed from a CUDA graph.

Needs PyTorch and the variables that `torchrun` sets (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); all ranks use GPU 0.
Prints one line of JSON: steps and the seconds they took, without those of the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

HIDDEN = 1024
TOKENS = 512


class Job:
    """Groups and buffers of a rank, and its steps."""

    def __init__(self, *, cpu: bool, graph: bool) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cpu" if cpu else "cuda:0")
        kind = torch.float32 if cpu else torch.bfloat16
        half = self.world // 2
        pairs = [[first, first + 1] for first in range(0, self.world, 2)]
        self.tensor = self._mine(pairs, "TENSOR_MODEL_PARALLEL_GROUP")
        self.pipeline = self._mine([[rank, rank + half] for rank in range(half)], "PIPELINE_MODEL_PARALLEL_GROUP")
        self.data = self._mine([list(range(side, self.world, 2)) for side in (0, 1)], "DATA_PARALLEL_GROUP")
        self.experts = self._mine([list(range(self.world))], "EXPERT_MODEL_PARALLEL_GROUP")
        self.peer = (self.rank + half) % self.world
        self.first_stage = self.rank < half
        shards = dist.get_world_size(self.data)
        self.weight = torch.randn(HIDDEN, HIDDEN, device=self.device, dtype=kind)
        self.activation = torch.randn(TOKENS, HIDDEN, device=self.device, dtype=kind)
        self.shard = torch.empty(TOKENS // 2, HIDDEN, device=self.device, dtype=kind)
        self.received = torch.empty_like(self.activation)
        self.tokens = torch.randn(TOKENS * self.world, 64, device=self.device, dtype=kind)
        self.routed = torch.empty_like(self.tokens)
        self.gradient = torch.randn(1 << 20, device=self.device, dtype=torch.float32)
        self.layers = [torch.randn((1 << 16) // shards, device=self.device, dtype=kind) for _ in range(3)]
        self.whole = [torch.empty(1 << 16, device=self.device, dtype=kind) for _ in range(3)]
        self.reduced = torch.empty((1 << 20) // shards, device=self.device, dtype=torch.float32)
        self.flag = torch.zeros(1, device=self.device)
        self.cpu = cpu
        self.graph = self._captured() if graph else None

    def _mine(self, groups: list[list[int]], name: str) -> dist.ProcessGroup:
        """The group of these that this rank is in; all ranks make all of them, in one order."""
        made = [dist.new_group(ranks, group_desc=name) for ranks in groups]
        return next(group for group, ranks in zip(made, groups, strict=True) if self.rank in ranks)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """A graph of one AllReduce of the tensor-parallel group: one log line, a kernel at each replay."""
        dist.all_reduce(self.activation, group=self.tensor)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dist.all_reduce(self.activation, group=self.tensor)
        return graph

    def step(self, number: int, late_ms: float) -> None:
        """One step: two micro-batches, experts, gradients, control."""
        for _ in range(2):
            self._micro_batch(late_ms)
        dist.all_to_all_single(self.routed, self.tokens, group=self.experts)
        self._gradients()
        dist.all_reduce(self.flag)
        if self.graph is not None:
            self.graph.replay()
        if number % 10 == 0:
            dist.broadcast(self.flag, src=0)
            dist.barrier()
        self.synchronize()

    def _micro_batch(self, late_ms: float) -> None:
        for _ in range(4):
            self.activation = torch.tanh(self.activation @ self.weight)
        if late_ms:
            self.synchronize()
            time.sleep(late_ms / 1_000)
        dist.reduce_scatter_tensor(self.shard, self.activation, group=self.tensor)
        dist.all_gather_into_tensor(self.received, self.shard, group=self.tensor)
        dist.all_reduce(self.activation, group=self.tensor)
        both = [
            dist.P2POp(dist.isend, self.activation, self.peer, self.pipeline),
            dist.P2POp(dist.irecv, self.received, self.peer, self.pipeline),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if self.first_stage:
            dist.send(self.shard, self.peer, self.pipeline)
        else:
            dist.recv(self.shard, self.peer, self.pipeline)

    def _gradients(self) -> None:
        if self.cpu:  # gloo cannot coalesce these
            for whole, mine in zip(self.whole, self.layers, strict=True):
                dist.all_gather_into_tensor(whole, mine, group=self.data)
        else:
            with dist._coalescing_manager(group=self.data, device=self.device, async_ops=False):
                for whole, mine in zip(self.whole, self.layers, strict=True):
                    dist.all_gather_into_tensor(whole, mine, group=self.data)
        dist.reduce_scatter_tensor(self.reduced, self.gradient, group=self.data)
        dist.all_reduce(self.gradient, group=self.data)

    def synchronize(self) -> None:
        """Waits until the GPU has done everything."""
        if not self.cpu:
            torch.cuda.synchronize()


def die(number: int, at: int | None) -> None:
    """Kills this process without a word if this is the step for it."""
    if number == at:
        os.kill(os.getpid(), signal.SIGKILL)


def stall(number: int, at: int | None) -> None:
    """Calls nothing more if this is the step for it, as a rank whose data loader hangs."""
    if number == at:
        time.sleep(600)


def time_calls(calls: int) -> float:
    """Seconds that `calls` AllReduces of one rank alone take: the host's time, since they launch nothing."""
    tensor = torch.zeros(1024, device="cuda")
    start_ns = 0
    for number in range(calls + 1_000):
        if number == 1_000:
            start_ns = time.monotonic_ns()
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return (time.monotonic_ns() - start_ns) / 1e9


def ask_ras(answer: Path) -> None:
    """Writes what NCCL's RAS says of the job, in text and, where the version has it, in JSON."""
    for name, command in (("text", b"VERBOSE STATUS\n"), ("json", b"SET FORMAT json\nVERBOSE STATUS\n")):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 28028), timeout=2) as connection:
            connection.settimeout(2)
            connection.sendall(b"CLIENT PROTOCOL 2\n" + command)
            connection.shutdown(socket.SHUT_WR)
            answer.with_suffix(f".{name}.txt").write_bytes(b"".join(iter(lambda: connection.recv(65_536), b"")))


def main() -> None:
    """Runs the steps, or the calls of one rank alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--trace", type=Path, help="folder for traces of the profiler, of all steps to the end")
    parser.add_argument(
        "--late", type=float, default=0.0, help="milliseconds that this rank is late in each micro-batch"
    )
    parser.add_argument("--die-at", type=int, help="step at which this rank kills itself")
    parser.add_argument("--stall-at", type=int, help="step at which this rank sleeps for ten minutes")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that PyTorch's watchdog waits")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="gloo on CPU: to try this script where no GPU is")
    parser.add_argument("--dump", type=Path, help="folder for the Flight Recorder and the answers of NCCL's RAS")
    parser.add_argument("--calls", type=int, help="time so many calls of one rank alone instead")
    options = parser.parse_args()
    timeout = datetime.timedelta(seconds=options.timeout)
    if options.cpu:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", device_id=torch.device("cuda:0"), timeout=timeout)
    if options.calls is not None:
        with profiler(options.trace, 0) if options.trace else contextlib.nullcontext():
            seconds = time_calls(options.calls)
        print(json.dumps({"rank": 0, "calls": options.calls, "seconds": seconds}), flush=True)
        dist.destroy_process_group()
        return
    job = Job(cpu=options.cpu, graph=options.graph)
    for number in range(options.warm_up):
        job.step(number, 0.0)
    with profiler(options.trace, job.rank) if options.trace else contextlib.nullcontext() as watched:
        start_ns = time.monotonic_ns()
        for number in range(options.steps):
            die(number, options.die_at)
            stall(number, options.stall_at)
            if number == 5 and job.rank == 0 and options.dump is not None:
                ask_ras(options.dump / "ras")
            job.step(number, options.late)
            if watched is not None:
                watched.step()
        seconds = (time.monotonic_ns() - start_ns) / 1e9
    print(json.dumps({"rank": job.rank, "steps": options.steps, "seconds": seconds}), flush=True)
    if options.dump is not None and not options.cpu:
        (options.dump / f"nccl_trace_rank_{job.rank}").write_bytes(torch._C._distributed_c10d._dump_nccl_trace())
    dist.destroy_process_group()


def profiler(folder: Path, rank: int) -> torch.profiler.profile:
    """A profiler of CPU and GPU that writes one trace, named as PyTorch's own handler names it."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{socket.gethostname()}_{os.getpid()}.rank{rank}.pt.trace.json"
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
        on_trace_ready=lambda done: done.export_chrome_trace(str(folder / name)),
    )


if __name__ == "__main__":
    main()
