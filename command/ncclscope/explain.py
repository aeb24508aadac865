"""`ncclscope explain`: what a job should send by its description, what its log shows, and why they differ."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import click
import msgspec

from ncclscope.description_files import describe, description_options
from ncclscope.extras import require_service, require_writable
from ncclscope.service_port import ask, service_options
from ncclscope_agent.credentials import Credentials
from ncclscope_models.difference import Seen
from ncclscope_models.explanation import At, typical_iteration
from ncclscope_models.job import ModelError
from ncclscope_models.reconstruct import Answer, reconstruct
from ncclscope_wire.errors import ConfigError

if TYPE_CHECKING:
    from ncclscope_service.store.plan_records import PlanClass, PlanLine, PlanPattern, PlanRecord

_UNEXPLAINED: Final = 4
_NOTHING_READABLE: Final = 3
_SHOWN: Final = 12
"""Classes of ranks that are printed; plan.json has all."""
_NAMED: Final = 8
"""Ranks that are named one by one."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path, exists=True))
@description_options
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write plan.json and expected.parquet.")
@click.option("--strict", is_flag=True, help="Exit status 4 if tensor operations stay unexplained.")
@click.option("--job", help="Without PATHS: only this job of the service.")
@service_options
def explain(
    paths: tuple[Path, ...],
    models: tuple[Path, ...],
    assignments: tuple[str, ...],
    out: Path | None,
    strict: bool,
    job: str | None,
    service: str,
    credentials: Credentials,
) -> None:
    """Explain every operation of a run: expected by the job's description, observed in its log, and the reason.

    Without a description, what one iteration says of it is printed (Megatron-LM).

    PATHS: logs, and exports if they carry the marks of iterations. Without any, a running service is asked, which was
    given the description (`serve --model`), for its last look at each job.

    Exit status: 0 done; 2 wrong usage; 3 nothing readable; 4 with --strict and something unexplained.
    """
    require_service()
    if not paths:
        if models or assignments or out is not None:
            raise click.UsageError(
                "without PATHS the service is asked, which has its own description: see serve --model"
            )
        _explain_live(service, credentials, job, strict=strict)
        return
    from ncclscope.offline import run_offline  # noqa: PLC0415  (the packages of the service are only there now)
    from ncclscope_service.export.directory import write_plans  # noqa: PLC0415
    from ncclscope_service.job.plan import make_plan, plan_record  # noqa: PLC0415
    from ncclscope_service.job.plan_pattern import patterns_of  # noqa: PLC0415
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
        for name in sorted(set(store.process_job)):
            click.echo("\n".join(reconstruction(step_lines(store, name, store.operations.rows).seen)))
        return
    try:
        plans = {
            name: make_plan(name, described.completed, step_lines(store, name, store.operations.rows))
            for name in sorted(set(store.process_job))
        }
    except ModelError as error:
        raise ConfigError(str(error)) from error
    patterns = patterns_of(store, plans)
    for name, plan in plans.items():
        if len(plans) > 1:
            click.echo(f"job {name}")
        click.echo("\n".join([*report(plan_record(plan)), *pattern_lines(patterns[name])]))
    if out is not None:
        write_plans(plans, patterns, out)
        click.echo(f"\nwritten to {out}")
    if strict and any(plan.explanation.unexplained for plan in plans.values()):
        sys.exit(_UNEXPLAINED)


def _explain_live(service: str, credentials: Credentials, job: str | None, *, strict: bool) -> None:
    """Prints the last look of a running service at each of its jobs, or at one."""
    from ncclscope_service.store.plan_records import PlanPattern, PlanRecord  # noqa: PLC0415

    overview = json.loads(ask(service, "/api/overview", credentials=credentials))
    jobs = [each["name"] for each in overview["jobs"]]
    unexplained = 0
    for name in jobs if job is None else [job]:
        answer = ask(service, f"/api/jobs/{quote(name)}/plan", credentials=credentials)
        record = msgspec.json.decode(answer, type=PlanRecord | None)
        if record is None:
            click.echo(
                f"job {name}: no plan: serve --model describes no job of so many ranks, or nothing was seen of it"
            )
            continue
        unexplained += record.unexplained_operations
        answer = ask(service, f"/api/jobs/{quote(name)}/plan/pattern", credentials=credentials)
        pattern = msgspec.json.decode(answer, type=PlanPattern | None)
        lines = [*report(record), *(pattern_lines(pattern) if pattern is not None else ())]
        click.echo(f"job {name}\n" + "\n".join(lines))
    if strict and unexplained:
        sys.exit(_UNEXPLAINED)


def report(plan: PlanRecord) -> Iterator[str]:
    """The lines that are printed of one job."""
    yield f"model   {plan.model}"
    yield f"rules   {plan.rules}"
    for given in plan.not_nccl:
        yield f"        not in NCCL's log: {given.value} ({given.source})"
    iterations = plan.iterations
    whole = f"{len(iterations)} whole iterations, {iterations[0]} to {iterations[-1]}" if iterations else "no iteration"
    batch = f"{plan.micro_batches} micro-batches ({plan.batch})"
    yield f"plan    per iteration {batch}; {whole}; ranks {plan.rank_order}"
    if plan.rank_iterations_with_lost_lines:
        lost = f"{plan.rank_iterations_with_lost_lines:,} of {plan.rank_iterations:,} iterations of ranks"
        yield f"        lines were lost in {lost}"
    if plan.rank_iterations_skipped:
        skipped = f"{plan.rank_iterations_skipped:,} iterations of ranks"
        yield f"        SKIPPED (overflow) in {skipped}: no gradient norm, no parameters gathered"
    for each in plan.classes[:_SHOWN]:
        yield ""
        yield from _table(each)
    if len(plan.classes) > _SHOWN:
        yield f"\nand {len(plan.classes) - _SHOWN} more groups of ranks and iterations: --out writes all"
    left = plan.unexplained_operations
    yield f"\nunexplained: {f'{left:,} operations' if left else 'none'}"
    if left or not iterations:
        yield plan.verdict


def pattern_lines(pattern: PlanPattern) -> Iterator[str]:
    """The lines that are printed of who talks to whom, and when."""
    traffic = pattern.traffic
    if traffic.observed is not None:
        number = len(traffic.iterations)
        over = f"{number} iteration{'s' if number > 1 else ''}, by {traffic.by}"
        if traffic.differing:
            yield f"traffic {traffic.differing_known:,} pairs are off by more than 1 % of what is sent, mean of {over}:"
            for cell in traffic.differing:
                yield (
                    f"        {cell.sender} to {cell.receiver}: expected {_size(cell.expected)}, "
                    f"observed {_size(cell.observed)}"
                )
        else:
            yield f"traffic from each to each as expected, mean of {over}"
    for each in pattern.experts:
        ranks = ", ".join(map(str, each.ranks))
        seen = min(each.exchanges, default=0)
        pairs = "equal or transposed in pairs" if each.is_whole else "NOT all equal or transposed in pairs"
        yield (
            f"experts ranks {ranks}: {seen:,} of {each.expected:,} all-to-alls of tokens, {pairs}; busiest rank "
            f"{_imbalance(each.imbalance)} of the mean"
        )
    for rank in pattern.rhythm:
        spread = "" if rank.spread is None else f", lengths scatter by {rank.spread:.1%}"
        blocks = ", ".join(str(count) for count in dict.fromkeys(rank.blocks))
        yield f"rhythm  stage {rank.stage}, rank {rank.rank}: {blocks} of {rank.expected} blocks{spread}: {rank.beat}"


def _imbalance(found: Sequence[float | None]) -> str:
    known = [each for each in found if each is not None]
    return f"{max(known):.2f}" if known else "not known"


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


def _table(of: PlanClass) -> Iterator[str]:
    ranks = of.ranks
    named = ", ".join(map(str, ranks)) if len(ranks) <= _NAMED else f"{ranks[0]} to {ranks[-1]} ({len(ranks)})"
    yield f"ranks {named}; {of.rank_iterations} iterations of ranks"
    cells: list[tuple[str, ...]] = [
        ("group", "op", "elements", "expected", "observed", "bytes/iter", "wire", "reason"),
        *map(_cells, of.lines),
    ]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]) - 1)]
    for row in cells:
        words = [row[at].ljust(widths[at]) for at in (0, 1)]
        numbers = [row[at].rjust(widths[at]) for at in range(2, len(widths))]
        yield f"  {'  '.join([*words, *numbers])}  {row[-1]}".rstrip()


def _cells(line: PlanLine) -> tuple[str, ...]:
    return (
        f"{'/'.join(line.groups) or 'none'} ({line.comm_size})",
        f"{line.op} {line.dtype}",
        "mixed" if line.count is None else f"{line.count:,}",
        f"{line.expected:,}",
        f"{line.observed:,}",
        _size(line.logged_bytes),
        _size(line.wire_bytes),
        line.why,
    )


def _size(amount: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if amount >= size:
            return f"{amount / size:,.2f} {unit}"
    return f"{amount} B"
