from __future__ import annotations

from itertools import combinations
from math import isclose

import numpy as np
import pytest
from benchmarks.alignment.best_possible import best_in_order, bound, pair_posterior
from benchmarks.alignment.case import Loss
from benchmarks.alignment.methods import BOUND, NEEDLEMAN_WUNSCH, SLIDING_WINDOW, Method
from benchmarks.alignment.scenarios import LOSSES, MIXES, NAMES, case_of_names, drawn_cases
from benchmarks.alignment.score import scored


def _posterior_by_enumeration(
    kernels: list[int], lines: list[int], shares: list[float], loss: Loss
) -> list[list[float]]:
    """Every alignment written out: which kernels and lines are paired; in between all interleavings."""
    a, b = loss.lines, loss.kernels
    weights = np.zeros((len(kernels), len(lines)))
    total = 0.0
    for amount in range(min(len(kernels), len(lines)) + 1):
        for rows in combinations(range(len(kernels)), amount):
            for columns in combinations(range(len(lines)), amount):
                if any(kernels[row] != lines[column] for row, column in zip(rows, columns, strict=True)):
                    continue
                weight = _interleavings((*rows, len(kernels)), (*columns, len(lines)))
                steps = len(kernels) + len(lines) - amount
                weight *= ((1 - a) * (1 - b)) ** amount / (1 - a * b) ** steps
                weight *= (a * (1 - b)) ** (len(kernels) - amount) * ((1 - a) * b) ** (len(lines) - amount)
                # A pair shows one drawn symbol, not two.
                weight *= float(np.prod([shares[symbol] for symbol in kernels]))
                weight *= float(np.prod([shares[symbol] for place, symbol in enumerate(lines) if place not in columns]))
                total += weight
                weights[list(rows), list(columns)] += weight
    return [[float(value) for value in row] for row in weights / total]


def _interleavings(rows: tuple[int, ...], columns: tuple[int, ...]) -> float:
    product, row, column = 1.0, 0, 0
    for next_row, next_column in zip(rows, columns, strict=True):
        alone, other = next_row - row, next_column - column
        product *= _binomial(alone + other, alone)
        row, column = next_row + 1, next_column + 1
    return product


def _binomial(n: int, k: int) -> float:
    return float(np.prod([(n - i) / (i + 1) for i in range(k)])) if k else 1.0


@pytest.mark.parametrize(("kernels", "lines"), [([0, 1, 0], [0, 0, 1, 0]), ([0, 0], [0, 0, 0]), ([1, 0, 2], [2, 1, 0])])
def test_the_posterior_is_that_of_all_alignments_written_out(kernels: list[int], lines: list[int]) -> None:
    shares, loss = [0.5, 0.3, 0.2], Loss(lines=0.2, kernels=0.3)
    found = pair_posterior(np.array(kernels), np.array(lines), np.array(shares), loss)
    assert np.allclose(found, _posterior_by_enumeration(kernels, lines, shares, loss))


def test_nothing_lost_leaves_one_alignment() -> None:
    symbols = np.array([0, 0, 1, 0])
    posterior = pair_posterior(symbols, symbols, np.array([0.5, 0.5]), Loss(lines=0.0, kernels=0.0))
    assert np.allclose(posterior, np.eye(4))


def test_the_best_answers_are_those_of_highest_expected_f1() -> None:
    posterior = np.random.default_rng(1).dirichlet(np.ones(5), 4)[:, :4] * 0.9
    _, _, reached = best_in_order(posterior)
    wanted = float(posterior.sum())
    tried = [
        2 * float(posterior[list(rows), list(columns)].sum()) / (amount + wanted)
        for amount in range(1, 5)
        for rows in combinations(range(4), amount)
        for columns in combinations(range(4), amount)
    ]
    assert isclose(reached, max(tried))


@pytest.mark.parametrize("other", [SLIDING_WINDOW, NEEDLEMAN_WUNSCH], ids=lambda method: str(method.name))
def test_no_baseline_beats_the_bound(other: Method) -> None:
    for mix in (MIXES[0], MIXES[3]):
        for loss in LOSSES[1:]:
            cases = [case for seed in range(2) for case in drawn_cases(mix, NAMES, loss, ranks=2, seed=seed)]
            assert other.score(cases).exact.f1 <= BOUND.score(cases).exact.f1 + 0.02


def test_the_bound_comes_true_and_states_what_it_is_sure_of() -> None:
    cases = [case for seed in range(4) for case in drawn_cases(MIXES[0], NAMES, LOSSES[3], seed=seed)]
    bounds = [bound(case) for case in cases]
    score = scored((case, each.pairs) for case, each in zip(cases, bounds, strict=True))
    expected = np.mean([each.expected_f1 for each in bounds])
    assert abs(score.exact.f1 - expected) < 0.02
    assert score.calibration_error < 0.05
    assert all(each.expected_f1 <= each.ceiling + 1e-9 for each in bounds)


def test_a_case_that_was_not_drawn_has_no_bound() -> None:
    with pytest.raises(ValueError, match="shares"):
        bound(case_of_names("two", ["AllReduce"], ["AllReduce"]))
