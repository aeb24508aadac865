"""How right `tune` is where the truth is known: 50 simulated scenarios, each calibrated by one run's logs.

A scenario is a model on a fabric. One layout is simulated and its logs and exports are analysed, as a user would; then
other layouts are foretold from its `calibration.json` alone and held against the steps that the simulator gives them.
The simulator shares nothing with the models: tiles and waves, bandwidths, latencies and contention are its own. Beside
it the plain alternative, flops and bubble. Every other scenario is held out: nothing was fitted to what it shows. 50
more, drawn when all else was settled, have the same models and fabrics and other layouts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
from benchmarks.models.step_times import kendall_tau

from ncclscope.offline import run_offline
from ncclscope_models.calibration import Calibration, calibrations_of
from ncclscope_models.fitted_machine import fitted_machine, machine_before_fitting
from ncclscope_models.flops import step_flops
from ncclscope_models.job import Job, Layout, Precision, Recompute, Shape, Training, gpt
from ncclscope_models.layout_space import Space, layouts
from ncclscope_models.memory import GIB, Fit, MemoryNeed
from ncclscope_models.ranking import rank
from ncclscope_models.step_time import bubble_over_ideal
from ncclscope_service.export.directory import content_of
from ncclscope_service.export.selection import select
from ncclscope_service.export.tables.expected_times_file import calibration_document
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_simulator import Contention, GpuSpeed, MegatronModel, SimulationConfig, write
from ncclscope_simulator.step_times import step_durations

_SAMPLED: Final = 16
"""Layouts of a scenario whose truth is asked."""
_STEPS: Final = 3
"""Of the run that calibrates."""
_OVERHEAD: Final = 2 * GIB


@dataclass(frozen=True, slots=True)
class Fabric:
    """Nodes, their links and GPUs."""

    name: str
    nodes: int
    gpus: int
    nics: int
    slowdown: float
    gpu: str
    nccl: str
    """Up to 2.17 the simulator has NVLink of 240 GB/s and cards of 25 GB/s, then of 371 and 50."""


_GPUS: Final = {
    "A100": (GpuSpeed(tflops=312, memory=2039), 40 * GIB),
    "H100 SXM": (GpuSpeed(tflops=989, memory=3350, processors=132), 80 * GIB),
}
"""Speed in the simulator, memory."""
_FABRICS: Final = (
    Fabric("2 x 4 A100, 4 cards", 2, 4, 4, 0.1, "A100", "2.17.1"),
    Fabric("2 x 4 A100, 1 card", 2, 4, 1, 0.2, "A100", "2.17.1"),
    Fabric("8 H100, 1 node", 1, 8, 8, 0.1, "H100 SXM", "2.28.3"),
    Fabric("4 x 2 H100, 1 card", 4, 2, 1, 0.1, "H100 SXM", "2.28.3"),
    Fabric("2 x 8 H100, 4 cards", 2, 8, 4, 0.2, "H100 SXM", "2.28.3"),
)


def _llama(*, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int, ffn: int) -> Shape:
    return replace(
        gpt(layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=vocabulary),
        ffn=ffn,
        is_gated=True,
        has_bias=False,
        has_qkv_bias=False,
        positions_learned=0,
        is_tied=False,
    )


_SHAPES: Final[tuple[tuple[Shape, int], ...]] = (
    (gpt(layers=8, hidden=1024, heads=16, sequence=1024, vocabulary=51_200), 32),
    (gpt(layers=8, hidden=2048, heads=16, sequence=2048, vocabulary=51_200), 16),
    (gpt(layers=12, hidden=2560, heads=32, sequence=2048, vocabulary=51_200), 16),
    (gpt(layers=4, hidden=4096, heads=32, sequence=2048, vocabulary=51_200), 32),
    (gpt(layers=8, hidden=4096, heads=32, sequence=4096, vocabulary=51_200), 16),
    (gpt(layers=8, hidden=5120, heads=40, sequence=2048, vocabulary=51_200), 16),
    (_llama(layers=8, hidden=2048, heads=16, sequence=4096, vocabulary=128_000, ffn=5632), 16),
    (_llama(layers=8, hidden=4096, heads=32, sequence=4096, vocabulary=32_000, ffn=11_264), 16),
    (_llama(layers=16, hidden=3072, heads=24, sequence=2048, vocabulary=128_000, ffn=8192), 16),
    (_llama(layers=4, hidden=8192, heads=64, sequence=2048, vocabulary=32_000, ffn=28_672), 16),
)
"""With the global batch."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job that ran, on a fabric."""

    now: Job
    fabric: Fabric
    others: tuple[Job, ...]
    need: MemoryNeed

    def simulated(self, job: Job, **given: object) -> SimulationConfig:
        """The job in the simulator's terms."""
        shape, layout, training, fabric = job.shape, job.layout, job.training, self.fabric
        model = MegatronModel(
            micro_batch=training.micro_batch, vocabulary=shape.vocabulary, ffn=shape.ffn, gated=shape.is_gated,
            bias=shape.has_bias, tied=shape.is_tied, learned=shape.positions_learned > 0,
            full_recompute=training.recompute is Recompute.FULL, overlap=training.overlaps_gradients,
        )  # fmt: skip
        return SimulationConfig(
            nccl=fabric.nccl, nodes=fabric.nodes, gpus=fabric.gpus, tp=layout.tensor, pp=layout.pipeline,
            dp=layout.data, layers=job.layers_of_stage, interleave=layout.chunks, microbatches=job.micro_batches,
            hidden=shape.hidden, sequence=shape.sequence, sequence_parallel=layout.is_sequence_parallel,
            zero1=training.has_distributed_optimizer, megatron=model, gpu_speed=_GPUS[fabric.gpu][0],
            contention=Contention(fabric.nics, fabric.slowdown),
            **given,  # type: ignore[arg-type]  # further settings by name
        )  # fmt: skip

    def step_seconds(self, job: Job) -> float:
        """The truth."""
        return step_durations(self.simulated(job), 1)[0] / 1e9

    def calibration(self) -> Calibration:
        """The calibration that `analyze` writes of the run."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "job"
            write(self.simulated(self.now, iterations=_STEPS), out)
            run = run_offline([out / "logs", out / "nsys"], job="job", settings=PipelineSettings())
            content = content_of(select(run.pipeline.store))
            return calibrations_of(calibration_document(content.selection, content.totals), "run")[0]


def scenarios(draw: int = 0) -> Iterator[Scenario]:
    """50: each shape on each fabric, by a layout that shows what links it has; overlapped gradients in turns.

    Of another `draw`, layouts are others, and gradients overlap in the scenarios in which they did not.
    """
    for number, (shape, batch) in enumerate(_SHAPES):
        for place, fabric in enumerate(_FABRICS):
            seed, is_overlapped = 2000 * draw + 10 * number + place, (number // 2 + place + draw) % 2 == 1
            yield _scenario(shape, batch, fabric, seed, is_overlapped=is_overlapped)


def _scenario(shape: Shape, batch: int, fabric: Fabric, seed: int, *, is_overlapped: bool) -> Scenario:
    random = Random(seed)
    gpus = fabric.nodes * fabric.gpus
    first = Job(
        shape=shape,
        layout=Layout(tensor=1, pipeline=1, data=gpus),
        training=Training(
            micro_batch=1, global_batch=batch, precision=Precision.BF16, are_gradients_fp32=True,
            overlaps_gradients=is_overlapped, overlaps_pipeline=False,
        ),
        version="0.13",
    )  # fmt: skip
    need = MemoryNeed(_GPUS[fabric.gpu][1], more_bytes=_OVERHEAD)
    space = Space(gpus=gpus, gpus_per_node=fabric.gpus, recomputes=(Recompute.NONE, Recompute.FULL))
    fitting = [job for job in layouts(first, space) if need.fit(job) is not Fit.DOES_NOT]
    now = random.choice([job for job in fitting if job.layout.tensor > 1])
    others = [job for job in fitting if job != now]
    return Scenario(now, fabric, tuple(random.sample(others, min(_SAMPLED, len(others)))), need)


@dataclass(frozen=True, slots=True)
class Score:
    """How right one scenario is."""

    tau: float
    has_best: bool
    """Whether the fastest is among the first three."""
    regret: float
    errors: tuple[float, ...]
    inside: tuple[bool, ...]
    """Whether the truth lies in the interval; none for the plain alternative."""


def _score(foretold: Sequence[float], truth: Sequence[float], inside: Sequence[bool] = ()) -> Score:
    order = sorted(range(len(truth)), key=foretold.__getitem__)
    best = min(range(len(truth)), key=truth.__getitem__)
    return Score(
        tau=kendall_tau(foretold, truth),
        has_best=best in order[:3],
        regret=truth[order[0]] / truth[best] - 1,
        errors=tuple(one / other - 1 for one, other in zip(foretold, truth, strict=True)),
        inside=tuple(inside),
    )


def held_against_truth(scenario: Scenario) -> tuple[Score, Score]:
    """`tune`, and flops and bubble."""
    now = scenario.now
    calibration = scenario.calibration()
    fabric = scenario.fabric
    base = machine_before_fitting(fabric.gpu, fabric.gpus, network_cards=fabric.nics)
    cards = fabric.nics * (25e9 if fabric.gpu == "A100" else 50e9)  # for a run that sent nothing large between nodes
    fitted = fitted_machine(base, now, calibration, calibration.times, between_nodes=cards)
    ranking = rank(scenario.others, now, fitted, scenario.need, most=len(scenario.others))
    truth = [scenario.step_seconds(each.job) for each in ranking.ranked]
    inside = [each.low <= seconds <= each.high for each, seconds in zip(ranking.ranked, truth, strict=True)]
    ours = _score([each.seconds for each in ranking.ranked], truth, inside)
    scale = ranking.now.seconds / _flops_and_bubble(now)
    return ours, _score([scale * _flops_and_bubble(each.job) for each in ranking.ranked], truth)


def _flops_and_bubble(job: Job) -> float:
    flops = step_flops(job.shape, job.training.global_batch) / job.layout.ranks
    again = 4 / 3 if job.training.recompute is Recompute.FULL else 1.0
    return again * flops * (1 + float(bubble_over_ideal(job.layout.pipeline, job.micro_batches * job.layout.chunks)))


def main() -> None:
    """Prints the tables."""
    found, later = ([(each, *_told(each)) for each in scenarios(draw)] for draw in (0, 1))
    print(f"\n{len(found)} simulated scenarios, of each {_SAMPLED} layouts held against the truth\n")
    print(
        "| scenarios | n | Kendall tau, mean | best in first 3 | regret, mean | median error | 80 % covers | "
        "flops and bubble: tau | best in first 3 | regret | error |\n" + "|---" * 11 + "|"
    )
    print(_row("looked at", found[::2]))
    print(_row("held out", found[1::2]))
    for fabric in _FABRICS:
        print(_row(fabric.name, [each for each in found if each[0].fabric == fabric]))
    print(_row("all", found))
    for fabric in _FABRICS:
        print(_row(f"drawn later: {fabric.name}", [each for each in later if each[0].fabric == fabric]))
    print(_row("drawn later", later))


def _told(scenario: Scenario) -> tuple[Score, Score]:
    scores = held_against_truth(scenario)
    print(_line(scenario, *scores), file=sys.stderr, flush=True)
    return scores


def _line(scenario: Scenario, ours: Score, plain: Score) -> str:
    layout, training = scenario.now.layout, scenario.now.training
    return (
        f"{scenario.now.shape.hidden} {scenario.fabric.name}: t{layout.tensor} p{layout.pipeline} d{layout.data} "
        f"b{training.micro_batch} v{layout.chunks}{' overlap' * training.overlaps_gradients}: tau {ours.tau:.2f} "
        f"best {ours.has_best} regret {100 * ours.regret:.1f} % error {_percent(ours.errors)} bias "
        f"{100 * np.median(ours.errors):+.1f} % covers {np.mean(ours.inside):.2f}; plain {plain.tau:.2f}"
    )


def _row(name: str, found: Sequence[tuple[Scenario, Score, Score]]) -> str:
    cells = [name, str(len(found))]
    for scores in ([ours for _, ours, _ in found], [plain for _, _, plain in found]):
        cells.append(f"{np.mean([each.tau for each in scores]):.2f}")
        cells.append(f"{sum(each.has_best for each in scores)} of {len(scores)}")
        cells.append(f"{100 * np.mean([each.regret for each in scores]):.1f} %")
        cells.append(_percent([error for each in scores for error in each.errors]))
        inside = [each for score in scores for each in score.inside]
        cells += [f"{100 * np.mean(inside):.0f} %"] if inside else []
    return f"| {' | '.join(cells)} |"


def _percent(errors: Sequence[float]) -> str:
    return f"{100 * np.median(np.abs(errors)):.1f} %"
