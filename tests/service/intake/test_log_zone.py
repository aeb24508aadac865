"""The zone of stamps is found from launches."""

from __future__ import annotations

import numpy as np

from ncclscope_service.intake.stage import fit_zone

_HOUR = 3_600_000_000_000
_MIDNIGHT = 1_772_409_600_000_000_000


def _launches(rng: np.random.Generator) -> np.ndarray:
    return _MIDNIGHT + np.cumsum(rng.integers(1_000_000, 400_000_000, 500))


def test_stamps_in_utc_need_no_shift() -> None:
    launches = _launches(np.random.default_rng(1))
    assert fit_zone(launches - 40_000, launches) == 0


def test_a_zone_east_of_utc_is_found_also_at_half_hours() -> None:
    launches = _launches(np.random.default_rng(2))
    assert fit_zone(launches - 40_000 + 11 * _HOUR // 2, launches) == 11 * _HOUR // 2


def test_a_zone_west_of_utc_is_found_from_a_short_capture() -> None:
    launches = _launches(np.random.default_rng(3))
    assert fit_zone(launches - 40_000 - 8 * _HOUR, launches[200:260]) == -8 * _HOUR


def test_stamps_of_another_day_fit_nothing() -> None:
    launches = _launches(np.random.default_rng(4))
    assert fit_zone(launches - 48 * _HOUR, launches) is None


def test_nothing_to_compare_fits_nothing() -> None:
    assert fit_zone(np.empty(0, np.int64), np.array([5])) is None
