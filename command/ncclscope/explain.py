"""`ncclscope explain`: what a job should send by its description, what its log shows, and why they differ."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ncclscope.description_files import Described, describe
from ncclscope.extras import require_service, require_writable
from ncclscope_models.difference import Row, Seen
from ncclscope_models.explanation import At, RankClass, typical_iteration
from ncclscope_models.job import Job, ModelError
from ncclscope_models.reconstruct import Answer, reconstruct
from ncclscope_wire.errors import ConfigError

if TYPE_CHECKING:
    from ncclscope_service.export.plan import Plan

_UNEXPLAINED: Final = 4
_NOTHING_READABLE: Final = 3
_SHOWN: Final = 12
"""Classes of ranks that are printed; plan.json has all."""
_NAMED: Final = 8
"""Ranks that are named one by one."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file that describes the job, as for `ncclscope model`. Repeatable.",
)
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A field, for what no file says.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write plan.json and expected.parquet.")
@click.option("--strict", is_flag=True, help="Exit status 4 if tensor operations stay unexplained.")
def explain(
    paths: tuple[Path, ...],
    models: tuple[Path, ...],
    assignments: tuple[str, ...],
    out: Path | None,
    strict: bool,
) -> None:
    """Explain every operation of a run: expected by the job's description, observed in its log, and the reason.

    Without a description, what one iteration says of it is printed (Megatron-LM).

    PATHS: logs, and exports if they carry the marks of iterations. Exit status: 0 done; 2 wrong usage; 3 nothing
    readable; 4 with --strict and something unexplained.
    """
    require_service()
    from ncclscope.offline import run_offline  # noqa: PLC0415  (the packages of the service are only there now)
    from ncclscope_service.export.directory import write_plans  # noqa: PLC0415
    from ncclscope_service.export.plan import make_plan  # noqa: PLC0415
    from ncclscope_service.job.step_lines import step_lines  # noqa: PLC0415
    from ncclscope_service.store.settings import PipelineSettings  # noqa: PLC0415

    if out is not None:
        require_writable(out, "--out")
    described = describe(models, assignments) if models or assignments else None
    run = run_offline(
        list(paths), job="default", settings=PipelineSettings(), jobs=len(os.sched_getaffinity(0))
    )  # fmt: skip
    if not run.files_read:
        click.echo("nothing readable: give NCCL logs with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS naming COLL", err=True)
        sys.exit(_NOTHING_READABLE)
    store = run.pipeline.store
    if described is None:
        for job in sorted(set(store.process_job)):
            click.echo("\n".join(reconstruction(step_lines(store, job, store.operations.rows).seen)))
        return
    try:
        plans = {
            job: make_plan(job, described.completed, step_lines(store, job, store.operations.rows))
            for job in sorted(set(store.process_job))
        }
    except ModelError as error:
        raise ConfigError(str(error)) from error
    for job, plan in plans.items():
        if len(plans) > 1:
            click.echo(f"job {job}")
        click.echo("\n".join(report(described, plan)))
    if out is not None:
        write_plans(plans, out)
        click.echo(f"\nwritten to {out}")
    if strict and any(plan.explanation.unexplained for plan in plans.values()):
        sys.exit(_UNEXPLAINED)


def report(described: Described, plan: Plan) -> Iterator[str]:
    """The lines that are printed of one job."""
    from ncclscope_service.export.plan import verdict  # noqa: PLC0415

    job, explanation = described.completed.job, plan.explanation
    yield f"model   {_model(job)}"
    yield f"rules   {plan.basis.sentence}"
    for given in described.completed.not_nccl:
        yield f"        not in NCCL's log: {given.value} ({given.source})"
    batch = f"({job.training.global_batch} / ({job.layout.data} x {job.training.micro_batch}))"
    iterations = explanation.iterations()
    whole = f"{len(iterations)} whole iterations, {iterations[0]} to {iterations[-1]}" if iterations else "no iteration"
    yield f"plan    per iteration {job.micro_batches} micro-batches {batch}; {whole}; ranks {explanation.order}"
    lost = sum(at in explanation.lossy for at in explanation.differences)
    if lost:
        yield f"        lines were lost in {lost:,} of {len(explanation.differences):,} iterations of ranks"
    skipped = sum(each.step.is_skipped for each in explanation.differences.values())
    if skipped:
        yield f"        SKIPPED (overflow) in {skipped:,} iterations of ranks: no gradient norm, no parameters gathered"
    classes = explanation.classes()
    for each in classes[:_SHOWN]:
        yield ""
        yield from _table(each)
    if len(classes) > _SHOWN:
        yield f"\nand {len(classes) - _SHOWN} more groups of ranks and iterations: --out writes all"
    yield f"\nunexplained: {'none' if not explanation.unexplained else f'{explanation.unexplained:,} operations'}"
    if explanation.unexplained or not iterations:
        yield verdict(plan)


def reconstruction(seen: Mapping[At, Seen]) -> Iterator[str]:
    """The lines that are printed of a job without a description."""
    ranks = sorted({rank for rank, _ in seen})
    found = reconstruct({rank: typical_iteration(seen, rank) for rank in ranks}) if ranks else None
    if found is None or found.answer is Answer.NONE:
        yield "model   not given, and the traffic is of no job that the rules describe: give --model or --set"
        return
    yield f"model   not given; reconstructed from the traffic: {found.answer}, every tensor operation explained"
    for name in dict.fromkeys(name for known in found.known for name in known):
        values = dict.fromkeys(str(known[name]).lower() for known in found.known if name in known)
        yield f"  {name:<24}{' or '.join(values)}"
    if found.differing:
        yield f"told apart by any of: {', '.join(found.differing)}"
    yield f"not shown by the traffic: {', '.join(found.open)}"


def _model(job: Job) -> str:
    shape, layout = job.shape, job.layout
    degrees = [f"t {layout.tensor}", f"p {layout.pipeline}", f"d {layout.data}"]
    degrees += [f"{name} {degree}" for name, degree in (("c", layout.context), ("e", layout.expert)) if degree > 1]
    degrees += [f"{layout.chunks} chunks"] if layout.chunks > 1 else []
    parts = [
        f"{shape.layers} layers", f"hidden {shape.hidden}", f"heads {shape.heads}", f"sequence {shape.sequence}",
        f"vocabulary {shape.vocabulary:,}", *degrees, f"SP {'on' if layout.is_sequence_parallel else 'off'}",
        job.training.precision, f"{job.framework} {job.version}".strip(),
    ]  # fmt: skip
    return ", ".join(parts)


def _table(of: RankClass) -> Iterator[str]:
    ranks = of.ranks
    named = ", ".join(map(str, ranks)) if len(ranks) <= _NAMED else f"{ranks[0]} to {ranks[-1]} ({len(ranks)})"
    yield f"ranks {named}; {len(of.places)} iterations of ranks"
    cells: list[tuple[str, ...]] = [
        ("group", "op", "elements", "expected", "observed", "bytes/iter", "wire", "reason"),
        *map(_cells, of.rows),
    ]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]) - 1)]
    for row in cells:
        words = [row[at].ljust(widths[at]) for at in (0, 1)]
        numbers = [row[at].rjust(widths[at]) for at in range(2, len(widths))]
        yield f"  {'  '.join([*words, *numbers])}  {row[-1]}".rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    from ncclscope_service.export.plan import why  # noqa: PLC0415

    group = "/".join(row.groups) or "none"
    return (
        f"{group} ({row.ranks})",
        f"{row.op} {row.dtype}",
        "mixed" if row.elements is None else f"{row.elements:,}",
        f"{row.expected:,}",
        f"{row.observed:,}",
        _size(row.logged_bytes),
        _size(round(row.wire_bytes)),
        why(row),
    )


def _size(amount: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if amount >= size:
            return f"{amount / size:,.2f} {unit}"
    return f"{amount} B"
