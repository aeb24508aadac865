"""How well the time of a step is foretold: real runs of up to 256 A100 that nobody here made.

Each row: without calibration (data sheets alone), then calibrated by one run of the group, every run in its turn: its
step says how fast its GPUs compute, and the network stays as the data sheet has it. The plain
alternative beside it is the operations of the model and the bubble, times one factor. At the end, how many of these
forecasts lie within the 80 % intervals of `tune`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import isclose

import numpy as np
from benchmarks.models import corpora, vtrain
from benchmarks.models.vtrain import MeasuredStep

from ncclscope_models.fitted_machine import LEAST_WIDTH, NOT_MEASURED, FittedMachine, Links
from ncclscope_models.flops import step_flops
from ncclscope_models.job import Job
from ncclscope_models.machine import Machine
from ncclscope_models.memory import MemoryNeed
from ncclscope_models.predicted_step import calibrated, predict_step
from ncclscope_models.ranking import rank
from ncclscope_models.step_time import bubble_over_ideal

_FEW = 5
Predictor = Callable[[Job], float]


def main() -> None:
    """Prints the table."""
    folder = corpora.folder("measured_runs")
    machine = vtrain.a100(folder)
    inside: list[bool] = []
    all_errors: list[float] = []
    all_plain: list[float] = []
    print(
        "\n| runs | n | Kendall tau | best of first 5 is slower by | median error | flops and bubble: tau | "
        "one run calibrates: median error | regret of the first, mean | flops and bubble: error | regret |\n"
        + "|---" * 10
        + "|"
    )
    for name, runs in vtrain.multi_node(folder).items():
        seconds = [run.seconds for run in runs]
        ours = [predict_step(run.job, machine).seconds for run in runs]
        plain = [_flops_and_bubble(run.job) for run in runs]
        first = sorted(range(len(runs)), key=ours.__getitem__)[:_FEW]
        loss = min(seconds[at] for at in first) / min(seconds) - 1
        errors, regret = _calibrated(runs, lambda run: _scaled(run, machine))
        plain_errors, plain_regret = _calibrated(runs, _by_flops)
        inside += [each for run in runs for each in _inside(run, runs, machine)]
        all_errors, all_plain = [*all_errors, *errors], [*all_plain, *plain_errors]
        off = [abs(forecast / second - 1) for forecast, second in zip(ours, seconds, strict=True)]
        print(
            f"| {name} | {len(runs)} | {kendall_tau(ours, seconds):.2f} | {100 * loss:.1f} % "
            f"| {_percent(off)} | {kendall_tau(plain, seconds):.2f} | {_percent(errors)} | {100 * regret:.1f} % "
            f"| {_percent(plain_errors)} | {100 * plain_regret:.1f} % |"
        )
    print(
        f"\nOver all choices of the run, {len(all_errors)} forecasts: median error {_percent(all_errors)}, "
        f"by flops and bubble {_percent(all_plain)}; {100 * np.mean(inside):.0f} % lie within their intervals"
    )


def _percent(errors: Sequence[float]) -> str:
    return f"{100 * np.median(errors):.1f} %"


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Concordant less discordant pairs over all pairs; a tie is neither."""
    pairs = list(combinations(range(len(one)), 2))
    signs = [np.sign(one[a] - one[b]) * np.sign(other[a] - other[b]) for a, b in pairs]
    return float(sum(signs) / len(pairs))


def _calibrated(
    runs: Sequence[MeasuredStep], calibrate: Callable[[MeasuredStep], Predictor]
) -> tuple[list[float], float]:
    """Errors of the other runs, and mean regret of those foretold as fastest, over the choice."""
    errors: list[float] = []
    regrets: list[float] = []
    fastest = min(run.seconds for run in runs)
    for chosen in runs:
        predict = calibrate(chosen)
        forecasts = [predict(run.job) for run in runs]
        errors += [
            abs(forecast / run.seconds - 1) for forecast, run in zip(forecasts, runs, strict=True) if run is not chosen
        ]
        first = [run.seconds for run, each in zip(runs, forecasts, strict=True) if isclose(each, min(forecasts))]
        regrets.append(float(np.mean(first)) / fastest - 1)
    return errors, float(np.mean(regrets))


def _scaled(run: MeasuredStep, machine: Machine) -> Predictor:
    as_fast = calibrated(machine, run.job, run.seconds)
    return lambda job: predict_step(job, as_fast).seconds


def _inside(chosen: MeasuredStep, runs: Sequence[MeasuredStep], machine: Machine) -> list[bool]:
    """Whether the other runs' steps lie within the intervals of a ranking that this one calibrates.

    Links inside nodes were measured, those between them are from data sheets.
    """
    fitted = FittedMachine(
        machine=calibrated(machine, chosen.job, chosen.seconds),
        factor=1.0,
        inside=Links(latency=machine.inside_latency, bandwidth=machine.inside_bandwidth, width=LEAST_WIDTH, measured=1),
        between=Links(
            latency=machine.network_latency, bandwidth=machine.node_bandwidth, width=NOT_MEASURED, measured=0
        ),
        is_from_parts=False,
    )
    others = [run for run in runs if run is not chosen]
    need = MemoryNeed(None)
    ranked = rank([run.job for run in others], chosen.job, fitted, need, most=len(others)).ranked
    seconds = {each.job: each for each in ranked}
    return [seconds[run.job].low <= run.seconds <= seconds[run.job].high for run in others]


def _flops_and_bubble(job: Job) -> float:
    flops = step_flops(job.shape, job.training.global_batch) / job.layout.ranks
    return flops * (1 + float(bubble_over_ideal(job.layout.pipeline, job.micro_batches)))


def _by_flops(run: MeasuredStep) -> Predictor:
    factor = run.seconds / _flops_and_bubble(run.job)
    return lambda job: factor * _flops_and_bubble(job)
