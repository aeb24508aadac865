from __future__ import annotations

from dataclasses import replace

import numpy as np

from ncclscope_service.detect.context import Context, Group
from ncclscope_service.detect.lossy_calls import NumberedCalls
from ncclscope_service.detect.mismatch import CALL, Mismatch
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_TIME_NS, OPERATION_CODES

SECOND = 1_000_000_000
CONTEXT = Context(
    job="job",
    groups={
        0: Group(
            comm_id="0xabc", parallelism="DP", global_ranks=(10, 11, 12, 13), hosts=("node0", "node1", "node2", "node3")
        )
    },
)


def calls(rank: int, count: int, wrong_at: int | None = None, wrong_bytes: int = 512, first: int = 0) -> Columns:
    made = np.zeros(count, CALL)
    made["rank"], made["coll_seq"] = rank, np.arange(first, first + count)
    made["op"] = OPERATION_CODES["AllReduce"]
    made["message_bytes"] = 1024 + (made["coll_seq"] % 7) * 8
    made["logged_ns"] = made["coll_seq"] * 1000
    if wrong_at is not None:
        made["message_bytes"][wrong_at] = wrong_bytes
    return made


def fed(*parts: Columns) -> Mismatch:
    """A detector that got these calls one after the other."""
    detector = Mismatch()
    for part in parts:
        detector.ingest_calls(part, CONTEXT)
    return detector


def test_ranks_that_agree_are_quiet_however_far_apart_they_run() -> None:
    later = (np.concatenate([calls(rank, 100, first=first) for rank in (1, 2, 3)]) for first in range(0, 2000, 100))
    assert fed(calls(0, 2000), *later).findings(0) == []


def test_the_rank_that_differs_is_named_with_both_calls() -> None:
    for odd in range(4):
        (finding,) = fed(*(calls(rank, 100, 40 if rank == odd else None) for rank in range(4))).findings(0)
        assert finding.ranks == (10 + odd,)
        assert finding.hosts == (f"node{odd}",)
        assert finding.since_ns == 40_000
        assert finding.evidence["coll_seq"] == 40
        assert "AllReduce of 512 bytes" in finding.summary
        assert finding.summary.endswith("but the other ranks call AllReduce of 1064 bytes")


def test_two_against_two_names_all_with_less_confidence_as_long_as_nothing_like_it_came_before() -> None:
    for wrong_at, ranks, confidence in ((20, (10, 11, 12, 13), 0.5), (60, (10, 11), 0.8)):
        (finding,) = fed(*(calls(rank, 100, wrong_at if rank < 2 else None) for rank in range(4))).findings(0)
        assert (finding.ranks, finding.confidence) == (ranks, confidence)
        assert finding.summary.endswith(", as before") is (confidence == 0.8)


def test_sizes_that_are_not_known_are_not_compared() -> None:
    parts = (calls(rank, 100, 40 if rank == 2 else None, wrong_bytes=-1) for rank in range(4))
    assert fed(*parts).findings(0) == []


def test_a_line_that_was_lost_without_a_trace_is_no_mismatch() -> None:
    lossy = calls(2, 99)
    lossy["message_bytes"][40:] = calls(2, 100)["message_bytes"][41:]
    assert fed(calls(0, 100), calls(1, 100), lossy, calls(3, 100)).findings(10**12) == []


def test_a_rank_that_stops_after_its_wrong_call_is_named_when_nothing_more_comes() -> None:
    detector = fed(*(calls(rank, 41, 40 if rank == 3 else None) for rank in range(4)))
    assert detector.findings(1_000_000) == []
    (finding,) = detector.findings(10_000_000_000)
    assert finding.ranks == (13,)
    assert finding.evidence["collectives"] == ["0xabc:40"]
    assert finding.evidence["differs_in"] == "size"


def repeating(rank: int, count: int) -> Columns:
    """A sequence of which every step calls the same: seven sizes, an AllGather and a ReduceScatter among them."""
    made = calls(rank, count)
    place = made["coll_seq"] % 7
    made["op"] = np.where(place == 3, OPERATION_CODES["AllGather"], made["op"])
    made["op"] = np.where(place == 4, OPERATION_CODES["ReduceScatter"], made["op"])
    return made


def test_a_rank_that_calls_what_comes_next_calls_in_another_order() -> None:
    odd = repeating(2, 95)  # up to the AllGather of a step
    odd["op"][-1], odd["message_bytes"][-1] = odd["op"][-7], odd["message_bytes"][-7]
    (finding,) = fed(*(repeating(rank, 95) for rank in (0, 1)), odd, repeating(3, 95)).findings(20 * SECOND)
    assert (finding.ranks, finding.evidence["differs_in"]) == ((12,), "order")
    assert "in different orders" in finding.summary


def test_a_rank_that_calls_what_never_comes_here_calls_another_operation() -> None:
    odd = repeating(2, 95)
    odd["op"][-1] = OPERATION_CODES["Broadcast"]
    (finding,) = fed(*(repeating(rank, 95) for rank in (0, 1)), odd, repeating(3, 95)).findings(20 * SECOND)
    assert finding.evidence["differs_in"] == "operation"


def with_a_lost_line(rank: int, count: int) -> Columns:
    """The same, but one line of rank 2 is missing: all that follows has a number too low."""
    made = repeating(rank, count)
    if rank == 2:
        made = np.delete(made, 50)
        made["coll_seq"][50:] -= 1
    made["stamp_ns"] = made["logged_ns"]
    return made


def test_a_communicator_with_lost_lines_is_told_as_such() -> None:
    detector = fed(*(with_a_lost_line(rank, 200) for rank in range(4)))
    assert detector.findings(0) == []
    assert detector.with_losses == frozenset({0})
    assert detector.enqueued() == {}


def test_lost_lines_that_equal_calls_do_not_show_are_counted_as_kernels_have_shown_them() -> None:
    detector = Mismatch()
    for rank in range(4):
        made = calls(rank, 200 - (rank == 2))
        made["message_bytes"] = 1024
        detector.ingest_calls(made, CONTEXT)
    assert detector.findings(0) == []
    assert (detector.with_losses, detector.enqueued()) == (frozenset(), {})
    detector.update_context(replace(CONTEXT, has_lost_lines=True))
    assert detector.findings(0) == []
    assert detector.with_losses == frozenset({0})
    newest = NumberedCalls(
        199, np.full((1, 4), 1024), np.full(1, NO_TIME_NS), np.array([200, 200, 200, 199]), is_told=True
    )
    assert detector.findings(20 * SECOND, lambda _: newest) == []
    assert detector.with_losses == frozenset()
    assert detector.enqueued() == {0: {0: 200, 1: 200, 2: 200, 3: 199}}


def test_after_a_lost_line_it_is_known_again_how_far_ranks_have_come() -> None:
    detector = Mismatch()
    for begin, end in ((0, 200), (200, 400)):
        for rank in range(4):
            detector.ingest_calls(with_a_lost_line(rank, 400)[begin : end - (rank == 2)], CONTEXT)
        detector.findings(0)
    detector.findings(20 * SECOND)
    assert detector.findings(20 * SECOND) == []
    assert detector.with_losses == frozenset()
    (counts,) = detector.enqueued().values()
    assert len(set(counts.values())) == 1


def test_a_wrong_call_at_which_the_job_stands_still_is_found_after_lost_lines() -> None:
    detector = Mismatch()
    for begin, end in ((0, 200), (200, 400)):
        for rank in range(4):
            made = with_a_lost_line(rank, 400)
            if rank == 3:
                made["message_bytes"][-1] = 512
            detector.ingest_calls(made[begin : end - (rank == 2)], CONTEXT)
        detector.findings(0)
    (finding,) = detector.findings(20 * SECOND)
    assert (finding.ranks, finding.confidence) == ((13,), 0.7)
    assert "of 512 bytes" in finding.summary


def test_calls_of_all_ranks_at_once_give_what_they_give_one_by_one() -> None:
    for wrong_at in (None, 0, 40, 99):
        parts = [calls(rank, 100, wrong_at if rank == 2 else None) for rank in range(4)]
        together, apart = fed(np.concatenate(parts)), fed(*parts)
        assert together.findings(0) == apart.findings(0)
        later = [calls(rank, 50, 10 if rank == 1 else None, first=100) for rank in range(4)]
        together.ingest_calls(np.concatenate(later), CONTEXT)
        for part in later:
            apart.ingest_calls(part, CONTEXT)
        assert together.findings(0) == apart.findings(0)
