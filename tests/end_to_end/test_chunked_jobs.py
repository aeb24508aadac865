"""Jobs whose captures come in many exports: what was recorded finds its kernel, and guesses are called guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from end_to_end.processes import run_command

Row = dict[str, Any]

_SMALL = ("--nodes", "1", "--gpus", "2", "--tp", "2", "--pp", "1")


def _analyzed(folder: Path, *more: str) -> list[tuple[Row, Row]]:
    """What is true and what was found, of every operation that was logged."""
    job, out = folder / "job", folder / "out"
    assert run_command("simulate", "--out", str(job), *_SMALL, *more).returncode == 0
    assert run_command("analyze", str(job), "--out", str(out)).returncode == 0
    truth, ours = _rows(job / "truth" / "operations.parquet"), _rows(out / "operations.parquet")
    assert ours.keys() == truth.keys()
    return [(row, ours[key]) for key, row in truth.items()]


def _rows(path: Path) -> dict[tuple[str, int], Row]:
    return {(Path(row["log_file"]).name, row["log_line"]): row for row in pq.read_table(path).to_pylist()}


def _is_whole(row: Row) -> bool:
    return bool(row["covered"] and not row["kernel_cut"] and not row["kernel_lost"])


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.21", "2.28"])
def test_a_clean_capture_in_many_chunks_is_aligned_exactly(version: str, tmp_path: Path) -> None:
    rows = _analyzed(tmp_path, "--nccl", version, "--iterations", "30", "--chunk-seconds", "0.2")
    assert len(list((tmp_path / "job" / "nsys").glob("*/*.sqlite"))) >= 20
    wrong = [
        (row["log_file"], row["log_line"], row["kernel_correlation_id"], own["kernel_correlation_id"], own["match"])
        for row, own in rows
        if _is_whole(row) and row["kernel_correlation_id"] != own["kernel_correlation_id"]
    ]
    assert not wrong, f"{len(wrong)} pairs are wrong, for instance {wrong[0]}"


@pytest.mark.slow
def test_a_wrong_pair_after_a_hole_without_stamps_is_called_a_guess(tmp_path: Path) -> None:
    rows = _analyzed(tmp_path, "--nccl", "2.21", "--iterations", "40", "--capture", "duty:0.5", "--chunk-seconds", "4")
    found = [(row, own) for row, own in rows if own["kernel_correlation_id"] is not None]
    assert found
    wrong = [own for row, own in found if row["kernel_correlation_id"] != own["kernel_correlation_id"]]
    sure = [own for own in wrong if own["confidence"] > 0.5]
    assert len(sure) <= 0.005 * len(found), f"{len(sure)} of {len(wrong)} wrong pairs of {len(found)} are believed"
