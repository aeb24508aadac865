"""Makes launches of what a rank calls: lines, kernels, channels, pointers and plans as the NCCL version has them.

Launches are made once: a training step repeats itself, buffers included, because the allocator reuses them.
Source: NCCL src/enqueue.cc taskAppend, scheduleCollTasksToPlan, scheduleP2pTasksToPlan, ncclLaunchKernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from ncclscope_simulator import log_lines
from ncclscope_simulator.cluster import stable_hash
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.data_types import DataType, bus_factor, message_bytes
from ncclscope_simulator.groups import Endpoint, Group
from ncclscope_simulator.kernel_names import all_gather_v, kernel_name
from ncclscope_simulator.operations import Launch, Meeting, Operation
from ncclscope_simulator.plans import Plan, capacity, cut, plans_of

_THREADS = {"LL": 512, "LL128": 640, "SIMPLE": 544}
_BYTES_PER_CHANNEL = 128 * 1024
_CHANNELS_IN_NODE = 16
_CHANNELS_BETWEEN_NODES = 8


class Buffers:
    """Device addresses of one rank: each name keeps its address, as with an allocator in a steady loop."""

    def __init__(self, seed: int, rank: int) -> None:
        self._next = 0x7F00_0000_0000 + (stable_hash(seed, "device", rank) % 2**12 << 28)
        self._known: dict[str, str] = {}

    def at(self, name: str, size: int) -> str:
        """The address of a buffer, as a log line prints it."""
        if name not in self._known:
            self._known[name] = f"{self._next:#x}"
            self._next += ceil(size / 0x200000) * 0x200000
        return self._known[name]


@dataclass(slots=True)
class Builder:
    """Makes the templates of one rank."""

    config: SimulationConfig
    rank: int
    endpoints: dict[int, Endpoint]
    buffers: Buffers

    def collective(
        self,
        group: Group,
        op: str,
        *,
        name: str,
        count: int,
        dtype: DataType,
        red: int = 0,
        root: int = 0,
        autograd: bool = False,
    ) -> Launch:
        """An ungrouped collective; `count` as the caller gives it to NCCL's API, `name` names its buffer."""
        endpoint = self.endpoints[group.index]
        operation = self._operation(endpoint, op, name, count, dtype, red, root)
        size = operation.message_bytes
        algorithm = "TREE" if op == "AllReduce" and group.spans_nodes and size < 256 * 1024 else "RING"
        protocol = "LL" if size < 64 * 1024 else "LL128" if size < 1024 * 1024 else "SIMPLE"
        meeting = Meeting.NOBODY if group.size == 1 else Meeting.ROOT if op == "Broadcast" else Meeting.EVERYBODY
        grid = self._channels(group, size)
        return Launch(
            endpoint=endpoint,
            operations=(operation,),
            grouped=False,
            meeting=meeting,
            autograd=autograd,
            kernel=kernel_name(self.config.traits, op, dtype, algorithm, protocol),
            grid=grid,
            block=_THREADS[protocol],
            tunings=self._tunings(endpoint, operation, count * dtype.bytes, algorithm, protocol, grid),
            bus_bytes=size * bus_factor(op, group.size),
            peers=(),
            root=group.members[root] if meeting is Meeting.ROOT else None,
            network=group.spans_nodes,
            size_bytes=size,
        )

    def _tunings(
        self, endpoint: Endpoint, operation: Operation, per_rank: int, algorithm: str, protocol: str, channels: int
    ) -> tuple[str, ...]:
        group, op, size = endpoint.group, operation.op, operation.message_bytes
        if endpoint.comm_rank or group.size == 1 or op == "AlltoAll":
            return ()
        tuning = log_lines.tuning(
            self.config.traits,
            op=op,
            bytes_per_rank=per_rank,
            total_bytes=size,
            algorithm=algorithm,
            protocol=protocol,
            time_us=_model_us(self.config, group, op, size),
            channels=channels,
        )
        return () if tuning is None else (tuning,)

    def coalesced(self, launches: list[Launch]) -> Launch:
        """Collectives of one kind and communicator in one group. Of one, itself in a group of its own."""
        last = launches[-1]
        grid = max(launch.grid for launch in launches)
        sizes = [launch.size_bytes for launch in launches]
        most = capacity(self.config.traits, self.config.work_fifo, grid, "collective")
        return replace(
            last,
            operations=tuple(operation for launch in launches for operation in launch.operations),
            grouped=True,
            grid=grid,
            tunings=tuple(tuning for launch in launches for tuning in launch.tunings),
            bus_bytes=sum(launch.bus_bytes for launch in launches),
            size_bytes=sum(sizes),
            plans=plans_of(cut(sizes, most), last.kernel, grid),
        )

    def broadcasts(self, group: Group, names: list[str], *, count: int, dtype: DataType) -> Launch:
        """Each rank's part of each of these buffers, a Broadcast of it as root, all in one group."""
        launches = [
            self.collective(group, "Broadcast", name=f"{name}.{root}", count=count, dtype=dtype, root=root)
            for name in names
            for root in range(group.size)
        ]
        made = replace(self.coalesced(launches), root=None)
        if group.size == 1:
            return made
        made = replace(made, meeting=Meeting.EVERYBODY)
        if not self.config.traits.all_gather_v:
            return made
        kernel = all_gather_v()
        plans = plans_of([made.size_bytes // len(names)] * len(names), kernel, made.grid)
        return replace(made, kernel=kernel, plans=plans, tunings=())

    def all_to_all(self, group: Group, *, name: str, count: int, dtype: DataType, autograd: bool) -> Launch:
        """An exchange of `count` elements with each peer: AlltoAll from 2.28 on, else Sends and Recvs in one group."""
        if self.config.traits.all_to_all:
            made = self.collective(group, "AlltoAll", name=name, count=count, dtype=dtype, autograd=autograd)
            return replace(made, plans=self._plans_of_exchange(made.kernel, made.grid, group.size, count * dtype.bytes))
        pairs = [(op, peer) for peer in range(group.size) for op in ("Send", "Recv")]
        return self._exchange(group, pairs, name, count, dtype, autograd, Meeting.EVERYBODY)

    def uneven_all_to_all(
        self, group: Group, counts: Mapping[tuple[str, int], int], *, name: str, dtype: DataType, autograd: bool
    ) -> Launch:
        """An exchange of so many elements by (`Send` or `Recv`, peer); where there are none, no operation."""
        pairs = [(op, peer) for peer in range(group.size) for op in ("Send", "Recv") if counts[op, peer]]
        most = max(counts.values())
        return self._exchange(group, pairs, name, most, dtype, autograd, Meeting.EVERYBODY, counts)

    def outside(self, group: Group, *, kernel: str, name: str, count: int, dtype: DataType, autograd: bool) -> Launch:
        """An exchange of as much as `all_to_all`, by a kernel of a library that NCCL knows nothing of."""
        made = self.collective(group, "AlltoAll", name=name, count=count, dtype=dtype, autograd=autograd)
        return replace(made, kernel=kernel.rsplit("::", 1)[-1], tunings=(), outside=kernel)

    def point_to_point(
        self,
        group: Group,
        pairs: list[tuple[str, int]],
        *,
        name: str,
        count: int,
        dtype: DataType,
        autograd: bool = False,
    ) -> Launch:
        """Sends and Recvs, (`Send` or `Recv`, communicator rank of the peer), in one group."""
        return self._exchange(group, pairs, name, count, dtype, autograd, Meeting.PEERS)

    def _exchange(
        self,
        group: Group,
        pairs: list[tuple[str, int]],
        name: str,
        count: int,
        dtype: DataType,
        autograd: bool,
        meeting: Meeting,
        counts: Mapping[tuple[str, int], int] | None = None,
    ) -> Launch:
        """`counts`: elements of each pair, where they differ; `count` is the largest then."""
        endpoint = self.endpoints[group.index]
        each = dict.fromkeys(pairs, count) if counts is None else counts
        operations = tuple(
            self._operation(endpoint, op, f"{name}.{op}.{peer}", each[op, peer], dtype, 0, peer) for op, peer in pairs
        )
        size = count * dtype.bytes
        peers = tuple(
            (group.members[peer], op == "Send", each[op, peer] * dtype.bytes)
            for op, peer in pairs
            if group.members[peer] != self.rank
        )
        sent = sum(each for _, sends, each in peers if sends)
        received = sum(each for _, sends, each in peers if not sends)
        kernel = kernel_name(self.config.traits, "Send", dtype, "RING", "SIMPLE")
        grid = min(8, max(1, len(peers)) * max(1, min(4, ceil(size / _BYTES_PER_CHANNEL))))
        return Launch(
            endpoint=endpoint,
            operations=operations,
            grouped=True,
            meeting=meeting,
            autograd=autograd,
            kernel=kernel,
            grid=grid,
            block=_THREADS["SIMPLE"],
            tunings=(),
            bus_bytes=float(max(sent, received)),
            peers=peers,
            root=None,
            network=any(self._node(peer) != self._node(self.rank) for peer, _, _ in peers),
            size_bytes=size,
            plans=self._plans_of_exchange(kernel, grid, len({peer for _, peer in pairs}), size),
        )

    def _plans_of_exchange(self, kernel: str, grid: int, peers: int, size: int) -> tuple[Plan, ...]:
        most = capacity(self.config.traits, self.config.work_fifo, grid, "exchange")
        return plans_of(cut([size] * peers, most), kernel, grid)

    def _operation(
        self, endpoint: Endpoint, op: str, name: str, count: int, dtype: DataType, red: int, root: int
    ) -> Operation:
        traits, group = self.config.traits, endpoint.group
        in_bytes = traits.bytes_logged and op in {"AllGather", "Broadcast"}
        logged = count * dtype.bytes if in_bytes else count
        dtype_id = 0 if in_bytes else dtype.id
        send, recv = self._pointers(endpoint, op, name, count * dtype.bytes)
        written = {
            "op": op,
            "send": send,
            "recv": recv,
            "count": logged,
            "dtype": dtype_id,
            "red": red,
            "root": root,
            "comm": endpoint.comm_ptr,
            "stream": endpoint.stream_ptr,
        }
        before, after = log_lines.operation_parts(**written, ranks=group.size)  # type: ignore[arg-type]  # one dict for two lines
        return Operation(
            op=op,
            count=logged,
            dtype_id=dtype_id,
            dtype=dtype,
            red=red,
            root=root,
            message_bytes=message_bytes(op, count, dtype.bytes, group.size),
            before_count=before,
            after_count=after,
            call=log_lines.call(**written),  # type: ignore[arg-type]  # as above
        )

    def _pointers(self, endpoint: Endpoint, op: str, name: str, size: int) -> tuple[str, str]:
        ranks = endpoint.group.size
        if op == "Send":
            buffer = self.buffers.at(name, size)
            return (buffer, log_lines.NIL) if self.config.traits.pointer_of_send == "send" else (log_lines.NIL, buffer)
        if op == "Recv":
            return log_lines.NIL, self.buffers.at(name, size)
        if op in {"AllGather", "ReduceScatter", "AlltoAll"} and ranks > 1:
            small, large = self.buffers.at(f"{name}.part", size), self.buffers.at(f"{name}.whole", size * ranks)
            if op == "AlltoAll":
                return self.buffers.at(f"{name}.other", size * ranks), large
            return (small, large) if op == "AllGather" else (large, small)
        buffer = self.buffers.at(name, size)
        return buffer, buffer

    def _channels(self, group: Group, size: int) -> int:
        most = _CHANNELS_BETWEEN_NODES if group.spans_nodes else _CHANNELS_IN_NODE
        return max(1, min(most, ceil(size / _BYTES_PER_CHANNEL)))

    def _node(self, rank: int) -> int:
        return rank // self.config.gpus


def _model_us(config: SimulationConfig, group: Group, op: str, size: int) -> float:
    """NCCL's own estimate, roughly: latency plus size over the modelled bandwidth. Source: src/graph/tuning.cc."""
    busbw = 50.0 if group.spans_nodes else config.traits.nvlink_switch
    latency = 25.0 if group.spans_nodes else 9.0
    return latency + size * bus_factor(op, group.size) / (busbw * 1000.0)
