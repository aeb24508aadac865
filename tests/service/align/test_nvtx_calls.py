"""Ranges of NCCL's calls to calls and to the stretches in which they launch."""

from __future__ import annotations

import numpy as np

from ncclscope_service.align.nvtx_calls import thread_calls
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
