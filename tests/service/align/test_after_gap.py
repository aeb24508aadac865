from __future__ import annotations

import numpy as np

from ncclscope_service.align.by_order.after_gap import BehindGap, GapHistory, GapPlace
from ncclscope_service.align.coverage import Coverage
from ncclscope_service.align.thread_backlog import THREAD_KERNEL
from ncclscope_wire.batch import Columns

PERIOD = 50
PER_LAUNCH = 20
"""Correlation ids that each launch uses up, with the calls around it."""


def kernels(first: int, amount: int, *, late_ids: int = 0) -> Columns:
    """Kernels of launches from a number on, 1 ms apart."""
    rows = np.zeros(amount, THREAD_KERNEL)
    numbers = np.arange(first, first + amount)
    rows["correlation_id"] = 1000 + numbers * PER_LAUNCH + late_ids
    rows["time_ns"] = 1_000_000 * numbers
    return rows


def symbols(first: int, amount: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A program of period 50 in which every launch of a period is another."""
    return (np.arange(first, first + amount) % PERIOD).astype(np.int32)


def resumed(hidden: int, *, late_ids: int = 0, final: bool = True, launches: int = 4000) -> GapPlace | None:
    """600 launches are known; so many more were not recorded; then 300 kernels come."""
    resumption = GapHistory()
    resumption.remember(kernels(0, 600), np.arange(600), np.arange(600), 0)
    behind = kernels(600 + hidden, 300, late_ids=late_ids)
    fits = np.eye(PERIOD, dtype=bool)
    given = BehindGap(
        np.arange(launches + 1),
        np.arange(600, 600 + launches),
        symbols(600, launches),
        behind,
        symbols(600 + hidden, 300),
        fits,
    )
    return resumption.find(given, 600, step=0, final=final)


def test_the_jump_of_the_correlation_ids_says_how_many_launches_a_hole_hides() -> None:
    for hidden in (0, 7, 333, 1510):
        found = resumed(hidden)
        assert found is not None
        assert found.skipped == hidden
        assert found.trust > 0.8


def resumed_with_losses(hidden: int, lost: float, seed: int) -> tuple[GapPlace, int]:
    """As `resumed`, but lines are lost; and how many of those left the hole hides."""
    chance = np.random.default_rng(seed)
    left = np.flatnonzero(chance.random(4600) >= lost)
    known = left[left < 600]
    resumption = GapHistory()
    resumption.remember(kernels(0, 600)[known], np.arange(len(known)), known, 0)
    own = left[left >= 600]
    given = BehindGap(
        np.arange(len(own) + 1),
        own,
        (own % PERIOD).astype(np.int32),
        kernels(600 + hidden, 300),
        symbols(600 + hidden, 300),
        np.eye(PERIOD, dtype=bool),
    )
    found = resumption.find(given, len(known), step=0, final=True)
    assert found is not None
    return found, int(np.searchsorted(own, 600 + hidden))


def test_lines_lost_among_those_compared_do_not_move_the_place_by_a_period() -> None:
    for seed in range(20):
        for lost in (0.01, 0.05):
            found, hidden = resumed_with_losses(250, lost, seed)
            assert abs(found.skipped - hidden) < PERIOD // 10 or not found.is_sure


def test_where_kernels_fit_nowhere_the_likeliest_place_is_a_guess() -> None:
    resumption = GapHistory()
    resumption.remember(kernels(0, 600), np.arange(600), np.arange(600), 0)
    nothing = np.zeros((PERIOD, PERIOD), dtype=bool)
    given = BehindGap(
        np.arange(2001), np.arange(600, 2600), symbols(600, 2000), kernels(900, 300), symbols(900, 300), nothing
    )
    assert resumption.find(given, 600, step=0, final=True) == GapPlace(300, 0.5)


def test_a_jump_that_points_between_two_places_is_a_guess() -> None:
    found = resumed(500, late_ids=PER_LAUNCH * PERIOD // 2)
    assert found is not None
    assert found.trust <= 0.5


def test_more_launches_are_waited_for() -> None:
    assert resumed(1500, final=False, launches=1600) is None
    assert resumed(1500, final=False, launches=4000) is not None


def test_few_kernels_say_nothing_sure() -> None:
    resumption = GapHistory()
    resumption.remember(kernels(0, 600), np.arange(600), np.arange(600), 0)
    fits = np.eye(PERIOD, dtype=bool)
    few = BehindGap(np.arange(1001), np.arange(600, 1600), symbols(600, 1000), kernels(700, 10), symbols(700, 10), fits)
    assert resumption.find(few, 600, step=0, final=True) == GapPlace(0, 0.5)


def test_kernels_are_taken_up_to_the_next_hole() -> None:
    coverage = Coverage()
    coverage.add(0, 100_000_000)
    coverage.add(400_000_000, 600_000_000)
    rows = np.concatenate([kernels(10, 50), kernels(450, 30)])
    assert GapHistory().next_border(rows, coverage, final=True) == (50, True)


def test_a_hole_before_the_first_kernel_is_a_border_of_its_own() -> None:
    coverage = Coverage()
    coverage.add(0, 100_000_000)
    coverage.add(400_000_000, 600_000_000)
    resumption = GapHistory()
    resumption.remember(kernels(0, 60), np.arange(60), np.arange(60), 0)
    assert resumption.next_border(kernels(450, 30), coverage, final=True) == (0, True)
    assert resumption.next_border(kernels(450, 30), coverage, final=True, is_behind=True) == (30, False)


def test_kernels_of_a_capture_that_is_not_over_wait() -> None:
    coverage = Coverage()
    coverage.add(0, 30_000_000)
    assert GapHistory().next_border(kernels(10, 50), coverage, final=False) == (21, False)


def _resumed_in(program: list[int], *, lost: int | None = None, late_ids: int = 0, irregular: bool = False) -> GapPlace:
    """As `resumed`, in a program of these symbols: 510 launches are hidden, and the line of one behind them is lost.

    `irregular`: so are other calls between NCCL's, and correlation ids tell the place by a few launches only.
    """
    called = np.resize(np.array(program, np.int32), 4600)
    left = np.delete(np.arange(600, 4600), [] if lost is None else [510 + lost])
    used = np.random.default_rng(0).integers(0, 8 * PER_LAUNCH, 1410).cumsum() if irregular else np.zeros(1410, int)
    before, behind = kernels(0, 600), kernels(1110, 300, late_ids=late_ids)
    before["correlation_id"] += used[:600]
    behind["correlation_id"] += used[1110:]
    resumption = GapHistory()
    resumption.remember(before, np.arange(600), np.arange(600), 0)
    fits = np.eye(max(program) + 1, dtype=bool)
    given = BehindGap(np.arange(len(left) + 1), left, called[left], behind, called[1110:1410], fits)
    found = resumption.find(given, 600, step=0, final=True)
    assert found is not None
    return found


def test_which_of_the_first_few_alternating_calls_was_lost_is_no_doubt_of_the_place() -> None:
    program = [*range(3, 7), *[1, 2] * 8, *range(7, 37)]
    assert np.resize(program, 1120)[1100:].tolist() == [*range(3, 7), *[1, 2] * 8], "a capture begins amid them"
    for lost in (None, *range(9)):
        found = _resumed_in(program, lost=lost, irregular=True)
        assert abs(found.skipped - 510) <= (0 if lost is None else 2)
        assert found.is_sure, lost


def test_places_a_short_step_apart_are_two() -> None:
    assert _resumed_in([1, 2, 2, 3, 4]).is_sure
    for step in ([1, 2], [1, 2, 2, 3, 4]):
        assert _resumed_in(step, late_ids=PER_LAUNCH * len(step) // 2).trust <= 0.5
        assert _resumed_in(step, irregular=True).trust <= 0.5
