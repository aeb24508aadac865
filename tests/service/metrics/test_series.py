"""Who has series of its own: first come, first served, and for good."""

from __future__ import annotations

import numpy as np

from ncclscope_service.metrics.series import SILENT_NS, SeriesBudget


def admitted(budget: SeriesBudget, communicators: list[int], codes: list[int]) -> list[bool]:
    return [bool(each) for each in budget.admit_series(np.array(communicators, np.int64), np.array(codes, np.int64))]


def test_the_first_ones_are_let_in_and_stay() -> None:
    budget = SeriesBudget(max_communicators=2, max_group_series=3)
    assert [budget.admit_communicator(index, "j") for index in (7, 3, 5)] == [True, True, False]
    assert admitted(budget, [7, 3, 5, 3], [1, 1, 1, 2]) == [True, True, False, True]
    assert admitted(budget, [3, 7, 7, 5], [2, 9, 1, 1]) == [True, False, True, False], "in any order"


def test_operations_of_no_known_communicator_are_summed() -> None:
    budget = SeriesBudget()
    budget.admit_communicator(0, "j")
    assert admitted(budget, [-1, 0], [0, 0]) == [False, True]


def test_a_silent_job_makes_room_for_another() -> None:
    budget = SeriesBudget(max_communicators=1, max_group_series=1)
    budget.record_activity({"old": 5}, 0)
    assert budget.admit_communicator(0, "old")
    assert admitted(budget, [0], [4]) == [True]
    budget.record_activity({"old": 5, "new": 1}, SILENT_NS - 1)
    assert not budget.admit_communicator(1, "new")
    budget.record_activity({"old": 5, "new": 2}, SILENT_NS)
    assert (budget.is_silent("old", SILENT_NS), budget.is_silent("new", SILENT_NS)) == (True, False)
    assert budget.admit_communicator(1, "new")
    assert admitted(budget, [1, 0], [4, 4]) == [True, False]
    budget.record_activity({"old": 6}, SILENT_NS + 1)
    assert not budget.is_silent("old", SILENT_NS + 1)
