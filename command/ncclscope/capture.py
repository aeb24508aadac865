"""`ncclscope capture`: runs a job and records it with nsys now and then; or puts the helper beside a trainer."""

from __future__ import annotations

import shutil
import tempfile
import zipapp
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import click

import ncclscope_capture
from ncclscope_capture.capture import capture as run_captured
from ncclscope_capture.capture import follow
from ncclscope_capture.settings import flag_of, load, settings_table

_Function = TypeVar("_Function", bound=Callable[..., object])
_FILE: Final = "capture.pyz"


def _setting_options(function: _Function) -> _Function:
    """One flag for every setting, from its table."""
    for name, default, about in reversed(settings_table()):
        shown = "" if default == "" else f"  [default: {default}]"
        function = click.option(flag_of(name), name, metavar=about["metavar"], help=about["help"] + shown)(function)
    return function


@click.command(context_settings={"help_option_names": ["-h", "--help"], "allow_interspersed_args": False})
@_setting_options
@click.option("--install", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help=f"Write the helper to DIR/{_FILE}, for Pythons (3.10 on) without ncclscope, and end.")  # fmt: skip
@click.argument("command", nargs=-1, metavar="-- COMMAND...")
def capture(*, install: Path | None, command: tuple[str, ...], **given: object) -> None:
    """Run a job, record a few seconds of it now and then with nsys, and hand exports to the agent.

    Signals and exit status are the job's. If nsys is missing or fails, the job runs without it. Exit status 2: wrong
    settings.
    """
    if install is not None:
        click.echo(install_helper(install))
        return
    try:
        settings = load(given)
    except ValueError as faults:
        raise click.UsageError(str(faults)) from faults
    if bool(settings.session) == bool(command):
        raise click.UsageError("either a command behind --, or --session NAME")
    if settings.session:
        follow(settings)
    else:
        run_captured(settings, command)


def install_helper(directory: Path) -> Path:
    """Writes the helper into a directory as one file that Python runs; a file of that name is replaced at once."""
    directory.mkdir(parents=True, exist_ok=True)
    final, unfinished = directory / _FILE, directory / f".{_FILE}"
    with tempfile.TemporaryDirectory() as alone:
        package = Path(ncclscope_capture.__file__).parent
        shutil.copytree(package, Path(alone) / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        main = f"{package.name}.__main__:main"
        zipapp.create_archive(alone, unfinished, interpreter="/usr/bin/env python3", main=main)
    unfinished.chmod(0o755)
    unfinished.replace(final)
    return final
