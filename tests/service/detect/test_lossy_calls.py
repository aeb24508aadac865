from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclscope_service.detect.lossy_calls import UNTOLD, LossyCalls, NumberedCalls
from ncclscope_service.detect.mismatch import CALL
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

RANKS = 4
PROGRAM = np.array([8, 8, 8, 3, 8, 8, 5, 5, 1])
"""Calls of a step, which repeats itself."""


def calls(rank: int, amount: int, random: np.random.Generator, *, lost: float, is_stamped: bool = True) -> Columns:
    """What is left of a rank's lines."""
    made = np.zeros(amount, CALL)
    made["rank"], made["coll_seq"] = rank, np.arange(amount)
    made["message_bytes"] = PROGRAM[made["coll_seq"] % len(PROGRAM)]
    made["logged_ns"] = made["coll_seq"] * 1_000_000 + random.integers(0, 50_000, amount)
    made["stamp_ns"] = made["logged_ns"] if is_stamped else NO_TIME_NS
    left: Columns = made[random.random(amount) >= lost]
    return left


def codes(rows: Columns) -> NDArray[np.int64]:
    made: NDArray[np.int64] = rows["message_bytes"].astype(np.int64)
    return made


def ingest(lossy: LossyCalls, rows: Columns) -> None:
    lossy.ingest(rows, codes(rows))


def placed(*parts: Columns, begin: int = 0) -> LossyCalls:
    """The calls of so many ranks, each with its place."""
    lossy = LossyCalls(len(parts), begin)
    for part in parts:
        ingest(lossy, part)
    lossy.place(is_end=True)
    return lossy


@pytest.mark.parametrize("is_stamped", [True, False])
def test_how_far_each_rank_has_come_is_told_though_each_lost_other_lines(is_stamped: bool) -> None:
    random = np.random.default_rng(1)
    lossy = LossyCalls(RANKS, 0)
    for rank in range(RANKS):
        own = calls(rank, 600 - (rank == 2), random, lost=0.01, is_stamped=is_stamped)
        whole = calls(rank, 600 - (rank == 2), random, lost=0.0, is_stamped=is_stamped)
        ingest(lossy, np.concatenate([own[own["coll_seq"] < 590], whole[590:]]))
    lossy.place(is_end=True)
    assert lossy.is_placed
    counts = lossy.enqueued()
    assert {rank: counts[0] - count for rank, count in counts.items()} == {0: 0, 1: 0, 2: 1, 3: 0}
    assert lossy.difference() is None


def test_calls_that_come_in_pieces_are_placed_as_those_that_come_at_once() -> None:
    parts = [calls(rank, 3000, np.random.default_rng(rank), lost=0.005) for rank in range(RANKS)]
    whole, pieces = placed(*parts, begin=7), LossyCalls(RANKS, 7)
    for begin in range(0, 3000, 250):
        ingest(pieces, np.concatenate([part[begin : begin + 250] for part in parts]))
    pieces.place(is_end=True)
    assert whole.enqueued() == pieces.enqueued()


def test_a_wrong_call_at_the_end_is_found_among_lost_lines() -> None:
    for seed in range(4):
        random = np.random.default_rng(seed)
        lossy = LossyCalls(RANKS, 0)
        for rank in range(RANKS):
            own = calls(rank, 400, random, lost=0.01)
            end = calls(rank, 400, random, lost=0.0)[392:]
            if rank == 1:
                end["message_bytes"][-1] = 77
            ingest(lossy, np.concatenate([own[own["coll_seq"] < 392], end]))
        lossy.place(is_end=True)
        found = lossy.difference()
        assert found is not None
        assert found.ranks_by_call == {int(PROGRAM[399 % len(PROGRAM)]): {0, 2, 3}, 77: {1}}
        assert found.coll_seq == lossy.enqueued()[1] - 1


def test_a_wrong_call_is_found_although_another_rank_lost_a_line_just_before() -> None:
    parts = [calls(rank, 400, np.random.default_rng(rank), lost=0.0) for rank in range(RANKS)]
    parts[1]["message_bytes"][-1] = 77
    parts[3] = np.delete(parts[3], 397)
    found = placed(*parts).difference()
    assert found is not None
    assert found.ranks_by_call == {int(PROGRAM[399 % len(PROGRAM)]): {0, 2}, 77: {1}}


def test_of_calls_that_are_all_equal_nothing_tells_which_line_was_lost() -> None:
    parts = [calls(rank, 100, np.random.default_rng(rank), lost=0.05) for rank in range(2)]
    for part in parts:
        part["message_bytes"] = 8
    assert not placed(*parts).is_placed


def test_a_rank_that_is_too_far_ahead_of_another_tells_nothing() -> None:
    assert not placed(*(calls(rank, 70_000, np.random.default_rng(0), lost=0.0) for rank in range(2))).is_placed


def test_where_many_lines_were_lost_the_names_of_calls_do_not_tell_how_far_a_rank_has_come() -> None:
    random = np.random.default_rng(1)
    assert not placed(*(calls(rank, 600, random, lost=0.05) for rank in range(RANKS))).is_placed


def test_numbers_that_kernels_gave_hold_though_all_calls_are_equal_and_many_were_lost() -> None:
    parts = [calls(rank, 100, np.random.default_rng(rank), lost=0.2) for rank in range(3)]
    for part in parts:
        part["message_bytes"] = 8
    lossy = placed(*parts, begin=7)
    newest = np.array([[8, 8, 8], [8, UNTOLD, 8], [8, 8, NO_NUMBER]])
    lossy.settle(NumberedCalls(95, newest, np.array([5, 6, 7]), np.array([98, 98, 97]), is_told=True))
    assert lossy.is_placed
    assert lossy.enqueued() == {0: 98, 1: 98, 2: 97}
    assert lossy.difference() is None
    newest[2] = [8, 8, 9]
    lossy.settle(NumberedCalls(95, newest, np.array([5, 6, 7]), np.array([98, 98, 98]), is_told=True))
    found = lossy.difference()
    assert found is not None
    assert (found.coll_seq, found.at_ns, found.ranks_by_call) == (97, 7, {8: {0, 1}, 9: {2}})
    ingest(lossy, calls(0, 1, np.random.default_rng(0), lost=0.0))
    assert not lossy.is_placed
