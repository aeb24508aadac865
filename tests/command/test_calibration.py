"""`calibration.json` of one run says how long transfers of the next should take."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from emission_samples import small

from ncclscope.calibration import step_of
from ncclscope.cli import main
from ncclscope_models.calibration import Calibration
from ncclscope_models.transfer_estimate import TransferTimes

_SHAPE = ("--nodes", "2", "--gpus", "2", "--tp", "2", "--pp", "1", "--iterations", "8", "--layers", "4")


def _run(folder: Path, *options: str) -> Path:
    done = CliRunner().invoke(main, ["simulate", "--out", str(folder), *_SHAPE, *options])
    assert done.exit_code == 0, done.output
    return folder


def _analyzed(job: Path, *options: str) -> list[dict[str, object]]:
    out = job.parent / f"{job.name}-out"
    done = CliRunner().invoke(main, ["analyze", str(job), "--out", str(out), "--jobs", "1", *options])
    assert done.exit_code == 0, done.output
    rows: list[dict[str, object]] = pq.read_table(out / "expected_times.parquet").to_pylist()
    return rows


def test_transfers_of_a_slow_run_take_longer_than_its_calibration_says(tmp_path: Path) -> None:
    first = _analyzed(_run(tmp_path / "first"))
    assert {row["source"] for row in first} == {"this_run", None}
    by_history = [row for row in first if row["basis"] == "history"]
    assert by_history
    assert all(0.9 < float(str(row["over_expected_ratio"])) < 1.1 for row in by_history)
    slow = _run(tmp_path / "slow", "--seed", "1", "--fault", "slow_link:node=1,factor=0.25")
    rows = _analyzed(slow, "--calibration", str(tmp_path / "first-out" / "calibration.json"))
    over = {
        str(row["parallelism"]): float(str(row["over_expected_ratio"]))
        for row in rows
        if row["source"] == "calibration"
    }
    assert over["DP"] > 2
    assert over["TP"] == pytest.approx(1, abs=0.1)


def test_a_calibration_has_the_gpu_and_how_many_network_cards_a_node_has(tmp_path: Path) -> None:
    job = _run(tmp_path / "shared", "--contention", "nics=1,slowdown=0.1")
    _analyzed(job)
    document = json.loads((tmp_path / "shared-out" / "calibration.json").read_text())
    assert [(each["network_cards"], each["gpu"]) for each in document["jobs"]] == [(1, "H100 SXM")]


def test_a_file_that_is_no_calibration_is_named(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    arguments = ["analyze", str(tmp_path), "--calibration", str(tmp_path / "wrong.json")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "wrong.json" in done.output
    assert "calibration.json" in done.output


def test_why_a_calibration_says_no_step_is_said_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    described = small(tp=2, dp=2, iterations=2).described()
    run = Calibration(
        job="before", ranks=4, ranks_per_node=4, times=TransferTimes({}), step=None, median_step_ns=1_000_000
    )
    assert step_of(described, [run], None) is None
    assert "no step is expected of --calibration: before: the run was not described" in capsys.readouterr().err
    assert step_of(described, [], None) is None
    assert step_of(None, [run], None) is None
    assert capsys.readouterr().err == ""
