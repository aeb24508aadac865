"""Simulated jobs that tests read: written once per configuration and session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulator.jobs import Simulate

from ncclscope_simulator import SimulationConfig, write


@pytest.fixture(scope="session")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Simulate:
    """Writes a small job with the given configuration and gives its folder; equal configurations are written once."""
    known: dict[SimulationConfig, Path] = {}

    def _simulate(**given: Any) -> Path:
        settings: dict[str, Any] = {"iterations": 2, "layers": 1, "microbatches": 2, "step_seconds": 0.05}
        config = SimulationConfig(**(settings | given))
        if config not in known:
            known[config] = tmp_path_factory.mktemp("job")
            write(config, known[config])
        return known[config]

    return _simulate
