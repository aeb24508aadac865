"""What the demo says of the faults that it injects."""

from __future__ import annotations

from ncclscope.demo import FoundFindings


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
