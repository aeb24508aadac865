"""The random part of a step: how far computations and transfers deviate from their model, and small delays.

Deviations are normal and independent, or with `noise_correlation` of Student's t and kept in part from one step to
the next, by rank and by communicator. All follows from the seed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ncclscope_simulator.config import SimulationConfig

_BLOCK: Final = 4096
"""Numbers that are drawn for a step; a step that needs more takes them again from the first."""
_LEAST_COMPUTATION: Final = 0.1
_LEAST_TRANSFER: Final = 0.5


class Noise:
    """Draws for one step after the other; the order of the questions decides who gets which number."""

    def __init__(self, config: SimulationConfig, groups: int) -> None:
        self._config = config
        self._normal: list[float] = []
        self._uniform: list[float] = []
        self._uneven: list[float] = []
        self._drawn = 0
        self._slowness = [0.0] * config.world
        """By rank: how its computation deviates in this step, in units of its spread."""
        self._congestion = [0.0] * groups
        """The same of transfers, by group."""

    def begin_step(self, iteration: int) -> None:
        """Draws the numbers of a step."""
        random = np.random.default_rng([self._config.seed, iteration, 1])
        self._normal, self._uniform = random.standard_normal(_BLOCK).tolist(), random.random(_BLOCK).tolist()
        if self._config.noise_correlation or self._config.imbalance:
            self._begin_uneven_step(iteration)

    def _begin_uneven_step(self, iteration: int) -> None:
        random, kept = np.random.default_rng([self._config.seed, iteration, 2]), self._config.noise_correlation
        fresh = (1 - kept**2) ** 0.5 / 2**0.5  # Student's t of 4 degrees has the variance 2
        for values in (self._slowness, self._congestion):
            drawn = random.standard_t(4, len(values)).tolist()
            values[:] = [kept * value + fresh * new for value, new in zip(values, drawn, strict=True)]
        self._uneven = np.exp(self._config.imbalance * random.standard_normal(_BLOCK)).tolist()

    def computation_factor(self, rank: int) -> float:
        """How much longer than modelled the next computation of a rank takes."""
        deviation = self._slowness[rank] if self._config.noise_correlation else self._next(self._normal)
        return max(_LEAST_COMPUTATION, 1.0 + self._config.compute_cv * deviation)

    def transfer_factor(self, group: int) -> float:
        """How much longer than modelled the next transfer within a group takes."""
        deviation = self._congestion[group] if self._config.noise_correlation else self._next(self._normal)
        return max(_LEAST_TRANSFER, 1.0 + self._config.bandwidth_cv * deviation)

    def expert_factor(self) -> float:
        """How much more than the mean an expert has to do, next time."""
        return self._next(self._uneven)

    def uniform(self) -> float:
        """A number from 0 to below 1."""
        return self._next(self._uniform)

    def _next(self, numbers: list[float]) -> float:
        self._drawn += 1
        return numbers[self._drawn % _BLOCK]
