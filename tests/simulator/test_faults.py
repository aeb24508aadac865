"""Faults that stop a job, or make it call something else, as its log shows them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from simulator.jobs import log_lines, truth

from ncclscope_simulator import SimulationConfig, parse_faults, write

_SMALL = SimulationConfig(
    nodes=1, gpus=4, tp=4, pp=1, dp=1, iterations=4, layers=1, microbatches=2, step_seconds=0.1, hang_seconds=1.0
)


def played(folder: Path, fault: str) -> Path:
    write(replace(_SMALL, faults=parse_faults([fault])), folder)
    return folder


def test_stuck_inside_all_have_enqueued_and_nothing_ends(tmp_path: Path) -> None:
    rows = [row for row in truth(played(tmp_path, "hang:rank=1,at=2,how=inside")) if row["parallelism"] == "TP"]
    assert len(set(Counter(row["rank"] for row in rows).values())) == 1
    last = max(row["coll_seq"] for row in rows)
    assert [row["end_true_ns"] for row in rows if row["coll_seq"] == last] == [None] * 4
    assert all(row["end_true_ns"] is not None for row in rows if row["coll_seq"] < last)


@pytest.mark.parametrize("how", ["count", "operation", "order"])
def test_a_mismatch_shows_in_the_last_call_of_one_rank(how: str, tmp_path: Path) -> None:
    calls: dict[int, list[tuple[str, int]]] = {}
    for row in truth(played(tmp_path, f"mismatch:rank=1,at=2,how={how}")):
        if row["parallelism"] == "TP":
            calls.setdefault(row["rank"], []).append((row["op"], row["count"]))
    assert calls[0] == calls[2] == calls[3]
    assert calls[1][:-1] == calls[0][:-1]
    assert calls[1][-1] != calls[0][-1]


def test_a_killed_job_destroys_nothing(tmp_path: Path) -> None:
    folder = played(tmp_path, "kill:at=2")
    assert not any("Destroy" in line for line in log_lines(folder))
    assert max(row["iteration"] for row in truth(folder)) == 2


def test_a_pause_is_a_gap_between_steps(tmp_path: Path) -> None:
    stamps = sorted(row["called_ns"] for row in truth(played(tmp_path, "pause:at=2,seconds=7")))
    assert max(after - before for before, after in pairwise(stamps)) > 7_000_000_000


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("mismatch:rank=1,at=2,how=late", "how must be count, operation, order"),
        ("pause:at=1,seconds=1,only=9", "no rank 9 in 4 ranks"),
        ("slow_nic:node=0,gpu=3,gpus=2,factor=0.5", "no GPUs 3 to 4"),
    ],
)
def test_faults_that_cannot_be_are_refused(fault: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        replace(_SMALL, faults=parse_faults([fault]))
