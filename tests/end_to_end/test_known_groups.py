"""Jobs whose opCount stands still and whose lines have no stamps, with groups that something else tells."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from end_to_end.processes import run_command

_VERSIONS = ("2.18", "2.22", "2.28", "2.30")
_SHAPE = ("--nodes", "1", "--gpus", "4", "--tp", "1", "--pp", "2", "--dp", "2", "--ep", "2", "--iterations", "3")
_GROUPS = ("--coalesce", "--zero1", "--stuck-op-count", "--no-timestamps", "--layers", "3")


def _wrong_pairs(job: Path, *options: str) -> tuple[int, int]:
    """Simulates and analyses; how many operations have another kernel (or launch) than they should, and of how many."""
    done = run_command("simulate", "--out", str(job), *_SHAPE, *_GROUPS, *options)
    assert done.returncode == 0, done.stderr
    done = run_command("analyze", str(job), "--out", str(job / "out"))
    assert done.returncode == 0, done.stderr
    truth = _pairs(job / "truth" / "operations.parquet")
    ours = _pairs(job / "out" / "operations.parquet")
    assert ours.keys() == truth.keys()
    return sum(ours[line] != kernel for line, kernel in truth.items()), len(truth)


def _pairs(path: Path) -> dict[tuple[str, int], int | None]:
    return {
        (Path(row["log_file"]).name, row["log_line"]): row["kernel_correlation_id"]
        for row in pq.read_table(path).to_pylist()
    }


@pytest.mark.slow
@pytest.mark.parametrize("version", _VERSIONS)
def test_call_lines_make_a_capture_exact(version: str, tmp_path: Path) -> None:
    wrong, of = _wrong_pairs(tmp_path / "job", "--nccl", version, "--calls", "--no-nvtx")
    assert (wrong, of > 500) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize("payload", [(), ("--nvtx-payload",)], ids=["names", "payloads"])
def test_nvtx_ranges_make_a_capture_exact(version: str, payload: tuple[str, ...], tmp_path: Path) -> None:
    wrong, of = _wrong_pairs(tmp_path / "job", "--nccl", version, *payload)
    assert (wrong, of > 500) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["2.26", "2.28"])
def test_nvtx_ranges_place_a_capture_in_pieces(version: str, tmp_path: Path) -> None:
    pieces = ("--iterations", "25", "--capture", "duty:0.4", "--chunk-seconds", "4")
    wrong, of = _wrong_pairs(tmp_path / "job", "--nccl", version, *pieces)
    assert wrong <= 0.01 * of


@pytest.mark.slow
def test_what_the_alignment_would_have_said_is_checked_and_counted(tmp_path: Path) -> None:
    wrong, of = _wrong_pairs(tmp_path / "job", "--nccl", "2.28")
    read = json.loads((tmp_path / "job" / "out" / "summary.json").read_text())["read"]
    assert wrong == 0
    assert read["alignment_checked"] == of
    assert 0 < read["alignment_disagreements"] < of
