"""The options of `serve` that say who may come in, and the refusal to open a port to others without them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from ncclscope_wire.loopback import is_loopback

if TYPE_CHECKING:
    from ncclscope_service.credentials import CredentialFiles

P = ParamSpec("P")
R = TypeVar("R")

_NAMES = ("tls_cert", "tls_key", "client_ca", "agent_tokens", "http_tls", "http_client_ca", "http_tokens", "insecure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """As given."""

    tls_cert: Path | None
    tls_key: Path | None
    client_ca: Path | None
    agent_tokens: Path | None
    http_tls: bool
    http_client_ca: Path | None
    http_tokens: Path | None
    insecure: bool

    @classmethod
    def of_options(cls, given: dict[str, Any]) -> Security:
        """From all options of a command, by name; others are left alone."""
        return cls(**{name: given[name] for name in _NAMES})

    def for_agents(self) -> CredentialFiles:
        """The files of the agents' port."""
        from ncclscope_service.credentials import CredentialFiles  # noqa: PLC0415  (needs [service])

        return CredentialFiles(cert=self.tls_cert, key=self.tls_key, client_ca=self.client_ca, tokens=self.agent_tokens)

    def for_http(self) -> CredentialFiles:
        """The files of the HTTP port."""
        from ncclscope_service.credentials import CredentialFiles  # noqa: PLC0415

        return CredentialFiles(
            cert=self.tls_cert if self.http_tls else None,
            key=self.tls_key if self.http_tls else None,
            client_ca=self.http_client_ca,
            tokens=self.http_tokens,
            demands_certificate=False,
        )

    def check(self, *, listen: str, http: str) -> None:
        """Refuses ports that others can reach and that lack TLS or a way to tell who comes, unless told to.

        Raises:
            click.UsageError: says which port lacks what, and what to do.
        """
        if self.tls_key is not None and self.tls_cert is None:
            raise click.UsageError("--tls-key: there is no --tls-cert that it belongs to")
        if self.insecure:
            return
        faults = [
            f"{option} {host}: others can reach it, and it lacks {' and '.join(lacks)}"
            for option, host, lacks in (
                ("--listen", listen, self.for_agents().missing(("--tls-cert", "--client-ca", "--agent-tokens"))),
                ("--http", http, self.for_http().missing(("--tls-cert", "--http-client-ca", "--http-tokens"))),
            )
            if lacks and not is_loopback(host)
        ]
        if faults:
            advice = "give them, listen on 127.0.0.1, or say --insecure where the network is trusted"
            raise click.UsageError("\n".join([*faults, advice]))


def security_options(command: Callable[P, R]) -> Callable[..., R]:
    """Adds the options; the command gets them as `security`."""

    @functools.wraps(command)
    def with_security(*args: P.args, **options: P.kwargs) -> R:
        given = {name: options.pop(name) for name in _NAMES}
        options["security"] = Security(**given)  # type: ignore[arg-type]  # click has checked the types
        return command(*args, **options)

    decorated: Callable[..., R] = with_security
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


_FILE = click.Path(path_type=Path, dir_okay=False)
_OPTIONS = (
    click.option("--tls-cert", type=_FILE, help="Certificate of this service (PEM): both ports speak TLS."),
    click.option("--tls-key", type=_FILE, help="Its key; default: in the same file."),
    click.option("--client-ca", type=_FILE, help="Agents must show a certificate that one of these signed (PEM)."),
    click.option("--agent-tokens", type=_FILE, help="Agents must show one of these tokens, each with what it may say."),
    click.option("--http-tls/--no-http-tls", default=True, help="HTTP speaks TLS too, where there is --tls-cert."),
    click.option("--http-client-ca", type=_FILE, help="Who asks over HTTP may show a certificate that these signed."),
    click.option("--http-tokens", type=_FILE, help="Who asks over HTTP must show one of these tokens."),
    click.option(
        "--insecure", is_flag=True, help="Open ports to other machines although TLS or a way to tell who comes lacks."
    ),
)
