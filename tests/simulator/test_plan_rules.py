"""How many kernels a simulated group takes."""

from __future__ import annotations

import pytest

from ncclscope_simulator.config import SimulationConfig
from ncclscope_simulator.plans import capacity, cut, plans_of
from ncclscope_simulator.version import traits


def test_one_kernel_takes_what_the_version_allows() -> None:
    assert capacity(traits("2.12"), None, 16, "collective") is None
    assert capacity(traits("2.21"), None, 16, "collective") == 65_536 // 2 // 16 * 9
    assert capacity(traits("2.21"), 64, 16, "collective") == 18
    assert capacity(traits("2.28"), None, 16, "collective") == 254 * 10 - 16
    assert capacity(traits("2.28"), 1920, 16, "collective") == 10
    assert capacity(traits("2.28"), 2, 16, "exchange") == 1


def test_the_largest_operations_come_first_and_plans_are_filled_in_turn() -> None:
    assert cut([1, 5, 3, 4, 2], 2) == [9, 5, 1]
    assert cut([1, 2], None) == [3]
    assert plans_of([3], "kernel", 4) == ()
    assert [plan.share for plan in plans_of([9, 5, 1], "kernel", 4)] == [9 / 15, 5 / 15, 1 / 15]


def test_a_version_without_a_fifo_refuses_the_setting() -> None:
    with pytest.raises(ValueError, match="no work FIFO"):
        SimulationConfig(nccl="2.12", work_fifo=64)
