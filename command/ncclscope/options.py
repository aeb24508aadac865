"""Options that several subcommands have, and ways to group them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import click

from ncclscope_agent.nccl_settings.advice import NcclVersion, read_version

R = TypeVar("R")


def nccl_version(_: click.Context, __: click.Parameter, value: str | None) -> NcclVersion | None:
    """The version that was given; None if none was."""
    if value is None:
        return None
    found = read_version(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a version such as 2.27.5")
    return found


def gathered(
    name: str, record: type[Any], *options: Callable[[Any], Any]
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Adds options to a command, which gets their values as one record: a dataclass whose fields are named as they are.

    `name` is that of the record among the command's arguments.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def with_record(**given: object) -> R:
            values = {field.name: given.pop(field.name) for field in fields(record)}
            return command(**given, **{name: record(**values)})

        decorated: Callable[..., R] = with_record
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


class SectionedCommand(click.Command):
    """A command whose help lists its options by section; what no section names comes last."""

    sections: Mapping[str, tuple[str, ...]]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of options for each section."""
        records = {each.name: each.get_help_record(ctx) for each in self.get_params(ctx)}
        named = {name for names in self.sections.values() for name in names}
        rest = tuple(str(name) for name in records if name not in named)
        for heading, names in {**self.sections, "Other": rest}.items():
            rows = [record for name in names if (record := records.get(name)) is not None]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def sectioned(sections: Mapping[str, tuple[str, ...]]) -> type[SectionedCommand]:
    """The class of a command with these sections: heading to names of parameters."""
    return type("Sectioned", (SectionedCommand,), {"sections": sections})
