"""Layouts in order of their predicted step: which fit, how sure the order is, and what makes the difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import exp, hypot, log
from typing import Final

from ncclscope_models.fitted_machine import FittedMachine, variants
from ncclscope_models.job import Job
from ncclscope_models.memory import Fit, MemoryNeed
from ncclscope_models.predicted_step import PARTS, PredictedStep, StepPredictor

BASE_WIDTH: Final = 0.027
"""Half-width, as a logarithm, of what no term says: of another layout than the one that calibrated by its whole step.
With it 74 % of 860 forecasts of vTrain's measured steps lie within their intervals (`benchmarks.models step_times`)."""
_PARTS_WIDTH: Final = 0.015
"""The same where the run was recorded with its parts, since then `left open` says how well they explain it. From 25
simulated scenarios; with it 83 % of the forecasts of others lie within their intervals (`benchmarks.models tune`)."""
_OTHER_TENSOR: Final = 2.0
"""Both are so many times as wide where tensor ranks differ, whose matrices have other widths: as median errors on
vTrain's are."""
_EXACT: Final = 300
"""Layouts whose pipeline is run event by event; of the others it is known that they are slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A layout and its step, in seconds."""

    job: Job
    seconds: float
    low: float
    high: float
    """Four of five steps lie between them."""
    parts: Mapping[str, float]
    """By `PARTS`, `idle` and, if corrections are learned, `learned`; they sum up to `seconds`."""
    widths: Mapping[str, float]
    """By what is not sure: half of the interval that it makes alone, as a logarithm."""
    memory_bytes: int
    fit: Fit | None
    """None where the memory of a GPU is not known."""
    not_corrected: str | None = None
    """Why what was learned does not correct it; None if it does, or if nothing was learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Layouts from the fastest on."""

    considered: int
    do_not_fit: int
    ranked: tuple[Ranked, ...]
    alike: int
    """The first so many are not told apart: their intervals overlap that of the best."""
    now: Ranked


def rank(candidates: Iterable[Job], now: Job, fitted: FittedMachine, need: MemoryNeed, *, most: int = 20) -> Ranking:
    """The fastest `most` of those that fit, and `now` with them; `now` is the job that calibrated the machine.

    Every candidate gets a lower bound of its step, which lies within a few percent below it; those with the lowest are
    then run event by event until no other can be among the first.
    """
    predictor = StepPredictor(fitted.machine)
    considered = too_large = 0
    bounds: list[tuple[float, int, Job]] = []
    for job in candidates:
        considered += 1
        if need.fit(job) is Fit.DOES_NOT:
            too_large += 1
        else:
            bounds.append((predictor.at_least(job), considered, job))
    steps: list[tuple[float, int, Job, PredictedStep]] = []
    for bound, number, job in nsmallest(max(_EXACT, 2 * most), bounds):
        known = nsmallest(most, (each[0] for each in steps))
        if len(known) == most and bound > known[-1]:
            break
        step = predictor.predict(job)
        steps.append((step.seconds, number, job, step))
    unsure = {
        name: [(StepPredictor(machine), factor) for machine, factor in ends]
        for name, ends in variants(fitted, now).items()
    }
    first = [
        _ranked(job, step, now, fitted, unsure, need) for _, _, job, step in nsmallest(most, steps, key=lambda s: s[:2])
    ]
    alike = sum(each.low <= first[0].high for each in first) if first else 0
    return Ranking(
        considered=considered,
        do_not_fit=too_large,
        ranked=tuple(first),
        alike=alike,
        now=_ranked(now, predictor.predict(now), now, fitted, unsure, need),
    )


def _ranked(
    job: Job,
    step: PredictedStep,
    now: Job,
    fitted: FittedMachine,
    unsure: Mapping[str, Sequence[tuple[StepPredictor, float]]],
    need: MemoryNeed,
) -> Ranked:
    is_now = (job.layout, job.training) == (now.layout, now.training)
    factor = fitted.factor if is_now else fitted.factor_of_others
    seconds = step.seconds * factor + fitted.idle
    width = (_PARTS_WIDTH if fitted.is_from_parts else BASE_WIDTH) * (
        1.0 if job.layout.tensor == now.layout.tensor else _OTHER_TENSOR
    )
    widths: dict[str, float] = {"model": 0.0 if is_now else width}
    below = above = widths["model"]
    for name, ends in () if is_now else unsure.items():
        off = [log((predictor.predict(job).seconds * times + fitted.idle) / seconds) for predictor, times in ends]
        widths[name] = max(map(abs, off))
        below, above = hypot(below, max(0.0, -min(off))), hypot(above, max(0.0, *off))
    return Ranked(
        job=job,
        seconds=seconds,
        low=seconds * exp(-below),
        high=seconds * exp(above),
        parts={**{part: factor * getattr(step, part) for part in PARTS}, "idle": fitted.idle},
        widths=widths,
        memory_bytes=need.bytes(job),
        fit=need.fit(job),
    )


def differences(one: Ranked, other: Ranked, most: int = 3) -> list[tuple[str, float]]:
    """Parts in which a step differs from another's, the largest first, in seconds: negative where it is shorter."""
    off = {part: one.parts[part] - other.parts[part] for part in one.parts}
    return sorted(off.items(), key=lambda each: -abs(each[1]))[:most]


def widest(ranked: Sequence[Ranked]) -> tuple[str, float, Ranked] | None:
    """What makes the intervals of these layouts wide: the term, its share of their squared widths, and the layout
    that it concerns most; None of none."""
    squares: Counter[str] = Counter()
    for each in ranked:
        squares.update({name: width**2 for name, width in each.widths.items()})
    if not squares or not squares.total():
        return None
    name, square = squares.most_common(1)[0]
    return name, square / squares.total(), max(ranked, key=lambda each: each.widths.get(name, 0.0))
