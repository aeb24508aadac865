"""Credentials of a port, read from files: its certificate, the signers of its clients', and a list of tokens.

The files are looked at every other second, and at once at SIGHUP; what changed is used from the next connection on.
Wrong files are logged once, and what held before stays in force.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio import to_thread

from ncclscope_service.auth.access import MOST_LINES, AccessList, parse_access
from ncclscope_wire.errors import ConfigError

_log = structlog.get_logger(__name__)

_LOOK_SECONDS: Final = 2.0
_MOST_LIST_BYTES: Final = MOST_LINES * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialFiles:
    """The files of one port; None: not given."""

    cert: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    tokens: Path | None = None

    def missing(self, options: tuple[str, str, str]) -> list[str]:
        """Credentials that a port lacks if others can reach it; `options` name those for certificate, CA and tokens."""
        cert, client_ca, tokens = options
        lacks = [] if self.cert is not None else [f"a certificate for TLS ({cert} FILE)"]
        if self.client_ca is None and self.tokens is None:
            lacks.append(f"a way to authenticate clients ({tokens} FILE or {client_ca} FILE)")
        return lacks


class Credentials:
    """Current credentials of one port, from its files."""

    def __init__(self, files: CredentialFiles, *, what: str) -> None:
        """Reads the files; `what` names the port in logs.

        Raises:
            ConfigError: a file cannot be read, or is not what it should be.
        """
        self._files = files
        self._what = what
        self._stamps = self._stamps_now()
        self._failed: str | None = None
        self.access: AccessList | None = None
        self.generation = 0
        """Grows whenever something changed."""
        self._newest: ssl.SSLContext | None = None
        self._load()
        self.context = self._front_context()
        """For every connection; it takes the newest certificate by itself. None: no TLS."""

    def reload(self, *, is_forced: bool = False) -> bool:
        """Takes what changed in the files since the last look; True if something did and could be used."""
        stamps = self._stamps_now()
        if stamps == self._stamps and not is_forced:
            return False
        self._stamps = stamps
        try:
            self._load()
        except ConfigError as error:
            if str(error) != self._failed:
                _log.warning("credentials_not_reloaded", port=self._what, why=str(error))
            self._failed = str(error)
            return False
        self._failed = None
        self.generation += 1
        _log.info("credentials_reloaded", port=self._what)
        return True

    async def watch(self) -> None:
        """Reloads for ever; returns at once if there are no files."""
        if not any(self._paths()):
            return
        while True:
            await anyio.sleep(_LOOK_SECONDS)
            await to_thread.run_sync(self.reload)

    def _load(self) -> None:
        context, access = _context(self._files), _access(self._files.tokens)
        self._newest, self.access = context, access

    def _front_context(self) -> ssl.SSLContext | None:
        if self._newest is None:
            return None
        context = _context(self._files)
        assert context is not None, "a certificate was there a moment ago"

        def to_newest(connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
            if self._newest is not None:
                connection.context = self._newest

        # Called in each handshake, before the certificate is shown. *Source:* SSL_CTX_set_tlsext_servername_callback(3)
        context.sni_callback = to_newest
        return context

    def _paths(self) -> Iterator[Path]:
        for path in (self._files.cert, self._files.key, self._files.client_ca, self._files.tokens):
            if path is not None:
                yield path

    def _stamps_now(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._paths())


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Differs between two contents of a file; Kubernetes swaps a link, editors write a new file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _context(files: CredentialFiles) -> ssl.SSLContext | None:
    if files.cert is None:
        if files.client_ca is not None:
            raise ConfigError(f"{files.client_ca}: certificates of clients need TLS: give --tls-cert FILE too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.cert, files.key)
    except OSError as error:
        key = (
            "; its key is looked for in it: give --tls-key FILE too"
            if files.key is None
            else f" and its key, {files.key}"
        )
        raise ConfigError(f"{files.cert}: {_why(error)}: name a PEM certificate{key}") from error
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError as error:
            raise ConfigError(f"{files.client_ca}: {_why(error)}: name a PEM file of certificates") from error
        context.verify_mode = ssl.CERT_REQUIRED
    # A session that was begun with an older list of signers is not gone on with.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def _access(path: Path | None) -> AccessList | None:
    if path is None:
        return None
    try:
        with path.open("rb") as stream:
            text = stream.read(_MOST_LIST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{path}: {_why(error)}: name a file of tokens") from error
    return parse_access(text, where=str(path))


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificate or key").lower().replace("_", " ")
    return error.strerror or type(error).__name__
