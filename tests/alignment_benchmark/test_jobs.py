from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from benchmarks.alignment.jobs import score_file, score_simulated, simulated

from ncclscope_simulator.config import SimulationConfig

_SMALL = SimulationConfig(nodes=1, gpus=2, tp=2, pp=1, dp=1, layers=1, microbatches=1, iterations=3)
_PLACE = ("log_file", "log_line")


def _write(job: Path, rows: list[dict[str, object]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), job / "answers.parquet")
    return job / "answers.parquet"


def test_a_small_clean_job_is_read_exactly() -> None:
    found = score_simulated(_SMALL)
    assert found.score.exact.f1 == 1.0
    assert found.score.exact.wanted > 50
    assert found.not_captured == 0


def test_any_tool_can_be_scored_by_what_it_writes() -> None:
    with simulated(_SMALL) as job:
        truth = pq.read_table(job / "truth" / "operations.parquet").to_pylist()
        right = [{name: row[name] for name in (*_PLACE, "kernel_correlation_id")} for row in truth]
        assert score_file(job, _write(job, right)).score.exact.f1 == 1.0
        one, other = [row for row in right if row["kernel_correlation_id"] is not None][:2]
        numbers = one["kernel_correlation_id"], other["kernel_correlation_id"]
        other["kernel_correlation_id"], one["kernel_correlation_id"] = numbers
        exact = score_file(job, _write(job, right)).score.exact
        assert exact.right == exact.wanted - 2


def test_what_was_not_captured_is_not_wanted_but_counted() -> None:
    with simulated(SimulationConfig(nodes=1, gpus=2, tp=2, pp=1, dp=1, iterations=2, capture="none")) as job:
        truth = pq.read_table(job / "truth" / "operations.parquet").to_pylist()
        told: dict[str, object] = {"kernel_correlation_id": None, "match": "not_covered"}
        found = score_file(job, _write(job, [{**{name: row[name] for name in _PLACE}, **told} for row in truth]))
        assert found.score.exact.wanted == 0
        assert found.said_so == found.not_captured == sum(row["launch_id"] is not None for row in truth)
