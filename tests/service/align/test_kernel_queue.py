from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclscope_service.align.expected_launches import LAUNCH
from ncclscope_service.align.kernel_queue import PlacingInput, ThreadMemory, place_by_time
from ncclscope_service.align.thread_backlog import THREAD_KERNEL
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS


def placing(
    stamps: list[int], times: list[int], *, lanes: list[int] | None = None, continues: list[int] | None = None
) -> PlacingInput:
    """Lines and kernels of thread 7; lane i of the lines runs on lane i of the kernels."""
    launches, kernels = np.zeros(len(stamps), LAUNCH), np.zeros(len(times), THREAD_KERNEL)
    launches["logged_at_ns"], launches["tid"] = stamps, 7
    kernels["time_ns"], kernels["correlation_id"] = times, np.arange(len(times))
    if lanes is not None:
        launches["lane"] = lanes
    fits = launches["lane"][:, None] == kernels["lane"][None, :]
    together = np.isin(np.arange(len(stamps)), continues or [])
    return PlacingInput(launches, kernels, np.full(len(times), 7, np.int64), fits, together)


def indices(*values: int) -> NDArray[np.intp]:
    return np.array(values, dtype=np.intp)


def test_an_orphan_belongs_to_the_last_line_before_it_that_has_no_kernel() -> None:
    given = placing([100, 200, 300], [250, 310])
    times, tids = place_by_time(given, indices(0))
    assert times.tolist() == [201]
    assert tids.tolist() == [7]


def test_several_orphans_are_placed_from_the_last_to_the_first() -> None:
    times, _ = place_by_time(placing([100, 200, 300, 400], [350, 360, 410]), indices(0, 1))
    assert times.tolist() == [201, 301]


def test_a_line_of_another_lane_is_not_taken() -> None:
    times, _ = place_by_time(placing([100, 200], [250], lanes=[0, 1]), indices(0))
    assert times.tolist() == [101]


def test_lines_of_one_group_share_the_kernel() -> None:
    times, _ = place_by_time(placing([100, 200, 210], [250, 260], continues=[1]), indices(0, 1))
    assert times.tolist() == [101, 211]


def test_an_orphan_for_which_no_line_is_left_stays_without_a_time() -> None:
    times, tids = place_by_time(placing([300], [250]), indices(0))
    assert times.tolist() == [NO_TIME_NS]
    assert tids.tolist() == [NO_NUMBER]


def test_the_thread_is_that_of_an_earlier_kernel_in_the_same_neighbourhood() -> None:
    memory = ThreadMemory()
    symbols, tids = np.array([1, 2, 3, 2] * 20), np.array([11, 22, 11, 33] * 20)
    memory.recall(symbols, tids.copy(), len(tids))
    lost = tids.copy()
    lost[[9, 11]] = NO_NUMBER
    assert memory.recall(symbols, lost, len(lost)).tolist() == tids.tolist()


def test_a_kernel_like_no_other_is_of_the_thread_of_all_around_it_if_that_is_one() -> None:
    assert ThreadMemory().recall(np.array([1, 1, 5]), np.array([11, 11, NO_NUMBER]), 3).tolist() == [11, 11, 11]
    assert ThreadMemory().recall(np.array([1, 1, 5]), np.array([11, 22, NO_NUMBER]), 3).tolist() == [11, 22, NO_NUMBER]
