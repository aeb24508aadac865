"""Steps of layouts, corrected by what predictions of a hundred recorded runs and more were off by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import nsmallest
from math import log
from typing import Final

from ncclscope_models.calibration import Calibration
from ncclscope_models.description import Description, Given, completed
from ncclscope_models.fitted_machine import FittedMachine
from ncclscope_models.job import Job
from ncclscope_models.predicted_step import predict_step
from ncclscope_models.ranking import Ranked, Ranking
from ncclscope_models.residual import Features, MeasuredTime, OutsideError, Residual, learned

CORRECTED: Final = 300
"""So many of the layouts that are fastest before they are corrected are, and then put in order."""


def step_features(job: Job, gpus_per_node: int) -> Features:
    """A model's width and what the framework was told are kinds of a step, its depth and layout numbers."""
    shape, layout, training = job.shape, job.layout, job.training
    experts = "none" if shape.experts is None else f"{shape.experts.experts} of top {shape.experts.top_k}"
    return Features(
        kinds={
            "hidden": shape.hidden,
            "ffn": shape.ffn,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "vocabulary": shape.vocabulary,
            "experts": experts,
            "framework": job.framework.value,
            "precision": training.precision.value,
            "recompute": training.recompute.value,
            "distributed_optimizer": str(training.has_distributed_optimizer).lower(),
            "sequence_parallel": str(layout.is_sequence_parallel).lower(),
            "overlap_gradients": str(training.overlaps_gradients).lower(),
            "GPUs of a node": gpus_per_node,
        },
        numbers={
            "layers": shape.layers,
            "sequence": shape.sequence,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "data": layout.data,
            "context": layout.context,
            "expert": layout.expert,
            "chunks": layout.chunks,
            "micro_batch": training.micro_batch,
            "micro-batches": job.micro_batches,
        },
        products={"GPUs": layout.ranks},
    )


def learned_from(calibrations: Sequence[Calibration], fitted: FittedMachine) -> Residual:
    """From runs of this machine that were described and whose step is known; all are predicted by the same machine.

    Raises:
        NotLearnedError: There are too few, or they do not foretell each other.
    """
    machine = fitted.machine
    times: list[MeasuredTime] = []
    for of in calibrations:
        ns = of.step.mean_ns if of.step is not None else of.median_step_ns
        if of.description is None or not ns:
            continue
        job = completed(Description({name: Given(value, of.job) for name, value in of.description.items()})).job
        features = step_features(job, of.ranks_per_node or machine.gpus_per_node)
        run = (tuple(features.kinds.items()), tuple(features.numbers.items()))
        predicted = fitted.seconds(predict_step(job, machine).seconds)
        times.append(MeasuredTime(run=run, features=features, predicted=predicted, observed=ns / 1e9))
    return learned(times)


def corrected(ranking: Ranking, residual: Residual, gpus_per_node: int, most: int) -> Ranking:
    """The first `most` of these layouts, in the order of their corrected steps."""
    now = (ranking.now.job.layout, ranking.now.job.training)
    found = [
        _as_observed(each) if (each.job.layout, each.job.training) == now else _corrected(each, residual, gpus_per_node)
        for each in ranking.ranked
    ]
    ranked = tuple(nsmallest(most, found, key=lambda each: each.seconds))
    return replace(
        ranking,
        ranked=ranked,
        alike=sum(each.low <= ranked[0].high for each in ranked) if ranked else 0,
        now=_as_observed(ranking.now),
    )


def _as_observed(now: Ranked) -> Ranked:
    """The layout that was recorded, which took what it took."""
    return replace(now, parts={**now.parts, "learned": 0.0})


def _corrected(found: Ranked, residual: Residual, gpus_per_node: int) -> Ranked:
    """With the interval of what is learned, and its share among the parts."""
    try:
        correction = residual.correction(step_features(found.job, gpus_per_node))
    except OutsideError as outside:
        return replace(found, parts={**found.parts, "learned": 0.0}, not_corrected=str(outside))
    seconds = found.seconds * correction.typical
    return replace(
        found,
        seconds=seconds,
        low=found.seconds * correction.low,
        high=found.seconds * correction.high,
        parts={**found.parts, "learned": seconds - found.seconds},
        widths={"learned": log(correction.high / correction.typical)},
    )
