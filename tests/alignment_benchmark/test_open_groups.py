from __future__ import annotations

import numpy as np
import pytest
from benchmarks.alignment.jobs import Row
from benchmarks.alignment.open_groups import bound_of_groups, membership


def _rows(launches: list[int], *, counts: bool = False) -> list[Row]:
    ops = ["Send", "Recv"]
    return [
        {
            "host": "a",
            "pid": 1,
            "tid": 1,
            "comm_ptr": "0x1",
            "op": ops[nth % 2],
            "peer": 1,
            "launch_id": launch,
            "op_count": launch if counts else 0,
        }
        for nth, launch in enumerate(launches)
    ]


def test_two_of_three_cut_anywhere_is_right_by_the_chance_of_each_cut() -> None:
    posterior = membership(np.array([0.5, 0.5]), 2)
    assert posterior == pytest.approx(np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]))


def test_the_likelier_neighbours_are_held_together() -> None:
    posterior = membership(np.array([0.9, 0.5]), 2)
    assert posterior[1] == pytest.approx([0.9, 0.1])


def test_as_many_kernels_as_operations_or_one_leave_no_choice() -> None:
    assert bound_of_groups(_rows([0, 1, 2, 3])).f1 == pytest.approx(1.0)
    assert bound_of_groups(_rows([0, 0, 0, 0])).f1 == pytest.approx(1.0)


def test_groups_of_changing_size_cannot_all_be_told_unless_op_count_moves() -> None:
    launches = [0, 1, 1, 1, 2, 2, 3, 4, 4, 4, 5, 5]
    assert 0.2 < bound_of_groups(_rows(launches)).f1 < 0.9
    assert bound_of_groups(_rows(launches, counts=True)).f1 == 1.0
