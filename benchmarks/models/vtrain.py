"""Iteration times measured on A100 clusters, and AllReduce times inside a node, as vTrain published them.

Source: VIA-Research/vTrain (MIT): iteration times that its paper measured. A part of the runs only; others are unseen.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ncclscope_models.job import Job, Layout, Precision, Recompute, Training, gpt
from ncclscope_models.machine import Machine
from ncclscope_models.transfer_curve import TransferCurve, transfer_curve

_VOCABULARY: Final = 51_200
_RANKS: Final = range(2, 9)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A run."""

    job: Job
    seconds: float


def multi_node(folder: Path) -> dict[str, list[MeasuredStep]]:
    """Runs by model, GPUs and batch."""
    found: dict[str, list[MeasuredStep]] = defaultdict(list)
    for row in csv.DictReader((folder / "vtrain_multi_node.csv").read_text().splitlines()):
        name = f"{row['Parameters (billion)']} B on {row['# GPUs']} GPUs, batch {row['global batch']}"
        found[name].append(_step(row))
    return dict(found)


def single_node(folder: Path) -> list[MeasuredStep]:
    """Runs on one node, in the order of the table."""
    rows = csv.DictReader((folder / "vtrain_single_node.csv").read_text().splitlines())
    return [_step(row) for row in rows]


def _step(row: dict[str, str]) -> MeasuredStep:
    tensor = int(row["tensor parallelism"])
    job = Job(
        shape=gpt(
            layers=int(row["# layers"]),
            hidden=int(row["hidden size"]),
            heads=int(row["attention heads"]),
            sequence=int(row["sequence length"]),
            vocabulary=_VOCABULARY,
        ),
        layout=Layout(tensor=tensor, pipeline=int(row["pipeline parallelism"]), data=int(row["data parallelism"])),
        training=Training(
            micro_batch=int(row["micro batch"]),
            global_batch=int(row["global batch"]),
            precision=Precision.FP16,
            are_gradients_fp32=False,
            recompute=Recompute.FULL,
        ),
    )
    return MeasuredStep(job, float(row["iteration time (ms)"]) / 1e3)


def allreduce_times(folder: Path, gpu: str) -> dict[int, tuple[Floats, Floats]]:
    """Message bytes and seconds, by ranks in one node."""
    found: dict[int, tuple[Floats, Floats]] = {}
    for ranks in _RANKS:
        table = np.genfromtxt(folder / f"vtrain_AR_{gpu}_GPU{ranks}.txt", delimiter=",", skip_header=1, usecols=(0, 3))
        found[ranks] = table[:, 0], table[:, 1] / 1e9
    return found


def a100(folder: Path) -> Machine:
    """Eight A100 and four network cards of 200 Gbit/s to a node: data sheets; of matrices three quarters of the peak.

    The runs are of 2022, before FlashAttention.
    """
    curves: dict[tuple[str, int], TransferCurve] = {
        ("AllReduce", ranks): transfer_curve(sizes.tolist(), seconds.tolist())
        for ranks, (sizes, seconds) in allreduce_times(folder, "a100").items()
    }
    return Machine(
        gpus_per_node=8,
        network_cards=4,
        peak_flops=312e12,
        best_share=0.75,
        inside_bandwidth=235e9,
        node_bandwidth=100e9,
        inside_latency=2e-6,
        network_latency=15e-6,
        memory_bandwidth=1.5e12,
        writes_scores=True,
        inside=curves,
    )
