"""What the demo says of the faults that it injects."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from end_to_end.processes import running, wait_for

from ncclscope.demo import DemoRun, FoundFindings
from ncclscope.simulate import BEHIND


def test_each_finding_is_said_once_and_each_fault_has_its_outcome() -> None:
    found = FoundFindings()
    late = {"id": "late_rank-1", "kind": "late_rank", "confidence": 0.95, "summary": "rank 1 is late", "since_ns": 7}
    other = {**late, "id": "late_rank-2", "summary": "rank 2 is late", "since_ns": 9}
    assert found.new_lines([], 1.0) == []
    assert found.new_lines([late], 19.2) == ["+ 19 s      late_rank (95% sure): rank 1 is late"]
    assert found.new_lines([other, late], 31.0) == ["+ 31 s      late_rank (95% sure): rank 2 is late"]
    assert found.outcome("late_rank:rank=1,ms=4").endswith(
        "late_rank:rank=1,ms=4: late_rank, found 19 s after the start"
    )
    assert found.outcome("slow_nic:node=1,gpu=0").endswith("slow_link, no such finding so far")
    assert found.outcome("drop_lines:ratio=0.01").endswith("no finding is expected of it alone")


def test_a_pause_of_the_simulated_job_is_told(tmp_path: Path) -> None:
    run = DemoRun(folder=tmp_path, simulator=(), http_port=0)
    (tmp_path / "cluster.log").write_text("simulating 8 ranks into x\n")
    assert run.new_pauses() == []
    with (tmp_path / "cluster.log").open("a") as log:
        log.write(f"{BEHIND} 7 s\n")
    assert run.new_pauses() == [f"{BEHIND} 7 s"]
    assert run.new_pauses() == [], "once"


def test_the_simulator_says_for_how_long_it_could_not_keep_up(tmp_path: Path) -> None:
    with running(
        tmp_path / "log", "simulate", "--live", "--out", str(tmp_path / "out"), "--nodes", "1", "--gpus", "4"
    ) as job:
        wait_for(lambda: "simulating" in (tmp_path / "log").read_text(), "its start")
        job.send_signal(signal.SIGSTOP)
        until = time.monotonic() + 4
        wait_for(lambda: time.monotonic() > until, "a pause that is longer than any of a machine that keeps up")
        job.send_signal(signal.SIGCONT)
        wait_for(lambda: BEHIND in (tmp_path / "log").read_text(), "the pause")
