"""Open windows: which pairs are given out, also where prices come to no rest, and how sure a place in a step is."""

from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.align.by_order import open_window
from ncclscope_service.align.by_order.open_window import Repetition, repetition_of
from ncclscope_service.align.by_order.pair_hmm import Indices, Posterior
from ncclscope_service.align.expected_launches import LAUNCH
from ncclscope_wire.batch import Columns


def _posterior(pairs: list[list[float]]) -> Posterior:
    fresh = np.array(pairs)[:, :, None]
    nothing = np.zeros(1)
    return Posterior(fresh, np.zeros_like(fresh), np.zeros_like(fresh), nothing, nothing, nothing, nothing)


def test_prices_that_alternate_for_ever_end_with_the_better_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    probable = _posterior([[0.9, 0.1], [0.1, 0.15]])
    asked: list[float] = []

    def alternating(_probable: Posterior, price: float) -> tuple[Indices, Indices, Indices]:
        """A guess that is worth little as long as a pair costs much, the probable one as long as it costs little."""
        asked.append(price)
        row = np.array([0 if price < 0.4 else 1])
        return np.zeros(1, np.intp), row, row

    monkeypatch.setattr(open_window, "most_accurate", alternating)
    rows, columns = open_window._best(probable)  # pyright: ignore[reportPrivateUsage]  (its callers show nothing of the rounds)
    assert (rows.tolist(), columns.tolist()) == ([0], [0])
    assert len(set(asked[1:])) == 2, "it would alternate for ever"
    assert len(asked) < 100


def test_nothing_probable_gives_no_pairs() -> None:
    rows, columns = open_window._best(_posterior([[0.0]]))  # pyright: ignore[reportPrivateUsage]
    assert (len(rows), len(columns)) == (0, 0)


def _calls(signatures: list[int]) -> Columns:
    launches = np.zeros(len(signatures), LAUNCH)
    launches["signature"] = signatures
    return launches


_STEP = [1, 2, 2, 2, 3, 1, 2, 2, 2, 4]
"""Two microbatches and the end of the step."""
_BEFORE = [7, 8, 9]


def test_the_shortest_repetition_over_all_launches_is_the_step() -> None:
    assert repetition_of(_calls(_BEFORE + 12 * _STEP)) == Repetition(range(3, 123), 10)
    assert repetition_of(_calls(_BEFORE + 12 * _STEP + [5, 6])) == Repetition(range(3, 123), 10)


@pytest.mark.parametrize(
    "signatures",
    [
        pytest.param([], id="nothing"),
        pytest.param([1, 2, 3] * 3, id="too few"),
        pytest.param(list(range(200)), id="no repetition"),
        pytest.param(10 * _STEP + list(range(20, 80)), id="a part of it repeats"),
        pytest.param(list(range(50)) + list(range(40)), id="not yet twice"),
    ],
)
def test_launches_that_do_not_repeat_twice_have_no_step(signatures: list[int]) -> None:
    assert repetition_of(_calls(signatures)) is None


def test_a_pair_is_as_sure_as_its_place_in_the_step() -> None:
    pairs = np.zeros((7, 2))
    pairs[1::2, 0] = 0.3
    pairs[0, 1] = 0.2
    pairs[2::2, 1] = 0.25
    repetition = Repetition(range(1, 7), 2)
    rows, columns = np.array([1, 2, 0]), np.array([0, 1, 1])
    assert repetition.in_any_step(pairs, rows, columns).tolist() == pytest.approx([0.9, 0.75, 0.2])


def test_of_launches_that_repeat_behind_the_window_none_is_summed_up() -> None:
    pairs = np.full((2, 2), 0.4)
    assert Repetition(range(5, 99), 3).in_any_step(pairs, np.array([0]), np.array([1])).tolist() == [0.4]
