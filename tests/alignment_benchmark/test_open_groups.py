from __future__ import annotations

import numpy as np
import pytest
from benchmarks.alignment.captures import bound_of_groups, held_stretches, meaning_bound, membership
from benchmarks.alignment.jobs import Row


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
            "message_bytes": 4,
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


def test_which_stretch_a_kernel_holds_agrees_with_what_each_operation_is_in() -> None:
    together = np.array([0.9, 0.2, 0.6, 0.5])
    held = held_stretches(together, 3)
    assert held.sum(axis=(1, 2)) == pytest.approx(np.ones(3))
    within = [[held[kernel, : nth + 1, nth + 1 :].sum() for kernel in range(3)] for nth in range(5)]
    assert np.array(within) == pytest.approx(membership(together, 3))


def test_of_meaning_more_is_right_than_of_pairs() -> None:
    together = np.array([0.5, 0.5])
    assert meaning_bound(together, 2, ["Send", "Send", "Send"]) == pytest.approx(2.5)
    assert meaning_bound(together, 2, ["Send", "Recv", "Send"]) == pytest.approx(2.5)
    assert meaning_bound(np.array([1.0, 0.0]), 2, ["Send", "Recv", "Send"]) == pytest.approx(3.0)
