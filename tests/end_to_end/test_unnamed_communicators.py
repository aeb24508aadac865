"""Jobs of NCCL up to 2.15, whose logs print no commId: the ranks of every communicator are found all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from end_to_end.processes import run_command

_SHAPE = ("--nodes", "4", "--gpus", "4", "--tp", "2", "--pp", "2", "--iterations", "6", "--nccl", "2.14")


def _analyzed(root: Path, *more: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """(truth of the operations, operations, communicators) of a simulated job."""
    done = run_command("simulate", "--out", str(root / "job"), *_SHAPE, *more)
    assert done.returncode == 0, done.stderr
    done = run_command("analyze", str(root / "job"), "--out", str(root / "out"))
    assert done.returncode == 0, done.stderr
    return (
        pq.read_table(root / "job" / "truth" / "operations.parquet").to_pylist(),
        pq.read_table(root / "out" / "operations.parquet").to_pylist(),
        pq.read_table(root / "out" / "communicators.parquet").to_pylist(),
    )


def _groups(rows: list[dict[str, Any]]) -> set[frozenset[tuple[str, int]]]:
    """Communicators as the sets of (log file, line) of their operations."""
    groups: dict[str, set[tuple[str, int]]] = {}
    for row in rows:
        groups.setdefault(row["comm_id"], set()).add((Path(row["log_file"]).name, row["log_line"]))
    return {frozenset(lines) for lines in groups.values()}


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["full", "none"])
def test_every_communicator_is_put_together(capture: str, tmp_path: Path) -> None:
    truth, ours, communicators = _analyzed(tmp_path, "--capture", capture)
    assert _groups(ours) == _groups(truth)
    used = [row for row in communicators if row["operations"]]
    assert {row["identity"] for row in used} == {"inferred"}
    assert all(0.5 < row["identity_confidence"] < 1 for row in used)
    assert all(None not in row["ranks"] for row in used)
    assert len({row["comm_id"] for row in communicators}) == len(communicators)


@pytest.mark.slow
def test_their_bandwidth_is_measured_as_if_they_had_been_named(tmp_path: Path) -> None:
    truth, ours, _ = _analyzed(tmp_path)
    known = {(Path(row["log_file"]).name, row["log_line"]): row for row in ours}
    for row in truth:
        own = known[Path(row["log_file"]).name, row["log_line"]]
        assert own["parallelism"] == row["parallelism"]
        assert own["comm_rank"] == row["comm_rank"]
        if row["busbw_bytes_per_second"]:
            assert own["busbw_bytes_per_second"] == pytest.approx(row["busbw_bytes_per_second"], rel=0.05)
