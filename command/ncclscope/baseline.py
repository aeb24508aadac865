"""The option that names outputs of nccl-tests, shared by `serve` and `analyze`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from ncclscope_service.nccl.nccl_tests import MeasuredBaseline

P = ParamSpec("P")
R = TypeVar("R")


def baseline_option(command: Callable[P, R]) -> Callable[..., R]:
    """Adds --baseline to a command, which gets `baselines`: the files."""

    @functools.wraps(command)
    def with_files(*args: P.args, **options: P.kwargs) -> R:
        options["baselines"] = options.pop("baseline")
        return command(*args, **options)

    decorated: Callable[..., R] = with_files
    return click.option(
        "--baseline",
        multiple=True,
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Output of nccl-tests on this machine: the baseline for communicators of as many ranks "
        "and nodes. Repeatable.",
    )(decorated)


def read_baselines(paths: tuple[Path, ...]) -> MeasuredBaseline | None:
    """The measurements that these files hold; None without files.

    Raises:
        click.UsageError: a file holds no measurement that can be used.
    """
    from ncclscope_service.nccl.nccl_tests import MeasuredBaseline, MeasuredSize, NcclTests  # noqa: PLC0415

    tested: list[MeasuredSize] = []
    for path in paths:
        skipped: Counter[str] = Counter()
        with path.open(errors="replace") as lines:
            found = list(NcclTests(path.name).read(lines, skipped))
        if not found:
            raise click.UsageError(_why_unusable(path, skipped))
        tested += found
    return MeasuredBaseline(tested) if tested else None


def _why_unusable(path: Path, skipped: Counter[str]) -> str:
    if skipped["operation_not_printed"]:
        return (
            f"--baseline: {path} does not say which operation was tested. "
            "Name the file after the program, for instance all_reduce_perf.txt"
        )
    if skipped["ranks_not_printed"]:
        return (
            f"--baseline: {path} has rows, but no list of devices before them ('#  Rank  0 ... on HOST device'), "
            "so it is not known for how many ranks and nodes they hold. Give the whole output of nccl-tests"
        )
    return f"--baseline: no row of nccl-tests (size, count, type, ..., busbw) in {path}"
