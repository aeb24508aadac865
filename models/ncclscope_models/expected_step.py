"""How long a step of a job should take, from a run of the same machine whose description its calibration has.

The job that was recorded is expected to take as long again, and another one what the machine of that run foretells
(`fitted_machine`, `ranking`). What no term says is at least as wide as for another layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, hypot, log

from ncclscope_models.calibration import Calibration
from ncclscope_models.description import Description, Given, completed
from ncclscope_models.fitted_machine import FittedMachine, fitted_machine, machine_before_fitting
from ncclscope_models.job import Job, ModelError
from ncclscope_models.memory import MemoryNeed
from ncclscope_models.ranking import BASE_WIDTH, Ranked, rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedStep:
    """Seconds of a step; four of five jobs lie between `low` and `high`."""

    low: float
    typical: float
    high: float
    run: str
    """The job that was recorded."""
    is_same: bool
    """It had the same layout and batch."""

    @property
    def limit(self) -> float:
        """Seconds that hardly any job exceeds: twice the interval, as logarithms."""
        return self.typical * (self.high / self.typical) ** 2


def expected_step(job: Job, calibrations: Sequence[Calibration], gpu: str | None = None) -> ExpectedStep | None:
    """By the first run that says it, those of as many ranks first; None if none has a description and a step."""
    for of in sorted(calibrations, key=lambda each: each.ranks != job.layout.ranks):
        if of.description is None or of.ranks_per_node is None:
            continue
        try:
            now = completed(Description({name: Given(value, of.job) for name, value in of.description.items()})).job
            fitted = fitted_machine(
                machine_before_fitting(gpu, of.ranks_per_node, inside_latency=0.0), now, of, of.times
            )
            if now.shape == job.shape and _reaches(fitted, job):
                return _expected(rank((job,), now, fitted, MemoryNeed(None), most=1).ranked[0], now, of.job)
        except ModelError:
            continue
    return None


def _reaches(fitted: FittedMachine, job: Job) -> bool:
    """Whether the run has shown the links that the job uses."""
    return fitted.between is not None or job.layout.ranks <= fitted.machine.gpus_per_node


def _expected(found: Ranked, now: Job, run: str) -> ExpectedStep:
    is_same = (found.job.layout, found.job.training) == (now.layout, now.training)
    least = BASE_WIDTH if is_same else 0.0  # of another layout it is in the interval already
    return ExpectedStep(
        low=found.seconds * exp(-hypot(least, log(found.seconds / found.low))),
        typical=found.seconds,
        high=found.seconds * exp(hypot(least, log(found.high / found.seconds))),
        run=run,
        is_same=is_same,
    )
