"""Ranks of which lines were lost are aligned by what they called and when their kernels ended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ncclscope_service.number.across_ranks import (
    CALL,
    OFFSET,
    OVERLAP,
    RANKS,
    align_ranks,
    apart_by_steps,
    first_violation,
    unknown_offsets,
)
from ncclscope_service.number.healing import heal
from ncclscope_wire.batch import Columns
from ncclscope_wire.terms import NO_NUMBER, NO_TIME_NS

_US = 1_000
_PATTERN = (1, 2, 1, 2, 3, 3)


def _calls(kept: NDArray[np.intp], ends_ns: NDArray[np.int64], *, timed: bool = True) -> Columns:
    """One rank's calls, of which those in `kept` have a line; their ids are the numbers of their collectives."""
    calls = np.zeros(len(kept), CALL)
    calls["id"] = kept
    calls["symbol"] = calls["kind"] = np.resize(_PATTERN, int(kept.max(initial=0)) + 1)[kept]
    calls["is_sized"] = calls["is_counted"] = calls["is_n_to_n"] = True
    calls["end_ns"] = ends_ns[kept] if timed else NO_TIME_NS
    calls["start_ns"] = ends_ns[kept] - 10 * _US if timed else NO_TIME_NS
    calls["stamp_ns"] = NO_TIME_NS
    return calls


def _job(seed: int, losses: list[float], *, size: int = 300, timed: bool = True) -> list[Columns]:
    """Ranks whose hosts' clocks are up to 5 ms apart, and whose kernels of one collective end within 4 us."""
    chance = np.random.default_rng(seed)
    ends = np.cumsum(chance.exponential(300 * _US, size) + 80 * _US).astype(np.int64)
    return [
        _calls(
            np.flatnonzero(chance.random(size) >= loss),
            ends + int(chance.integers(-5_000, 5_000)) * _US + chance.integers(-2, 3, size) * _US,
            timed=timed,
        )
        for loss in losses
    ]


def _joined(calls: list[Columns], places: NDArray[np.int64]) -> list[set[int]]:
    """By collective that was found: those that its calls are of."""
    return [{int(calls[rank]["id"][place]) for rank, place in enumerate(row.tolist()) if place >= 0} for row in places]


def _heal(calls: list[Columns]) -> NDArray[np.int64]:
    ranks = len(calls)
    healed = heal(calls, unknown_offsets(ranks), np.arange(ranks, dtype=np.int32), is_forced=True, is_end=True)
    return healed.places


@given(seed=st.integers(0, 1000), losses=st.lists(st.sampled_from([0.0, 0.01, 0.05]), min_size=2, max_size=5))
def test_no_two_collectives_are_joined_where_kernels_ended(seed: int, losses: list[float]) -> None:
    calls = _job(seed, losses)
    joined = _joined(calls, _heal(calls))
    assert all(len(of) == 1 for of in joined)
    numbers = [next(iter(of)) for of in joined]
    assert numbers == sorted(set(numbers)), "each once and in order"
    assert set(numbers) == {int(each) for of in calls for each in of["id"]}


@given(seed=st.integers(0, 1000), ranks=st.integers(2, 5), timed=st.booleans())
def test_where_nothing_was_lost_every_call_keeps_its_number(seed: int, ranks: int, timed: bool) -> None:
    calls = _job(seed, [0.0] * ranks, timed=timed)
    assert (_heal(calls) == np.arange(300)[:, None]).all()
    matrix = np.stack(calls, axis=1)
    count, _ = first_violation(matrix, unknown_offsets(ranks), np.arange(ranks, dtype=np.int32))
    assert count == 300


def test_a_loss_among_equal_calls_shows_at_once_by_the_kernels() -> None:
    ends = np.cumsum(np.full(40, 100 * _US)) + np.arange(40) ** 2 * _US
    whole, lossy = _calls(np.arange(40), ends), _calls(np.delete(np.arange(40), 20), ends)
    whole["symbol"] = lossy["symbol"] = 1
    count, offsets = first_violation(
        np.stack([whole[:39], lossy], axis=1), np.zeros(2, OFFSET), np.asarray([0, 1], np.int32)
    )
    assert count == 20
    assert offsets["ns"].tolist() == [0, 0]


@pytest.mark.parametrize("until", [20, 40])
def test_clocks_that_drift_while_nothing_is_recorded_lose_no_line(until: int) -> None:
    """`until`: of how many collectives in the first look; the second one is behind the gap, or within it."""
    ends = np.arange(40) * 3_000 * _US + (np.arange(40) >= 20) * 4_000_000 * _US
    matrix = np.stack([_calls(np.arange(40), ends), _calls(np.arange(40), ends + ends // 20_000)], axis=1)
    hosts = np.arange(2, dtype=np.int32)
    count, offsets = first_violation(matrix[:until], unknown_offsets(2), hosts)
    assert count == until
    assert first_violation(matrix[until:], offsets, hosts)[0] == 40 - until
    matrix[20:, 1] = np.roll(matrix[20:, 1], -1)  # the first one behind the gap was lost
    count, offsets = first_violation(matrix[:until], unknown_offsets(2), hosts)
    assert count == 20
    assert not len(matrix[until:]) or first_violation(matrix[until:], offsets, hosts)[0] == 0


def test_a_clock_that_steps_loses_no_line() -> None:
    calls = _job(1, [0.0, 0.0], size=100)
    for name in ("start_ns", "end_ns"):
        calls[1][name][50:] += 7_000 * _US
    assert (_heal(calls) == np.arange(100)[:, None]).all()


def test_a_rank_that_calls_something_else_once_loses_no_number() -> None:
    for timed in (True, False):
        calls = _job(2, [0.0, 0.0, 0.0], size=80, timed=timed)
        calls[1]["symbol"][33] = 9
        assert (_heal(calls) == np.arange(80)[:, None]).all()


def test_a_rank_whose_last_call_is_another_lost_nothing_unless_kernels_ended() -> None:
    for timed, rows in ((False, 80), (True, 81)):
        calls = _job(2, [0.0, 0.0], size=80, timed=timed)
        calls[1]["symbol"][-1] = 9
        if timed:
            calls[1]["end_ns"][-1] += 50_000 * _US
        healed = heal(calls, unknown_offsets(2), np.arange(2, dtype=np.int32), is_forced=True, is_end=True)
        assert len(healed.places) == rows
        assert healed.lost.total() == rows - 80


def test_without_times_a_loss_is_placed_where_calls_differ() -> None:
    calls = [
        _calls(np.arange(60), np.arange(60), timed=False),
        _calls(np.delete(np.arange(60), 20), np.arange(60), timed=False),
    ]
    aligned = align_ranks(calls, unknown_offsets(2), is_end=True)
    assert [len(of) for of in _joined(calls, aligned.places)] == [1] * 60
    assert (aligned.shown_by, aligned.lost) == (RANKS, 1)


def test_a_burst_of_a_hundred_lost_lines_is_one_gap() -> None:
    ends = np.cumsum(np.random.default_rng(3).exponential(300 * _US, 400) + 20 * _US).astype(np.int64)
    calls = [_calls(np.arange(400), ends), _calls(np.delete(np.arange(400), np.arange(150, 250)), ends)]
    joined = _joined(calls, _heal(calls))
    assert all(len(of) == 1 for of in joined)
    assert len(joined) == 400


def test_what_lacks_its_line_is_known_by_its_kernel() -> None:
    calls = _job(4, [0.0, 0.0], size=50)
    calls[1]["is_sized"][20] = calls[1]["is_counted"][20] = False
    calls[1]["symbol"][20] = 77
    count, _ = first_violation(np.stack(calls, axis=1), unknown_offsets(2), np.arange(2, dtype=np.int32))
    assert count == 50


def test_the_end_of_what_came_decides_nothing_yet() -> None:
    calls = _job(5, [0.0, 0.05], size=150)
    aligned = align_ranks(calls, unknown_offsets(2), is_end=False)
    assert 0 < len(aligned.places) < 120
    assert aligned.shown_by == OVERLAP


@pytest.mark.parametrize("seed", [3, 11, 12, 13, 47, 62])
@pytest.mark.parametrize("op_counts", [False, True])
def test_what_the_draft_lost_is_one_collective_for_all_ranks(seed: int, op_counts: bool) -> None:
    # Of a run of equal calls nothing tells which one was lost.
    chance = np.random.default_rng(seed)
    symbols = np.resize([4, 1, 2, 1, 2, 1, 2, 3, 3, 3], 120)
    calls: list[Columns] = []
    for _ in range(4):
        own = _calls(np.flatnonzero(chance.random(120) >= 0.02), np.arange(120), timed=False)
        own["symbol"] = own["kind"] = symbols[own["id"]]
        own["op_count"] = own["id"] * op_counts
        own["stamp_ns"] = own["id"] * 18 * _US + chance.integers(0, 2_000, len(own))
        calls.append(own)
    aligned = align_ranks(calls, unknown_offsets(4), is_end=True)
    assert len(aligned.places) == 120


@pytest.mark.parametrize("steps_late", [0, 1, 2])
@pytest.mark.parametrize("clock_ms", [-40, 0, 40])
def test_ranks_that_are_whole_steps_apart_are_known_by_clocks_that_are_nearer_than_steps(
    steps_late: int, clock_ms: int
) -> None:
    per_step, step_ns = 7, 100_000_000
    places = np.arange(10 * per_step)
    calls = np.zeros((len(places), 2), CALL)
    calls["is_n_to_n"], calls["step"] = True, (places // per_step)[:, None]
    ends = places // per_step * step_ns + places % per_step * 1_000_000
    calls["end_ns"][:, 0] = ends
    calls["end_ns"][:, 1] = ends - steps_late * step_ns + clock_ms * 1_000_000
    offsets, later = apart_by_steps(calls, np.array([0, 1], np.int32))
    assert offsets["ns"].tolist() == [0, clock_ms * 1_000_000]
    assert later.tolist() == [0, steps_late * per_step]


def test_ranks_that_lost_lines_between_steps_are_left_to_what_heals_losses() -> None:
    calls = np.zeros((20, 2), CALL)
    calls["is_n_to_n"], calls["step"] = True, (np.arange(20) // 4)[:, None]
    calls["end_ns"] = np.arange(20)[:, None] * 1_000_000
    calls[9:19, 1] = calls[10:20, 1]
    offsets, later = apart_by_steps(calls, np.array([0, 1], np.int32))
    assert np.isnan(offsets["ns"]).all()
    assert later.tolist() == [0, 0]


def test_ranks_of_which_no_step_is_known_stay_as_they_are() -> None:
    calls = np.zeros((4, 2), CALL)
    calls["is_n_to_n"], calls["step"] = True, NO_NUMBER
    offsets, later = apart_by_steps(calls, np.array([0, 1], np.int32))
    assert np.isnan(offsets["ns"]).all()
    assert later.tolist() == [0, 0]
