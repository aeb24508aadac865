"""The options of `serve` and `analyze` that say how the pipeline works and what is known of the machine and the job."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ncclscope.calibration import calibration_option, read_calibrations, step_of, transfers_of
from ncclscope.config_file import config_path, read_thresholds
from ncclscope.description_files import describe, gpu_option, model_option
from ncclscope.options import gathered
from ncclscope_service.detect.settings import check, parse_assignment
from ncclscope_wire.errors import ConfigError

if TYPE_CHECKING:
    from ncclscope_service.nccl.nccl_tests import MeasuredBaseline
    from ncclscope_service.store.settings import PipelineSettings
    from ncclscope_service.store.settings import Sizes as PipelineSizes

R = TypeVar("R")

_OPTION: Final = "--set"
_DIMENSIONS: Final = {"tp": "tensor", "pp": "pipeline", "dp": "data", "ep": "expert", "cp": "context"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options as given."""

    baseline: tuple[Path, ...]
    calibrations: tuple[Path, ...]
    models: tuple[Path, ...]
    gpu: str | None
    sizes: Sizes
    thresholds: Thresholds

    def settings(self, **more: Any) -> PipelineSettings:  # noqa: ANN401  (other settings of the pipeline)
        """The settings of the pipeline, and more of them.

        Raises:
            click.UsageError, ConfigError: a file is not what its option names.
        """
        from ncclscope_service.store.settings import PipelineSettings  # noqa: PLC0415  (needs [service])

        described = describe(self.models).completed if self.models else None
        calibrations = read_calibrations(self.calibrations)
        return PipelineSettings(
            sizes=self.sizes.for_pipeline(),
            gpus_per_node=self.sizes.gpus_per_node,
            baseline=read_baselines(self.baseline),
            calibration=transfers_of(calibrations),
            description=described,
            expected_step=step_of(described, calibrations, self.gpu),
            gpu=self.gpu,
            thresholds=self.thresholds(),
            **more,
        )


_baseline_option = click.option(
    "--baseline",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Output of nccl-tests on this machine: the baseline for communicators of as many ranks and nodes. Repeatable.",
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a job's parallel dimensions as given; None = not given, and inferred from the traffic."""

    tp: int | None
    pp: int | None
    dp: int | None
    ep: int | None
    cp: int | None
    gpus_per_node: int | None

    def for_pipeline(self) -> PipelineSizes:
        """The sizes in the form that the pipeline takes."""
        from ncclscope_service.store.settings import Sizes as PipelineSizes  # noqa: PLC0415

        return PipelineSizes(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep, cp=self.cp)


size_options = gathered(
    "sizes",
    Sizes,
    click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs per node."),
    *(
        click.option(f"--{name}", type=click.IntRange(min=1), help=f"Size of {word} parallelism.")
        for name, word in _DIMENSIONS.items()
    ),
)
"""Adds --tp --pp --dp --ep --cp --gpus-per-node to a command, which gets them as `sizes`."""


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


def threshold_options(command: Callable[..., R]) -> Callable[..., R]:
    """Adds --set to a command, which gets `thresholds`; wrong ones are a usage error."""

    @functools.wraps(command)
    def with_thresholds(*, set: tuple[str, ...], **given: object) -> R:  # noqa: A002  (the option's name)
        thresholds = Thresholds.of_command(set)
        try:
            thresholds()
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        return command(**given, thresholds=thresholds)

    decorated: Callable[..., R] = with_thresholds
    return click.option(
        _OPTION,
        multiple=True,
        metavar="NAME=NUMBER",
        help="A threshold of a detector, for instance detect.late_rank.least_share=0.02, or for some jobs "
        "detect.job.'llama-*'.late_rank.least_share=0.02. Repeatable; wins over the file.",
    )(decorated)


pipeline_options = gathered(
    "pipeline",
    PipelineOptions,
    _baseline_option,
    calibration_option,
    model_option,
    gpu_option,
    size_options,
    threshold_options,
)
"""Adds the options to a command, which gets them as `pipeline`."""
