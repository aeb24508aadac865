from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.by_order.missing_launches import LineGaps
from ncclscope_service.align.expected_launches import LAUNCH
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER

RATE = 0.2


def launches(texts: NDArray[np.int64] | list[int], *, lost: list[int] | None = None, member: int = 0) -> Columns:
    rows = np.zeros(len(texts), LAUNCH)
    rows["text"], rows["member"] = texts, member
    rows["lines_lost"] = NO_NUMBER if lost is None else lost
    return rows


def missing(rows: Columns, gaps: LineGaps | None = None) -> NDArray[np.float64]:
    """Before each launch, all on one lane."""
    lanes = np.zeros(len(rows), np.int32)
    return (gaps or LineGaps()).missing(rows, lanes, np.zeros(5, np.int32), RATE).amount


def test_the_program_tells_where_a_line_is_missing() -> None:
    texts = np.tile(np.arange(8), 40)
    kept = np.random.default_rng(0).random(len(texts)) >= RATE
    found = missing(launches(texts[kept]))
    truth = np.diff(np.flatnonzero(kept)) - 1
    told = found[1:-1]
    assert told[truth == 0].max() < 0.4
    assert np.abs(told[truth == 1].mean() - 1) < 0.3
    assert np.abs(told[truth == 2].mean() - 2) < 0.5


def test_calls_that_are_independent_of_each_other_tell_nothing() -> None:
    found = missing(launches(np.random.default_rng(0).integers(0, 8, 200)))
    assert np.allclose(found, RATE / (1 - RATE), atol=0.01)


def test_op_count_tells_it_exactly() -> None:
    found = missing(launches([0] * 30, lost=[0] * 10 + [3] + [0] * 19))
    assert np.isclose(found[10], 3.0)
    assert np.delete(found, [0, 10, 30]).max() < 0.01


def test_a_count_that_mostly_stands_is_not_believed() -> None:
    found = missing(launches([0] * 30, lost=[0, NO_NUMBER] * 15))
    assert np.allclose(found, RATE / (1 - RATE), atol=0.01)


def test_a_missing_line_is_of_the_lane_of_its_communicator() -> None:
    rows = np.concatenate([launches([0] * 20, lost=[0] * 20), launches([1] * 20, lost=[0] * 20, member=1)])
    order = np.argsort(np.tile(np.arange(20), 2), kind="stable")
    rows = rows[order]
    rows["lines_lost"][21] = 2
    found = LineGaps().missing(rows, rows["member"], np.array([0, 0, 1, 1], np.int32), RATE)
    assert found.lanes[20, 2] > 1.9
    assert found.lanes[20, 0] < 0.1


def test_what_was_decided_before_tells_of_a_later_window() -> None:
    gaps = LineGaps()
    gaps.learn(launches(np.tile(np.arange(8), 20)))
    assert missing(launches([0, 1, 3, 4, 5]), gaps)[2] > 0.8
    assert missing(launches([2, 3, 4, 5, 6]), gaps)[0] > 1.5
