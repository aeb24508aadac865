"""Who may ask what over HTTP: a token as `Authorization: Bearer`, a certificate, or a login that the token bought.

Open to all: `/healthz`, `/readyz`, the login, and the page's own files, which hold no data. GET and HEAD need the role
`read`, everything else `write`. A port without tokens and certificates serves anybody; on loopback only under its
own names: a foreign web page whose name was made to lead here (DNS rebinding) must not read it through a browser here.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http.cookies import CookieError, SimpleCookie
from typing import Final

from ncclscope_service.access import AccessList, Grant, Role, digest_of

COOKIE: Final = "ncclscope_login"
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/login", "/logout"})
OPEN_FOLDER: Final = "/static/"
_READING: Final = frozenset({"GET", "HEAD"})
_OWN_SITE: Final = frozenset({"same-origin", "none"})
_LOCAL_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What bounds requests; who is over it gets 429, and is counted."""

    requests_per_second: float = 100.0
    """Of one address, over time."""
    burst: int = 400
    """Of one address, at once."""
    failures_per_minute: float = 30.0
    """Wrong tokens of one address."""
    max_path_characters: int = 1024
    max_addresses: int = 4096
    """Whose requests are counted; beyond it the one longest away is forgotten."""
    max_logins: int = 1024
    """Beyond it the oldest ends."""
    login_seconds: float = 12 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What of a request decides about it."""

    method: str
    path: str
    address: str
    headers: Mapping[str, str]
    """By lower-case name."""
    certificate: tuple[str, ...] = ()
    """Names in the client's verified certificate; empty where it showed none."""


class Answer(Enum):
    """What becomes of a request."""

    GO_ON = "go_on"
    UNAUTHORIZED = "unauthorized"
    LOGIN = "login"
    """As UNAUTHORIZED, to somebody with a browser."""
    FORBIDDEN = "forbidden"
    """Known, and not allowed to do that."""
    CROSS_SITE = "cross_site"
    WRONG_NAME = "wrong_name"
    TOO_MANY = "too_many_requests"
    TOO_LONG = "path_too_long"


@dataclass(slots=True)
class _Bucket:
    """So much may be done at once; it fills again over time."""

    level: float
    at: float

    def take(self, now: float, *, rate: float, size: float) -> bool:
        self.level = min(size, self.level + (now - self.at) * rate)
        self.at = now
        if self.level < 1:
            return False
        self.level -= 1
        return True

    def is_empty(self, now: float, *, rate: float, size: float) -> bool:
        return min(size, self.level + (now - self.at) * rate) < 1


class HttpGate:
    """Decides about requests; `now` is any clock's seconds."""

    def __init__(
        self,
        *,
        access: AccessList | None = None,
        asks_for_certificate: bool = False,
        names: frozenset[str] | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        """`names`: host names, beside `localhost` and addresses, under which an open port may be asked; None: any."""
        self.access = access
        """May be changed between two calls."""
        self._asks_for_certificate = asks_for_certificate
        self._names = None if names is None else names | _LOCAL_NAMES
        self._limits = limits or HttpLimits()
        self._requests: dict[str, _Bucket] = {}
        self._failures: dict[str, _Bucket] = {}
        self._logins: dict[bytes, tuple[bytes, float]] = {}
        """Digest of the cookie to the digest of the token and the end."""
        self.refused = Counter[str]()

    @property
    def is_open(self) -> bool:
        """Anybody may ask."""
        return self.access is None and not self._asks_for_certificate

    def decide(self, asked: Asked, now: float) -> Answer:
        """What becomes of a request; refusals are counted."""
        answer = self._decision(asked, now)
        if answer is not Answer.GO_ON:
            self.refused[answer.value] += 1
        return answer

    def login(self, token: str, address: str, now: float) -> str | None:
        """The cookie for who has this token; None where it is wrong, or was tried too often from there."""
        if self.access is None or self._is_guessing(address, now):
            return None
        digest = digest_of(token)
        if self.access.of_digest(digest) is None:
            self._note_failure(address, now)
            self.refused["wrong_token"] += 1
            return None
        cookie = secrets.token_urlsafe(32)
        while len(self._logins) >= self._limits.max_logins:
            del self._logins[next(iter(self._logins))]
        self._logins[digest_of(cookie)] = digest, now + self._limits.login_seconds
        return cookie

    def logout(self, headers: Mapping[str, str]) -> None:
        """Ends the login of this request's cookie."""
        self._logins.pop(digest_of(_cookie(headers)), None)

    def _decision(self, asked: Asked, now: float) -> Answer:
        limits = self._limits
        requests = self._bucket(self._requests, asked.address, limits.burst, now)
        if asked.path not in ("/healthz", "/readyz") and not requests.take(
            now, rate=limits.requests_per_second, size=limits.burst
        ):
            return Answer.TOO_MANY
        if len(asked.path) > limits.max_path_characters:
            return Answer.TOO_LONG
        return self._decision_by_place(asked, now)

    def _decision_by_place(self, asked: Asked, now: float) -> Answer:
        if asked.method not in _READING and _is_cross_site(asked.headers):
            return Answer.CROSS_SITE
        if asked.path in OPEN_PATHS or asked.path.startswith(OPEN_FOLDER):
            return Answer.GO_ON
        if self.is_open:
            return Answer.GO_ON if self._is_own_name(asked.headers.get("host", "")) else Answer.WRONG_NAME
        return Answer.TOO_MANY if self._is_guessing(asked.address, now) else self._decision_by_grant(asked, now)

    def _decision_by_grant(self, asked: Asked, now: float) -> Answer:
        grant = self._grant(asked, now)
        if grant is None:
            return self._unknown(asked)
        return Answer.GO_ON if asked.method in _READING or grant.role is Role.WRITE else Answer.FORBIDDEN

    def _grant(self, asked: Asked, now: float) -> Grant | None:
        scheme, _, token = asked.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.access is not None:
            found = self.access.of_token(token.strip())
            if found is None:
                self._note_failure(asked.address, now)
            return found
        return self._grant_of_certificate(asked.certificate) or self._grant_of_login(_cookie(asked.headers), now)

    def _grant_of_certificate(self, certificate: tuple[str, ...]) -> Grant | None:
        if not certificate:
            return None
        if self.access is None:
            return Grant(name=certificate[0], role=Role.WRITE)
        return self.access.of_certificate(certificate)

    def _grant_of_login(self, cookie: str, now: float) -> Grant | None:
        if not cookie or self.access is None:
            return None
        token, until = self._logins.get(digest_of(cookie), (b"", 0.0))
        return self.access.of_digest(token) if now < until else None

    def _unknown(self, asked: Asked) -> Answer:
        is_browser = asked.method in _READING and "text/html" in asked.headers.get("accept", "")
        return Answer.LOGIN if is_browser and self.access is not None else Answer.UNAUTHORIZED

    def _is_own_name(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return self._names is None or name.lower() in self._names or _is_address(name)

    def _is_guessing(self, address: str, now: float) -> bool:
        bucket, limit = self._failures.get(address), self._limits.failures_per_minute
        return bucket is not None and bucket.is_empty(now, rate=limit / 60, size=limit)

    def _note_failure(self, address: str, now: float) -> None:
        limit = self._limits.failures_per_minute
        self._bucket(self._failures, address, limit, now).take(now, rate=limit / 60, size=limit)

    def _bucket(self, buckets: dict[str, _Bucket], address: str, size: float, now: float) -> _Bucket:
        bucket = buckets.pop(address, None) or _Bucket(level=size, at=now)
        if len(buckets) >= self._limits.max_addresses:
            del buckets[next(iter(buckets))]
        buckets[address] = bucket
        return bucket


def _is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether another site's page asks through a user's browser. *Source:* Fetch Metadata; RFC 6454, section 7."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in _OWN_SITE
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def _cookie(headers: Mapping[str, str]) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
