"""Reads the files and flags that describe a job, for `model`, `explain`, `analyze` and `serve`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import click

from ncclscope_models.description import Completed, Description, completed, merged, parsed
from ncclscope_models.description_sources.files import read_parsed
from ncclscope_models.description_sources.megatron import Output, read_output
from ncclscope_models.flops import PEAK_FLOPS
from ncclscope_models.job import ModelError
from ncclscope_wire.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_LARGEST_BYTES: Final = 16 << 20
"""Of a configuration. A job's output may be of any length: it is read line by line."""


def description_options(command: Callable[P, R]) -> Callable[P, R]:
    """Adds --model and --set to a command, which gets `models` and `assignments`."""
    with_set = click.option(
        "--set", "assignments", multiple=True, metavar="NAME=VALUE", help="A field, for what no file says."
    )
    return model_option(with_set(command))


def model_option(command: Callable[P, R]) -> Callable[P, R]:
    """Adds --model to a command, which gets `models`."""
    return click.option(
        "--model",
        "models",
        multiple=True,
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="A file that describes the job, as for `ncclscope model`. Repeatable.",
    )(command)


def gpu_option(command: Callable[P, R]) -> Callable[P, R]:
    """Adds --gpu to a command, which gets `gpu`."""
    return click.option(
        "--gpu",
        type=click.Choice(list(PEAK_FLOPS), case_sensitive=False),
        help="The GPU of all nodes, for what share of its peak is used; else as captures name it.",
    )(command)


@dataclass(frozen=True, slots=True)
class Described:
    """A job as its files describe it."""

    completed: Completed
    outputs: Mapping[str, Output]
    """By file, what jobs printed."""


def describe(paths: Sequence[Path], assignments: Sequence[str] = ()) -> Described:
    """The job of these files and of assignments `name=value`.

    Raises:
        ConfigError: a file is none that is known, fields are missing, or sources contradict each other.
    """
    descriptions: list[Description] = []
    outputs: dict[str, Output] = {}
    try:
        descriptions += [described_fields([assignment]) for assignment in assignments]
        for path in paths:
            content = _parsed(path)
            if content is not None:
                descriptions.append(read_parsed(content, path.name))
                continue
            with path.open(encoding="utf-8", errors="replace") as lines:
                outputs[path.name] = read_output(lines, path.name)
            descriptions.append(outputs[path.name].description)
        return Described(completed(merged(descriptions)), outputs)
    except ModelError as error:
        raise ConfigError(str(error)) from error


def described_fields(assignments: Sequence[str]) -> Description:
    """The description that assignments `name=value` give.

    Raises:
        ModelError: no such field, or not of its type.
    """
    named = [
        (name.strip(), text, assignment) for assignment in assignments for name, _, text in [assignment.partition("=")]
    ]
    return Description({name: parsed(name, text, f"--set {assignment}") for name, text, assignment in named})


def _parsed(path: Path) -> Mapping[str, Any] | None:
    """Content of a JSON, TOML or YAML file, by its name; None of any other."""
    if path.suffix not in (".json", ".toml", ".yaml", ".yml"):
        return None
    if path.stat().st_size > _LARGEST_BYTES:
        raise ConfigError(f"{path}: larger than {_LARGEST_BYTES >> 20} MiB, which no description is")
    text = path.read_text(encoding="utf-8")
    try:
        content: object = _yaml(text, path) if path.suffix.startswith(".y") else _json_or_toml(text, path)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: no table of fields")
    return {str(key): value for key, value in content.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _json_or_toml(text: str, path: Path) -> object:
    return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)


def _yaml(text: str, path: Path) -> object:
    try:
        import yaml  # noqa: PLC0415  (nothing else here needs it)
    except ImportError as error:
        raise ConfigError(f"{path}: YAML needs PyYAML (pip install pyyaml), or give the file as JSON") from error
    try:
        content: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    return content
