"""One rank that calls NCCL itself, for any version of the library: `python -m benchmarks.real_run.direct --library SO`.

PyTorch loads the one NCCL that it was built with. Here the library is opened by its path: communicators are made by
splits, and calls are alone, several in a group, sends and receives, and with `--graph` replayed from a CUDA graph.
PyTorch gives the memory, the streams and the profiler. With `--trace` each call or group of calls stands in the trace
as `direct:RANKS:FIRST:COUNT`: the ranks of its communicator, and which of its calls, counted from 0.

Needs what `workload` needs, and prints what it prints.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from benchmarks.real_run.workload import die, profiler

_FLOAT32: Final = 7
_BFLOAT16: Final = 9
_SUM: Final = 0
_KEPT_APART: Final = os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND
"""PyTorch's own NCCL is in the process too: neither may call the other's functions."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class Nccl:
    """The functions of one libnccl.so.2 that are used here; all raise `RuntimeError` with the function's name."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=_KEPT_APART)

    def call(self, name: str, *arguments: object) -> None:
        """Calls `name`, which gives an `ncclResult_t`."""
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} gave {result}: see NCCL's log")

    def version(self) -> str:
        """As 2.27.5."""
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"

    def unique_id(self) -> bytes:
        """A new one, for all ranks of one communicator."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def communicator(self, unique_id: bytes, rank: int, size: int) -> ctypes.c_void_p:
        """One communicator of `size` ranks."""
        made = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(made), size, _UniqueId.from_buffer_copy(unique_id), rank)
        return made

    def split(self, parent: ctypes.c_void_p, color: int, key: int) -> ctypes.c_void_p:
        """A part of a communicator: of the ranks that give one color."""
        made = ctypes.c_void_p()
        self.call("ncclCommSplit", parent, color, key, ctypes.byref(made), None)
        return made


class Group:
    """One communicator with the ranks in it, and its calls so far."""

    def __init__(self, nccl: Nccl, communicator: ctypes.c_void_p, ranks: list[int], stream: torch.cuda.Stream) -> None:
        self.ranks = ranks
        self._nccl, self._communicator = nccl, communicator
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self._calls = Counter[str]()

    @contextmanager
    def noted(self, count: int = 1) -> Iterator[None]:
        """Names the next calls in the profiler's trace; more than one are a group of NCCL."""
        label = ",".join(str(rank) for rank in self.ranks)
        with torch.profiler.record_function(f"direct:{label}:{self._calls['all']}:{count}"):
            if count > 1:
                self._nccl.call("ncclGroupStart")
            yield
            if count > 1:
                self._nccl.call("ncclGroupEnd")
        self._calls["all"] += count

    def reduce(self, name: str, output: torch.Tensor, tensor: torch.Tensor, count: int) -> None:
        """`ncclAllReduce` or `ncclReduceScatter`, which differ in what `count` counts."""
        self._nccl.call(
            name, _at(tensor), _at(output), _size(count), _kind(tensor), _SUM, self._communicator, self._stream
        )

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """`ncclAllGather` of all of `tensor`."""
        self._nccl.call(
            "ncclAllGather",
            _at(tensor),
            _at(output),
            _size(tensor.numel()),
            _kind(tensor),
            self._communicator,
            self._stream,
        )

    def broadcast(self, tensor: torch.Tensor) -> None:
        """`ncclBroadcast` in place, from the first rank."""
        size = _size(tensor.numel())
        self._nccl.call(
            "ncclBroadcast", _at(tensor), _at(tensor), size, _kind(tensor), 0, self._communicator, self._stream
        )

    def exchange(self, name: str, tensor: torch.Tensor, peer: int) -> None:
        """`ncclSend` or `ncclRecv` of all of `tensor`; `peer` counts within the communicator."""
        size = _size(tensor.numel())
        self._nccl.call(name, _at(tensor), size, _kind(tensor), peer, self._communicator, self._stream)


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


def _kind(tensor: torch.Tensor) -> int:
    return _FLOAT32 if tensor.dtype == torch.float32 else _BFLOAT16


class Job:
    """Groups and buffers of a rank, and its steps: tensor, pipeline and data parallelism of a world of 2, 4 or 8."""

    def __init__(self, nccl: Nccl, store: dist.Store, rank: int, world: int) -> None:
        if rank == 0:
            store.set("id", nccl.unique_id())
        self.stream = torch.cuda.Stream()
        all_ranks = nccl.communicator(store.get("id"), rank, world)
        half = max(world // 2, 1)
        self.world = Group(nccl, all_ranks, list(range(world)), self.stream)
        first = rank // 2 * 2
        self.tensor = Group(nccl, nccl.split(all_ranks, rank // 2, rank), [first, first + 1], self.stream)
        self.pipeline = Group(
            nccl, nccl.split(all_ranks, rank % half, rank), [rank % half, rank % half + half], self.stream
        )
        self.data = Group(nccl, nccl.split(all_ranks, rank % 2, rank), list(range(rank % 2, world, 2)), self.stream)
        self.is_first_stage = rank < half
        self.activation = torch.zeros(512 * 1024, device="cuda", dtype=torch.bfloat16)
        self.received = torch.zeros_like(self.activation)
        self.shard = torch.zeros(256 * 1024, device="cuda", dtype=torch.bfloat16)
        self.gradient = torch.zeros(1 << 20, device="cuda")
        self.layers = [torch.zeros((1 << 18) // len(self.data.ranks), device="cuda") for _ in range(3)]
        self.whole = torch.zeros(1 << 18, device="cuda")
        self.flag = torch.zeros(1, device="cuda")
        self.graph: torch.cuda.CUDAGraph | None = None

    def record_graph(self) -> None:
        """Records a graph of two AllReduces of the tensor-parallel group, which each step then replays."""
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(2):
                with self.tensor.noted():
                    self.tensor.reduce("ncclAllReduce", self.activation, self.activation, self.activation.numel())

    def step(self, number: int, late_ms: float) -> None:
        """One step: two micro-batches, gradients, control."""
        for _ in range(2):
            self._micro_batch(late_ms)
        with self.data.noted(len(self.layers)):
            for layer in self.layers:
                self.data.all_gather(self.whole, layer)
        with self.data.noted():
            self.data.reduce("ncclAllReduce", self.gradient, self.gradient, self.gradient.numel())
        with self.world.noted():
            self.world.reduce("ncclAllReduce", self.flag, self.flag, 1)
        if self.graph is not None:
            with torch.cuda.stream(self.stream):
                self.graph.replay()
        if number % 10 == 0:
            with self.world.noted():
                self.world.broadcast(self.flag)
        torch.cuda.synchronize()

    def _micro_batch(self, late_ms: float) -> None:
        if late_ms:
            torch.cuda.synchronize()
            time.sleep(late_ms / 1_000)
        with self.tensor.noted():
            self.tensor.reduce("ncclReduceScatter", self.shard, self.activation, self.shard.numel())
        with self.tensor.noted():
            self.tensor.all_gather(self.received, self.shard)
        with self.tensor.noted():
            self.tensor.reduce("ncclAllReduce", self.activation, self.activation, self.activation.numel())
        peer = 1 if self.is_first_stage else 0
        with self.pipeline.noted(2):
            self.pipeline.exchange("ncclSend", self.activation, peer)
            self.pipeline.exchange("ncclRecv", self.received, peer)
        with self.pipeline.noted():
            self.pipeline.exchange("ncclSend" if self.is_first_stage else "ncclRecv", self.shard, peer)


def time_calls(nccl: Nccl, calls: int) -> float:
    """Seconds that `calls` AllReduces of a communicator of one rank take; they launch nothing."""
    stream = torch.cuda.Stream()
    group = Group(nccl, nccl.communicator(nccl.unique_id(), 0, 1), [0], stream)
    tensor = torch.zeros(1024, device="cuda")
    start_ns = 0
    for number in range(calls + 1_000):
        if number == 1_000:
            start_ns = time.monotonic_ns()
        group.reduce("ncclAllReduce", tensor, tensor, 1024)
    torch.cuda.synchronize()
    return (time.monotonic_ns() - start_ns) / 1e9


def main() -> None:
    """Runs the steps, or the calls of one rank alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--calls", type=int, help="time so many calls of one rank alone instead")
    options = parser.parse_args()
    torch.cuda.set_device(0)
    nccl = Nccl(options.library)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.calls is not None:
        seconds = time_calls(nccl, options.calls)
        print(json.dumps({"rank": rank, "calls": options.calls, "seconds": seconds}), flush=True)
        return
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=rank == 0)
    job = Job(nccl, store, rank, world)
    for number in range(options.warm_up):
        job.step(number, 0.0)
    if options.graph:
        job.record_graph()
    with profiler(options.trace, rank) if options.trace else nullcontext() as watched:
        start_ns = time.monotonic_ns()
        for number in range(options.steps):
            die(number, options.die_at)
            job.step(number, options.late)
            if watched is not None:
                watched.step()
        seconds = (time.monotonic_ns() - start_ns) / 1e9
    print(json.dumps({"rank": rank, "steps": options.steps, "seconds": seconds}), flush=True)
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world:  # it holds the store that the others ask
        time.sleep(0.01)


if __name__ == "__main__":
    main()
