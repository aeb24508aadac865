"""Simulated jobs whose experts exchange tokens by DeepEP: its kernels are communication, with waiting, exactly."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ncclscope.offline import run_offline
from ncclscope_service.export.directory import write_run
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig, write
from ncclscope_simulator.faults import parse_faults

Spans = list[tuple[int, int]]
JOB = SimulationConfig(
    nodes=2,
    gpus=4,
    tp=1,
    pp=1,
    dp=8,
    ep=4,
    ep_dispatch="deepep",
    iterations=6,
    profiled=(0, 5),
    faults=parse_faults(["late_rank:rank=3,ms=2,every=layer"]),
)


def _length(spans: Spans) -> int:
    """Time that the spans cover, each moment once."""
    covered, until = 0, 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered


def _computation(folder: Path) -> defaultdict[int, Spans]:
    """By process, when kernels of matrix products ran."""
    found: defaultdict[int, Spans] = defaultdict(list)
    for path in (folder / "nsys").rglob("*.sqlite"):
        with closing(sqlite3.connect(path)) as export:
            (since,) = export.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
            for process, start, end in export.execute(
                'SELECT (globalPid >> 24) & 0xffffff, "start", "end" FROM CUPTI_ACTIVITY_KIND_KERNEL k '
                "JOIN StringIds s ON s.id = k.shortName WHERE s.value LIKE '%gemm%'"
            ):
                found[process].append((start + since, end + since))
    return found


@pytest.fixture(scope="module", name="folder")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job, with logs, exports and traces."""
    folder = tmp_path_factory.mktemp("deepep")
    write(JOB, folder)
    return folder


@pytest.mark.parametrize("inputs", [("logs", "nsys"), ("kineto",)], ids=["logs and nsys", "PyTorch traces"])
def test_exposed_communication_and_waiting_are_those_of_the_truth(
    folder: Path, tmp_path: Path, inputs: tuple[str, ...]
) -> None:
    run = run_offline([folder / name for name in inputs], job="job", settings=PipelineSettings())
    write_run(run.pipeline.store, tmp_path)
    truth = pq.read_table(folder / "truth" / "outside.parquet").to_pylist()
    spans: defaultdict[tuple[int, int], Spans] = defaultdict(list)
    for row in [*truth, *pq.read_table(folder / "truth" / "operations.parquet").to_pylist()]:
        if row["start_ns"] is not None:
            spans[row["pid"], row["iteration"]].append((row["start_ns"], row["end_ns"]))
    computation = _computation(folder)
    rows = [row for row in pq.read_table(tmp_path / "iterations.parquet").to_pylist() if row["exposed_ns"] is not None]
    assert len(rows) == 48
    for row in rows:
        mine, beside = spans[row["pid"], row["iteration"]], computation[row["pid"]]
        assert row["communication_ns"] == pytest.approx(_length(mine), rel=0.001)
        assert row["exposed_ns"] == pytest.approx(_length(mine + beside) - _length(beside), rel=0.01)
        assert 0 < row["outside_ns"] < row["communication_ns"]
    kernels = {
        (row["host"], row["pid"], row["correlation_id"]): row
        for row in pq.read_table(tmp_path / "kernels.parquet").to_pylist()
        if row["library"] == "DeepEP"
    }
    assert len(kernels) == len(truth)
    for row in truth:
        assert kernels[row["host"], row["pid"], row["correlation_id"]]["wait_ns"] == pytest.approx(
            row["wait_ns"], abs=2_000
        )
