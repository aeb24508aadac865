"""Share of their peak that the GPUs of a job compute, where its description and its GPU are known; never guessed.

MFU counts the operations of the model, HFU those that are computed a second time too. A step lasts as long as the
median iteration. A job whose traffic names another field than its description has neither, nor one in 32 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ncclscope_models.flops import PEAK_FLOPS, gpu_named, repeated_flops, step_flops, utilization
from ncclscope_models.job import Precision
from ncclscope_service.store.tables import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """Of the GPUs of one job."""

    job: str
    gpu: str
    peak_flops: float
    """Dense 16-bit operations per second of one."""
    ranks: int
    step_flops: float
    """Operations of the model in a step, of all ranks; whole, and of large jobs beyond 64 bits."""
    mfu: float
    """Model flops utilization, 0 to 1."""
    hfu: float
    """Hardware flops utilization: with what is computed again in the backward pass."""


def utilization_of(store: Store, job: str, step_ns: float | None) -> Utilization | None:
    """Of a job whose median step is so long; None where the description, the GPU or the step is not known."""
    plan, gpu = store.plans.get(job), gpu_of(store, job)
    if store.description is None or plan is None or plan.edits or gpu is None or not step_ns:
        return None
    described = store.description.job
    if described.training.precision is Precision.FP32:
        return None
    samples, ranks, peak = described.training.global_batch, described.layout.ranks, PEAK_FLOPS[gpu]
    model = step_flops(described.shape, samples)
    hardware = model + repeated_flops(described.shape, samples, described.training.recompute)
    return Utilization(
        job=job,
        gpu=gpu,
        peak_flops=peak,
        ranks=ranks,
        step_flops=float(model),
        mfu=utilization(model, step_ns * 1e-9, ranks, peak),
        hfu=utilization(hardware, step_ns * 1e-9, ranks, peak),
    )


def gpu_of(store: Store, job: str) -> str | None:
    """The GPU of all nodes of a job: the one that the user names, else the one that all captures of its hosts name.

    Where no capture names one, it is that of the run by which its step is expected.
    """
    if store.gpu is not None:
        return store.gpu
    hosts = {process.host for process, of in zip(store.processes, store.process_job, strict=True) if of == job}
    names = {store.captures.gpus[host] for host in hosts & store.captures.gpus.keys()}
    if names <= {None}:
        return None if store.expected_step is None else store.expected_step.gpu
    name = names.pop() if len(names) == 1 else None
    return None if name is None else gpu_named(name)
