"""Times of transfers between measured sizes and beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_models.transfer_curve import Line, fit_line, transfer_curve

SIZES = [float(1 << power) for power in range(10, 30, 2)]


def test_a_line_is_found_again_between_sizes_and_beyond_both_ends() -> None:
    line = Line(alpha=20e-6, seconds_per_byte=1 / 200e9)
    curve = transfer_curve(SIZES, line.seconds(SIZES).tolist())
    assert curve.seconds([SIZES[0] / 4, SIZES[-1] * 8]) == pytest.approx(line.seconds([SIZES[0] / 4, SIZES[-1] * 8]))
    between = [size * 2 for size in SIZES[:-1]]
    assert curve.seconds(between) == pytest.approx(line.seconds(between), rel=0.08)
    assert curve.seconds(SIZES) == pytest.approx(line.seconds(SIZES))
    assert curve.holds([SIZES[0] / 2, SIZES[0], SIZES[-1], SIZES[-1] * 2]).tolist() == [False, True, True, False]


@given(st.lists(st.floats(1e-6, 1e-2), min_size=4, max_size=len(SIZES)))
def test_the_curve_stays_between_the_points_that_it_goes_through(seconds: list[float]) -> None:
    sizes = SIZES[: len(seconds)]
    curve = transfer_curve(sizes, seconds)
    for at in range(len(sizes) - 1):
        inside = curve.seconds(np.linspace(sizes[at], sizes[at + 1], 9))
        low, high = sorted(seconds[at : at + 2])
        assert np.all(inside >= low * (1 - 1e-9))
        assert np.all(inside <= high * (1 + 1e-9))


def test_a_fit_has_no_negative_part() -> None:
    assert fit_line([1e6, 2e6, 4e6], [3e-3, 2e-3, 1e-3]).seconds_per_byte == 0
    assert fit_line([1e6, 2e6, 4e6], [1e-3, 3e-3, 9e-3]).alpha == 0


def test_too_few_sizes_are_an_error() -> None:
    with pytest.raises(ValueError, match="needs 4 sizes, not 3"):
        transfer_curve(SIZES[:3], [1.0, 2.0, 3.0])
