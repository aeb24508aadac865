"""Times and orderings that papers print, held against the equations here: what agrees, and what a paper leaves out.

Korthikanti et al. 2022, table 5: eight steps, each foretold from each other one. PCCL (Singh's dissertation, chapter
6): where a hierarchical AllGather overtakes the flat ring. Li et al. (ConfigTuner, 6.2 and 6.3): best micro-batches and
degrees, for assumed curves of utilization, which are not printed. AxoNN (Singh, figure 5.2): grids by volume against
grids with start-up costs, since measured times are not printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import numpy as np

from ncclscope_models.collective_time import FRONTIER, FourAxes, axonn_layer, hierarchical_speedup, ring_gather
from ncclscope_models.flops import PEAK_FLOPS, step_flops
from ncclscope_models.job import Job, Layout, Precision, Recompute, Training, gpt
from ncclscope_models.layout import grids, share_of_node_bandwidth
from ncclscope_models.machine import Machine
from ncclscope_models.memory import state_bytes_axonn
from ncclscope_models.predicted_step import calibrated, predict_step
from ncclscope_models.step_time import bubble_over_ideal, uniform_step

_MIB: Final = 2**20


def main() -> None:
    """Prints the tables."""
    _korthikanti()
    _crossover()
    _micro_batches()
    _grids()


_A100: Final = Machine(
    gpus_per_node=8,
    peak_flops=PEAK_FLOPS["A100"],
    best_share=0.75,
    inside_bandwidth=235e9,
    node_bandwidth=200e9,
    inside_latency=2e-6,
    network_latency=15e-6,
    memory_bandwidth=2.039e12,
    writes_scores=True,
)
"""DGX A100 of 80 GB with eight cards of 200 Gbit/s: data sheets, and AllReduce inside a node as vTrain measured it."""
_CALCULON_A100: Final = replace(
    _A100,
    inside_bandwidth=0.6 * 300e9,
    node_bandwidth=8 * 0.9 * 25e9,
    memory_bandwidth=2.048e12,
    memory_efficiency=((100e6, 0.9), (10e6, 0.75), (1e6, 0.6), (0.0, 0.3)),
)
"""The same by what its links reach, and its memory by the size of an operation.
Source: Calculon, systems/a100_80g.json (efficiency, MB_efficiency) and calculon/memory.py."""
_TABLE_5: Final = (
    ("22 B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    ("175 B", 96, 12_288, 96, 8, 3, 1, 64, 18.13, 13.75),
    ("530 B", 105, 20_480, 128, 35, 3, 1, 280, 49.05, 37.83),
    ("1 T", 128, 25_600, 160, 64, 1, 1, 512, 94.42, 71.49),
)
"""Model, layers, hidden, heads, pipeline, chunks, micro-batch, global batch, seconds with full recompute, and with
sequence parallelism and selective recompute. Source: Korthikanti et al. 2022 (arXiv 2205.05198), table 5."""
_CALCULON: Final = 3.65
"""Mean error of Calculon on the same eight, in %: calculon-ai/calculon@caa4b11, run by its validation."""


def _steps_of_table_5() -> Iterator[tuple[str, Job, float]]:
    for name, layers, hidden, heads, pipeline, chunks, micro_batch, batch, full, selective in _TABLE_5:
        for seconds, recompute in ((full, Recompute.FULL), (selective, Recompute.SELECTIVE)):
            job = Job(
                shape=gpt(layers=layers, hidden=hidden, heads=heads, sequence=2048, vocabulary=51_200),
                layout=Layout(
                    tensor=8,
                    pipeline=pipeline,
                    chunks=chunks,
                    is_sequence_parallel=recompute is Recompute.SELECTIVE,
                ),
                training=Training(
                    micro_batch=micro_batch,
                    global_batch=batch,
                    precision=Precision.BF16,
                    are_gradients_fp32=True,
                    recompute=recompute,
                ),
            )
            yield f"{name}, {recompute}", job, seconds


def _korthikanti() -> None:
    steps = list(_steps_of_table_5())
    print("\nKorthikanti et al., table 5: each step foretold from each other one (mean error of the other seven, %)\n")
    print("| calibrated on | mean | largest | flops and bubble: mean | largest |\n|---|---|---|---|---|")
    ours: list[float] = []
    plain: list[float] = []
    by_data_sheets: list[float] = []
    for name, chosen, seconds in steps:
        factor = seconds / _flops_and_bubble(chosen)
        others = [(job, truth) for _, job, truth in steps if job != chosen]
        off = _errors(calibrated(_CALCULON_A100, chosen, seconds), others)
        by_flops = [abs(factor * _flops_and_bubble(job) / truth - 1) for job, truth in others]
        print(_row(name, off, by_flops))
        ours, plain = [*ours, *off], [*plain, *by_flops]
        by_data_sheets += _errors(calibrated(_A100, chosen, seconds), others)
    print(_row("all choices", ours, plain))
    print(f"\nCalculon: {_CALCULON} % mean")
    print(f"Here, by data sheets: {100 * np.mean(by_data_sheets):.1f} % mean")


def _errors(machine: Machine, jobs: list[tuple[Job, float]]) -> list[float]:
    return [abs(predict_step(job, machine).seconds / truth - 1) for job, truth in jobs]


def _row(name: str, ours: list[float], plain: list[float]) -> str:
    cells = [f"{100 * each:.1f}" for errors in (ours, plain) for each in (np.mean(errors), max(errors))]
    return f"| {name} | {' | '.join(cells)} |"


def _flops_and_bubble(job: Job) -> float:
    again = 4 / 3 if job.training.recompute is Recompute.FULL else 1.0
    bubble = bubble_over_ideal(job.layout.pipeline, job.micro_batches * job.layout.chunks)
    return again * step_flops(job.shape, job.training.global_batch) / job.layout.ranks * (1 + float(bubble))


_PCCL: Final = (
    ("Frontier", 8, 32, 1024, "0.52", 0.52, 0.52),
    ("Frontier", 8, 2048, 1024, "7", 7.0, 7.0),
    ("Frontier", 8, 2048, 512, "11.4", 11.4, 11.4),
    *(("Frontier", 8, 2048, mib, "> 30", 30.0, float("inf")) for mib in (64, 32, 16)),
    ("Perlmutter", 4, 32, 1024, "1/1.5", 0.667, 0.667),
    ("Perlmutter", 4, 2048, 32, "3 to 5", 3.0, 5.0),
    ("Perlmutter", 4, 2048, 256, "2 to 3", 2.0, 3.0),
)
"""Machine, GPUs of a node, GPUs, MiB, and the speed-up of an AllGather as it is printed, at least and at most.
Source: Singh's dissertation, section 6.3.1."""


def _crossover() -> None:
    print(
        "\nPCCL: speed-up of the hierarchical AllGather over the flat ring; four parameters fitted to Frontier's six\n"
    )
    print("| machine | GPUs | MiB | printed | here | off by | same side of 1 |\n|---|---|---|---|---|---|---|")
    for machine, per_node, gpus, mib, printed, low, high in _PCCL:
        here = hierarchical_speedup(mib * _MIB, gpus // per_node, per_node, FRONTIER)
        off = max(low / here, here / high, 1.0) - 1
        agrees = "yes" if (here > 1) is (low > 1) else "no"
        print(f"| {machine} | {gpus} | {mib} | {printed} | {here:.2f} | {100 * off:.0f} % | {agrees} |")


_HALF_WORKS: Final = (0.0, 2e5, 5e5, 2e6, 6e6)
"""Micro-batch x sequence x hidden / tensor ranks at which matrices reach half of their best rate; 0: all of it."""
_BEST_SHARE: Final = 0.6
_INSIDE: Final = 400e9 * 0.8
_BETWEEN: Final = 50e9 * 0.8
"""Bytes per second: NVSwitch of 400 GB/s inside a node, a card of 400 Gbit/s a GPU, four fifths of either."""
_LI: Final = (
    ("39 B", 48, 8192, 4, 4, 48, 3, 1.12),
    ("76 B", 60, 10_240, 4, 8, 64, 2, 1.36),
    ("145 B", 80, 12_288, 8, 8, 96, 3, 1.11),
)
"""Model, layers, hidden, tensor, pipeline, batch of a replica (of 76 B the table's 64: section 6.2 prints 59), the best
micro-batch, and its gain over 6. Source: Li et al., Analyzing Communication Predictability in LLM Training, 6.2."""
_LI_DEGREES: Final = ((8, 2, 6), (4, 4, 3), (2, 8, 1))
"""Tensor, pipeline, best micro-batch of 39 B, whose best is (4, 4), 1.17 times as fast as (8, 2). Same, 6.3."""
_MOST_MICRO_BATCH: Final = 6
"""All that fits, by the paper."""


def _li_seconds(layers: int, hidden: int, tensor: int, pipeline: int, batch: int, b: int, half_work: float) -> float:
    """A step by the paper's equations 1 to 9, with an assumed curve of utilization."""
    work = b * 2048 * hidden / tensor
    return uniform_step(
        parameters=12 * layers * hidden**2,
        layers=layers,
        h=hidden,
        s=2048,
        b=b,
        micro_batches=batch // b,
        pipeline=pipeline,
        tensor=tensor,
        data=1,
        tensor_bytes_per_s=_INSIDE,
        pipeline_bytes_per_s=_BETWEEN,
        data_bytes_per_s=_BETWEEN,
        utilization=_BEST_SHARE * work / (work + half_work),
        peak_flops=PEAK_FLOPS["H100 SXM"],
    ).total


def _micro_batches() -> None:
    print("\nLi et al., 6.2 and 6.3: the best micro-batch up to 6 by equations 1 to 9, for utilizations w/(w + w0)\n")
    names = [*(f"{each[0]}: {each[6]}" for each in _LI), *(f"({t}, {p}): {b}" for t, p, b in _LI_DEGREES)]
    print(f"| w0 | {' | '.join(names)} | (4, 4) over (8, 2): 1.17 |\n{'|---' * (len(names) + 2)}|")
    for half_work in _HALF_WORKS:
        cells: list[str] = []
        for _, layers, hidden, tensor, pipeline, batch, _, printed in _LI:
            times = _by_micro_batch(layers, hidden, tensor, pipeline, batch, half_work)
            best = min(times, key=times.__getitem__)
            last = max(times)
            cells.append(f"{best} (gains {times[last] / times[best]:.2f} over {last}, printed {printed})")
        steps: dict[tuple[int, int], float] = {}
        for tensor, pipeline, _ in _LI_DEGREES:
            times = _by_micro_batch(48, 8192, tensor, pipeline, 48, half_work)
            steps[tensor, pipeline] = min(times.values())
            cells.append(str(min(times, key=times.__getitem__)))
        print(f"| {half_work:.0e} | {' | '.join(cells)} | {steps[8, 2] / steps[4, 4]:.2f} |")


def _by_micro_batch(layers: int, hidden: int, tensor: int, pipeline: int, batch: int, w0: float) -> dict[int, float]:
    possible = [b for b in range(1, _MOST_MICRO_BATCH + 1) if batch % b == 0]
    return {b: _li_seconds(layers, hidden, tensor, pipeline, batch, b, w0) for b in possible}


@dataclass(frozen=True, slots=True)
class _Perlmutter:
    """Four A100 of 40 GB to a node. Inside bandwidths and the batch are not printed: assumed."""

    gpus_per_node: int = 4
    inside: float = 200e9
    between: float = 100e9
    """Bytes per second that four cards of 200 Gbit/s carry."""
    latency: float = 15e-6
    """Of a step of a ring, for the second ranking."""
    memory: float = 40e9
    tokens: int = 64 * 2048


def _grids() -> None:
    machine = _Perlmutter()
    print(
        "\nAxoNN, figure 5.2: of the first ten grids by volume, how many are among the first ten with start-up costs\n"
    )
    print("| model | GPUs | grids | that fit (20 bytes a parameter) | in both first tens | printed against measured |")
    print("|---|---|---|---|---|---|")
    for name, layers, hidden, gpus in (("20 B", 32, 7168, 32), ("40 B", 38, 9216, 64)):
        every = list(grids(gpus))
        parameters = 12 * layers * hidden**2
        fitting = [each for each in every if state_bytes_axonn(parameters) / prod(each[:3]) < 0.8 * machine.memory]
        firsts: list[set[tuple[int, ...]]] = []
        for latency in (0.0, machine.latency):
            seconds = {each: _model_seconds(each, layers, hidden, machine, latency) for each in fitting}
            firsts.append(set(sorted(fitting, key=seconds.__getitem__)[:10]))
        both = len(firsts[0] & firsts[1])
        print(f"| {name} | {gpus} | {len(every)} | {len(fitting)} | {both} of 10 | 9 of 10 |")


def _model_seconds(degrees: tuple[int, ...], layers: int, hidden: int, machine: _Perlmutter, latency: float) -> float:
    """Equations 5.1 to 5.7 over all layers, and the start of each collective, which they leave out."""
    grid = _axes(*degrees)
    bandwidth = _axes(*(_axis_bandwidth(degrees, axis, machine) for axis in range(4)))
    matrices = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
    found = 0.0
    for place, (k, n) in enumerate(matrices):
        axes = (_swapped(grid), _swapped(bandwidth)) if place % 2 else (grid, bandwidth)
        found += axonn_layer(machine.tokens / grid.data, k, n, *axes)
        # Of x, y and data an AllReduce, of z an AllGather and a ReduceScatter: two rings each.
        found += sum(2 * ring_gather(0, degree, latency, 1.0) for degree in degrees)
    return layers * found


def _swapped(axes: FourAxes) -> FourAxes:
    return replace(axes, x=axes.y, y=axes.x)


def _axes(x: float, y: float, z: float, data: float) -> FourAxes:
    return FourAxes(x=x, y=y, z=z, data=data)


def _axis_bandwidth(degrees: tuple[int, ...], axis: int, machine: _Perlmutter) -> float:
    if prod(degrees[: axis + 1]) <= machine.gpus_per_node:
        return machine.inside
    return machine.between * share_of_node_bandwidth(degrees, axis, machine.gpus_per_node)
