"""The numbers of a finding against the truth of the simulated job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from end_to_end.processes import run_command
from numpy.typing import NDArray

pytestmark = pytest.mark.slow

_FROM = 10


def _simulated(out: Path, fault: str, *more: str) -> Path:
    more = ("--iterations", "60", "--step-seconds", "0.4", "--fault", fault, *more)
    assert run_command("simulate", "--out", str(out), *more).returncode == 0
    return out


def _begins(job: Path) -> NDArray[np.float64]:
    """When each step begins, in ns."""
    table = pq.read_table(job / "truth" / "operations.parquet", columns=["iteration", "start_true_ns"])
    steps, starts = (np.array(table[name].to_pylist(), np.float64) for name in ("iteration", "start_true_ns"))
    return np.array([np.nanmin(starts[steps == step]) for step in range(60)])


def _waits(job: Path, comm_id: str) -> NDArray[np.float64]:
    """Longest wait in the AllGathers of each step of a group, in ns."""
    filters = [("comm_id", "==", comm_id), ("op", "==", "AllGather")]
    table = pq.read_table(job / "truth" / "operations.parquet", columns=["iteration", "wait_ns"], filters=filters)
    steps, waits = (np.array(table[name].to_pylist(), np.float64) for name in ("iteration", "wait_ns"))
    return np.array([waits[steps == step].max() for step in range(60)])


@pytest.mark.parametrize("seed", [1, 2])
def test_the_pipeline_partner_of_a_late_rank_is_innocent(seed: int, tmp_path: Path) -> None:
    shape = ("--nodes", "4", "--gpus", "2", "--order", "tp-pp-dp", "--seed", str(seed))
    late = _simulated(tmp_path / "late", f"late_rank:rank=3,ms=40,from={_FROM}", *shape)
    out = tmp_path / "out"
    assert run_command("analyze", str(late / "logs"), str(late / "nsys"), "--out", str(out)).returncode == 0
    assert [(each["kind"], each["ranks"]) for each in json.loads((out / "findings.json").read_text())] == [
        ("late_rank", [3])
    ]


@pytest.mark.parametrize(("rank", "ms"), [(1, 4), (3, 40)])
def test_the_delay_the_count_the_cost_and_the_begin_of_a_late_rank_are_those_of_the_job(
    rank: int, ms: int, tmp_path: Path
) -> None:
    healthy, late = (
        _simulated(tmp_path / name, fault)
        for name, fault in (("healthy", "none"), ("late", f"late_rank:rank={rank},ms={ms},from={_FROM}"))
    )
    out = tmp_path / "out"
    assert run_command("analyze", str(late / "logs"), str(late / "nsys"), "--out", str(out)).returncode == 0
    finding: dict[str, Any]
    (finding,) = json.loads((out / "findings.json").read_text())
    evidence = finding["evidence"]
    begins = _begins(late)
    step_ns, healthy_ns = (float(np.median(np.diff(each)[2 * _FROM :])) for each in (begins, _begins(healthy)))
    assert (finding["kind"], finding["ranks"]) == ("late_rank", [rank])
    assert evidence["longest_ns"] == pytest.approx(np.median(_waits(late, finding["comm_id"])[_FROM:]), rel=0.05)
    assert (evidence["operation"], evidence["late_operations_per_step"], evidence["operations_per_step"]) == (
        "AllGather", 1, 32,
    )  # fmt: skip
    assert evidence["cost_ratio"] == pytest.approx(evidence["cost_ns"] / step_ns, rel=0.05)
    # the bubble of the pipeline hides a little of it
    assert 0.75 * evidence["cost_ns"] <= step_ns - healthy_ns <= 1.05 * evidence["cost_ns"]
    assert abs(finding["since_ns"] - begins[_FROM]) <= 2 * step_ns
    assert f"{evidence['longest_ns'] / 1e6:.1f} ms late (1 of 32)" in finding["summary"]
    assert f"{100 * evidence['cost_ratio']:.1f} % of step time" in finding["summary"]


def test_the_ranks_that_others_wait_for_are_those_of_the_job(tmp_path: Path) -> None:
    job, out = _simulated(tmp_path / "job", "late_rank:rank=3,ms=4", "--iterations", "10"), tmp_path / "out"
    ran = run_command("analyze", str(job / "logs"), str(job / "nsys"), "--out", str(out))
    _, first, *rest = ran.stdout.split("Who is waited for\n")[1].splitlines()
    assert first.split()[0] == "3"
    assert next(row.split()[0] for row in (first, *rest) if " TP " in row) == "3"
    names = ["comm_id", "coll_seq", "rank", "start_true_ns"]
    filters = [("coll_seq", ">=", 0)]
    arrived: dict[tuple[str, int], dict[int, int]] = {}
    for row in pq.read_table(job / "truth" / "operations.parquet", columns=names, filters=filters).to_pylist():
        arrived.setdefault((row["comm_id"], row["coll_seq"]), {})[row["rank"]] = row["start_true_ns"]
    told = pq.read_table(out / "operations.parquet", columns=[*names[:2], "last_rank"], filters=filters).to_pylist()
    known = [row for row in told if row["last_rank"] is not None]
    assert len(known) > len(told) / 4
    for row in known:
        ranks = arrived[row["comm_id"], row["coll_seq"]]
        assert row["last_rank"] == max(ranks, key=lambda rank: ranks[rank])
