"""The script for a real run on a GPU, as far as it can be tried without one."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.real_run import record
from benchmarks.real_run.__main__ import print_cost
from benchmarks.real_run.score import Score, compare, score

from ncclscope_agent.nccl_settings.advice import NcclVersion
from ncclscope_simulator import SimulationConfig, write

NCCL = NcclVersion(2, 28, 3)
VARIANTS = {variant.name: variant for variant in record.variants(nsys=True, inspector=Path("inspector.so"))}


@pytest.fixture
def simulated(tmp_path: Path) -> Path:
    """The logs of a job and traces of its last iterations, in the folders of a real run."""
    job = tmp_path / "job"
    write(SimulationConfig(nodes=1, gpus=4, iterations=8, profiled=(4, 8), tp=2, pp=1, dp=2), job)
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    for log in sorted(job.rglob("*.log")):
        log.rename(run / "logs" / log.name)
    (job / "kineto").rename(run / "traces")
    return run


def test_lines_with_stamps_are_given_the_kernels_of_the_trace(simulated: Path) -> None:
    found = score(simulated)
    assert found.known > 100
    assert found == Score(known=found.known, given=found.known, right=found.known)
    assert found.f1 == 1.0


def test_a_wrong_kernel_costs_both_precision_and_recall_and_a_missing_one_recall() -> None:
    truth = {(7, "[0, 1]", place): place + 100 for place in range(4)} | {(7, "[0, 1]", 4): None}
    swapped = truth | {(7, "[0, 1]", 0): 101, (7, "[0, 1]", 1): None, (7, "[0, 1]", 9): 99}
    assert compare(truth, swapped) == Score(known=4, given=3, right=2)
    assert compare(truth, swapped).f1 == pytest.approx(4 / 7)


def test_nothing_is_scored_where_nothing_is_known() -> None:
    assert Score(known=0, given=0, right=0).f1 is None


def test_each_rank_is_a_node_of_its_own_and_has_the_variables_of_its_run(tmp_path: Path) -> None:
    found = record.environment(VARIANTS["logs"], NCCL, 3, tmp_path)
    assert found["NCCL_HOSTID"] == "rank3"
    assert found["NCCL_DEBUG_FILE"] == str(tmp_path / "logs" / "nccl.rank3.%h.%p.log")
    assert "NCCL_DEBUG_TIMESTAMP_FORMAT" in found
    without = record.environment(VARIANTS["logs_without_stamps"], NCCL, 3, tmp_path)
    assert found.keys() - without.keys() == {"NCCL_DEBUG_TIMESTAMP_FORMAT", "NCCL_DEBUG_TIMESTAMP_LEVELS"}
    assert "CALL" in record.environment(VARIANTS["logs_and_calls"], NCCL, 0, tmp_path)["NCCL_DEBUG_SUBSYS"]


def test_plain_runs_log_nothing_and_frame_the_others(tmp_path: Path) -> None:
    names = list(VARIANTS)
    assert (names[0], names[-1]) == ("plain", "plain_again")
    for name in (names[0], names[-1]):
        assert not any("DEBUG" in variable for variable in record.environment(VARIANTS[name], NCCL, 0, tmp_path))


def test_the_name_of_the_machine_and_its_folders_leave_a_capture(tmp_path: Path) -> None:
    host = socket.gethostname()
    (tmp_path / f"nccl.{host}.7.log").write_text(f"{host}:7:7 [0] NCCL INFO {tmp_path}/x\n")
    record.mask(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "nccl.node.7.log": "node:7:7 [0] NCCL INFO ./x\n"
    }


def test_others_are_ended_when_a_rank_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "STUCK_S", 0.1)
    waits = "import sys; sys.stdin.read()"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        for code in (waits, "import os; os._exit(3)")
    ]
    assert record.ends(processes) == [-9, 3]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()


def test_the_cost_is_a_ratio_to_the_plain_runs_at_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    row = record.Row(variant="logs", nccl="2.28.3", ranks=2, exits=(0, 0), step_ms=5.25, log_bytes=2_500_000)
    print_cost(
        [
            dataclasses.replace(row, variant="plain", step_ms=4.0, log_bytes=0),
            row,
            dataclasses.replace(row, variant="killed", exits=(1, -9), step_ms=None),
            dataclasses.replace(row, variant="plain_again", step_ms=6.0, log_bytes=0),
            dataclasses.replace(row, ranks=4),
        ]
    )
    lines = capsys.readouterr().out.splitlines()[3:]
    assert lines[1] == "| 2.28.3 | 2 | logs | 5.25 | 1.050 | 2.50 |"
    assert lines[2] == "| 2.28.3 | 2 | killed | not measured | not measured | 2.50 |"
    assert lines[4] == "| 2.28.3 | 4 | logs | 5.25 | not measured | 2.50 |"
