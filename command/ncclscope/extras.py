"""Checks before a subcommand begins: packages that the base install does not bring, folders to write to."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Final

import click

_SERVICE_PACKAGES: Final = ("plotly", "pyarrow", "starlette", "uvicorn")


def require_service() -> None:
    """Ends the command with a sentence if the packages of the service are not installed."""
    missing = [name for name in _SERVICE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(
            f"this needs the packages of the service ({', '.join(missing)} missing): "
            "install them with `pip install 'ncclscope[service]'`"
        )


def require_notify() -> None:
    """Ends the command with a sentence if the package that sends notifications is not installed."""
    if importlib.util.find_spec("apprise") is None:
        raise click.ClickException(
            "addresses of Apprise's need apprise: install it with `pip install 'ncclscope[notify]'`"
        )


def require_otlp() -> None:
    """Ends the command with a sentence if the package that exports by OTLP is not installed."""
    if importlib.util.find_spec("opentelemetry") is None:
        raise click.ClickException(
            "--otlp needs OpenTelemetry's exporter: install it with `pip install 'ncclscope[otlp]'`"
        )


def require_models() -> None:
    """Ends the command with a sentence if the packages that learn corrections are not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("sklearn", "scipy")):
        raise click.ClickException(
            "--learn needs scikit-learn and scipy: install them with `pip install 'ncclscope[models]'`"
        )


def require_grafana() -> None:
    """Ends the command with a sentence if the package that talks to Grafana is not installed."""
    if importlib.util.find_spec("grafana_api") is None:
        raise click.ClickException("this needs grafana-api: install it with `pip install 'ncclscope[grafana]'`")


def require_writable(folder: Path, option: str) -> None:
    """Makes the folder if need be, and ends the command with a sentence if no file can be written into it.

    Better said before the work than after it. `option` is the flag that named the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise click.ClickException(
            f"{option}: cannot write into {folder.absolute()}: {error.strerror or error}. "
            f"Name a folder that this user may make or write to with {option}"
        ) from error
