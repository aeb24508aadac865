"""Writes what a node's profiler saw as an SQLite export of nsys, under a temporary name, and renames it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ncclscope_simulator.capture import Capture, GraphSeen, KernelSeen, RangeSeen
from ncclscope_simulator.cluster import Cluster, Node, bus_id, stable_hash
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.groups import Endpoint
from ncclscope_simulator.kernel_names import demangled_name
from ncclscope_simulator.nvtx_payload import nccl_domain
from ncclscope_simulator.schema import Schema, schema_of

_VM: Final = 1 << 48
_PUSH_POP: Final = 59
_DOMAIN_CREATE: Final = 75
_DEFAULT_DOMAIN: Final = 0
_NO_PROCESS: Final = -144115188075855872
"""The pseudo process 0xFE00000000000000 of diagnostics, as SQLite shows it."""

Value = int | str | float | bytes | None


def global_pid(pid: int) -> int:
    """nsys's process id: VM 1, bits 24 to 47 the pid."""
    return _VM | pid << 24


def global_tid(pid: int, tid: int) -> int:
    """nsys's thread id: as `global_pid`, bits 0 to 23 the tid."""
    return global_pid(pid) | tid


@dataclass(slots=True)
class _Strings:
    ids: dict[str, int] = field(default_factory=dict[str, int])

    def id(self, text: str) -> int:
        return self.ids.setdefault(text, len(self.ids) + 1)


@dataclass(slots=True)
class ExportWriter:
    """Writes the exports of one node."""

    config: SimulationConfig
    cluster: Cluster
    node: Node
    endpoints: list[dict[int, Endpoint]]
    nccl_since_ns: int
    """Reference time at which NCCL registered its NVTX domain."""

    def write(self, path: Path, seen: Capture, begins_ns: int, ends_ns: int) -> int:
        """Writes one export and gives the number of kernel rows. Times count from its begin on the host's clock."""
        schema = schema_of(self.config.nsys)
        host = self.node.clock.host_ns
        chunk = _Chunk(self, schema, host(begins_ns), host(ends_ns) - host(begins_ns), ends_ns)
        rows = chunk.rows(seen)
        temporary = path.with_name(path.name + ".tmp")
        temporary.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = OFF")
            database.execute("PRAGMA synchronous = OFF")
            database.execute("BEGIN")
            for table, columns in schema.tables.items():
                if rows[table]:
                    database.execute(f"CREATE TABLE {table} ({columns})")
                    marks = ", ".join("?" * len(rows[table][0]))
                    database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows[table])
            database.execute(f"CREATE TABLE {schema.meta_table} (name TEXT NOT NULL, value TEXT)")
            database.executemany(f"INSERT INTO {schema.meta_table} VALUES (?, ?)", chunk.meta(path))
            database.execute("COMMIT")
        temporary.replace(path)
        return len(seen.kernels)


@dataclass(slots=True)
class _Chunk:
    writer: ExportWriter
    schema: Schema
    utc_ns: int
    duration_ns: int
    ends_true_ns: int
    strings: _Strings = field(default_factory=_Strings)

    def rows(self, seen: Capture) -> dict[str, list[tuple[Value, ...]]]:
        """Rows of every table, empty for tables that a lazy export leaves out."""
        rows: dict[str, list[tuple[Value, ...]]] = {
            "TARGET_INFO_SYSTEM_ENV": [
                (_VM, "Local (CLI)", "Hostname", 619, f"{self.writer.node.host}.cluster.example")
            ],
            "TARGET_INFO_SESSION_START_TIME": [self._session()],
            "ANALYSIS_DETAILS": [(_VM, self.duration_ns, self._system_ns(), self._system_ns() + self.duration_ns)],
            "PROCESSES": list(self._processes()),
            "DIAGNOSTIC_EVENT": list(self._diagnostics()),
            "NVTX_EVENTS": list(self._nvtx(seen.ranges)),
            "CUPTI_ACTIVITY_KIND_RUNTIME": list(self._runtime(seen)),
            "CUPTI_ACTIVITY_KIND_KERNEL": [self._kernel(kernel, nth) for nth, kernel in enumerate(seen.kernels, 1)],
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": [self._graph(graph) for graph in seen.graphs],
            "ThreadNames": list(self._threads()),
            "TARGET_INFO_GPU": list(self._gpus()),
            "TARGET_INFO_CUDA_DEVICE": list(self._devices()),
            "TARGET_INFO_CUDA_STREAM": list(self._streams()),
            "ENUM_NSYS_EVENT_TYPE": [
                (34, "NvtxMark", "NvtxMark"),
                (_PUSH_POP, "NvtxPushPopRange", "NvtxPushPopRange"),
                (60, "NvtxStartEndRange", "NvtxStartEndRange"),
                (_DOMAIN_CREATE, "NvtxDomainCreate", "NvtxDomainCreate"),
            ],
        }
        rows["StringIds"] = [(number, text) for text, number in self.strings.ids.items()]
        return rows

    def meta(self, path: Path) -> list[tuple[str, str | None]]:
        """Rows of the metadata table."""
        major, minor, micro = self.schema.schema_version.split(".")
        rows: list[tuple[str, str | None]] = [
            ("EXPORT_PRODUCT_NAME", "NVIDIA Nsight Systems"),
            ("EXPORT_PRODUCT_VERSION", self.schema.product_version),
            ("EXPORT_SCHEMA_VERSION", self.schema.schema_version),
            ("EXPORT_SCHEMA_VERSION_MAJOR", major),
            ("EXPORT_SCHEMA_VERSION_MINOR", minor),
            ("EXPORT_SCHEMA_VERSION_MICRO", micro),
            ("EXPORT_PLATFORM", "linux-desktop"),
            ("EXPORT_TIME_UTC", _utc(self.utc_ns + self.duration_ns)),
        ]
        if self.schema.time_shift_known:
            rows += [
                ("EXPORT_PARAM_OUTPUT_FILE", path.name),
                ("EXPORT_PARAM_LAZY", "true"),
                ("EXPORT_PARAM_TIME_NORMALIZE", "false"),
                ("EXPORT_PARAM_TIME_SHIFT", "0"),
                ("EXPORT_CONFIG_TIME_SHIFT", "0"),
            ]
        if self.schema.product_version >= "2026":
            rows.append(("EXPORT_PARAM_INCLUDE_BLOBS", str(self.writer.config.nvtx_payload).lower()))
        return rows

    def _relative(self, true_ns: int) -> int:
        return self.writer.node.clock.host_ns(true_ns) - self.utc_ns

    def _end(self, true_ns: int | None) -> int:
        """The end of a row on the export's clock. What is open when the export ends is cut there: at the duration."""
        if true_ns is None or true_ns > self.ends_true_ns:
            return self.duration_ns
        return self._relative(true_ns)

    def _system_ns(self) -> int:
        """The system clock from 2026 on; before, ns since the session began."""
        if "systemClockNs" in self.schema.tables["TARGET_INFO_SESSION_START_TIME"]:
            return self.utc_ns - self.writer.node.boot_ns
        return self.utc_ns - self.writer.node.clock.host_ns(self.writer.config.start_ns) + 300_000_000

    def _session(self) -> tuple[Value, ...]:
        utc = _utc(self.utc_ns)
        if "systemClockNs" in self.schema.tables["TARGET_INFO_SESSION_START_TIME"]:
            return self.utc_ns, utc, utc, self._system_ns()
        return self.utc_ns, utc, utc

    def _processes(self) -> Iterator[tuple[Value, ...]]:
        for pid, name in ((1, "systemd"), (811, "sshd"), (1402, "slurmstepd"), (1517, "nsys")):
            yield global_pid(pid), pid, name
        for process in self.writer.node.processes:
            yield global_pid(process.pid), process.pid, "python3"

    def _diagnostics(self) -> Iterator[tuple[Value, ...]]:
        if "DIAGNOSTIC_EVENT" in self.schema.tables:
            yield 0, 1, 3, 1, "Profiling has started.", _NO_PROCESS
            if self.writer.config.chunk_ns is not None:
                for process in self.writer.node.processes:
                    text = "Not all NVTX events might have been collected."
                    yield self.duration_ns, 1, 2, 2, text, global_pid(process.pid)

    def _nvtx(self, ranges: list[RangeSeen]) -> Iterator[tuple[Value, ...]]:
        if not self.writer.config.nvtx:
            return
        has_blobs = "binaryData" in self.schema.tables["NVTX_EVENTS"]
        blank = (None,) * (8 + has_blobs)
        domains: dict[int, int] = {}
        since = self._relative(self.writer.nccl_since_ns)
        for process in self.writer.node.processes:
            domains[process.pid] = nccl_domain(process.pid)
            for number in range(1, domains[process.pid] + 1):
                name = "NCCL" if number == domains[process.pid] else "MPI"
                thread = global_tid(process.pid, process.pid)
                yield (since, None, _DOMAIN_CREATE, None, None, None, name, thread, None, None, number, *blank)
        for each in ranges:
            pid = self.writer.cluster.workers[each.rank].process.pid
            thread, text, domain = global_tid(pid, each.tid), each.text, domains[pid] if each.nccl else _DEFAULT_DOMAIN
            yield (
                self._relative(each.start_ns),
                self._end(each.end_ns),
                _PUSH_POP,
                None,
                None,
                None,
                None if each.nccl else text,
                thread,
                None,
                self.strings.id(text) if each.nccl else None,
                domain,
                *(blank if each.payload is None else (*blank[:-1], each.payload)),
            )

    def _runtime(self, seen: Capture) -> Iterator[tuple[Value, ...]]:
        for api in seen.apis:
            thread = global_tid(self.writer.cluster.workers[api.rank].process.pid, api.tid)
            name = self.strings.id(api.name)
            yield (
                self._relative(api.start_ns),
                self._end(api.end_ns),
                api.event_class,
                thread,
                api.correlation_id,
                name,
                0,
                None,
            )

    def _kernel(self, kernel: KernelSeen, nth: int) -> tuple[Value, ...]:
        worker = self.writer.cluster.workers[kernel.rank]
        traits = self.writer.config.traits
        long = demangled_name(traits, kernel.name) if kernel.nccl else f"void {kernel.name}(T1, T2)"
        if kernel.outside:
            long = f"void {kernel.outside}<(int)8, (int)768>(int4 *)"
        head: tuple[Value, ...] = (
            self._relative(kernel.start_ns),
            self._end(kernel.end_ns),
            worker.local_rank,
            1 + worker.process.ranks.index(kernel.rank),
        )
        columns = self.schema.tables["CUPTI_ACTIVITY_KIND_KERNEL"]
        green: tuple[Value, ...] = (None,) if "greenContextId" in columns else ()
        late: tuple[Value, ...] = (None,) * 4 + (1, 1, 1, 0, 0, 0, 0, "") if "tensorSize" in columns else ()
        return (
            *head,
            *green,
            kernel.stream_id,
            kernel.correlation_id,
            global_pid(worker.process.pid),
            self.strings.id(long),
            self.strings.id(kernel.name),
            self.strings.id(f"_Z{len(kernel.name)}{kernel.name}"),
            1,
            1,
            96 if kernel.nccl else 168,
            kernel.grid,
            1,
            1,
            kernel.block,
            1,
            1,
            7072 if kernel.nccl else 0,
            82240 if kernel.nccl else 98304,
            0,
            0,
            nth,
            102400,
            kernel.node_id,
            1,
            *late,
        )

    def _graph(self, graph: GraphSeen) -> tuple[Value, ...]:
        worker = self.writer.cluster.workers[graph.rank]
        columns = self.schema.tables["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"]
        return (
            self._relative(graph.start_ns),
            self._end(graph.end_ns),
            worker.local_rank,
            1 + worker.process.ranks.index(graph.rank),
            *((None,) if "greenContextId" in columns else ()),
            graph.stream_id,
            graph.correlation_id,
            global_pid(worker.process.pid),
            graph.graph,
            graph.graph,
        )

    def _threads(self) -> Iterator[tuple[Value, ...]]:
        for process in self.writer.node.processes:
            for rank in process.ranks:
                worker = self.writer.cluster.workers[rank]
                yield self.strings.id("python3"), 20, global_tid(process.pid, worker.main_tid)
                yield self.strings.id("pt_autograd_0"), 20, global_tid(process.pid, worker.autograd_tid)

    def _gpus(self) -> Iterator[tuple[Value, ...]]:
        newer = self.writer.config.traits.nvlink_switch > 300
        name, chip, major, multiprocessors = (
            ("NVIDIA H100 80GB HBM3", "GH100", 9, 132) if newer else ("NVIDIA A100-SXM4-80GB", "GA100", 8, 108)
        )
        for local in range(self.writer.config.gpus):
            bus = bus_id(local)
            where = f"0000:{bus >> 12:02x}:{bus >> 4 & 0xFF:02x}.{bus & 0xF}"
            uuid = f"{stable_hash(self.writer.config.seed, self.writer.node.host, local):016x}"
            yield _VM, local, name, where, 1, 85_520_809_984, multiprocessors, uuid, chip, local, major, 0

    def _devices(self) -> Iterator[tuple[Value, ...]]:
        if "TARGET_INFO_CUDA_DEVICE" in self.schema.tables:
            for process in self.writer.node.processes:
                for rank in process.ranks:
                    local = self.writer.cluster.workers[rank].local_rank
                    yield local, local, process.pid

    def _streams(self) -> Iterator[tuple[Value, ...]]:
        for process in self.writer.node.processes:
            for place, rank in enumerate(process.ranks):
                yield 7, 0, 1, process.pid, 1 + place, 0, 1
                for endpoint in self.writer.endpoints[rank].values():
                    yield endpoint.stream_id, 0, 1, process.pid, 1 + place, 0, 2


def _utc(ns: int) -> str:
    return f"{datetime.fromtimestamp(ns // 10**9, UTC):%Y-%m-%dT%H:%M:%S}"
