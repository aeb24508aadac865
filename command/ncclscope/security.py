"""The options of `serve` that say who may come in, and the refusal to open a port to others without them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ncclscope.options import gathered
from ncclscope_wire.loopback import is_loopback

if TYPE_CHECKING:
    from ncclscope_service.auth.credentials import CredentialFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The options of TLS and access, as given."""

    tls_cert: Path | None
    tls_key: Path | None
    client_ca: Path | None
    agent_tokens: Path | None
    http_tls: bool
    http_client_ca: Path | None
    http_tokens: Path | None
    insecure: bool

    def for_agents(self) -> CredentialFiles:
        """The files of the agents' port."""
        from ncclscope_service.auth.credentials import CredentialFiles  # noqa: PLC0415  (needs [service])

        return CredentialFiles(cert=self.tls_cert, key=self.tls_key, client_ca=self.client_ca, tokens=self.agent_tokens)

    def for_http(self) -> CredentialFiles:
        """The files of the HTTP port."""
        from ncclscope_service.auth.credentials import CredentialFiles  # noqa: PLC0415

        return CredentialFiles(
            cert=self.tls_cert if self.http_tls else None,
            key=self.tls_key if self.http_tls else None,
            client_ca=self.http_client_ca,
            tokens=self.http_tokens,
        )

    def check(self, *, listen: str, http: str) -> None:
        """Refuses ports that others can reach and that lack TLS or authentication, unless --insecure is given.

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
            advice = "give them, listen on 127.0.0.1, or give --insecure if the network is trusted"
            raise click.UsageError("\n".join([*faults, advice]))


_FILE = click.Path(path_type=Path, dir_okay=False)

security_options = gathered(
    "security",
    Security,
    click.option("--tls-cert", type=_FILE, help="Certificate of this service (PEM). Turns TLS on for both ports."),
    click.option("--tls-key", type=_FILE, help="Private key; default: in the certificate file."),
    click.option(
        "--client-ca", type=_FILE, help="Require agents to present a certificate signed by one of these (PEM)."
    ),
    click.option(
        "--agent-tokens",
        type=_FILE,
        help="Require agents to present a token from this list, which also says what each may send.",
    ),
    click.option("--http-tls/--no-http-tls", default=True, help="Whether HTTP uses TLS, if there is --tls-cert."),
    click.option(
        "--http-client-ca",
        type=_FILE,
        help="Require HTTP clients to present a certificate signed by one of these (PEM).",
    ),
    click.option(
        "--http-tokens", type=_FILE, help="Require HTTP clients to present a token from this list (Bearer or Basic)."
    ),
    click.option(
        "--insecure",
        is_flag=True,
        help="Allow ports on other addresses than loopback without TLS or without authentication.",
    ),
)
"""Adds the options; the command gets them as `security`."""
