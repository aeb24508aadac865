"""Thresholds of the detectors, as `serve` and `analyze` take them: from the file of --config, and --set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import click

from ncclscope.config_file import config_path, read_thresholds
from ncclscope_service.detect.settings import check, parse_assignment
from ncclscope_wire.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_OPTION: Final = "--set"


class Thresholds:
    """The thresholds that --config and --set give; the file is read again at each call."""

    def __init__(self, file: Path | None, given: tuple[str, ...]) -> None:
        self._file = file
        self._given = given

    @classmethod
    def of_command(cls, given: tuple[str, ...]) -> Thresholds:
        """Those of the command that runs."""
        return cls(config_path(), given)

    def __call__(self) -> dict[str, float]:
        """The thresholds that are given, by name; those of --set win.

        Raises:
            ConfigError: names everything that is wrong.
        """
        of_file = {} if self._file is None else read_thresholds(self._file)
        try:
            return check({**of_file, **check(dict(map(parse_assignment, self._given)))})
        except ConfigError as error:
            raise ConfigError("\n".join(f"{_OPTION}: {line}" for line in str(error).splitlines())) from error


def threshold_options(command: Callable[P, R]) -> Callable[..., R]:
    """Adds --set to a command, which gets `thresholds`; wrong ones are a usage error."""

    @functools.wraps(command)
    def with_thresholds(*args: P.args, **options: P.kwargs) -> R:
        given: tuple[str, ...] = options.pop("set")  # type: ignore[assignment]  # click gives texts
        options["thresholds"] = thresholds = Thresholds.of_command(given)
        try:
            thresholds()
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        return command(*args, **options)

    decorated: Callable[..., R] = with_thresholds
    return click.option(
        _OPTION,
        multiple=True,
        metavar="NAME=NUMBER",
        help="A threshold of a detector, for instance detect.late_rank.least_share=0.02, or for some jobs "
        "detect.job.'llama-*'.late_rank.least_share=0.02. Repeatable; wins over the file.",
    )(decorated)
