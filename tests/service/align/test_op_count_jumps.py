from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.align.op_count import FARTHEST, OpCountJumps
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER


def lines(members: list[int], counts: list[int]) -> Columns:
    rows = np.zeros(len(members), dtype=[("member", "<i4"), ("op_count", "<u8")])
    rows["member"], rows["op_count"] = members, counts
    return rows


def test_a_step_of_one_says_that_no_line_is_missing() -> None:
    assert OpCountJumps().ingest_lines(lines([0, 0, 0], [4, 5, 6])).tolist() == [NO_NUMBER, 0, 0]


def test_a_larger_step_says_how_many_launches_have_no_line() -> None:
    assert OpCountJumps().ingest_lines(lines([0, 0, 0], [4, 7, 8])).tolist() == [NO_NUMBER, 2, 0]


def test_each_communicator_counts_for_itself() -> None:
    assert OpCountJumps().ingest_lines(lines([0, 1, 0, 1], [4, 90, 5, 92])).tolist() == [NO_NUMBER, NO_NUMBER, 0, 1]


def test_a_count_that_stands_says_nothing() -> None:
    assert OpCountJumps().ingest_lines(lines([0, 0], [4, 4])).tolist() == [NO_NUMBER, NO_NUMBER]


@pytest.mark.parametrize("later", [3, 4 + FARTHEST + 1])
def test_a_step_back_or_a_great_one_is_no_loss(later: int) -> None:
    assert OpCountJumps().ingest_lines(lines([0, 0], [4, later])).tolist() == [NO_NUMBER, NO_NUMBER]
