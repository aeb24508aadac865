"""`ncclscope env`: the NCCL variables to set, for a shell, a prolog, a manifest or a file."""

from __future__ import annotations

import click

from ncclscope import node
from ncclscope.options import nccl_version
from ncclscope_agent.nccl_settings.advice import DEFAULT_LOG_FILE, NcclVersion
from ncclscope_agent.nccl_settings.presets import Form, preset, written


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nccl", callback=nccl_version, metavar="VERSION", help="NCCL's version, for example 2.27.5.")
@click.option("--find", is_flag=True, help="Look up the version on this node: the Python package, then the library.")
@click.option("--log-file", default=DEFAULT_LOG_FILE, show_default=True, metavar="PATTERN", help="NCCL_DEBUG_FILE.")
@click.option(
    "--calls", is_flag=True, help="Also log every API call (NCCL 2.13 and newer), which shows groups exactly."
)
@click.option("--format", "form", type=click.Choice([form.value for form in Form]), default=Form.SH.value,
              show_default=True, help="Output format.")  # fmt: skip
def env(*, nccl: NcclVersion | None, find: bool, log_file: str, calls: bool, form: str) -> None:
    """Print the NCCL variables that ncclscope needs; without --nccl, values that suit all versions.

    In a shell: eval "$(ncclscope env --nccl 2.27.5)"
    """
    if nccl is None and find:
        found = node.nccl_on_this_node()
        nccl = None if found is None else found.version
    click.echo(written(preset(nccl, log_file=log_file, calls=calls), Form(form)), nl=False)
