"""The truth about the job, beside what was recorded of it: `truth/operations.parquet` and `truth/job.json`."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Final

from ncclscope_simulator.cluster import Cluster
from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.groups import Endpoint, Group, coordinates

_FLUSH_ROWS: Final = 10_000
_REMEMBERED: Final = 20_000
"""Bandwidths and steps that are remembered for the medians of an endless job."""
_BOUNDS: Final = (4 * 1024, 64 * 1024, 1024**2, 16 * 1024**2, 256 * 1024**2)
_CLASSES: Final = ("4KiB", "64KiB", "1MiB", "16MiB", "256MiB", "inf")

Columns = tuple[tuple[str, str], ...]
"""Names and types."""


def _columns(*neighbours: tuple[str, str]) -> Columns:
    """Columns in order: neighbours of one type by that type and their names."""
    return tuple((name, kind) for kind, names in neighbours for name in names.split())


COLUMNS: Final = _columns(
    ("string", "host"),
    ("int64", "pid tid"),
    ("int32", "rank local_rank"),
    ("string", "comm_id comm_ptr"),
    ("int32", "comm_rank comm_size"),
    ("string", "parallelism"),
    ("int32", "iteration"),
    ("string", "op"),
    ("uint64", "op_count"),
    ("int64", "seq coll_seq"),
    ("uint64", "count"),
    ("string", "dtype red_op"),
    ("int32", "root peer"),
    ("int64", "message_bytes"),
    ("string", "log_file"),
    ("int64", "log_line"),
    ("bool", "line_lost line_torn"),
    ("int64", "called_ns launch_id"),
    ("string", "kernel"),
    ("int32", "grid"),
    ("int64", "kernel_correlation_id"),
    ("bool", "kernel_lost kernel_cut covered"),
    ("int64", "stream_id start_ns end_ns start_true_ns end_true_ns duration_ns wait_ns transfer_ns"),
    ("int64", "modelled_transfer_ns"),
    ("float64", "busbw_bytes_per_second"),
    ("bool", "captured"),
    ("int64", "graph_node_id"),
    ("bool", "inspected"),
)
"""Columns of `truth/operations.parquet`: one row per operation that a rank asked for, null if there is none.

The kernel of a captured operation is that of its graph's first replay; of a launch of several kernels the first that
was recorded.
"""

REPLAY_COLUMNS: Final = _columns(
    ("string", "host"),
    ("int64", "pid"),
    ("int32", "rank"),
    ("string", "comm_id"),
    ("int32", "iteration"),
    ("int64", "launch_id replay graph graph_node_id correlation_id"),
    ("string", "kernel"),
    ("int64", "stream_id"),
    ("bool", "covered cut lost"),
    ("int64", "start_ns end_ns start_true_ns end_true_ns wait_ns transfer_ns"),
    ("float64", "busbw_bytes_per_second"),
)
"""Columns of `truth/replays.parquet`: one row per kernel of every graph launch; `launch_id` is that of the captured
operations in `truth/operations.parquet`. The file is written if there are graphs."""

PLAN_COLUMNS: Final = _columns(
    ("string", "host"),
    ("int64", "pid"),
    ("int32", "rank"),
    ("string", "comm_id"),
    ("int32", "iteration"),
    ("int64", "launch_id"),
    ("int32", "plan"),
    ("string", "kernel"),
    ("int32", "grid"),
    ("int64", "correlation_id stream_id"),
    ("bool", "covered cut lost"),
    ("int64", "start_ns end_ns"),
)
"""Columns of `truth/plans.parquet`: one row per kernel of every launch that took several, by `launch_id` of
`truth/operations.parquet`, whose times reach from the first one's start to the last one's end. The file is written
if there are such launches."""

OUTSIDE_COLUMNS: Final = _columns(
    ("string", "host"),
    ("int64", "pid"),
    ("int32", "rank"),
    ("string", "comm_id"),
    ("int32", "iteration"),
    ("string", "kernel"),
    ("int64", "correlation_id stream_id"),
    ("bool", "covered"),
    ("int64", "start_ns end_ns start_true_ns end_true_ns wait_ns transfer_ns"),
    ("float64", "busbw_bytes_per_second"),
)
"""Columns of `truth/outside.parquet`: one row per kernel of a library that communicates without NCCL. The file is
written if there are such."""

Cell = int | float | str | bool | None
Row = dict[str, Cell]
"""A row of a table: value by column."""


def size_class(size: int) -> str:
    """The class of a message size, named by its upper bound (inclusive)."""
    return _CLASSES[sum(size > bound for bound in _BOUNDS)]


@dataclass(slots=True)
class RowsFile:
    """Appends rows to a parquet file as they come; it stands under its name once it is closed.

    Raises ModuleNotFoundError, with a sentence, if pyarrow is missing: it comes with the extra `service`.
    """

    path: Path
    columns: Columns = COLUMNS
    _rows: list[Row] = field(default_factory=list[Row])
    _writer: Any = None
    _arrow: Any = None
    _schema: Any = None

    def __post_init__(self) -> None:
        try:
            self._arrow = import_module("pyarrow")
            parquet: Any = import_module("pyarrow.parquet")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "the truth of a simulated job is a parquet file: pip install 'ncclscope[service]'"
            ) from error
        types: dict[str, Any] = {"bool": self._arrow.bool_()}
        fields = [(name, types.get(kind) or getattr(self._arrow, kind)()) for name, kind in self.columns]
        self._schema = self._arrow.schema(fields)
        self._writer = parquet.ParquetWriter(str(self._temporary()), self._schema)

    def __del__(self) -> None:
        # Left half written by an error: a writer that is let go would try to end its file, and print that it could not.
        if self._writer is not None:
            self._writer.is_open = False

    def append(self, rows: list[Row]) -> None:
        """Adds rows, each with a value for every one of `columns`."""
        self._rows.extend(rows)
        if len(self._rows) >= _FLUSH_ROWS:
            self._flush()

    def close(self) -> None:
        """Writes what is left and gives the file its name."""
        self._flush()
        self._writer.close()
        self._temporary().replace(self.path)

    def _flush(self) -> None:
        if self._rows:
            columns = [
                self._arrow.array([row[each.name] for row in self._rows], type=each.type) for each in self._schema
            ]
            self._writer.write_table(self._arrow.Table.from_arrays(columns, schema=self._schema))
            self._rows.clear()

    def _temporary(self) -> Path:
        return self.path.with_name(self.path.name + ".tmp")


@dataclass(slots=True)
class Tally:
    """Counts, bandwidths and step times of the whole job."""

    counts: Counter[str] = field(default_factory=Counter[str])
    bandwidths: dict[tuple[str, str, str], deque[float]] = field(
        default_factory=dict[tuple[str, str, str], deque[float]]
    )
    steps: deque[dict[str, int | None]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def count_lines(self, lines: Mapping[str, Sized]) -> None:
        """Counts the lines of some log files."""
        self.counts["log_lines"] += sum(len(own) for own in lines.values())

    def bandwidth(self, comm_id: str, op: str, size: int, value: float) -> None:
        """Remembers the bus bandwidth of one launch."""
        key = (comm_id, op, size_class(size))
        if key not in self.bandwidths:
            self.bandwidths[key] = deque(maxlen=_REMEMBERED)
        self.bandwidths[key].append(value)


def job(
    config: SimulationConfig,
    cluster: Cluster,
    groups: tuple[Group, ...],
    endpoints: list[dict[int, Endpoint]],
    tally: Tally,
    end_ns: int | None,
) -> dict[str, object]:
    """The content of `truth/job.json`; end None: the job still runs."""
    return {
        "nccl_version": config.traits.text,
        "nsys_version": config.nsys,
        "seed": config.seed,
        "start_ns": config.start_ns,
        "end_ns": end_ns,
        "shape": {
            "nodes": config.nodes,
            "gpus_per_node": config.gpus,
            "tp": config.tp,
            "pp": config.pp,
            "dp": config.dp,
            "ep": config.ep,
            "cp": config.cp,
            "order": config.order,
            "sequence_parallel": config.sequence_parallelism,
            "zero1": config.zero1,
            "zero2": config.zero2,
            "fsdp": config.fsdp,
            "replicate": config.replicate,
            "deepspeed": config.deepspeed,
        },
        "faults": [{name: getattr(fault, name) for name in fault.__slots__} for fault in config.faults],
        "hosts": {
            node.host: _clock(node.clock.offset_ns, node.clock.drift_ppb, node.clock.at_ns, node.clock.steps)
            for node in cluster.nodes
        },
        "ranks": [
            {
                "rank": worker.rank,
                "host": worker.process.host,
                "pid": worker.process.pid,
                "local_rank": worker.local_rank,
                "tp": coordinates(config, worker.rank)[0],
                "dp": coordinates(config, worker.rank)[1],
                "pp": coordinates(config, worker.rank)[2],
                "log_file": worker.process.log_name,
            }
            for worker in cluster.workers
        ],
        "communicators": [_communicator(group, endpoints) for group in groups],
        "busbw": [
            {
                "comm_id": comm_id,
                "op": op,
                "size_class": klass,
                "launches": len(values),
                "median_bytes_per_second": median(values),
            }
            for (comm_id, op, klass), values in sorted(tally.bandwidths.items())
        ],
        "iterations": list(tally.steps),
        "counts": dict(sorted(tally.counts.items())),
    }


def _clock(offset_ns: int, drift_ppb: int, at_ns: int, steps: list[tuple[int, int]]) -> dict[str, object]:
    return {
        "offset_ns": offset_ns,
        "drift_ppm": drift_ppb / 1000,
        "at_ns": at_ns,
        "steps": [{"since_true_ns": since, "step_ns": step} for since, step in steps],
    }


def _communicator(group: Group, endpoints: list[dict[int, Endpoint]]) -> dict[str, object]:
    return {
        "comm_id": group.comm_id,
        "parallelism": group.parallelism,
        "size": group.size,
        "ranks": list(group.members),
        "nodes": list(group.nodes),
        "split_count": group.split_count,
        "color": group.color,
        "comm_ptrs": [endpoints[rank][group.index].comm_ptr for rank in group.members],
    }


def write_job(path: Path, content: dict[str, object]) -> None:
    """Writes `truth/job.json`, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
