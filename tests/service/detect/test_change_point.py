"""What a series' past says of its noise, and what a window says of a loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
from service.detect.test_false_alarms import correlated

from ncclscope_service.detect.statistics import QUICK, STEADY, DropRule, DropWatch, log_likelihood_ratio, noise_of


@pytest.mark.parametrize("phi", [0.0, 0.6])
def test_the_noise_of_a_long_past_is_that_which_made_it(phi: float) -> None:
    series = 3.0 + 0.05 * correlated(np.random.default_rng(1), (20_000, 1), phi, heavy=True)[:, 0]
    noise = noise_of(series)
    assert noise.middle == pytest.approx(3.0, abs=0.005)
    assert noise.phi == pytest.approx(phi, abs=0.03)
    assert noise.spread == pytest.approx(0.05, rel=0.1)
    assert noise.scale == pytest.approx(0.05 * math.sqrt((1 - phi**2) / 2), rel=0.05)


def test_a_series_without_noise_has_some_all_the_same() -> None:
    noise = noise_of(np.zeros(30))
    assert noise.scale > 0.01
    assert noise.sigma >= 0.02


def test_a_loss_speaks_for_itself_and_a_healthy_window_against_it() -> None:
    assert log_likelihood_ratio(0.0, 5.0) < -4
    assert log_likelihood_ratio(-2.5, 5.0) == pytest.approx(0.0)
    assert log_likelihood_ratio(-5.0, 5.0) > 4


def test_a_collapse_speaks_as_clearly_as_the_loss_that_is_sought() -> None:
    assert log_likelihood_ratio(-50.0, 5.0) == log_likelihood_ratio(-5.0, 5.0)


def delay(rule: DropRule, seed: int, loss: float, windows: int = 10_000) -> int | None:
    """Windows from a loss, which lasts so many, to the alarm, in correlated noise with heavy tails of CV 5 %."""
    before = rule.baseline + 30
    levels = 0.05 * correlated(np.random.default_rng(seed), (before + 100, 1), 0.6, heavy=True)[:, 0]
    levels[before : before + windows] += math.log1p(-loss)
    watch = DropWatch(rule)
    for at, level in enumerate(levels.tolist()):
        watch.ingest_window(at, level)
        if watch.drop is not None:
            return at - before + 1
    return None


def test_a_lone_series_shows_a_fifth_lost_within_a_minute_though_its_noise_is_correlated_and_heavy_tailed() -> None:
    delays = [found for seed in range(60) if (found := delay(STEADY, seed, 0.2)) is not None]
    assert len(delays) == 60
    assert np.percentile(delays, 50) <= 6
    assert np.percentile(delays, 90) <= 9
    assert min(delays) >= 1


def test_a_minute_of_windows_is_enough_to_find_most_losses_of_a_fifth() -> None:
    delays = [found for seed in range(40) if (found := delay(QUICK, seed, 0.2)) is not None]
    assert len(delays) >= 30


@pytest.mark.parametrize("windows", [1, 2])
def test_a_collapse_of_one_or_two_windows_is_no_alarm(windows: int) -> None:
    assert [delay(STEADY, seed, 0.6, windows) for seed in range(20)] == [None] * 20


def test_an_alarm_says_since_when_and_how_much() -> None:
    random = np.random.default_rng(4)
    watch = DropWatch(STEADY)
    for window in range(500):
        watch.ingest_window(window, float(random.normal(0, 0.02)) - (0.3 if window >= 450 else 0.0))
    assert watch.drop is not None
    assert watch.drop.since_ns == 450
    assert watch.drop.share == pytest.approx(1 - math.exp(-0.3), abs=0.03)
