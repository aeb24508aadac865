"""Runs of one symbol, as long on both sides: closed formulas against all alignments summed up."""

from __future__ import annotations

import numpy as np
import pytest

from ncclscope_service.equal_runs import LONGEST, EqualRuns, expected_hidden
from ncclscope_service.pair_hmm import Posterior, Weights, posterior

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


@pytest.mark.parametrize("length", [2, 7, 24, 100])
def test_pairs_of_a_run_are_as_sure_as_the_sum_over_all_alignments_says(length: int) -> None:
    symbols = np.concatenate([[5], np.full(length, 7), [5] * 200]).astype(np.int32)
    runs = EqualRuns()
    assert runs.take(symbols, 0, 1, 0.0) is None
    sure = runs.take(symbols, 1, length, BOTH)
    found = all_alignments(length)
    assert sure == pytest.approx(np.diagonal(found.fresh[:, :, 0]), rel=1e-6)
    assert runs.hidden() == pytest.approx(float(found.lost_lines[0]), rel=1e-6)
    assert expected_hidden(symbols[1 : length + 1], BOTH) == pytest.approx(float(found.lost_lines[0]), rel=1e-6)


def test_a_run_is_as_sure_however_it_was_cut() -> None:
    rng = np.random.default_rng(0)
    symbols = np.repeat(np.arange(40), rng.integers(1, 400, 40)).astype(np.int32)
    whole, pieces = EqualRuns(), EqualRuns()
    at_once = whole.take(symbols, 0, len(symbols), BOTH)
    assert at_once is not None
    # As runs are given out: short ones whole, long ones once their length is known to be long.
    borders = np.flatnonzero(np.diff(symbols)) + 1
    lengths = np.diff(np.concatenate([[0], borders, [len(symbols)]]))
    ends = [*borders.tolist(), len(symbols)]
    cuts: list[int] = []
    for end, length in zip(ends, lengths.tolist(), strict=True):
        cuts += [*range(end - length + 7, end - LONGEST, 50), end]
    parts, begin = [], 0
    for cut in cuts:
        part = pieces.take(symbols[: cut + LONGEST + 16], begin, cut - begin, BOTH)
        assert part is not None
        parts.append(part)
        begin = cut
    assert np.concatenate(parts) == pytest.approx(at_once)
    assert pieces.hidden() == pytest.approx(whole.hidden())


def test_without_losses_on_both_sides_nothing_is_doubted() -> None:
    assert EqualRuns().take(np.zeros(100, np.int32), 0, 60, 0.0) is None
    assert expected_hidden(np.zeros(100, np.int32), 0.0) == 0


def test_what_is_alone_is_surer_than_what_is_among_equals() -> None:
    symbols = np.array([1, 2, 3, 4, *[5] * 40, 6, 7] + [8] * 140, np.int32)
    sure = EqualRuns().take(symbols, 0, 46, BOTH)
    assert sure is not None
    assert sure[:4].min() > 0.99
    assert sure[24] < 0.7
    assert sure[24] < sure[5] < sure[4]
