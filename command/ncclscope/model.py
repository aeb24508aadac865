"""`ncclscope model`: what a job's files say of it, each field with its source, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from ncclscope.description_files import Described, describe
from ncclscope_models import flops, memory
from ncclscope_models.description import FIELDS, Completed
from ncclscope_models.description_sources.files import model_toml
from ncclscope_models.description_sources.megatron import Output
from ncclscope_models.emission.rules import basis
from ncclscope_models.job import ModelError
from ncclscope_models.parameters import stage_parameters, whole_model

_GIB: Final = 2**30


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A field, for what no file says.")
@click.option("--fields", is_flag=True, help="List the fields of a description, and end.")
@click.option("--toml", is_flag=True, help="Print the description as model.toml and nothing else.")
@click.option("--gpu-memory", type=click.FloatRange(min=0, min_open=True), metavar="GIB", help="Memory of a GPU.")
def model(
    files: tuple[Path, ...], assignments: tuple[str, ...], fields: bool, toml: bool, gpu_memory: float | None
) -> None:
    """Describe a job: parameters, operations and memory, with the source of every field.

    FILES: a job's output with Megatron-LM's arguments, Hugging Face's config.json, files of DeepSpeed, torchtitan or
    NeMo, model.toml. Files that contradict each other are an error that names both places.
    """
    if fields:
        click.echo("\n".join(f"{name:<26}{kind.__name__:<6}{says}" for name, (kind, says) in FIELDS.items()))
        return
    if not files and not assignments:
        raise click.UsageError("give a file that describes the job, or --set")
    described = describe(files, assignments)
    if toml:
        click.echo(model_toml(described.completed), nl=False)
        return
    click.echo("\n".join(_lines(described, gpu_memory)))


def _lines(described: Described, gpu_memory: float | None) -> Iterator[str]:
    completed = described.completed
    job = completed.job
    width = max(len(str(given.value)) for given in completed.fields.values())
    for name, given in completed.fields.items():
        yield f"{name:<26}{given.value!s:<{width + 2}}{given.source}"
    yield ""
    yield f"rules          {basis(job.framework, job.version).sentence}"
    each = f"{job.training.micro_batch} samples, on each of {job.layout.ranks} ranks"
    yield f"micro-batches  {job.micro_batches} of {each}"
    yield f"parameters     {whole_model(job.shape):,} in the model"
    for stage in _distinct_stages(completed):
        yield f"  stage {stage:<6} {stage_parameters(job, stage):,} on each rank{_printed_count(completed, stage)}"
    work = flops.step_flops(job.shape, job.training.global_batch)
    yield f"operations     {work / 1e15:,.3f} PFLOP a step, nothing computed twice"
    for name, output in described.outputs.items():
        yield from _rates(name, output, completed)
    yield from _memory(described, gpu_memory)
    for given in completed.not_nccl:
        yield f"not in NCCL's log: {given.value} ({given.source})"
    if completed.assumed:
        yield f"assumed        {', '.join(completed.assumed)}"


def _distinct_stages(completed: Completed) -> list[int]:
    """The first stage of each number of parameters."""
    stages = range(completed.job.layout.pipeline)
    first = {stage_parameters(completed.job, stage): stage for stage in reversed(stages)}
    return sorted(first.values())


def _printed_count(completed: Completed, stage: int) -> str:
    counts = [count for count in completed.counts if count.stage == stage]
    if not counts:
        return ""
    off = counts[0].parameters - stage_parameters(completed.job, stage)
    says = "as printed" if off == 0 else f"{off:+,} printed"
    return f"  ({says}: {counts[0].source}{f' and {len(counts) - 1} more' if len(counts) > 1 else ''})"


def agreeing_rates(output: Output, completed: Completed) -> tuple[int, int]:
    """(iterations whose printed throughput is ours within the rounding of what is printed, iterations with one)."""
    job, agree, with_rate = completed.job, 0, 0
    for progress in output.progress:
        if progress.tflops_per_gpu is None:
            continue
        with_rate += 1
        work = flops.step_flops(job.shape, progress.global_batch or job.training.global_batch)
        low, high = (
            flops.throughput_per_gpu(work, (progress.elapsed_ms + off) / 1e3, job.layout.ranks) / 1e12
            for off in (0.05, -0.05)
        )
        agree += low - 0.051 <= progress.tflops_per_gpu <= high + 0.051
    return agree, with_rate


def _rates(name: str, output: Output, completed: Completed) -> Iterator[str]:
    agree, with_rate = agreeing_rates(output, completed)
    if with_rate:
        yield f"  {name}: {agree:,} of {with_rate:,} printed throughputs are those of this count"
    elif output.progress:
        times = sorted(progress.elapsed_ms for progress in output.progress)
        middle = times[len(times) // 2] / 1e3
        job = completed.job
        rate = flops.throughput_per_gpu(
            flops.step_flops(job.shape, job.training.global_batch), middle, job.layout.ranks
        )
        yield f"  {name}: {rate / 1e12:,.1f} TFLOP/s on each GPU at the median step of {middle:,.3f} s"


def _memory(described: Described, gpu_memory: float | None) -> Iterator[str]:
    job = described.completed.job
    try:
        parts = [memory.job_memory(job, stage) for stage in range(job.layout.pipeline)]
    except ModelError as error:
        yield f"memory         not known: {error}"
        return
    stage = max(range(len(parts)), key=lambda at: parts[at].total)
    most = parts[stage]
    is_covered = memory.covers_activations(job)
    named = {"parameters and optimizer": most.parameters_and_optimizer, "logits": most.logits}
    if is_covered:
        named["activations"] = most.activations
    listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in sorted(named.items(), key=lambda each: -each[1]))
    at_least = "" if is_covered else ", at least (no formula for the activations of this model)"
    yield f"memory         {most.total / _GIB:.2f} GiB on a GPU of stage {stage}{at_least}: {listed}"
    yield "               without NCCL's buffers, the CUDA context (0.5 to 1 GiB) and fragmentation (5 to 15 %)"
    outputs = described.outputs.items()
    peaks = [(line.max_allocated_mib, name, line.line) for name, output in outputs for line in output.memory]
    if peaks:
        peak, name, line = max(peaks)
        yield f"               PyTorch allocated {peak / 1024:.2f} GiB at most ({name}:{line})"
    if gpu_memory is not None:
        answer = memory.fit(most.total, round(gpu_memory * _GIB))
        if not is_covered and answer is memory.Fit.FITS:
            yield f"               whether it fits into {gpu_memory:g} GiB is not known"
        else:
            word = {memory.Fit.DOES_NOT: "does not fit", memory.Fit.TIGHT: "fits tightly"}.get(answer, "fits")
            yield f"               {word} into {gpu_memory:g} GiB"
