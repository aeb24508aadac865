"""Dumps of NCCL's Inspector plug-in: what it writes of the kernels that ran, in the format of a chosen version.

Source: NCCL plugins/profiler/inspector/inspector.cc, inspector_json.cc, json.cc; numbers: src/plugin/profiler.cc
ncclProfilerStartTaskEvents; hash of a split: src/init.cc ncclCommInitRankFunc, src/include/utils.h eatHash.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ncclscope_simulator.cluster import Cluster
from ncclscope_simulator.config import INSPECTOR_FORMATS, SimulationConfig
from ncclscope_simulator.data_types import bus_factor, message_bytes
from ncclscope_simulator.groups import Group
from ncclscope_simulator.operations import Operation
from ncclscope_simulator.runs import Run, Step

_DUMP_NS: Final = 100_000_000
"""NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS."""
_LEAST_BYTES: Final = {"v4.0": 0, "v4.2": 8192, "v4.3": 8192}
"""NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, which the first builds do not have."""
_LOWERED: Final = "AlltoAll"
_SEEN_LATE_NS: Final = 4_000
"""The plug-in takes the host's time when NCCL's thread sees that a channel began or ended, so long afterwards at most.
Drawn; how long it is in reality was not measured."""
_CHANNELS: Final = 4
"""That are written of each record at most: the first and the last tell its begin and end."""
_MASK: Final = 2**64 - 1


@dataclass(slots=True)
class Dumped:
    """The lines that a step adds to the dumps, and the operations that they record."""

    lines: dict[str, list[tuple[int, str]]]
    """By file: (reference time at which it is written, line)."""
    written: set[tuple[int, int]]
    """(id of the run, number of the operation in it) that have a record."""


@dataclass(frozen=True, slots=True)
class _Record:
    group: Group
    rank: int
    payload: str


@dataclass(slots=True)
class InspectorDumps:
    """Keeps what NCCL and the plug-in count per rank and communicator."""

    config: SimulationConfig
    cluster: Cluster
    groups: tuple[Group, ...]
    _hashes: dict[int, int] = field(default_factory=dict[int, int])
    _collectives: dict[tuple[int, int, str], int] = field(default_factory=lambda: defaultdict(int))
    """Next coll_sn by rank, group and operation."""
    _pairs: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    """Last p2p_sn by rank and group."""

    def observe(self, step: Step) -> Dumped:
        """The dumps of what a step ran."""
        random = np.random.default_rng([self.config.seed, step.iteration, 7])
        dumps: dict[int, dict[int, list[_Record]]] = defaultdict(lambda: defaultdict(list))
        written: set[tuple[int, int]] = set()
        for run in step.runs:
            if not run.launches or run.launch.outside or run.start_ns is None or run.end_ns is None:
                continue
            due = -(-run.end_ns // _DUMP_NS) * _DUMP_NS
            for nth, operation in enumerate(run.launch.operations):
                records = self._records(run, operation, random)
                if records and random.random() >= self.config.inspector_holes:
                    dumps[run.rank][due].extend(records)
                    written.add((id(run), nth))
        lines: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for rank, by_time in dumps.items():
            process = self.cluster.workers[rank].process
            for due, records in sorted(by_time.items()):
                texts = self._dump(rank, due, records)
                lines[f"inspector/{process.host}-pid{process.pid}.log"].extend((due, text) for text in texts)
        for own in lines.values():
            own.sort(key=lambda line: line[0])
        return Dumped(dict(lines), written)

    def _records(self, run: Run, operation: Operation, random: np.random.Generator) -> list[_Record]:
        group = run.launch.endpoint.group
        times = self._times(run, random) if self.config.inspector_verbose else ""
        microseconds = ((run.end_ns or 0) - (run.start_ns or 0)) // 1000
        size = operation.count * operation.dtype.bytes
        if operation.op == _LOWERED:
            own = run.launch.endpoint.comm_rank
            peers = [peer for peer in range(group.size) if peer != own]
            payloads = [self._pair(run, op, peer, size, microseconds) for peer in peers for op in ("Send", "Recv")]
        elif operation.collective:
            payloads = [self._collective(run, operation, size, microseconds)]
        else:
            payloads = [self._pair(run, operation.op, operation.root, size, microseconds)]
        return [_Record(group, run.rank, f"{payload[:-1]}{times}}}") for payload in payloads if payload is not None]

    def _times(self, run: Run, random: np.random.Generator) -> str:
        """When the call was made and each channel began and ended, as the plug-in saw it by the host's clock."""
        clock = self.cluster.nodes[self.cluster.workers[run.rank].node].clock
        channels = max(1, min(run.launch.grid, _CHANNELS))
        seen = random.integers(0, _SEEN_LATE_NS, (2, channels), endpoint=True).tolist()
        kind = "coll" if run.launch.operations[0].collective else "p2p"

        def at_us(reference_ns: int) -> int:
            return clock.host_ns(reference_ns) // 1000

        events = ",".join(
            f'{{"channel_id":{channel},"kernel_start_ts":{at_us((run.start_ns or 0) + began)},'
            f'"kernel_stop_ts":{at_us((run.end_ns or 0) + ended)}}}'
            for channel, (began, ended) in enumerate(zip(*seen, strict=True))
        )
        return (
            f',"event_trace_ts":{{"{kind}_start_ts":{at_us(run.call_ns)},"{kind}_stop_ts":{at_us(run.end_ns or 0)},'
            f'"kernel_events":[{events}]}}'
        )

    def _collective(self, run: Run, operation: Operation, size: int, microseconds: int) -> str | None:
        group, op = run.launch.endpoint.group, operation.op
        key = (run.rank, group.index, op)
        number = self._collectives[key]
        self._collectives[key] += 1
        if size < _LEAST_BYTES[self._format]:
            return None
        total = message_bytes(op, operation.count, operation.dtype.bytes, group.size)
        rate = total / 1e3 / microseconds if microseconds else 0.0
        chosen = '"coll_algo":"RING","coll_proto":"SIMPLE",' if self._format != "v4.0" else ""
        return (
            f'"coll_perf":{{"coll":"{op}",{chosen}"coll_sn":{number},"coll_msg_size_bytes":{size},'
            f'"coll_exec_time_us":{microseconds},"coll_timing_source":"kernel_gpu","coll_algobw_gbs":{rate:f},'
            f'"coll_busbw_gbs":{rate * bus_factor(op, group.size):f}}}'
        )

    def _pair(self, run: Run, op: str, peer: int, size: int, microseconds: int) -> str | None:
        if size < _LEAST_BYTES[self._format]:
            return None
        key = (run.rank, run.launch.endpoint.group.index)
        self._pairs[key] += 1
        rate = size / 1e3 / microseconds if microseconds else 0.0
        return (
            f'"p2p_perf":{{"p2p":"{op}","p2p_sn":{self._pairs[key]},"p2p_peer":{peer},"p2p_msg_size_bytes":{size},'
            f'"p2p_exec_time_us":{microseconds},"p2p_timing_source":"kernel_gpu","p2p_algobw_gbs":{rate:f},'
            f'"p2p_busbw_gbs":{rate:f}}}'
        )

    @property
    def _format(self) -> str:
        return self.config.inspector or INSPECTOR_FORMATS[0]

    def _dump(self, rank: int, due: int, records: list[_Record]) -> list[str]:
        """The lines of one dump of a rank: communicator by communicator."""
        by_group: dict[int, list[_Record]] = defaultdict(list)
        for record in records:
            by_group[record.group.index].append(record)
        metadata = self._metadata(rank, due)
        lines: list[str] = []
        for own in by_group.values():
            about = f"{self._header(own[0].group, rank)},{metadata}"
            payloads = sorted((record.payload for record in own), key=lambda text: text.startswith('"p2p'))
            if self._format != "v4.0":
                pairs = sum(payload.startswith('"p2p') for payload in payloads)
                lines.append(f"{{{about},{_statistics(len(payloads) - pairs, pairs)}}}")
            context = "" if self._format == "v4.3" else f"{about},"
            lines.extend(f"{{{context}{payload}}}" for payload in payloads)
        return lines

    def _header(self, group: Group, rank: int) -> str:
        named = "" if self._format == "v4.0" else f'"comm_name":{json.dumps(group.parallelism)},'
        place = group.members.index(rank)
        return (
            f'"header":{{"id":"{self._hash(group):#x}",{named}"rank":{place},"n_ranks":{group.size},'
            f'"nnodes":{len(group.nodes)}}}'
        )

    def _metadata(self, rank: int, due: int) -> str:
        worker = self.cluster.workers[rank]
        at_us = self.cluster.nodes[worker.node].clock.host_ns(due) // 1000
        return (
            f'"metadata":{{"inspector_output_format_version":"{self._format}","git_rev":"","rec_mechanism":'
            f'"nccl_profiler_interface","dump_timestamp_us":{at_us},"hostname":"{worker.process.host}",'
            f'"pid":{worker.process.pid}}}'
        )

    def _hash(self, group: Group) -> int:
        if group.index not in self._hashes:
            if group.comm_hash is not None:
                self._hashes[group.index] = group.comm_hash
            else:
                parent = self._hash(self.groups[group.parent or 0])
                numbers = ((parent, 8), (group.split_count or 0, 4), (group.color or 0, 4))
                self._hashes[group.index] = _hash_of(numbers)
        return self._hashes[group.index]


def _statistics(collectives: int, pairs: int) -> str:
    return (
        f'"dump_stats":{{"coll_records":{collectives},"coll_dropped_total":0,"coll_dropped_since_last_dump":0,'
        f'"p2p_records":{pairs},"p2p_dropped_total":0,"p2p_dropped_since_last_dump":0}}'
    )


def _hash_of(numbers: tuple[tuple[int, int], ...]) -> int:
    """NCCL's hash of (number, its size in bytes), one after the other."""
    one = two = 1
    for number, size in numbers:
        one ^= size
        one = (one + two) & _MASK
        two ^= one
        one ^= one >> 31
        one = one * 0x9DE62BBC8CEF3CE3 & _MASK
        two ^= two >> 32
        two = two * 0x485CD6311B599E79 & _MASK
        one = (one + number) & _MASK
    one ^= one >> 31
    one = (one * 0xBAC3BD562846DE6B + two) & _MASK
    one ^= one >> 32
    return one * 0x995A187A14E7B445 & _MASK
