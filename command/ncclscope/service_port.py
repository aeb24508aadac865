"""The HTTP port of a running service, as commands ask it."""

from __future__ import annotations

import functools
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import click

from ncclscope_agent.credentials import Credentials

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE_SECONDS: Final = 600
_FILE: Final = click.Path(path_type=Path, dir_okay=False)


def service_options(command: Callable[P, R]) -> Callable[..., R]:
    """Adds --service --token-file --tls-ca to a command, which gets `service` and `credentials`."""

    @functools.wraps(command)
    def with_service(*args: P.args, **options: P.kwargs) -> R:
        service = options["service"]
        if not str(service).startswith(("http://", "https://")):
            raise click.UsageError(f"--service: {service!r} is not an address such as http://127.0.0.1:9798")
        token_file, ca = options.pop("token_file"), options.pop("ca")
        options["credentials"] = Credentials(tls_ca=str(ca or ""), token_file=str(token_file or ""))
        return command(*args, **options)

    decorated: Callable[..., R] = with_service
    for option in (
        click.option("--tls-ca", "ca", type=_FILE, help="CA certificates that sign the service's certificate (PEM)."),
        click.option("--token-file", type=_FILE, help="File with a token for the service."),
        click.option(
            "--service",
            default="http://127.0.0.1:9798",
            show_default=True,
            metavar="URL",
            help="HTTP address of the service.",
        ),
    ):
        decorated = option(decorated)
    return decorated


def ask(
    service: str, path: str, *, method: str = "GET", body: object = None, credentials: Credentials | None = None
) -> bytes:
    """The service's answer to a request; `body` is sent as JSON.

    Raises:
        click.ClickException: the service is not there, or refuses; says which and what to do.
    """
    url = f"{service.rstrip('/')}{path}"
    known = credentials or Credentials()
    token, context = known.token(), known.context()
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    if data is not None:
        request.add_header("Content-Type", "application/json")
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS, context=context) as answer:
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        advice = " (--token-file FILE)" if error.code in (401, 403) else ""
        raise click.ClickException(f"{url}: {_reason(error)}{advice}") from error
    except http.client.HTTPException as error:
        raise click.ClickException(
            f"{service} does not speak HTTP: is it the port for agents, or one with TLS (https://)? Name the service's "
            "HTTP address with --service"
        ) from error
    except (urllib.error.URLError, OSError, ValueError) as error:
        if isinstance(error, urllib.error.URLError) and isinstance(error.reason, ssl.SSLCertVerificationError):
            raise click.ClickException(
                f"{service} has a certificate that is refused: {error.reason.verify_message}; --tls-ca names who may "
                "sign it"
            ) from error
        raise click.ClickException(
            f"no service answers at {service}: {_cause(error)}. "
            "Start one with `ncclscope serve`, or name it with --service"
        ) from error


def _cause(error: Exception) -> str:
    """The system's own words for an error, without those of the libraries on the way."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(inner.strerror or inner) if isinstance(inner, OSError) else str(inner)


def _reason(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or f"HTTP {error.code}"
