"""Between which times a line became visible, as looks tell it."""

from __future__ import annotations

import numpy as np
from benchmarks.load.watch import Look, delays_s
from numpy.typing import NDArray


def _look(answered_s: float, counted: int, took_s: float = 0.25) -> Look:
    return Look(
        at_ns=round(answered_s * 1e9), operations=counted, by_communicator={7: counted}, series=0,
        metrics_seconds=took_s, page_seconds=None, cpu_seconds=0.0, resident_mib=0.0, load_average=0.0,
    )  # fmt: skip


def _each_second(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return numbers * 10**9


def test_a_line_became_visible_between_the_look_that_did_not_count_it_and_the_one_that_did() -> None:
    looks = [_look(1.0, 1), _look(2.0, 1), _look(3.0, 3), _look(4.0, 4)]
    most, least = delays_s(looks, 7, _each_second, 0, 10**10)
    assert most.tolist() == [1.0, 2.0, 1.0, 1.0]
    assert least.tolist() == [0.0, 0.75, 0.0, 0.0]


def test_only_lines_that_were_due_in_the_time_asked_for_and_are_counted_at_last_are_told_of() -> None:
    looks = [_look(1.0, 1), _look(9.0, 3)]
    most, _ = delays_s(looks, 7, _each_second, 10**9, 10**10)
    assert most.tolist() == [8.0, 7.0]
    assert delays_s(looks, 8, _each_second, 0, 10**10)[0].tolist() == []
