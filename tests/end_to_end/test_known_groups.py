"""Jobs whose opCount stands still and whose lines have no stamps, with groups that something else tells."""

from __future__ import annotations

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
