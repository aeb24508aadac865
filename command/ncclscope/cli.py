"""The command line: one command, a subcommand for each thing it does."""

from __future__ import annotations

import difflib
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

_SECTIONS: Final = {
    "One node": {
        "run": "Run a job with NCCL's variables, an agent, a page and a report",
        "demo": "Watch a simulated job on this machine, without a GPU",
        "analyze": "Turn logs and exports of a finished run into a report",
    },
    "A cluster": {
        "agent": "Follow logs and exports on a node, and send them",
        "serve": "Take data from agents; live page, /metrics and API",
        "env": "Print the variables that a job needs",
        "check": "Say what is missing on this node",
        "capture": "Run a job and record its kernels now and then with nsys",
        "config": "Check a configuration file",
    },
    "A running service": {
        "snapshot": "Write the report of what a service keeps",
        "findings": "List, acknowledge and mute findings",
        "settings": "Print or change thresholds of detectors",
        "grafana": "Install dashboards and alert rules",
    },
    "Without a cluster": {
        "model": "Say what a job computes and sends, from its description",
        "explain": "Hold what a job sent against what its description says",
        "tune": "Rank the layouts of a job by their predicted step",
        "simulate": "Write the logs, exports and truth of a simulated job",
    },
}
"""Subcommands by what a newcomer wants, in the order in which they are met, with what each does in a line."""

_COMMANDS: Final = {
    "demo": ("ncclscope.demo", "demo"),
    "agent": ("ncclscope.agent", "agent"),
    "serve": ("ncclscope.serve", "serve"),
    "analyze": ("ncclscope.analyze", "analyze"),
    "snapshot": ("ncclscope.snapshot", "snapshot"),
    "model": ("ncclscope.model", "model"),
    "explain": ("ncclscope.explain", "explain"),
    "tune": ("ncclscope.tune", "tune"),
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
        return list(dict.fromkeys([*(name for of in _SECTIONS.values() for name in of), *_COMMANDS]))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list for each section; a subcommand of none comes last, with the begin of its help."""
        named = {name for of in _SECTIONS.values() for name in of}
        rest = {name: _begin_of_help(self.get_command(ctx, name)) for name in _COMMANDS if name not in named}
        for heading, of in {**_SECTIONS, "Other": rest}.items():
            if of:
                with formatter.section(heading):
                    formatter.write_dl(list(of.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The subcommand that is meant; an unknown name is answered with those like it."""
        if args and args[0] not in _COMMANDS and (like := difflib.get_close_matches(args[0], _COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(like)}?")
        return super().resolve_command(ctx, args)

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


def _begin_of_help(command: click.Command | None) -> str:
    return "" if command is None else command.get_short_help_str(limit=200)


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
