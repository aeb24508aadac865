"""What the files of deploy/ tell ncclscope to do, held against what it can do."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

from ncclscope.cli import main


def command_named(name: str) -> click.Command:
    """A subcommand."""
    found = main.get_command(click.Context(main), name)
    assert found is not None, f"there is no `ncclscope {name}`"
    return found


def flags_of(name: str) -> set[str]:
    """All flags of a subcommand, both names of those that have two."""
    options = [each for each in command_named(name).params if isinstance(each, click.Option)]
    own = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    return own | {"--help", "--version"}


def check_arguments(arguments: Iterable[str], *, where: str) -> None:
    """Fails where arguments of `ncclscope` name a subcommand or a flag that is not there."""
    name, *rest = arguments
    if name.startswith("-"):
        return
    known = flags_of(name)
    for argument in rest:
        if argument == "--":
            return
        flag = re.match(r"--[a-z][a-z-]*", argument)
        assert flag is None or flag[0] in known, f"{where}: `ncclscope {name}` has no {flag[0]}"


def check_variables(names: Iterable[str], *, where: str) -> None:
    """Fails where a variable of the agent or of `serve` is none of theirs."""
    known = {f"NCCLSCOPE_{flag[2:].replace('-', '_').upper()}" for flag in flags_of("agent")}
    known |= {f"NCCLSCOPE_SERVE_{flag[2:].replace('-', '_').upper()}" for flag in flags_of("serve")}
    for name in names:
        assert not name.startswith("NCCLSCOPE_") or name in known, f"{where}: {name} sets nothing"
