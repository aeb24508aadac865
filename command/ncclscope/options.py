"""Options that several subcommands have."""

from __future__ import annotations

import click

from ncclscope_agent.nccl_settings.advice import NcclVersion, read_version


def nccl_version(_: click.Context, __: click.Parameter, value: str | None) -> NcclVersion | None:
    """The version that was given; None if none was."""
    if value is None:
        return None
    found = read_version(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a version such as 2.27.5")
    return found
