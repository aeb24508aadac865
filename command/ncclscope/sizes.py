"""The options that tell the sizes of a job's parallel dimensions, shared by `serve` and `analyze`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from ncclscope_service.store.settings import Sizes as PipelineSizes

P = ParamSpec("P")
R = TypeVar("R")

_DIMENSIONS = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "ep": "expert",
    "cp": "context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes as given; None = not given, and inferred from the traffic."""

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


def size_options(command: Callable[P, R]) -> Callable[..., R]:
    """Adds --tp --pp --dp --ep --cp --gpus-per-node to a command, which gets them as `sizes`."""

    @functools.wraps(command)
    def with_sizes(*args: P.args, **options: P.kwargs) -> R:
        given = {name: options.pop(name) for name in (*_DIMENSIONS, "gpus_per_node")}
        options["sizes"] = Sizes(**given)  # type: ignore[arg-type]  # click gives each an int or None
        return command(*args, **options)

    decorated: Callable[..., R] = with_sizes
    for name, word in reversed(_DIMENSIONS.items()):
        option = click.option(f"--{name}", type=click.IntRange(min=1), help=f"Size of {word} parallelism.")
        decorated = option(decorated)
    return click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs per node.")(decorated)
