"""The command line: one command, a subcommand for each thing it does."""

from __future__ import annotations

import importlib
from typing import Final

import click

from ncclscope import __version__
from ncclscope_wire.errors import NcclscopeError

_COMMANDS: Final = {
    "demo": ("ncclscope.demo", "demo"),
    "agent": ("ncclscope.agent", "agent"),
    "serve": ("ncclscope.serve", "serve"),
    "analyze": ("ncclscope.analyze", "analyze"),
    "snapshot": ("ncclscope.snapshot", "snapshot"),
    "simulate": ("ncclscope.simulate", "simulate"),
    "check": ("ncclscope.check", "check"),
}
"""Subcommand to the module and object that hold it: imported when it is asked for, to start fast."""


class _Commands(click.Group):
    """Imports a subcommand when it is asked for, and turns our own errors into a sentence and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The subcommands in the order in which a newcomer meets them."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand of that name."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Runs the subcommand."""
        try:
            return super().invoke(ctx)
        except NcclscopeError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ncclscope")
def main() -> None:
    """Live monitoring of NCCL communication: how fast it is, who waits for whom, and what is stuck."""
