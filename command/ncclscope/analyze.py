"""`ncclscope analyze`: the pipeline over files, once, with everything that it writes."""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from ncclscope.config_file import config_option
from ncclscope.extras import require_service, require_writable
from ncclscope.pipeline_options import PipelineOptions, pipeline_options
from ncclscope_wire.errors import ConfigError, FormatError

if TYPE_CHECKING:
    from ncclscope.offline import OfflineRun
    from ncclscope_service.export.comparison import RunFigures
    from ncclscope_service.store.records import Finding

_NOTHING_READABLE = 3
_TRACED_OPERATIONS = 50_000
"""Operations of a trace whose iterations are not chosen: 70 MB of events, which a browser opens in seconds."""
_WHY = {
    "not_read_empty": "empty",
    "not_read_inspector_metrics": "NCCL Inspector's means for Prometheus, which say nothing of single operations "
    "(dumps do: unset NCCL_INSPECTOR_PROM_DUMP)",
    "not_read_nccl_tests": "words of nccl-tests without a row of its table",
    "not_read_unknown": "of another kind (no NCCL log, nsys export, PyTorch trace, Inspector dump, topology, "
    "output of nccl-tests)",
    "unreadable": "cannot be read (may this user read them?)",
    "duplicate": "equal to others",
    "report_with_export": "its export is read",
    "topology_of_unknown_host": "a topology that does not name its host",
}
"""Reasons for which files are left out, in words."""
_NAMED: Final = 5


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--out",
    default=Path("ncclscope-report"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Output folder; created if needed, existing files are replaced.",
)
@click.option("--brief", is_flag=True, help="Print ten lines instead of all tables.")
@click.option("--job", default="default", show_default=True, help="Name of the job.")
@click.option("--iterations", metavar="A-B", help="Only these iterations, for example 5-8 (by NVTX marks).")
@click.option(
    "--log-timezone",
    metavar="ZONE",
    help="Time zone of the logs' stamps: UTC, local, +02:00 or a name. Default: the one that fits the "
    "exports, else UTC.",
)
@click.option(
    "--seen",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Hangs that a service saw while the job ran, as in findings.json: files do not tell how long nothing came, "
    "and a job that was ended at work looks like one that hung.",
)
@click.option(
    "--compare",
    "compared",
    metavar="DIR",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Another run, put beside this one: the folder that an earlier analyze wrote, or its logs and exports "
    "(repeatable).",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=lambda: len(os.sched_getaffinity(0)),
    show_default="the cores that it may use",
    help="Processes that read files; with more than one, another writes the trace beside the rest.",
)
@pipeline_options
def analyze(
    *,
    paths: tuple[Path, ...],
    out: Path,
    brief: bool,
    job: str,
    iterations: str | None,
    log_timezone: str | None,
    seen: Path | None,
    compared: tuple[Path, ...],
    jobs: int,
    pipeline: PipelineOptions,
) -> None:
    """Analyze logs and exports of a finished run. Files under PATHS are recognised by their content.

    Exit status: 0 done, even if files were skipped; 2 wrong usage; 3 nothing readable.
    """
    require_service()
    gc.disable()
    from ncclscope.offline import run_offline  # noqa: PLC0415  (the packages of the service are only there now)
    from ncclscope_service.export.directory import content_of, write_content, write_plans  # noqa: PLC0415
    from ncclscope_service.export.selection import latest_iterations, select  # noqa: PLC0415
    from ncclscope_service.export.terminal import terminal_report, terminal_summary  # noqa: PLC0415
    from ncclscope_service.job.plan import make_plan  # noqa: PLC0415
    from ncclscope_service.job.plan_pattern import patterns_of  # noqa: PLC0415
    from ncclscope_service.job.step_lines import step_lines  # noqa: PLC0415

    gc.freeze()  # what was imported stays: no collection need go through it
    gc.enable()
    bounds = _bounds(iterations)
    require_writable(out, "--out")
    settings = pipeline.settings(seen_hangs=_seen_hangs(seen, job))
    read = partial(run_offline, settings=settings, log_timezone=log_timezone, progress=_progress, jobs=jobs)
    try:
        run = read(list(paths), job=job)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    if not run.files_read:
        click.echo(_why_nothing(run), err=True)
        sys.exit(_NOTHING_READABLE)
    selection = replace(select(run.pipeline.store, iterations=bounds), benchmarks=tuple(run.benchmarks))
    content = content_of(selection, compare=_compared(compared, read), name=_name(paths))
    drawn = latest_iterations(selection, _TRACED_OPERATIONS) if bounds is None else None
    trace_of = None if drawn is None else select(run.pipeline.store, iterations=drawn)
    write_content(content, out, trace_of=trace_of, trace_beside=jobs > 1)
    if (described := settings.description) is not None:
        store = run.pipeline.store
        whole = {name: step_lines(store, name, store.operations.rows) for name in store.plans}
        plans = {name: make_plan(name, described, lines) for name, lines in whole.items()}
        write_plans(plans, patterns_of(store, plans), out)
    click.echo((terminal_summary if brief else terminal_report)(selection, content.totals))
    for sentence in _left_out(run):
        click.echo(f"Not read, {sentence}")
    if drawn is not None and not brief:
        click.echo(f"The trace shows iterations {drawn[0]} to {drawn[1]}: give --iterations for others.")
    if not brief:
        click.echo(f"\nwritten to {out}")


analyze.params.append(config_option(None))


def _seen_hangs(path: Path | None, job: str) -> tuple[Finding, ...]:
    """The hangs in a file of findings that were open, as those of this job."""
    from ncclscope_service.store.records import Finding, FindingKind  # noqa: PLC0415

    if path is None:
        return ()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Finding])
    except (msgspec.MsgspecError, OSError, ValueError) as error:
        raise click.UsageError(f"--seen: {path} is no list of findings: {error}") from error
    return tuple(replace(each, job=job) for each in found if each.kind is FindingKind.HANG and each.until_ns is None)


def _compared(paths: tuple[Path, ...], read: Callable[..., OfflineRun]) -> RunFigures | None:
    """The figures of the other run; None if none is given."""
    from ncclscope_service.export.comparison import (  # noqa: PLC0415
        figures_of_folder,
        figures_of_selection,
        is_output_folder,
    )
    from ncclscope_service.export.selection import select  # noqa: PLC0415

    if not paths:
        return None
    if len(paths) == 1 and is_output_folder(paths[0]):
        try:
            return figures_of_folder(paths[0], _name(paths))
        except FormatError as error:
            raise click.UsageError(f"--compare: {error}") from error
    run = read(list(paths), job="default")
    if not run.files_read:
        raise click.UsageError(f"--compare: {_why_nothing(run)}")
    return figures_of_selection(select(run.pipeline.store), _name(paths))


def _name(paths: tuple[Path, ...]) -> str:
    """The name of a run beside another: the folder that holds all of it."""
    names = {path.resolve().name if len(paths) == 1 else path.resolve().parent.name for path in paths}
    return ", ".join(sorted(names))


def _bounds(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None or (found[2] is not None and int(found[2]) < int(found[1])):
        raise click.UsageError(f"--iterations: {text!r} is not A-B with A <= B, for instance 5-8")
    return int(found[1]), int(found[2] or found[1])


def _why_nothing(run: OfflineRun) -> str:
    why = "; ".join(_left_out(run)) or "no files at all"
    return (
        f"nothing readable: {why}. ncclscope reads NCCL logs (NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS naming COLL), "
        "Nsight Systems exports (.sqlite) and dumps of NCCL Inspector"
    )


def _left_out(run: OfflineRun) -> Iterator[str]:
    """Each reason for which files were left out, with the names of the first."""
    for reason, names in sorted(run.skipped.items()):
        more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        yield f"{_WHY.get(reason, reason)}: {', '.join(names[:_NAMED])}{more}"


class _Progress:
    """A line of progress on a terminal; silent elsewhere."""

    def __init__(self) -> None:
        self._shown_at = 0.0

    def __call__(self, done_bytes: int, total_bytes: int, name: str) -> None:
        if not sys.stderr.isatty() or time.monotonic() - self._shown_at < 0.1:
            return
        self._shown_at = time.monotonic()
        share = 100 if not total_bytes else 100 * done_bytes // total_bytes
        click.echo(f"\r{share:3d} %  {name[-60:]:60}", nl=False, err=True)
        if done_bytes >= total_bytes:
            click.echo("\r" + " " * 70 + "\r", nl=False, err=True)


_progress = _Progress()
