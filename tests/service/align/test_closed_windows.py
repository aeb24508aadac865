"""Small windows in a band say what the whole model says."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclscope_service.align.by_order.closed_windows import ClosedWindow, Items, decide_closed
from ncclscope_service.align.by_order.pair_hmm import CLOSED, Weights, posterior

RATES = (0.01, 0.02)
SAME = np.eye(8, dtype=bool)


def of_two_sides(rng: np.random.Generator, length: int, letters: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """A program of so many letters, of which either side lost a few in the middle."""
    program = rng.integers(0, letters, length).astype(np.int32)
    middle = np.arange(length // 3, 2 * length // 3)
    lost = rng.choice(middle, size=rng.integers(1, 4), replace=False), rng.choice(middle, size=2, replace=False)
    return np.delete(program, lost[0]), np.delete(program, lost[1])


def whole(left: NDArray[np.int32], right: NDArray[np.int32]) -> NDArray[np.float64]:
    """The probability of every pair, by the model without a band."""
    kernels, lines = RATES
    fits = SAME[left[:, None], right[None, :]]
    odds = fits / np.maximum(fits.mean(axis=1, keepdims=True), 1e-9)
    lost_kernel = np.full((len(left), 1), kernels * (1 - lines))
    lost_line = np.full((len(left) + 1, len(right), 1), lines * (1 - kernels))
    pair = (odds * (1 - kernels) * (1 - lines))[..., None]
    return posterior(Weights(pair, lost_kernel, lost_line, np.zeros((len(left), 1))), CLOSED).fresh[:, :, 0]


@pytest.mark.parametrize("letters", [2, 4, 8])
def test_the_probabilities_of_pairs_are_those_of_the_whole_model(letters: int) -> None:
    rng = np.random.default_rng(letters)
    sides = [of_two_sides(rng, int(length), letters) for length in rng.integers(20, 90, 12)]
    left, right = np.concatenate([each[0] for each in sides]), np.concatenate([each[1] for each in sides])
    launches = np.cumsum([0, *(len(each[0]) for each in sides)]).tolist()
    kernels = np.cumsum([0, *(len(each[1]) for each in sides)]).tolist()
    windows = [
        ClosedWindow(
            launches=range(launches[at], launches[at + 1]),
            kernels=range(kernels[at], kernels[at + 1]),
            reach=3,
            rates=RATES,
        )
        for at in range(len(sides))
    ]
    given = 0
    for found in decide_closed(windows, Items(left, right, SAME)):
        for launch, kernel, confidence in zip(found.launches, found.kernels, found.confidence, strict=True):
            at = int(np.searchsorted(launches, launch, side="right")) - 1
            expected = whole(*sides[at])[launch - launches[at], kernel - kernels[at]]
            assert confidence == pytest.approx(expected, abs=2e-3)
            given += 1
    assert given > 0.8 * min(len(left), len(right))


def test_pairs_of_a_window_do_not_depend_on_the_windows_beside_it() -> None:
    rng = np.random.default_rng(1)
    one, other = of_two_sides(rng, 40, 4), of_two_sides(rng, 70, 4)
    left, right = np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])
    alone = ClosedWindow(launches=range(len(one[0])), kernels=range(len(one[1])), reach=3, rates=RATES)
    beside = ClosedWindow(
        launches=range(len(one[0]), len(left)), kernels=range(len(one[1]), len(right)), reach=3, rates=(0.05, 0.05)
    )
    (first,) = decide_closed([alone], Items(left, right, SAME))
    (both,) = decide_closed([beside, alone], Items(left, right, SAME))
    mine = both.launches < len(one[0])
    assert np.array_equal(both.launches[mine], first.launches)
    assert np.array_equal(both.kernels[mine], first.kernels)
    assert np.allclose(both.confidence[mine], first.confidence)


def test_a_band_reaches_beyond_what_was_left_out() -> None:
    rng = np.random.default_rng(2)
    left = rng.permutation(np.arange(7).repeat(20)).astype(np.int32)
    right = np.delete(left, np.arange(60, 90))
    window = ClosedWindow(launches=range(len(left)), kernels=range(len(right)), reach=30, rates=RATES)
    (found,) = decide_closed([window], Items(left, right, SAME))
    before = found.launches < 55
    assert np.array_equal(found.kernels[before], found.launches[before])
    behind = found.launches >= 95
    assert np.array_equal(found.kernels[behind], found.launches[behind] - 30)
    assert np.count_nonzero(before) == 55
