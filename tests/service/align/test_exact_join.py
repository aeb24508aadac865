"""Lines to kernels through NCCL's NVTX ranges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from align_samples import Call, Sample
from exact_samples import BACKWARD, MAIN, Capture, Program, training

from ncclscope_service.align.exact_join import ExactJoin
from ncclscope_service.store.rows import Match
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


def joined(operations: Columns, captures: Sequence[Capture]) -> Columns:
    """All lines first, then the captures; in one pass."""
    join = ExactJoin()
    join.ingest_operations(operations)
    for capture in captures:
        join.ingest_capture(capture.ranges, capture.kernels, capture.end_ns)
    return np.sort(join.join_ready(final=True), order="operation")


def joined_in_portions(operations: Columns, captures: Sequence[Capture], seed: int) -> Columns:
    """Lines in random portions, each capture somewhere between them."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, len(operations) + 1, int(rng.integers(1, 40))))
    portions = np.split(operations, cuts)
    due = np.sort(rng.integers(0, len(portions) + 1, len(captures))).tolist()
    join = ExactJoin()
    found: list[Columns] = []
    for at in range(len(portions) + 1):
        for capture, when in zip(captures, due, strict=True):
            if when == at:
                join.ingest_capture(capture.ranges, capture.kernels, capture.end_ns)
        if at < len(portions):
            join.ingest_operations(portions[at])
        if rng.random() < 0.7:
            found.append(join.join_ready(final=False))
    found.append(join.join_ready(final=True))
    return np.sort(np.concatenate(found), order="operation")


def wrong(sample: Sample, opinions: Columns) -> int:
    """Pairs that are not true."""
    pairs = opinions[opinions["kernel"] != NO_NUMBER]
    return int(np.count_nonzero(pairs["kernel"] != sample.truth[pairs["operation"]]))


def pieces(program: Program, amount: int, share: float) -> list[tuple[int, int]]:
    """Spans of captures that record this share of a job, in equal pieces."""
    begin, end = program.span[0], program.recorder.now_ns + 1_000_000
    step = (end - begin) // amount
    return [(begin + at * step, begin + at * step + int(step * share)) for at in range(amount)]


@pytest.mark.parametrize("payloads", [True, False])
@pytest.mark.parametrize("stamps", [True, False])
def test_a_whole_capture_gives_every_line_its_kernel(payloads: bool, stamps: bool) -> None:
    program = training(8, payloads=payloads)
    sample = program.rows(stamps=stamps)
    opinions = joined(sample.operations, program.captured(sample, program.span))
    assert opinions["kernel"].tolist() == sample.truth.tolist()
    assert (opinions["match"] == Match.MATCHED).all()
    assert opinions["confidence"].min() >= 0.99


def test_a_group_over_two_communicators_has_one_launch_for_each() -> None:
    program = Program()
    tensor, shards = Call("AllReduce", 0, 0xA0), Call("AllGather", 2, 0xC0)
    program.issue(MAIN, tensor)
    program.issue(MAIN, shards)
    program.issue(MAIN, tensor, shards, tensor, shards)
    sample = program.rows()
    opinions = joined(sample.operations, program.captured(sample, program.span))
    assert opinions["kernel"].tolist() == [0, 1, 2, 3, 2, 3]
    assert opinions["launch"].tolist() == [0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("amount", "share"), [(1, 1.0), (4, 1.0), (5, 0.5)])
@pytest.mark.parametrize("stamps", [True, False])
def test_portions_in_any_order_give_what_one_pass_gives(stamps: bool, amount: int, share: float, seed: int) -> None:
    program = training(20)
    sample = program.rows(stamps=stamps)
    captures = program.captured(sample, *pieces(program, amount, share))
    at_once = joined(sample.operations, captures)
    np.testing.assert_array_equal(joined_in_portions(sample.operations, captures, seed), at_once)
    assert at_once["operation"].tolist() == sample.operations["id"].tolist()


def test_captures_in_pieces_pair_nothing_wrongly() -> None:
    program = training(40)
    for stamps, least in ((True, 0.95), (False, 0.6)):  # without stamps, what is a guess is left to others
        sample = program.rows(stamps=stamps)
        captures = program.captured(sample, *pieces(program, 8, 0.4))
        opinions = joined(sample.operations, captures)
        recorded = np.concatenate([capture.kernels["id"] for capture in captures])
        assert wrong(sample, opinions) == 0
        found = np.count_nonzero(np.isin(recorded, opinions["kernel"]))
        assert found >= least * len(recorded), (stamps, found, len(recorded))


def test_captures_that_come_in_the_wrong_order_pair_nothing_wrongly() -> None:
    program = training(40)
    for stamps, order in ((True, (1, 0, 3, 2, 5, 4)), (False, (0, 2, 1, 4, 3, 5))):
        sample = program.rows(stamps=stamps)
        captures = program.captured(sample, *pieces(program, 6, 0.5))
        join = ExactJoin()
        join.ingest_operations(sample.operations)
        found: list[Columns] = []
        for at in order:
            join.ingest_capture(captures[at].ranges, captures[at].kernels, captures[at].end_ns)
            found.append(join.join_ready(final=False))
        found.append(join.join_ready(final=True))
        opinions = np.concatenate(found)
        assert len(np.unique(opinions["operation"])) == len(opinions) == len(sample.operations)
        assert wrong(sample, opinions) == 0


@pytest.mark.parametrize("payloads", [True, False])
def test_lines_that_were_lost_inside_a_capture_cost_only_themselves(payloads: bool) -> None:
    program = training(20, payloads=payloads)
    for stamps in (True, False):
        sample = program.rows(stamps=stamps)
        told_apart = np.flatnonzero(sample.operations["tid"] == MAIN)[[9, 50, 62, 63, 140]]
        kept = np.delete(sample.operations, told_apart)
        opinions = joined(kept, program.captured(sample, program.span))
        assert (stamps, payloads, wrong(sample, opinions)) == (stamps, payloads, 0)
        # Of two calls in a row without a line, kinds alone do not tell whether the next like them had one.
        unsure = 0 if stamps or payloads else 1
        assert np.count_nonzero(opinions["kernel"] == NO_NUMBER) <= len(told_apart) + unsure


def test_which_of_two_equal_lines_in_a_row_was_lost_is_left_to_others() -> None:
    program = Program(payloads=False)
    receive = Call("Recv", 1, 0xB0, peer=1)
    for _ in range(60):
        program.issue(MAIN, Call("Send", 1, 0xB0, peer=1), receive)
        program.issue(MAIN, receive)
        for layer in range(4):
            program.issue(MAIN, Call("AllReduce", 0, 0xA0, count=1024 + layer))
    sample = program.rows()
    sample.operations["text"] = np.arange(len(sample.operations)) % 7
    sample.operations["text"][2::7] = sample.operations["text"][1::7]
    lost = np.asarray([7 * 40 + 1, 7 * 50 + 2])
    left = np.asarray([7 * 40, 7 * 40 + 2, 7 * 50, 7 * 50 + 1])
    opinions = joined(np.delete(sample.operations, lost), program.captured(sample, program.span))
    assert wrong(sample, opinions) == 0
    assert opinions["operation"][opinions["kernel"] == NO_NUMBER].tolist() == left.tolist()
    assert (opinions["match"][opinions["kernel"] == NO_NUMBER] == Match.PENDING).all()


def test_stamps_tell_which_of_many_equal_lines_was_lost() -> None:
    program = training(20)
    sample = program.rows(stamps=True)
    kept = np.delete(sample.operations, np.flatnonzero(sample.operations["tid"] == BACKWARD)[[5, 30, 31]])
    opinions = joined(kept, program.captured(sample, program.span))
    assert opinions["kernel"].tolist() == sample.truth[kept["id"]].tolist()


def test_stamps_tell_at_once_which_lines_a_capture_holds() -> None:
    program = training(20)
    for stamps, is_told in ((True, True), (False, False)):
        sample = program.rows(stamps=stamps)
        (capture,) = program.captured(sample, program.span)
        last = int(np.flatnonzero(sample.operations["tid"] == MAIN)[-1])
        join = ExactJoin()
        join.ingest_operations(sample.operations[:last])
        join.ingest_capture(capture.ranges, capture.kernels, capture.end_ns)
        early = join.join_ready(final=False)
        join.ingest_operations(sample.operations[last:])
        opinions = join.join_ready(final=False)
        of_main = sample.operations["id"][sample.operations["tid"] == MAIN]
        assert not np.isin(early["operation"], of_main).any()  # its last line may still tell that it is elsewhere
        assert bool(np.isin(of_main, opinions["operation"]).all()) == is_told
        assert wrong(sample, opinions) == 0


def test_stamps_of_whole_seconds_or_of_another_clock_do_no_harm() -> None:
    program = training(20)
    sample = program.rows(stamps=True)
    captures = program.captured(sample, program.span)
    for stamps in (
        sample.operations["logged_at_ns"] // 10**9 * 10**9,
        sample.operations["logged_at_ns"] + 3600 * 10**9,
        sample.operations["logged_at_ns"] - 3600 * 10**9,
        sample.operations["logged_at_ns"] - 45_000,
    ):
        rows = sample.operations.copy()
        rows["logged_at_ns"] = stamps
        assert joined(rows, captures)["kernel"].tolist() == sample.truth.tolist()


def test_a_range_that_was_lost_leaves_its_line_without_a_kernel() -> None:
    program = training(20)
    sample = program.rows()
    (capture,) = program.captured(sample, program.span)
    reduces = np.flatnonzero((capture.ranges["tid"] == MAIN) & (capture.ranges["bytes"] == 1026 * 4))
    ranges = np.delete(capture.ranges, reduces[10])
    opinions = joined(sample.operations, [Capture(ranges, capture.kernels, capture.end_ns)])
    assert wrong(sample, opinions) == 0
    assert np.count_nonzero(opinions["kernel"] == NO_NUMBER) == 1


def test_a_kernel_that_was_lost_leaves_its_line_unmatched() -> None:
    program = training(10)
    sample = program.rows()
    (capture,) = program.captured(sample, program.span)
    gone = int(sample.truth[sample.operations["tid"] == BACKWARD][11])
    kernels = capture.kernels[capture.kernels["id"] != gone]
    opinions = joined(sample.operations, [Capture(capture.ranges, kernels, capture.end_ns)])
    assert wrong(sample, opinions) == 0
    assert opinions["match"][opinions["kernel"] == NO_NUMBER].tolist() == [Match.UNMATCHED]


def test_a_group_whose_start_was_not_recorded_begins_with_the_capture() -> None:
    program = training(20)
    sample = program.rows(stamps=True)
    first = next(each for each in program.ranges if each[5] > program.span[0] + 800_000 and each[2] == 1000)
    captures = program.captured(sample, (first[5] + 1_000, 2**62))
    opinions = joined(sample.operations, captures)
    assert wrong(sample, opinions) == 0
    launched_inside = np.isin(sample.truth, captures[0].kernels["id"])
    assert np.count_nonzero(launched_inside & (opinions["kernel"] == NO_NUMBER)) <= 2


def test_calls_of_an_unknown_thread_join_nothing() -> None:
    program = training(4)
    sample = program.rows()
    (capture,) = program.captured(sample, program.span)
    capture.ranges["tid"] += 5_000
    capture.kernels["launch_tid"] += 5_000
    opinions = joined(sample.operations, [capture])
    assert (opinions["kernel"] == NO_NUMBER).all()
    assert (opinions["match"] == Match.PENDING).all()


def test_operations_that_are_given_up_come_out_once() -> None:
    program = training(6)
    sample = program.rows()
    join = ExactJoin()
    join.ingest_operations(sample.operations)
    join.give_up(int(sample.operations["id"][30]))
    early = join.join_ready(final=False)
    assert sorted(early["operation"].tolist()) == list(range(30))
    assert (early["match"] == Match.PENDING).all()
    rest = join.join_ready(final=True)
    assert sorted([*early["operation"].tolist(), *rest["operation"].tolist()]) == sample.operations["id"].tolist()
