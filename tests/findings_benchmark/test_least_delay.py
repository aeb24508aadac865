"""How soon a loss can be found at best."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.findings import least_delay


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_delay, "_WINDOWS", 2_000)
    monkeypatch.setattr(least_delay, "_COLUMNS", 100)


def test_a_larger_loss_is_found_sooner() -> None:
    small, large = (np.mean(least_delay.least_delays(loss, 0.05, 0.6, 1e-4, 200)) for loss in (0.1, 0.4))
    assert 1 <= large < small


def test_fewer_false_alarms_cost_time() -> None:
    few, many = (np.mean(least_delay.least_delays(0.2, 0.05, 0.6, rate, 200)) for rate in (1e-5, 1e-3))
    assert many < few
