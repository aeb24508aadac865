"""Access list of a port: tokens and certificates, each with what its holder may say or do.

One line each, words separated by blanks; `#` begins a remark. The first word is the token itself, or `cert:NAME` for
whoever has a certificate of that name:

    8c1f...e07a    name=rack-a  host=node0*,node1*
    3b77...91cd    name=train   job=llama-*
    cert:node07    host=node07
    f00d...4242    name=grafana role=read

Several tokens hold at once, so one is replaced by adding the new, changing the clients, and removing the old.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Final, cast

from ncclscope_wire.errors import ConfigError

LEAST_TOKEN_CHARACTERS: Final = 16
"""Shorter tokens are refused; `openssl rand -hex 32` makes good ones."""
MOST_TOKEN_CHARACTERS: Final = 512
MOST_LINES: Final = 10_000
"""A list longer than that is refused: each arrival is held against every line."""
_CERTIFICATE: Final = "cert:"
_KEYS: Final = ("name", "job", "host", "role")


class Role(Enum):
    """Rights of a client over HTTP."""

    READ = "read"
    """The page, the API and /metrics."""
    WRITE = "write"
    """Also what makes the service work or changes something: every method but GET and HEAD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Rights that one line of the list gives."""

    name: str = ""
    """Who it is; agents of one name are one owner, whichever token or certificate they show."""
    jobs: tuple[str, ...] = ()
    """Patterns (`*`, `?`) of job labels; empty: any."""
    hosts: tuple[str, ...] = ()
    """Patterns of host names; empty: any."""
    role: Role = Role.READ

    def allows_job(self, job: str) -> bool:
        """Whether it may speak of this job."""
        return not self.jobs or any(fnmatchcase(job, pattern) for pattern in self.jobs)

    def allows_host(self, host: str) -> bool:
        """Whether it may speak of this host."""
        return not self.hosts or any(fnmatchcase(host, pattern) for pattern in self.hosts)


class AccessList:
    """The lines of one file."""

    def __init__(self, tokens: Iterable[tuple[bytes, Grant]], certificates: Iterable[tuple[str, Grant]]) -> None:
        self._tokens = tuple(tokens)
        self._certificates = dict(certificates)

    def __len__(self) -> int:
        return len(self._tokens) + len(self._certificates)

    def grant_for_token(self, token: str) -> Grant | None:
        """The rights of this token; None if it is not in the list. Takes equally long for each."""
        return self.grant_for_digest(digest_of(token))

    def grant_for_digest(self, digest: bytes) -> Grant | None:
        """As `grant_for_token`, for a token of which only the digest is kept."""
        found: Grant | None = None
        for known, grant in self._tokens:
            if hmac.compare_digest(known, digest):
                found = grant
        return found

    def grant_for_certificate(self, names: Iterable[str]) -> Grant | None:
        """The rights of a certificate with these names, verified before; None if no name is in the list."""
        return next((self._certificates[name] for name in names if name in self._certificates), None)


def digest_of(token: str) -> bytes:
    """Digest of a token, which is kept and compared in its place."""
    return hashlib.sha256(token.encode(errors="replace")).digest()


def parse_access(text: str, *, where: str) -> AccessList:
    """The list in a file's text; `where` names the file in errors, which never repeat a token.

    Raises:
        ConfigError: names every line that is wrong, or says that there is none.
    """
    tokens: list[tuple[bytes, Grant]] = []
    certificates: list[tuple[str, Grant]] = []
    faults: list[str] = []
    lines = [(number, words) for number, words in enumerate(map(_words, text.splitlines()), 1) if words]
    for number, (who, *said) in lines[:MOST_LINES]:
        try:
            grant = _grant(said)
            if who.startswith(_CERTIFICATE):
                certificates.append((who.removeprefix(_CERTIFICATE), grant))
            else:
                tokens.append((_checked_digest(who), grant))
        except ValueError as fault:
            faults.append(f"{where}, line {number}: {fault}")
    if len(lines) > MOST_LINES:
        faults.append(f"{where}: over {MOST_LINES} lines")
    if not lines:
        faults.append(f"{where}: there is no token in it: write one a line, for instance of `openssl rand -hex 32`")
    if faults:
        raise ConfigError("\n".join(faults))
    return AccessList(tokens, certificates)


def _words(line: str) -> list[str]:
    words: list[str] = []
    for word in line.split():
        if word.startswith("#"):
            break
        words.append(word)
    return words


def _checked_digest(token: str) -> bytes:
    if not LEAST_TOKEN_CHARACTERS <= len(token) <= MOST_TOKEN_CHARACTERS:
        raise ValueError(f"a token has {LEAST_TOKEN_CHARACTERS} to {MOST_TOKEN_CHARACTERS} characters")
    if not token.isascii() or not token.isprintable():
        raise ValueError("a token is of printable ASCII characters")
    return digest_of(token)


def _grant(said: list[str]) -> Grant:
    given = dict(_pair(word) for word in said)
    try:
        role = Role(given.get("role", Role.READ.value))
    except ValueError:
        raise ValueError("role is read or write") from None
    return Grant(
        name=given.get("name", ""), jobs=_patterns(given.get("job")), hosts=_patterns(given.get("host")), role=role
    )


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if key == "name" and "/" in value:
        raise ValueError("a name has no slash")
    if not equals or key not in _KEYS or not value:
        raise ValueError(f"after the token come {', '.join(f'{known}=...' for known in _KEYS)}, separated by blanks")
    return key, value


def _patterns(text: str | None) -> tuple[str, ...]:
    return tuple(filter(None, (text or "").split(",")))


def certificate_names(certificate: object) -> tuple[str, ...]:
    """The names in a verified certificate as `ssl` gives it: DNS and URI names, then the common name; ":" for "/"."""
    return tuple(dict.fromkeys(name.replace("/", ":") for name in _names(certificate)))


def _names(certificate: object) -> Iterator[str]:
    content = cast("Mapping[str, Sequence[Sequence[object]]]", certificate or {})
    for kind, name in cast("Sequence[tuple[str, str]]", content.get("subjectAltName", ())):
        if kind in ("DNS", "URI"):
            yield name
    for part in cast("Sequence[Sequence[tuple[str, str]]]", content.get("subject", ())):
        for key, name in part:
            if key == "commonName":
                yield name
