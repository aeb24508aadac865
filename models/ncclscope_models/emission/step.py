"""The operations of one rank in one iteration, by the rules of its job's framework."""

from __future__ import annotations

from functools import lru_cache

from ncclscope_models.emission import deepspeed, megatron, pytorch
from ncclscope_models.emission.megatron import Step
from ncclscope_models.emission.operations import Emitted
from ncclscope_models.job import Framework, Job, Precision


@lru_cache(maxsize=4096)
def expected_operations(job: Job, stage: int, step: Step) -> tuple[Emitted, ...]:
    """Every operation that is expected of a rank of this pipeline stage, one-rank communicators included.

    Raises:
        ModelError: the job's framework has no rules for its layout.
    """
    if job.framework is Framework.FSDP2:
        return pytorch.fsdp_iteration(job)
    if job.framework is Framework.DDP:
        return pytorch.ddp_iteration(job)
    if job.framework is Framework.DEEPSPEED:
        return deepspeed.iteration(job)
    return megatron.iteration(job, stage, step)


def kinds_of_steps(job: Job) -> tuple[Step, ...]:
    """What an iteration of this job may be, the usual one first."""
    if job.framework is not Framework.MEGATRON:
        return (Step(),)
    found = [Step(), Step(is_logged=False)]
    if job.training.precision is Precision.FP16:
        found += [Step(is_skipped=True), Step(is_skipped=True, is_logged=False)]
    return tuple(found)
