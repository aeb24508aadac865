"""A stretch of a simulated job that can be repeated for ever: what each host's logs and exports say in it."""

from __future__ import annotations

import pickle
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from benchmarks.jobs import read_exports, read_logs
from numpy.typing import NDArray

from ncclscope_simulator import MegatronModel, SimulationConfig, write
from ncclscope_wire.batch import Batch, Columns
from ncclscope_wire.records import CaptureSeen, CommunicatorEventKind

RANKS_PER_HOST: Final = 8
_SKIPPED: Final = 3
"""First steps, which are not repeated: lazy connections."""
_REPEATED: Final = 4
"""Steps of the stretch; as many follow, to tell how counts grow from one stretch to the next."""
_BOUND_BY: Final = {"kernels": "launch_start_ns", "ranges": "end_ns", "busy": "start_ns"}
"""The time by which a row belongs to a stretch: a line is printed within its range."""
_TIMES: Final = ("logged_at_ns", "start_ns", "end_ns", "launch_start_ns", "launch_end_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLog:
    """The log of one rank. Times count from the stretch's beginning."""

    head: Batch
    """Dictionaries and communicators: all that comes before the stretch, without its operations."""
    rows: Columns
    """tables.OPERATION_ROW of the stretch."""
    op_counts: NDArray[np.uint64]
    """By how much each operation's opCount grows from one stretch to the next."""
    lines: int
    bytes: int
    communicators: NDArray[np.uint64]
    """commId of each operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedExport:
    """Content of an export of the stretch."""

    dictionaries: Batch
    tables: dict[str, Columns]
    """kernels, ranges and busy: those of the stretch."""
    correlations: int
    """By how much correlation ids grow from one stretch to the next."""
    capture: CaptureSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedHost:
    """One node."""

    name: str
    logs: tuple[RecordedLog, ...]
    export: RecordedExport


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """All hosts; after `period_ns` the stretch begins again."""

    hosts: tuple[RecordedHost, ...]
    period_ns: int

    @property
    def operations(self) -> int:
        """Of all ranks in one stretch."""
        return sum(len(log.rows) for host in self.hosts for log in host.logs)


def large_config(hosts: int, *, small_steps: bool = False, calls_as_megatron: bool = False) -> SimulationConfig:
    """A job of eight ranks a host; `small_steps`: few operations in each, for thousands of ranks."""
    pipeline = 4 if hosts % 4 == 0 else 1
    return SimulationConfig(
        nccl="2.28.3", nodes=hosts, gpus=RANKS_PER_HOST, tp=RANKS_PER_HOST, pp=pipeline, dp=hosts // pipeline,
        step_seconds=0.65, split=False, layers=1 if small_steps else 2, microbatches=2 if small_steps else 4,
        megatron=MegatronModel() if calls_as_megatron else None,
    )  # fmt: skip


def exported(share: float, seconds: float, *, stretch_s: float) -> tuple[int, int]:
    """Stretches in an export of about so long, and from one export to the next, for this share of the time."""
    if share <= 0:
        return 0, 1
    stretches = max(1, round(seconds / stretch_s))
    return stretches, max(stretches, round(stretches / share))


def kept(path: Path | None, config: SimulationConfig) -> RecordedJob:
    """The job that an earlier run recorded into this file, where it is one of this description; else `record`, and
    the file is written: thousands of ranks take minutes."""
    if path is not None and path.exists():
        found: tuple[SimulationConfig, RecordedJob] = pickle.loads(path.read_bytes())
        if found[0] == config:
            return found[1]
    job = record(config)
    if path is not None:
        path.write_bytes(pickle.dumps((config, job)))
    return job


def record(config: SimulationConfig) -> RecordedJob:
    """Simulates a job, with the steps that are needed and clocks that are right, and cuts a stretch out of it."""
    steps = _SKIPPED + 2 * _REPEATED
    config = replace(config, iterations=steps, clock_offset_ms=0.0, clock_drift_ppm=0.0)
    with tempfile.TemporaryDirectory() as folder:
        write(config, Path(folder))
        logs, exports = read_logs(Path(folder)), read_exports(Path(folder))
    by_host: defaultdict[str, list[list[Batch]]] = defaultdict(list)
    for batches in logs.values():
        by_host[batches[0].communicators[0].host].append(batches)
    whole = [np.concatenate([batch.operations for batch in batches]) for batches in logs.values()]
    bounds = [_bounds(rows, steps) for rows in whole]
    begins_ns = min(int(rows["logged_at_ns"][a]) for rows, (a, _) in zip(whole, bounds, strict=True))
    period_ns = max(
        int(rows["logged_at_ns"][b] - rows["logged_at_ns"][a]) for rows, (a, b) in zip(whole, bounds, strict=True)
    )
    ids = _comm_ids(batch for batches in logs.values() for batch in batches)
    hosts = [
        _host(name, its, exports[name], steps=steps, begins_ns=begins_ns, ids=ids)
        for name, its in sorted(by_host.items())
    ]
    return RecordedJob(hosts=tuple(hosts), period_ns=period_ns)


def _bounds(rows: Columns, steps: int) -> tuple[int, int]:
    """The first operation of the stretch, and of the next."""
    each, rest = divmod(len(rows), steps)
    assert rest == 0, "the steps of a simulated rank differ in length"
    return _SKIPPED * each, (_SKIPPED + _REPEATED) * each


def _comm_ids(batches: Iterable[Batch]) -> dict[tuple[str, int, int], int]:
    """commId by host, process and pointer."""
    return {
        (event.host, event.pid, event.pointer): event.comm_id
        for batch in batches
        for event in batch.communicators
        if event.comm_id is not None
    }


def _host(
    name: str,
    logs: list[list[Batch]],
    export: list[Batch],
    *,
    steps: int,
    begins_ns: int,
    ids: dict[tuple[str, int, int], int],
) -> RecordedHost:
    first: dict[int, tuple[int, int]] = {}
    recorded: list[RecordedLog] = []
    for batches in logs:
        rows = np.concatenate([batch.operations for batch in batches])
        a, b = _bounds(rows, steps)
        pid = batches[0].communicators[0].pid
        assert pid is not None, "a line of a simulated log names no process"
        first[pid] = int(rows["logged_at_ns"][a]), int(rows["logged_at_ns"][b])
        recorded.append(_log(batches, rows, a, b, begins_ns, name, pid, ids))
    return RecordedHost(name=name, logs=tuple(recorded), export=_export(export, first, begins_ns))


def _log(
    batches: list[Batch],
    rows: Columns,
    a: int,
    b: int,
    begins_ns: int,
    host: str,
    pid: int,
    ids: dict[tuple[str, int, int], int],
) -> RecordedLog:
    begin_line, end_line = int(rows["line"][a]), int(rows["line"][b])
    bytes_per_line = batches[-1].end / max(1, batches[-1].end_line)
    ended = {CommunicatorEventKind.DESTROY, CommunicatorEventKind.ABORT}
    events = [event for batch in batches for event in batch.communicators if event.kind not in ended]
    head = replace(
        _dictionaries(batches),
        end=round(bytes_per_line * begin_line),
        end_line=begin_line - 1,
        is_last=False,
        communicators=tuple(events),
        versions=batches[0].versions,
    )
    body = rows[a:b].copy()
    body["logged_at_ns"] -= begins_ns
    pointers = head.operation_templates["communicator"][body["template"]].tolist()
    return RecordedLog(
        head=head,
        rows=body,
        op_counts=rows["op_count"][b : 2 * b - a] - rows["op_count"][a:b],
        lines=end_line - begin_line,
        bytes=round(bytes_per_line * (end_line - begin_line)),
        communicators=np.array([ids[host, pid, pointer] for pointer in pointers], np.uint64),
    )


def _export(batches: list[Batch], first: dict[int, tuple[int, int]], begins_ns: int) -> RecordedExport:
    """Rows of each process between its first operation of the stretch and of the next."""
    known = _dictionaries(batches)
    capture = next(capture for batch in batches for capture in batch.captures)
    tables: dict[str, Columns] = {}
    correlations = 0
    for name, of_template in (("kernels", known.kernel_templates), ("ranges", known.range_templates), ("busy", None)):
        rows: Columns = np.concatenate([getattr(batch, name) for batch in batches])
        pids = rows["pid"] if of_template is None else of_template["pid"][rows["template"]]
        times = rows[_BOUND_BY[name]]
        lo = np.array([first[pid][0] for pid in pids.tolist()], np.int64)
        hi = np.array([first[pid][1] for pid in pids.tolist()], np.int64)
        chosen = rows[(times >= lo) & (times < hi)]
        if name == "kernels":
            correlations = int(rows["correlation_id"].max()) + 1
        for time in _TIMES:
            if time in (chosen.dtype.names or ()):
                chosen[time] -= begins_ns
        tables[name] = chosen
    return RecordedExport(dictionaries=known, tables=tables, correlations=correlations, capture=capture)


def _dictionaries(batches: list[Batch]) -> Batch:
    """One batch with the dictionaries of all, and nothing else."""

    def whole(name: str) -> Columns:
        found: Columns = np.concatenate([getattr(batch, name) for batch in batches])
        return found

    strings = tuple(text for batch in batches for text in batch.strings)
    return Batch(
        source=batches[0].source, begin=0, end=0, strings=strings,
        threads=whole("threads"), operation_templates=whole("operation_templates"),
        kernel_templates=whole("kernel_templates"), range_templates=whole("range_templates"),
    )  # fmt: skip
