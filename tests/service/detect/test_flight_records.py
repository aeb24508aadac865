"""What the dumps of PyTorch's Flight Recorder say of a job in which ranks wait."""

from __future__ import annotations

from ncclscope_service.detect.context import Context
from ncclscope_service.detect.flight_recorder import FlightRecords
from ncclscope_service.store.records import Finding
from ncclscope_wire.facts import FlightRecord

CONTEXT = Context(job="job", groups={})


def record(rank: int, group: str, enqueued: int, *, completed: int, operation: str = "all_reduce") -> FlightRecord:
    return FlightRecord(
        line=1,
        global_rank=rank,
        group=group,
        description=f"{group} group",
        group_ranks=(0, 1, 2, 3),
        last_enqueued=enqueued,
        last_completed=completed,
        sequence=min(completed + 1, enqueued),
        operation=operation,
        state="started" if enqueued > completed else "completed",
    )


def findings(*records: FlightRecord) -> list[Finding]:
    detector = FlightRecords()
    detector.ingest_records(records, CONTEXT)
    return detector.findings()


HELD = [record(0, "tp", 8, completed=6), record(1, "tp", 6, completed=6)]
"""Rank 0 waits for rank 1."""
BEHIND_THEM = [record(rank, "dp", 4 + (rank > 1), completed=4) for rank in range(4)]
"""Ranks 2 and 3 wait for ranks 0 and 1."""


def test_waits_that_end_at_one_rank_are_one_finding_about_it() -> None:
    stuck_on_gpu = [record(rank, "pp", 9, completed=8) for rank in (2, 3)]
    (found,) = findings(*HELD, *BEHIND_THEM, *stuck_on_gpu)
    assert found.ranks == (1,)
    assert found.summary == (
        "rank 1 has not called all_reduce 5 of dp group and operations of 1 other group; ranks 0, 2 and 3 are waiting "
        "(PyTorch's flight recorder)"
    )


def test_calls_that_do_not_fit_together_are_said_beside_it() -> None:
    unlike = [record(2, "pp", 9, completed=8), record(3, "pp", 9, completed=8, operation="broadcast")]
    assert [found.ranks for found in findings(*HELD, *unlike)] == [(1,), (3,)]


def test_where_ranks_wait_in_a_circle_each_group_is_a_finding() -> None:
    back = [record(1, "pp", 9, completed=8), record(0, "pp", 8, completed=8)]
    assert {found.evidence["group"] for found in findings(*HELD, *back)} == {"tp", "pp"}


def test_the_dump_of_one_more_rank_replaces_what_was_said_of_its_group_alone() -> None:
    detector = FlightRecords()
    detector.ingest_records([record(rank, "dp", 5, completed=4) for rank in (2, 3)], CONTEXT)
    (alone,) = detector.findings()
    assert (alone.ranks, alone.evidence["without_dump"]) == ((), [0, 1])
    detector.ingest_records([record(1, "dp", 4, completed=4)], CONTEXT)
    (found,) = detector.findings()
    assert (found.ranks, found.until_ns) == ((1,), None)
