"""`ncclscope config`: is a configuration file right, and what may be in one."""

from __future__ import annotations

import json
import socket
from dataclasses import fields
from pathlib import Path

import click

from ncclscope.config_file import TABLES, keys_of_agent, keys_of_command, read_table, read_thresholds, schema
from ncclscope.security import Security
from ncclscope.serve import address_of, serve
from ncclscope_agent.config import load
from ncclscope_wire.errors import ConfigError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--schema", "with_schema", is_flag=True, help="Print the JSON schema of such files.")
def config(file: Path | None, with_schema: bool) -> None:
    """Check a configuration FILE for `agent --config` and `serve --config`; start nothing.

    Exit status: 0 it is right; 2 it is wrong, or wrong usage.
    """
    keys = {"agent": keys_of_agent(), "serve": keys_of_command(serve)}
    if with_schema:
        click.echo(json.dumps(schema(keys), indent=2, ensure_ascii=False))
        return
    if file is None:
        raise click.UsageError("name a FILE, or ask for --schema")
    faults: list[str] = []
    given: dict[str, dict[str, object]] = {}
    for table in TABLES:
        try:
            given[table] = read_table(file, table, keys[table])
            if given[table]:
                _check_agent(given[table]) if table == "agent" else _check_serve(file)
        except (ConfigError, click.ClickException) as error:
            faults += [line for line in _sentences(error) if line not in faults]
    try:
        given["detect"] = {**read_thresholds(file)}
    except ConfigError as error:
        faults += [line for line in _sentences(error) if line not in faults]
    if faults:
        raise click.UsageError("\n".join(faults))
    told = ", ".join(f"[{table}] {len(values)} settings" for table, values in given.items() if values)
    click.echo(f"{file}: right: {told or 'no settings'}")


def _sentences(error: Exception) -> list[str]:
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    return text.splitlines()


def _check_agent(values: dict[str, object]) -> None:
    host = socket.gethostname().partition(".")[0]
    load({}, {}, host=host, file=values).credentials.check()


def _check_serve(file: Path) -> None:
    with serve.make_context("serve", ["--config", str(file)]) as context:
        given = context.params
        security = Security(**{field.name: given[field.name] for field in fields(Security)})
        security.check(listen=address_of(given["listen"], "listen")[0], http=address_of(given["http"], "http")[0])
