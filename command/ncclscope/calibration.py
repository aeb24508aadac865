"""The option that names calibrations, `calibration.json` of other runs, shared by `serve`, `analyze` and `tune`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

from ncclscope_models.calibration import Calibration, added_up, calibrations_of
from ncclscope_models.description import Completed
from ncclscope_models.expected_step import ExpectedStep, expected_step
from ncclscope_models.job import ModelError
from ncclscope_models.transfer_estimate import TransferTimes

P = ParamSpec("P")
R = TypeVar("R")


def calibration_option(command: Callable[P, R]) -> Callable[..., R]:
    """Adds --calibration to a command, which gets `calibrations`: the files."""

    @functools.wraps(command)
    def with_files(*args: P.args, **options: P.kwargs) -> R:
        options["calibrations"] = options.pop("calibration")
        return command(*args, **options)

    decorated: Callable[..., R] = with_files
    return click.option(
        "--calibration",
        multiple=True,
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="calibration.json of an earlier run of this machine, as analyze and snapshot write it: how long transfers "
        "should take. Repeatable.",
    )(decorated)


def read_calibrations(paths: tuple[Path, ...]) -> list[Calibration]:
    """All jobs of these files.

    Raises:
        click.UsageError: a file is no calibration.
    """
    found: list[Calibration] = []
    for path in paths:
        try:
            found += calibrations_of(json.loads(path.read_bytes()), str(path))
        except (ValueError, RecursionError) as error:  # of JSON, of text, or a ModelError
            raise click.UsageError(f"--calibration: {path}: {error}") from error
    return found


def transfers_of(calibrations: list[Calibration]) -> TransferTimes | None:
    """Their transfers together; None without any."""
    return added_up(calibrations) if calibrations else None


def step_of(described: Completed | None, calibrations: list[Calibration], gpu: str | None) -> ExpectedStep | None:
    """How long a step of this job should take; None, with the reason on standard error, if no calibration says it."""
    if described is None or not calibrations:
        return None
    try:
        return expected_step(described.job, calibrations, gpu)
    except ModelError as error:
        click.echo(f"no step is expected of --calibration: {error}", err=True)
        return None
