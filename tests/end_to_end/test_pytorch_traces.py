"""Simulated jobs of which only traces of the PyTorch profiler are left: measures and findings equal the truth."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ncclscope.offline import run_offline
from ncclscope_agent.files.exports import ExportFollower
from ncclscope_service.export.directory import write_run
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.records import FindingKind
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import SimulationConfig, write
from ncclscope_simulator.faults import parse_faults

SECOND = 1_000_000_000


TP4: dict[str, object] = {"tp": 4, "pp": 1, "dp": 2}


def job(folder: Path, **options: object) -> Path:
    write(SimulationConfig(nodes=2, gpus=4, iterations=26, profiled=(5, 24), **options), folder)  # type: ignore[arg-type]
    return folder


def analysed(*paths: Path) -> Pipeline:
    return run_offline(list(paths), job="job", settings=PipelineSettings()).pipeline


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(TP4, id="TP"),
        pytest.param({"tp": 2, "pp": 1, "dp": 4, "ep": 2}, id="EP"),
        pytest.param({"tp": 1, "pp": 1, "dp": 8, "fsdp": True, "nccl": "2.18"}, id="FSDP"),
        pytest.param({"tp": 2, "pp": 2, "dp": 2, "nccl": "2.21"}, id="PP"),
    ],
)
def test_every_call_has_its_kernel_and_every_collective_its_waiting(tmp_path: Path, options: dict[str, object]) -> None:
    folder = job(tmp_path / "job", **options)
    run = run_offline([folder / "kineto"], job="job", settings=PipelineSettings())
    write_run(run.pipeline.store, tmp_path / "out")
    columns = ["host", "pid", "kernel_correlation_id", "op", "wait_ns"]
    truth = {
        (row["host"], row["pid"], row["kernel_correlation_id"]): row
        for row in pq.read_table(folder / "truth" / "operations.parquet", columns=columns).to_pylist()
    }
    outcome = Counter[str]()
    for row in pq.read_table(tmp_path / "out" / "operations.parquet").to_pylist():
        outcome[row["match"]] += 1
        if row["match"] != "matched":
            continue
        real = truth[row["host"], row["pid"], row["kernel_correlation_id"]]
        assert {row["op"], real["op"]} in ({row["op"]}, {"Send", "Recv"}, {"AlltoAll", "Send"}, {"AlltoAll", "Recv"})
        if row["op"] == "Broadcast":  # a trace does not tell the root
            assert row["wait_ns"] is None
        else:
            assert row["wait_ns"] == pytest.approx(real["wait_ns"], rel=0.05, abs=2_000)
    assert outcome["matched"] > 1_000
    assert set(outcome) <= {"matched", "no_kernel"}
    assert not run.pipeline.store.findings
    assert not run.pipeline.store.verdicts  # a profile is not the end of a job


def test_a_late_rank_is_named_from_twenty_profiled_steps(tmp_path: Path) -> None:
    folder = job(tmp_path, **TP4, faults=parse_faults(["late_rank:rank=3,ms=30"]), capture="none")
    (finding,) = analysed(folder / "kineto").store.findings
    assert (finding.kind, finding.ranks) == (FindingKind.LATE_RANK, (3,))


def test_traces_beside_logs_count_no_call_twice(tmp_path: Path) -> None:
    folder = job(tmp_path, **TP4, capture="none")
    logs = analysed(folder / "logs").store
    both = analysed(folder / "kineto", folder / "logs").store
    assert len(both.operations.rows) == len(logs.operations.rows)
    assert len(both.communicators) == len(logs.communicators)
    matched = int((both.operations.rows["match"] == 1).sum())
    assert matched > 0.5 * len(both.operations.rows)


def test_ranks_that_began_to_record_at_other_steps_are_never_mixed(tmp_path: Path) -> None:
    """Their first calls have other numbers; kernels that must overlap in time put them in order."""
    folder = job(tmp_path / "job", **TP4)
    for path in sorted((folder / "kineto").iterdir())[::3]:
        _begin_later(path)
    store = analysed(folder / "kineto").store
    write_run(store, tmp_path / "out")
    columns = ["host", "pid", "kernel_correlation_id", "coll_seq"]
    truth = {
        (row["host"], row["pid"], row["kernel_correlation_id"]): row["coll_seq"]
        for row in pq.read_table(folder / "truth" / "operations.parquet", columns=columns).to_pylist()
    }
    numbers: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for row in pq.read_table(tmp_path / "out" / "operations.parquet").to_pylist():
        if row["match"] == "matched" and row["wait_ns"] is not None and row["coll_seq"] is not None:
            number = truth[row["host"], row["pid"], row["kernel_correlation_id"]]
            numbers[row["comm_id"], row["coll_seq"]].add(number)
    assert len(numbers) > 500
    assert all(len(of) == 1 for of in numbers.values())
    assert not [each for each in store.findings if each.kind is not FindingKind.BLIND]


def _begin_later(path: Path) -> None:
    """Removes the first 130 ms of a trace, and the kernels that were launched then."""
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    begin = min(event["ts"] for event in events) + 130_000
    gone = {e["args"].get("correlation") for e in events if e["ts"] < begin and e["cat"] == "cuda_runtime"}
    content["traceEvents"] = [
        event
        for event in events
        if (event["args"].get("correlation") not in gone if event["cat"] == "kernel" else event["ts"] >= begin)
    ]
    path.write_text(json.dumps(content))


def test_an_agent_reads_traces_as_they_appear(tmp_path: Path) -> None:
    folder = job(tmp_path, **TP4, capture="none")
    follower = ExportFollower([folder / "kineto"], host="h", is_applied=lambda _: None)
    pipeline, now_ns = Pipeline(), SECOND
    while follower.statistics().read < 8:
        for batch in follower.poll(now_ns):
            pipeline.ingest_batch(batch, agent="a", session="s", job="j")
        now_ns += SECOND // 4
    pipeline.finish(now_ns)
    offline = analysed(folder / "kineto").store
    assert len(pipeline.store.operations.rows) == len(offline.operations.rows)
    assert len(pipeline.store.collectives.rows) == len(offline.collectives.rows)
