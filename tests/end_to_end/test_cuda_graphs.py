"""Jobs that capture their step into CUDA graphs: lines once, kernels at every replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from end_to_end.processes import run_command

Row = dict[str, Any]

_SHAPE = ("--nodes", "2", "--gpus", "2", "--tp", "2", "--pp", "1", "--dp", "2", "--iterations", "6")
_GRAPHS = ("--cuda-graphs", "2", "--cuda-graph-trace", "node")


def _analyzed(folder: Path, *more: str) -> tuple[Path, Path]:
    job, out = folder / "job", folder / "out"
    done = run_command("simulate", "--out", str(job), *_SHAPE, *more)
    assert done.returncode == 0, done.stderr
    done = run_command("analyze", str(job), "--out", str(out))
    assert done.returncode == 0, done.stderr
    return job, out


def _operations(path: Path) -> dict[tuple[str, int], Row]:
    return {(Path(row["log_file"]).name, row["log_line"]): row for row in pq.read_table(path).to_pylist()}


def _pairs(job: Path, out: Path) -> list[tuple[Row, Row]]:
    truth, ours = _operations(job / "truth" / "operations.parquet"), _operations(out / "operations.parquet")
    assert truth.keys() == ours.keys()
    return [(row, ours[key]) for key, row in truth.items()]


def _assert_operations_name_their_first_kernel(job: Path, out: Path) -> None:
    for row, own in _pairs(job, out):
        assert row["kernel_correlation_id"] == own["kernel_correlation_id"]
        if own["kernel_correlation_id"] is not None:
            assert (row["start_ns"], own["match"]) == (own["start_ns"], "matched")


def _assert_replays_equal_truth(job: Path, out: Path) -> list[tuple[Row, Row]]:
    """Launch and number of every replayed kernel; gives truth and ours of each."""
    launch_of: dict[int, set[int]] = {}
    for row, own in _pairs(job, out):
        if row["captured"] and row["launch_id"] is not None:
            launch_of.setdefault(row["launch_id"], set()).add(own["launch_id"])
    assert all(len(launches) == 1 for launches in launch_of.values())
    kernels = {
        (row["host"], row["pid"], row["correlation_id"], row["stream_id"], row["start_ns"]): row
        for row in pq.read_table(out / "kernels.parquet").to_pylist()
    }
    found: list[tuple[Row, Row]] = []
    for row in pq.read_table(job / "truth" / "replays.parquet").to_pylist():
        own = kernels[row["host"], row["pid"], row["correlation_id"], row["stream_id"], row["start_ns"]]
        assert ({own["launch_id"]}, own["replay"]) == (launch_of[row["launch_id"]], row["replay"])
        found.append((row, own))
    return found


def _assert_bandwidths_agree(replays: list[tuple[Row, Row]]) -> None:
    whole = [pair for pair in replays if not pair[0]["cut"] and pair[0]["busbw_bytes_per_second"]]
    ratios = [
        own["busbw_bytes_per_second"] / row["busbw_bytes_per_second"]
        for row, own in whole
        if own["busbw_bytes_per_second"]
    ]
    assert len(ratios) >= 0.98 * len(whole)
    assert abs(float(np.median(ratios)) - 1) <= 0.01
    assert float(np.quantile(np.abs(np.asarray(ratios) - 1), 0.95)) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "chunks"),
    [(version, ()) for version in ("2.12", "2.22", "2.30")]
    + [(version, ("--chunk-seconds", "0.3")) for version in ("2.18", "2.28")],
    ids=["2.12", "2.22", "2.30", "2.18-chunked", "2.28-chunked"],
)
def test_every_replay_finds_the_operations_that_were_captured(
    version: str, chunks: tuple[str, ...], tmp_path: Path
) -> None:
    job, out = _analyzed(tmp_path, *_GRAPHS, "--nccl", version, *chunks)
    _assert_operations_name_their_first_kernel(job, out)
    replays = _assert_replays_equal_truth(job, out)
    assert {row["replay"] for row, _ in replays} == {0, 1, 2, 3}
    if version != "2.12":  # without a commId communicators are not joined across processes
        _assert_bandwidths_agree(replays)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.18", "2.28"])
def test_several_graphs_of_a_step_that_are_captured_anew_are_told_apart(version: str, tmp_path: Path) -> None:
    more = ("--graphs-per-step", "3", "--recapture-every", "2", "--nccl", version)
    job, out = _analyzed(tmp_path, *_GRAPHS, *more)
    _assert_operations_name_their_first_kernel(job, out)
    _assert_bandwidths_agree(_assert_replays_equal_truth(job, out))


@pytest.mark.slow
def test_graphs_of_all_gpus_of_one_process_are_told_apart(tmp_path: Path) -> None:
    job, out = _analyzed(tmp_path, *_GRAPHS, "--process-per-node")
    _assert_operations_name_their_first_kernel(job, out)
    _assert_replays_equal_truth(job, out)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.18", "2.28"])
def test_graphs_recorded_as_a_whole_are_counted_and_disturb_no_other_pair(version: str, tmp_path: Path) -> None:
    job, out = _analyzed(tmp_path, "--cuda-graphs", "2", "--nccl", version)
    for row, own in _pairs(job, out):
        if row["captured"]:
            assert own["match"] in {"unmatched", "not_covered"}
            assert own["busbw_bytes_per_second"] is None
        else:
            assert own["kernel_correlation_id"] == row["kernel_correlation_id"]
    summary = json.loads((out / "summary.json").read_text())
    launches = 4 * 4
    assert summary["captured"]["graph_launches"] == launches
    assert summary["read"]["skipped"]["graph_launch_without_kernels"] == launches
    note = "16 graph launches were recorded as a whole: record with nsys and --cuda-graph-trace=node"
    assert summary["captured"]["graphs_note"] == note
    again = run_command("analyze", str(job), "--out", str(tmp_path / "again"))
    assert note in again.stdout


@pytest.mark.slow
def test_a_graph_whose_capture_is_not_in_the_log_is_counted_as_unknown(tmp_path: Path) -> None:
    job, out = tmp_path / "job", tmp_path / "out"
    assert run_command("simulate", "--out", str(job), *_SHAPE, *_GRAPHS).returncode == 0
    captured = [row for row in pq.read_table(job / "truth" / "operations.parquet").to_pylist() if row["captured"]]
    for log in (job / "logs").glob("nccl.*.log"):
        lines = log.read_text().splitlines()
        gone = {row["log_line"] for row in captured if Path(row["log_file"]).name == log.name}
        log.write_text("\n".join(line for at, line in enumerate(lines, 1) if at not in gone) + "\n")
    assert run_command("analyze", str(job), "--out", str(out)).returncode == 0
    summary = json.loads((out / "summary.json").read_text())
    replays = pq.read_table(job / "truth" / "replays.parquet").num_rows
    assert summary["read"]["skipped"]["replay_of_unknown_capture"] == replays
    assert summary["match"]["unmatched"] == summary["match"]["pending"] == 0
