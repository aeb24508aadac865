"""Ranges of NCCL's calls to calls and to the stretches in which they launch."""

from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.align.nvtx_calls import CALL, GUESSED, LINE, Place, Placed, find_place, thread_calls
from ncclscope_service.store.rows import API_CALL, GROUP_END, GROUP_START
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS, OPERATION_CODES

SEND, REDUCE = OPERATION_CODES["Send"], OPERATION_CODES["AllReduce"]


def ranges(*rows: tuple[int, int, int]) -> Columns:
    """Of one thread: kind, start, end."""
    return np.array([(0, 1, kind, 0, 64, start, end) for kind, start, end in rows], API_CALL)


def test_calls_of_a_group_launch_when_its_outermost_end_is_called() -> None:
    calls = thread_calls(
        ranges(
            (REDUCE, 0, 9),
            (GROUP_START, 10, 11),
            (GROUP_START, 12, 13),
            (SEND, 14, 15),
            (GROUP_END, 16, 17),
            (SEND, 18, 19),
            (GROUP_END, 20, 40),
            (REDUCE, 50, 59),
        )
    )
    assert calls.calls["unit"].tolist() == [0, 1, 1, 2]
    assert calls.units_at(np.array([5, 17, 30, 45, 55])).tolist() == [0, NO_NUMBER, 1, NO_NUMBER, 2]


def test_ranges_inside_an_operation_are_part_of_it() -> None:
    calls = thread_calls(ranges((SEND, 10, 30), (GROUP_START, 12, 13), (GROUP_END, 14, 29), (SEND, 31, 40)))
    assert calls.calls["unit"].tolist() == [0, 1]
    assert calls.units_at(np.array([20, 35])).tolist() == [0, 1]


def test_ranges_come_in_any_order() -> None:
    rows = ranges((GROUP_START, 10, 11), (SEND, 12, 13), (SEND, 14, 15), (GROUP_END, 16, 30), (REDUCE, 31, 40))
    for seed in range(5):
        shuffled = np.random.default_rng(seed).permutation(rows)
        assert thread_calls(shuffled).calls["unit"].tolist() == [0, 0, 1]


def test_a_group_whose_start_was_not_recorded_holds_all_calls_before_its_end() -> None:
    calls = thread_calls(ranges((SEND, 0, 1), (SEND, 2, 3), (GROUP_END, 4, 20), (REDUCE, 30, 40)))
    assert calls.calls["unit"].tolist() == [0, 0, 1]
    assert calls.units_at(np.array([10, 35])).tolist() == [0, 1]


def test_a_group_that_is_open_at_the_end_launched_nothing_yet() -> None:
    calls = thread_calls(ranges((REDUCE, 0, 5), (GROUP_START, 10, 11), (SEND, 12, 13)))
    assert calls.calls["unit"].tolist() == [0, 1]
    assert calls.units_at(np.array([3, 100])).tolist() == [0, NO_NUMBER]


def test_a_call_that_was_cut_lasts_until_the_end() -> None:
    calls = thread_calls(ranges((REDUCE, 0, 5), (REDUCE, 10, NO_TIME_NS)))
    assert calls.units_at(np.array([4, 7, 500])).tolist() == [0, NO_NUMBER, 1]


def test_no_ranges_hold_nothing() -> None:
    calls = thread_calls(ranges())
    assert len(calls.calls) == 0
    assert calls.units_at(np.array([4])).tolist() == [NO_NUMBER]


def place(program: str, lost: list[int]) -> tuple[Place, list[int]]:
    """Where the calls of a program, by letters, are placed among its lines without those lost; and which are left."""
    kinds = np.array([ord(letter) for letter in program], np.int16)
    calls = np.zeros(len(kinds), CALL)
    calls["kind"], calls["bytes"] = kinds, NO_NUMBER
    calls["start_ns"], calls["end_ns"] = np.arange(len(kinds)) * 10, np.arange(len(kinds)) * 10 + 5
    left = np.delete(np.arange(len(kinds)), lost)
    lines = np.zeros(len(left), LINE)
    lines["kind"], lines["bytes"], lines["logged_at_ns"] = kinds[left], NO_NUMBER, NO_TIME_NS
    found = find_place(lines, 0, calls, np.arange(len(kinds)), None)
    assert found is not None
    return found, left.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_lost_lines_never_shift_those_behind_them_by_a_period(seed: int) -> None:
    program = "BGRGRGRGRAAA" * 50
    rng = np.random.default_rng(seed)
    found, left = place(program, np.flatnonzero(rng.random(len(program)) < 0.02).tolist())
    is_right = np.array(left)[found.lines].tolist() == found.calls.tolist()
    assert (is_right and len(found.lines) > 0.9 * len(left)) or found.trust <= GUESSED


def second_place(program: str, captures: tuple[range, range], lost: list[int]) -> tuple[Place, list[int]]:
    """Where the calls of a second capture are placed behind those of a first one; and which lines are left."""
    kinds = np.array([ord(letter) for letter in program], np.int16)
    calls = np.zeros(len(kinds), CALL)
    calls["kind"], calls["bytes"] = kinds, NO_NUMBER
    calls["start_ns"], calls["end_ns"] = np.arange(len(kinds)) * 10, np.arange(len(kinds)) * 10 + 5
    left = np.delete(np.arange(len(kinds)), lost)
    lines = np.zeros(len(left), LINE)
    lines["kind"], lines["bytes"], lines["logged_at_ns"] = kinds[left], NO_NUMBER, NO_TIME_NS
    first, second = captures
    known = np.flatnonzero(left < first.stop)
    before = Placed(
        calls[first.start : first.stop],
        np.arange(first.start, first.stop) * 7,
        int(left[known[-1]]),
        int(known[-1]),
        0.99,
        seen=(len(known), len(first)),
    )
    ids = np.arange(second.start, second.stop) * 7
    found = find_place(lines, len(known), calls[second.start : second.stop], ids, before)
    assert found is not None
    return found, left.tolist()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("loss", [0.0, 0.01, 0.05])
def test_a_capture_behind_a_hole_that_hides_losses_is_at_its_period_or_a_guess(seed: int, loss: float) -> None:
    program = ("BGRGRGRGRAAA" * 4 + "N") * 12
    lost = np.flatnonzero(np.random.default_rng(seed).random(len(program)) < loss).tolist()
    found, left = second_place(program, (range(100), range(250, 350)), lost)
    is_right = np.array(left)[found.lines].tolist() == (found.calls + 250).tolist()
    assert is_right or found.trust <= GUESSED
    assert loss > 0 or found.trust > GUESSED


def test_a_capture_that_is_not_the_first_does_not_begin_with_the_log() -> None:
    calls = np.zeros(24, CALL)
    calls["kind"], calls["bytes"] = [ord(letter) for letter in "BGRGRGRGRAAA" * 2], NO_NUMBER
    lines = np.zeros(48, LINE)
    lines["kind"], lines["bytes"] = np.tile(calls["kind"], 2), NO_NUMBER
    lines["logged_at_ns"] = NO_TIME_NS
    for is_first in (True, False):
        found = find_place(lines, 0, calls, np.arange(24), None, is_first=is_first)
        assert found is not None
        assert (found.trust > GUESSED) is is_first


@pytest.mark.parametrize(
    ("program", "is_short"), [("R", True), ("BGRGRGRGRAAA", True), ("BGRGRGRGRAAA" * 4 + "N", False)]
)
def test_a_capture_of_a_short_program_begins_with_the_log_only_if_that_is_known(program: str, is_short: bool) -> None:
    kinds = [ord(letter) for letter in program * (200 // len(program))]
    calls, lines = np.zeros(len(kinds), CALL), np.zeros(2 * len(kinds), LINE)
    calls["kind"], calls["bytes"] = kinds, NO_NUMBER
    lines["kind"], lines["bytes"], lines["logged_at_ns"] = kinds * 2, NO_NUMBER, NO_TIME_NS
    for begins_with_log in (True, False):
        found = find_place(lines, 0, calls, np.arange(len(calls)), None, begins_with_log=begins_with_log)
        assert found is not None
        assert (found.trust > GUESSED) is (begins_with_log or not is_short)


def test_only_lines_that_may_be_of_several_calls_are_left_to_others() -> None:
    found, left = place("BGRGRGRGRAAA" * 10, [58])
    unsure = sorted(set(range(len(left))) - set(found.lines.tolist()))
    assert [left[line] for line in unsure] == [57, 59]
    assert found.held == range(len(left))


def test_a_thread_that_calls_one_thing_only_is_left_to_others_once_a_line_is_lost() -> None:
    assert len(place("R" * 100, [])[0].lines) == 100
    assert len(place("R" * 100, [40])[0].lines) == 0


def test_lines_behind_a_call_that_was_cut_are_not_of_its_capture() -> None:
    every_ns, amount = 10_000, 50
    rows = [(REDUCE, k * every_ns, k * every_ns + 5_000) for k in range(amount - 1)]
    calls = thread_calls(ranges(*rows, (REDUCE, (amount - 1) * every_ns, NO_TIME_NS))).calls
    left = np.delete(np.arange(2 * amount), [30, 41])
    lines = np.zeros(len(left), LINE)
    lines["kind"], lines["bytes"], lines["logged_at_ns"] = REDUCE, NO_NUMBER, left * every_ns + 1_001
    found = find_place(lines, 0, calls, np.arange(len(calls)), None)
    assert found is not None
    assert found.is_timed
    assert left[found.lines].tolist() == found.calls.tolist() == left[left < amount - 1].tolist()
