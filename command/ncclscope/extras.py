"""Says what to install when a subcommand needs packages that the base install does not bring."""

from __future__ import annotations

import importlib.util
from typing import Final

import click

_SERVICE_PACKAGES: Final = ("plotly", "pyarrow", "starlette", "uvicorn")


def require_service() -> None:
    """Ends the command with a sentence where the packages of the service are not installed."""
    missing = [name for name in _SERVICE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"this needs the packages of the service ({', '.join(missing)} missing): "
            "install them with `pip install 'ncclscope[service]'`"
        )
