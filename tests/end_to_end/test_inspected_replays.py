"""Replays of CUDA graphs that nsys and NCCL Inspector both tell of are counted once, whoever tells first."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_agent.sources.nsys.export import read_export
from ncclscope_service.pipeline import Pipeline
from ncclscope_simulator import SimulationConfig, write
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import OPERATIONS

_SECOND = 1_000_000_000
_MEASURED = ("AllGather", "AllReduce", "ReduceScatter")


def batches(job: Path, what: str) -> list[Batch]:
    found: list[Batch] = []
    for path in sorted(path for path in (job / what).rglob("*") if path.is_file()):
        key = str(path.relative_to(job))
        if what == "nsys":
            found += read_export(path, source=Source(kind=SourceKind.NSYS, name=key, key=key))
        elif what == "inspector":
            dumps = InspectorReader(Source(kind=SourceKind.INSPECTOR, name=key, key=key))
            found += [*dumps.ingest_bytes(path.read_bytes()), *dumps.finish()]
        else:
            log = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=path.name, key=key))
            found += [*log.ingest_bytes(path.read_bytes(), None), *log.finish()]
    return found


def collectives_of(job: Path) -> Counter[str]:
    """How many collectives of each kind really ran, replays included."""
    sizes: dict[int, tuple[str, int]] = {}
    ran: Counter[str] = Counter()
    for row in pq.read_table(job / "truth" / "operations.parquet").to_pylist():
        if row["op"] in _MEASURED and row["comm_size"] > 1 and row["start_true_ns"] is not None:
            sizes[row["launch_id"]] = row["op"], row["comm_size"]
            if not row["captured"] and row["comm_rank"] == 0:
                ran[row["op"]] += 1
    kernels: Counter[tuple[str, int]] = Counter()
    for row in pq.read_table(job / "truth" / "replays.parquet").to_pylist():
        if row["launch_id"] in sizes:
            kernels[sizes[row["launch_id"]]] += 1
    for (op, size), amount in kernels.items():
        ran[op] += amount // size
    return ran


@pytest.mark.parametrize("order", [("logs", "nsys", "inspector"), ("logs", "inspector", "nsys"), ("logs", "inspector")])
def test_each_collective_is_counted_once(order: tuple[str, ...], tmp_path: Path) -> None:
    config = SimulationConfig(iterations=4, inspector="v4.0", cuda_graphs=2, cuda_graph_trace="node")
    write(config, tmp_path)
    pipeline, now_ns = Pipeline(), config.start_ns
    for what in order:
        for batch in batches(tmp_path, what):
            pipeline.ingest_batch(batch, agent="a", session="s", job="j")
        for _ in range(3):
            now_ns += 11 * _SECOND
            pipeline.process_backlog(now_ns)
    pipeline.finish(now_ns)
    names = Counter(OPERATIONS[code].name for code in pipeline.store.collectives.rows["op"].tolist())
    assert {name: names[name] for name in _MEASURED} == dict(collectives_of(tmp_path))
