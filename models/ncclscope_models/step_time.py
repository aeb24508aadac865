"""Time of a training step by the equations of papers: uniform stages, nothing overlapped.

They show what a configuration costs in principle. The schedule of a real step (stages that differ, overlap) is another
module's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ncclscope_models import textbook
from ncclscope_models.flops import approximate_flops


def bubble_share(pipeline: int, micro_batches: int, chunks: int = 1) -> Fraction:
    """Share of the whole step that a stage waits: ((p-1)/v) / (m + (p-1)/v).

    Source: Narayanan et al. 2021; some papers divide by v outside, which is not the same.
    """
    idle = Fraction(pipeline - 1, chunks)
    return idle / (micro_batches + idle)


def bubble_over_ideal(pipeline: int, micro_batches: int) -> Fraction:
    """(p-1)/m: the bubble in terms of the time without it, which is not a share of the step."""
    return Fraction(pipeline - 1, micro_batches)


def pipeline_seconds(pipeline: int, micro_batches: int, forward: float, backward: float) -> float:
    """(m + p - 1)(f + b): 1F1B with equal stages, f and b of a micro-batch on one stage."""
    return (micro_batches + pipeline - 1) * (forward + backward)


def axonn_bubble(inter: int, forward: float, backward: float) -> float:
    """(G-1)/G (t_f + t_b), times of the whole model. Source: Singh et al. (AxoNN), equation 4.6."""
    return (inter - 1) / inter * (forward + backward)


def slowest_stage_seconds(
    *,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    first_sync: float,
    update_and_gather: Sequence[float],
) -> float:
    """(m - 1 + p)(max F + max B) + gradients of the first stage + max(update + AllGather).

    The others' gradients are hidden behind the pipeline. Source: equation 7 of Zhang et al. 2025 (arXiv 2509.22832).
    """
    rounds = micro_batches - 1 + len(forward)
    return rounds * (max(forward) + max(backward)) + first_sync + max(update_and_gather)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Parts of a step, in seconds."""

    computation: float
    tensor: float
    pipeline: float
    data: float
    bubble: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.computation + self.tensor + self.pipeline + self.data + self.bubble


def uniform_step(
    *,
    parameters: int,
    layers: int,
    h: int,
    s: int,
    b: int,
    micro_batches: int,
    pipeline: int,
    tensor: int,
    data: int,
    tensor_bytes_per_s: float,
    pipeline_bytes_per_s: float,
    data_bytes_per_s: float,
    utilization: float,
    peak_flops: float,
) -> StepSeconds:
    """Step with full recompute, 16-bit gradients, nothing hidden.

    Source: Li et al., Analyzing Communication Predictability in LLM Training, equations 1 to 9.
    """
    flops = micro_batch_flops(parameters=parameters, pipeline=pipeline, tensor=tensor, b=b, s=s)
    computation = micro_batches * flops / (utilization * peak_flops)
    sent = textbook.tensor_parallel(
        b=b,
        s=s,
        h=h,
        layers=layers / pipeline,
        tensor=tensor,
        micro_batches=micro_batches,
        element_bytes=2,
        is_recomputed=True,
    )
    in_tensor = sent / tensor_bytes_per_s
    boundary = textbook.pipeline_boundary(b=b, s=s, h=h, micro_batches=micro_batches, element_bytes=2)
    in_pipeline = boundary / pipeline_bytes_per_s
    gradients = textbook.data_parallel(parameters, data, 2, tensor, pipeline)
    bubble = (pipeline - 1) * (computation + in_pipeline + in_tensor) / micro_batches
    return StepSeconds(computation, in_tensor, in_pipeline, gradients / data_bytes_per_s, bubble)


def micro_batch_flops(*, parameters: int, pipeline: int, tensor: int, b: int, s: int) -> float:
    """8 N/(p t) b s. Source: Li et al., equation 8."""
    return approximate_flops(parameters, b * s, is_recomputed=True) / (pipeline * tensor)


def days(total_tokens: float, tokens_per_step: float, step_seconds: float) -> float:
    """Days of training."""
    return total_tokens / tokens_per_step * step_seconds / 86_400


def rent_usd(gpus: int, days_: float, usd_per_gpu_hour: float) -> float:
    """What so many GPUs cost for so long."""
    return gpus * days_ * 24 * usd_per_gpu_hour


def scaling_efficiency(flops_small: float, gpus_small: int, flops_large: float, gpus_large: int) -> float:
    """Throughput per GPU of the larger run over that of the smaller, 0 to 1."""
    return flops_large / gpus_large / (flops_small / gpus_small)


def strong_scaling_efficiency(seconds_small: float, gpus_small: int, seconds_large: float, gpus_large: int) -> float:
    """GPU time of the smaller run over that of the larger, for the same work."""
    return seconds_small * gpus_small / (seconds_large * gpus_large)
