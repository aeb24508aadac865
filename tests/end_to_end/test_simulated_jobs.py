"""Simulated jobs against their truth: every operation finds its kernel, its communicator and its measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from end_to_end.processes import end, run_command, serving

Row = dict[str, Any]

_SHAPE = ("--nodes", "2", "--gpus", "4", "--tp", "2", "--pp", "2", "--dp", "2", "--iterations", "2")
_VERSIONS = ("2.18", "2.21", "2.28")
_EVERY_VERSION = tuple(f"2.{minor}" for minor in range(8, 31))
_IDENTITY = (
    "rank",
    "local_rank",
    "comm_id",
    "comm_rank",
    "comm_size",
    "parallelism",
    "iteration",
    "op",
    "seq",
    "coll_seq",
    "count",
    "message_bytes",
)


def _simulate(out: Path, *more: str) -> None:
    done = run_command("simulate", "--out", str(out), *_SHAPE, *more)
    assert done.returncode == 0, done.stderr


def _rows(path: Path) -> dict[tuple[str, int], Row]:
    return {(Path(row["log_file"]).name, row["log_line"]): row for row in pq.read_table(path).to_pylist()}


def _assert_equals_truth(job: Path, out: Path) -> None:
    _assert_pairs_equal_truth(job, out)
    truth, ours = _rows(job / "truth" / "operations.parquet"), _rows(out / "operations.parquet")
    for name in _IDENTITY:
        differing = [(key, row[name], ours[key][name]) for key, row in truth.items() if row[name] != ours[key][name]]
        assert not differing, f"{name} differs in {len(differing)} rows, for instance {differing[0]}"


def _assert_pairs_equal_truth(job: Path, out: Path) -> None:
    truth, ours = _rows(job / "truth" / "operations.parquet"), _rows(out / "operations.parquet")
    assert ours.keys() == truth.keys()
    wrong_pairs = [
        key for key, row in truth.items() if row["kernel_correlation_id"] != ours[key]["kernel_correlation_id"]
    ]
    assert not wrong_pairs, f"F1 is below 1: {len(wrong_pairs)} of {len(truth)} pairs are wrong"


def _assert_measures_agree(job: Path, out: Path) -> None:
    truth, ours = _rows(job / "truth" / "operations.parquet"), _rows(out / "operations.parquet")
    collectives = [
        (row, ours[key]) for key, row in truth.items() if row["coll_seq"] is not None and row["comm_size"] > 1
    ]
    errors = np.array(
        [
            abs(own["busbw_bytes_per_second"] / row["busbw_bytes_per_second"] - 1)
            for row, own in collectives
            if row["busbw_bytes_per_second"] and own["busbw_bytes_per_second"]
        ]
    )
    assert len(errors) > 0.9 * len(collectives)
    assert np.median(errors) <= 0.01
    assert np.quantile(errors, 0.95) <= 0.05


@pytest.mark.parametrize("version", _VERSIONS)
def test_a_clean_capture_is_aligned_exactly_offline(version: str, tmp_path: Path) -> None:
    _simulate(tmp_path / "job", "--nccl", version)
    done = run_command("analyze", str(tmp_path / "job"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    _assert_equals_truth(tmp_path / "job", tmp_path / "out")
    _assert_measures_agree(tmp_path / "job", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("version", _EVERY_VERSION)
def test_every_version_of_nccl_is_aligned_exactly(version: str, tmp_path: Path) -> None:
    _simulate(tmp_path / "job", "--nccl", version)
    done = run_command("analyze", str(tmp_path / "job"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    _assert_pairs_equal_truth(tmp_path / "job", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("version", _VERSIONS)
def test_a_clean_capture_is_aligned_exactly_live(version: str, tmp_path: Path) -> None:
    _simulate(tmp_path / "job", "--nccl", version, "--chunk-seconds", "0.5", "--iterations", "4")
    kept = ("--data", str(tmp_path / "data"), "--snapshot-on-end", str(tmp_path / "out"))
    with serving(tmp_path / "service.log", *kept) as service:
        for node in ("node00", "node01"):
            done = run_command(
                *("agent", "--once", "--connect", f"127.0.0.1:{service.agents}", "--name", node, "--job", "default"),
                *("--logs", str(tmp_path / "job" / "logs" / f"*{node}*")),
                *("--exports", str(tmp_path / "job" / "nsys" / node)),
            )
            assert done.returncode == 0, done.stderr
        assert end(service.process) == 0
    _assert_equals_truth(tmp_path / "job", tmp_path / "out")


@pytest.mark.slow
def test_two_seeds_give_different_jobs_that_each_agree_with_their_truth(tmp_path: Path) -> None:
    transfers: list[list[int]] = []
    for seed in ("1", "2"):
        job, out = tmp_path / f"job{seed}", tmp_path / f"out{seed}"
        _simulate(job, "--seed", seed)
        assert run_command("analyze", str(job), "--out", str(out)).returncode == 0
        _assert_equals_truth(job, out)
        _assert_measures_agree(job, out)
        transfers.append(pq.read_table(out / "operations.parquet", columns=["transfer_ns"])["transfer_ns"].to_pylist())
    assert transfers[0] != transfers[1]


@pytest.mark.slow
def test_logs_alone_give_counts_and_order_and_say_that_the_rest_is_not_recorded(tmp_path: Path) -> None:
    _simulate(tmp_path / "job", "--capture", "none")
    done = run_command("analyze", str(tmp_path / "job"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "not recorded" in done.stdout
    truth = _rows(tmp_path / "job" / "truth" / "operations.parquet")
    ours = _rows(tmp_path / "out" / "operations.parquet")
    assert ours.keys() == truth.keys()
    assert {row["match"] for row in ours.values()} <= {"not_covered", "no_kernel"}
    assert {row["busbw_bytes_per_second"] for row in ours.values()} == {None}
    assert all(row["seq"] == truth[key]["seq"] and row["op"] == truth[key]["op"] for key, row in ours.items())


@pytest.mark.slow
def test_lost_lines_never_give_a_bandwidth_of_operations_that_do_not_belong_together(tmp_path: Path) -> None:
    _simulate(tmp_path / "job", "--fault", "drop_lines:ratio=0.01", "--iterations", "10")
    assert run_command("analyze", str(tmp_path / "job"), "--out", str(tmp_path / "out")).returncode == 0
    truth = _rows(tmp_path / "job" / "truth" / "operations.parquet")
    ours = _rows(tmp_path / "out" / "operations.parquet")
    measured = [
        (row["busbw_bytes_per_second"], truth[key]["busbw_bytes_per_second"])
        for key, row in ours.items()
        if row["coll_seq"] is not None and row["busbw_bytes_per_second"] is not None
    ]
    off = [pair for pair in measured if pair[1] and abs(pair[0] / pair[1] - 1) > 0.5]
    assert len(off) <= 0.01 * len(measured), f"{len(off)} of {len(measured)} bandwidths are wrong by more than half"
