"""Runs of one symbol, as long on both sides: closed formulas against all alignments summed up."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclscope_service.align.by_order.known_runs import LONGEST, Doubts, EqualRuns
from ncclscope_service.align.by_order.pair_hmm import Posterior, Weights, posterior

BOTH = 2.0**-8


def all_alignments(length: int) -> Posterior:
    """A run of so many launches and kernels, any of which may belong together."""
    lost = np.sqrt(BOTH)
    return posterior(
        Weights(
            np.ones((length, length, 1)),
            np.full((length, 1), lost),
            np.full((length + 1, length, 1), lost),
            np.zeros((length, 1)),
        )
    )


def doubts_of(symbols: NDArray[np.int32], both_lost: float = BOTH) -> Doubts:
    doubts = EqualRuns().ahead(symbols).doubts(both_lost)
    assert doubts is not None
    return doubts


@pytest.mark.parametrize("length", [2, 7, 24, 100])
def test_pairs_of_a_run_are_as_sure_as_the_sum_over_all_alignments_says(length: int) -> None:
    symbols = np.concatenate([[5], np.full(length, 7), [5] * 200]).astype(np.int32)
    doubts = doubts_of(symbols)
    found = all_alignments(length)
    assert doubts.sure[1 : length + 1] == pytest.approx(np.diagonal(found.fresh[:, :, 0]), rel=1e-6)
    runs = EqualRuns()
    runs.hide(int(doubts.hidden_before[length + 1] - doubts.hidden_before[1]))
    assert runs.hidden() == pytest.approx(float(found.lost_lines[0]), rel=1e-3, abs=1e-4)
    assert runs.hidden() == 0


def test_a_run_is_as_sure_however_it_was_cut() -> None:
    rng = np.random.default_rng(0)
    symbols = np.repeat(np.arange(40), rng.integers(1, 400, 40)).astype(np.int32)
    at_once = doubts_of(symbols)
    # As runs are given out: short ones whole, long ones once their length is known to be long.
    borders = np.flatnonzero(np.diff(symbols)) + 1
    lengths = np.diff(np.concatenate([[0], borders, [len(symbols)]]))
    ends = [*borders.tolist(), len(symbols)]
    cuts: list[int] = []
    for end, length in zip(ends, lengths.tolist(), strict=True):
        cuts += [*range(end - length + 7, end - LONGEST, 50), end]
    pieces, parts, begin, hidden = EqualRuns(), [], 0, 0
    for cut in cuts:
        ahead = pieces.ahead(symbols[begin : cut + LONGEST + 16])
        doubts = ahead.doubts(BOTH)
        amount = cut - begin
        parts.append(doubts.sure[:amount] if doubts is not None else np.ones(amount))
        hidden += int(doubts.hidden_before[amount]) if doubts is not None else 0
        pieces.go_on(ahead, amount)
        begin = cut
    assert np.concatenate(parts) == pytest.approx(at_once.sure)
    assert hidden == at_once.hidden_before[-1]


def test_without_losses_on_both_sides_nothing_is_doubted() -> None:
    assert EqualRuns().ahead(np.zeros(100, np.int32)).doubts(0.0) is None


def test_where_nothing_is_repeated_nothing_is_doubted() -> None:
    assert EqualRuns().ahead(np.arange(100, dtype=np.int32)).doubts(1e-4) is None


def test_what_is_alone_is_surer_than_what_is_among_equals() -> None:
    symbols = np.array([1, 2, 3, 4, *[5] * 40, 6, 7] + [8] * 140, np.int32)
    sure = doubts_of(symbols).sure
    assert sure[:4].min() > 0.99
    assert sure[24] < 0.7
    assert sure[24] < sure[5] < sure[4]
