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
from ncclscope_models.fitted_machine import fitted_machine, machine_before_fitting
from ncclscope_models.job import Job, ModelError
from ncclscope_models.memory import MemoryNeed
from ncclscope_models.ranking import BASE_WIDTH, Ranked, rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedPart:
    """A part of the mean step of a rank."""

    part: str
    """As in `step_budget.parquet`."""
    parallelism: str | None
    seconds: float


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
    gpu: str | None = None
    """Of that run, one of `flops.PEAK_FLOPS`."""
    parts: tuple[ExpectedPart, ...] = ()
    """Of the step that was recorded, if it is the same job and its kernels were recorded; they sum up to `typical`.

    Of another layout there are none: what is foretold is of the stage that ends last, and what is observed of a mean
    rank, whose waiting is all that the stages differ by.
    """

    @property
    def limit(self) -> float:
        """Seconds that hardly any job exceeds: twice the interval, as logarithms."""
        return self.typical * (self.high / self.typical) ** 2


def expected_step(job: Job, calibrations: Sequence[Calibration], gpu: str | None = None) -> ExpectedStep:
    """By the first run that says it, those of as many ranks first.

    Raises:
        ModelError: None says it; the text has each run with what it lacks.
    """
    lacking: list[str] = []
    for of in sorted(calibrations, key=lambda each: each.ranks != job.layout.ranks):
        try:
            return _by_run(job, of, gpu)
        except ModelError as error:
            lacking.append(f"{of.job}: {error}")
    raise ModelError("; ".join(lacking) or "there is no calibration")


def _by_run(job: Job, of: Calibration, gpu: str | None) -> ExpectedStep:
    """What the run did not show is refused, but that a job does again takes as long again, whatever it uses."""
    if of.description is None:
        raise ModelError("the run was not described, or did something else: analyze it with --model")
    if of.ranks_per_node is None:
        raise ModelError("it does not say how many GPUs a node has")
    now = completed(Description({name: Given(value, of.job) for name, value in of.description.items()})).job
    if now.shape != job.shape:
        raise ModelError("it is of another model")
    base = machine_before_fitting(gpu or of.gpu, of.ranks_per_node, network_cards=of.network_cards)
    fitted = fitted_machine(base, now, of, of.times)
    if (job.layout, job.training) != (now.layout, now.training):
        if fitted.inside is None and min(of.ranks_per_node, job.layout.ranks) > 1:
            raise ModelError("no group of it lies in a node, and the job is laid out differently")
        if fitted.between is None and job.layout.ranks > of.ranks_per_node:
            raise ModelError("no group of it crosses nodes, and the job is laid out differently")
    return _expected(rank((job,), now, fitted, MemoryNeed(None), most=1).ranked[0], now, of)


def _expected(found: Ranked, now: Job, of: Calibration) -> ExpectedStep:
    is_same = (found.job.layout, found.job.training) == (now.layout, now.training)
    least = BASE_WIDTH if is_same else 0.0  # of another layout it is in the interval already
    return ExpectedStep(
        low=found.seconds * exp(-hypot(least, log(found.seconds / found.low))),
        typical=found.seconds,
        high=found.seconds * exp(hypot(least, log(found.high / found.seconds))),
        run=of.job,
        is_same=is_same,
        gpu=of.gpu,
        parts=tuple(
            ExpectedPart(part=part, parallelism=parallelism, seconds=ns / 1e9)
            for (part, parallelism), ns in (of.step.parts.items() if is_same and of.step is not None else ())
        ),
    )
