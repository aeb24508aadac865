"""Simulated jobs of which only nsys exports are left: measures and findings are those with logs, or said to lack."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ncclscope.offline import OfflineRun, run_offline
from ncclscope.simulate import configuration_of
from ncclscope_agent.files.exports import ExportFollower
from ncclscope_service.export.directory import write_run
from ncclscope_service.export.selection import select
from ncclscope_service.export.terminal import terminal_report
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import FindingKind
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig, write
from ncclscope_simulator.faults import parse_faults

SECOND = 1_000_000_000
MEASURES = ("op", "message_bytes", "comm_rank", "iteration", "wait_ns", "transfer_ns", "busbw_bytes_per_second")
JOBS = {
    "PP": SimulationConfig(nodes=2, gpus=4, tp=2, pp=2, dp=2, iterations=6, nsys="2026.2", nvtx_payload=True),
    "EP": SimulationConfig(
        nodes=2, gpus=4, tp=2, pp=1, dp=4, ep=2, iterations=6, nsys="2025.3", nvtx_payload=True, nccl="2.25.1"
    ),
    "FSDP in chunks": SimulationConfig(
        nodes=2,
        gpus=4,
        tp=1,
        pp=1,
        dp=8,
        fsdp=True,
        iterations=8,
        chunk_seconds=1.0,
        nsys="2026.2",
        nvtx_payload=True,
        split=False,
    ),
}


def analysed(folder: Path, out: Path, *names: str) -> tuple[OfflineRun, list[dict[str, object]]]:
    run = run_offline([folder / name for name in names], job="job", settings=PipelineSettings())
    write_run(run.pipeline.store, out)
    return run, pq.read_table(out / "operations.parquet").to_pylist()


@pytest.mark.parametrize("config", JOBS.values(), ids=JOBS.keys())
def test_measures_are_those_with_logs(tmp_path: Path, config: SimulationConfig) -> None:
    folder = tmp_path / "job"
    write(config, folder)
    _, logged = analysed(folder, tmp_path / "full", "logs", "nsys")
    _, alone = analysed(folder, tmp_path / "alone", "nsys")

    def by_kernel(rows: list[dict[str, object]]) -> dict[tuple[object, ...], set[tuple[object, ...]]]:
        found: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
        for row in rows:
            if row["match"] == "matched":
                key = row["host"], row["pid"], row["kernel_correlation_id"]
                found.setdefault(key, set()).add(tuple(row[name] for name in MEASURES))
        return found

    full, ours = by_kernel(logged), by_kernel(alone)
    assert len(full) > 500
    equal = sum(ours.get(key) == rows for key, rows in full.items())
    assert equal >= 0.99 * len(full)
    iterations = [pq.read_table(tmp_path / name / "iterations.parquet").to_pylist() for name in ("full", "alone")]
    exposed = [{(row["pid"], row["iteration"]): row["exposed_ns"] for row in rows} for rows in iterations]
    assert exposed[0] == exposed[1]


def test_a_late_rank_is_named_by_exports_alone(tmp_path: Path) -> None:
    config = SimulationConfig(
        nodes=2,
        gpus=4,
        tp=4,
        pp=1,
        dp=2,
        iterations=26,
        nvtx_payload=True,
        faults=parse_faults(["late_rank:rank=3,ms=30"]),
    )
    write(config, tmp_path / "job")
    run, _ = analysed(tmp_path / "job", tmp_path / "out", "nsys")
    (finding,) = run.pipeline.store.findings
    assert (finding.kind, finding.ranks) == (FindingKind.LATE_RANK, (3,))
    assert not run.pipeline.store.verdicts  # an export that ends is no job that ends


def test_without_payloads_kernels_and_exposure_are_known_and_that_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    write(SimulationConfig(nodes=2, gpus=4, iterations=5), folder)
    analysed(folder, tmp_path / "full", "logs", "nsys")
    run, operations = analysed(folder, tmp_path / "alone", "nsys")
    assert not operations
    exposed = [
        {(row["pid"], row["iteration"]): row["exposed_ns"] for row in pq.read_table(path).to_pylist()}
        for path in (tmp_path / "full" / "iterations.parquet", tmp_path / "alone" / "iterations.parquet")
    ]
    assert len(exposed[1]) == 4 * 8  # the end of the last one is not known
    assert exposed[1].items() <= exposed[0].items()
    assert "--include-blobs=true" in terminal_report(select(run.pipeline.store))


def test_an_agent_without_logs_takes_operations_from_exports(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    write(JOBS["PP"], folder)
    exports = ExportFollower([folder / "nsys"], host="h", is_applied=lambda _: None)
    pipeline, now_ns = Pipeline(), SECOND
    while exports.statistics().read < 2:
        for batch in exports.poll(now_ns):
            pipeline.ingest_batch(batch, agent="a", session="s", job="j")
        now_ns += SECOND // 4
    pipeline.finish(now_ns)
    _, alone = analysed(folder, tmp_path / "alone", "nsys")
    assert len(pipeline.store.operations.rows) == len(alone)


@pytest.mark.slow
def test_groups_are_named_by_records_alone_and_a_healthy_pipeline_accuses_nobody(tmp_path: Path) -> None:
    shape = ("--nodes", "2", "--gpus", "4", "--tp", "2", "--pp", "2", "--iterations", "24")
    write(configuration_of(("--out", str(tmp_path), *shape, "--inspector", "v4.0", "--capture", "none")), tmp_path)
    store = run_offline([tmp_path / "inspector"], job="j", settings=PipelineSettings()).pipeline.store
    kinds = Counter(each.parallelism for each in store.listed_communicators() if each.size > 1)
    assert kinds == {"WORLD": 1, "TP": 4, "DP": 4, "PP": 4, "EMBEDDING": 4}
    assert store.findings == []
