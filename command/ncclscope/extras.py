"""Checks before a subcommand begins: packages that the base install does not bring, folders to write to."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import click


def require_service() -> None:
    """Ends the command with a sentence if the packages of the service are not installed."""
    needed = ("plotly", "pyarrow", "starlette", "uvicorn")
    _require("service", needed, "this needs the packages of the service ({} missing): install them")


def require_notify() -> None:
    """Ends the command with a sentence if the package that sends notifications is not installed."""
    _require("notify", ("apprise",), "addresses of Apprise's need apprise: install it")


def require_otlp() -> None:
    """Ends the command with a sentence if the package that exports by OTLP is not installed."""
    _require("otlp", ("opentelemetry",), "--otlp needs OpenTelemetry's exporter: install it")


def require_models() -> None:
    """Ends the command with a sentence if the packages that learn corrections are not installed."""
    _require("models", ("sklearn", "scipy"), "--learn needs scikit-learn and scipy: install them")


def require_grafana() -> None:
    """Ends the command with a sentence if the package that talks to Grafana is not installed."""
    _require("grafana", ("grafana_api",), "this needs grafana-api: install it")


def _require(extra: str, modules: tuple[str, ...], sentence: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(f"{sentence.format(', '.join(missing))} with `pip install 'ncclscope[{extra}]'`")


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
