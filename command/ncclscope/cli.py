"""The command line: one command, a subcommand for each thing it does."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Final

import click
import structlog

from ncclscope import __version__
from ncclscope_wire.errors import NcclscopeError

_COMMANDS: Final = {
    "demo": ("ncclscope.demo", "demo"),
    "agent": ("ncclscope.agent", "agent"),
    "serve": ("ncclscope.serve", "serve"),
    "analyze": ("ncclscope.analyze", "analyze"),
    "snapshot": ("ncclscope.snapshot", "snapshot"),
    "model": ("ncclscope.model", "model"),
    "findings": ("ncclscope.findings", "findings"),
    "settings": ("ncclscope.findings", "settings"),
    "simulate": ("ncclscope.simulate", "simulate"),
    "run": ("ncclscope.run", "run"),
    "capture": ("ncclscope.capture", "capture"),
    "env": ("ncclscope.env", "env"),
    "check": ("ncclscope.check", "check"),
    "config": ("ncclscope.config", "config"),
    "grafana": ("ncclscope.grafana", "grafana"),
}
"""Subcommand to the module and object that hold it: imported when it is asked for, to start fast."""

_ADVICE: Final = {
    "PermissionError": "give this user the right to it, or name another path",
    "FileNotFoundError": "make its folder, or name another path",
    "NotADirectoryError": "a part of this path is a file: name another path",
}
"""Advice about an error of the operating system, by its class."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a full disk in the middle of a file; the system does not name the file then."""


class _Commands(click.Group):
    """Imports a subcommand when it is asked for, and turns what a user can mend into a sentence and exit code 1.

    That is every NcclscopeError, and every OSError that names a file or reports a full disk, alone or in groups of
    such. Anything else is a bug and shows where it happened.
    """

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
        except (NcclscopeError, OSError, ExceptionGroup) as error:
            sentences = [_sentence(single) for single in _singles(error)]
            told = list(dict.fromkeys(sentence for sentence in sentences if sentence is not None))
            if len(told) == 0 or None in sentences:
                raise
            raise click.ClickException("; ".join(told)) from error


def _singles(error: Exception) -> Iterator[Exception]:
    """The errors in a group and in the groups in it; a single error itself."""
    if not isinstance(error, ExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from _singles(inner)


def _sentence(error: Exception) -> str | None:
    """A sentence that says what is wrong, where, and what to do; None for a bug."""
    if isinstance(error, NcclscopeError):
        return str(error)
    if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
        return f"{os.strerror(error.errno)}: free space there, or name another folder to write to"
    if not isinstance(error, OSError) or error.filename is None:
        return None
    advice = _ADVICE.get(type(error).__name__, "mend that, or name another path")
    return f"{error.filename}: {error.strerror or error}: {advice}"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ncclscope")
def main() -> None:
    """Live NCCL monitoring: which communicator is slow, which rank everyone waits for, what hangs."""
    # What a subcommand gives is on stdout (`agent --print` in a pipe); its log lines are not part of it.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
