"""The HTTP port: access by token, uvicorn within limits of its own as one task of the service, and the page's files.

A token comes as `Authorization: Bearer` or as the password of HTTP Basic. Open to all are `/healthz`, `/readyz` and the
page's own files, which hold no data. GET and HEAD need the role `read`, everything else `write`. A port without tokens
serves everybody; on loopback only under its own names: a foreign web page whose name leads here (DNS rebinding) must
not read it through a user's browser.

*Source:* RFC 6750 (Bearer), RFC 7617 (Basic).

The page's own files are served with plotly's script out of its installed wheel: nothing is vendored or fetched.
"""

from __future__ import annotations

import contextlib
import gzip
import ipaddress
import socket
import ssl
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from enum import Enum
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Final

import anyio
import orjson
import structlog
import uvicorn
from anyio import to_thread
from anyio.abc import TaskStatus
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from ncclscope_service.auth.access import AccessList, Role
from ncclscope_service.export.report.page import plotly_script_path
from ncclscope_service.serve.http_connections import KNOWN, MAX_CONNECTIONS, connection_class
from ncclscope_wire.errors import ConfigError

_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_OPEN_FOLDER: Final = "/static/"
_READING: Final = frozenset({"GET", "HEAD"})
_OWN_SITE: Final = frozenset({"same-origin", "none"})
_LOCAL_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})
_CHALLENGE: Final = 'Basic realm="ncclscope (any name, a token as the password)", charset="UTF-8"'
"""Browsers ask for name and password when they see it, and send them from then on."""


class Refusal(Enum):
    """Why a request is refused."""

    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    """The token is known, and its role does not allow it."""
    CROSS_SITE = "cross_site"
    WRONG_NAME = "wrong_name"


_ANSWERS: Final[Mapping[Refusal, tuple[HTTPStatus, str]]] = {
    Refusal.UNAUTHORIZED: (
        HTTPStatus.UNAUTHORIZED,
        "a token is needed, and this is none or a wrong one: send it as `Authorization: Bearer TOKEN`, or as the "
        "password of HTTP Basic",
    ),
    Refusal.FORBIDDEN: (HTTPStatus.FORBIDDEN, "this token may read only: its line in the list needs role=write"),
    Refusal.CROSS_SITE: (HTTPStatus.FORBIDDEN, "another site asked for this: ask from this service's own page"),
    Refusal.WRONG_NAME: (
        HTTPStatus.MISDIRECTED_REQUEST,
        "this service is not known by that name: ask by address, or name it with --public-url",
    ),
}


class HttpAccess:
    """Decides about requests, and counts those that it refuses."""

    def __init__(
        self, access: Callable[[], AccessList | None] = lambda: None, *, names: frozenset[str] | None = None
    ) -> None:
        """`access`: the list of tokens as it is now; None: anybody may ask, under one of these `names`, `localhost` or
        an address. Names None: under any."""
        self._access = access
        self._names = None if names is None else names | _LOCAL_NAMES
        self.refused = Counter[str]()

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why the request is refused; None: it is not. Names of headers are in lower case."""
        refusal = self._refusal(method, path, headers)
        if refusal is not None:
            self.refused[refusal.value] += 1
        return refusal

    def name_of(self, headers: Mapping[str, str]) -> str:
        """The name that the list gives whoever asks; empty if it gives none."""
        access = self._access()
        grant = None if access is None else access.grant_for_token(_token(headers.get("authorization", "")))
        return "" if grant is None else grant.name

    def _refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        if method not in _READING and _is_cross_site(headers):
            return Refusal.CROSS_SITE
        if _is_open(path):
            return None
        access = self._access()
        if access is None:
            return None if self._is_own_name(headers.get("host", "")) else Refusal.WRONG_NAME
        grant = access.grant_for_token(_token(headers.get("authorization", "")))
        if grant is None:
            return Refusal.UNAUTHORIZED
        return None if method in _READING or grant.role is Role.WRITE else Refusal.FORBIDDEN

    def _is_own_name(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return self._names is None or name.lower() in self._names or _is_address(name)


class Gated:
    """Lets the application answer what may be asked, and refuses the rest."""

    def __init__(self, app: ASGIApp, access: HttpAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on if its sender may make it, else answers with the refusal."""
        refusal: Refusal | None = None
        if scope["type"] == "http":
            request = Request(scope)
            refusal = self._access.check(request.method, request.url.path, request.headers)
            if refusal is None and not _is_open(request.url.path):
                setattr(request.state, KNOWN, True)
            if request.method not in _READING:
                request.state.name = self._access.name_of(request.headers)
        await (self._app if refusal is None else _answer(refusal))(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def _answer(refusal: Refusal) -> Response:
    status, sentence = _ANSWERS[refusal]
    headers = {"WWW-Authenticate": _CHALLENGE} if status is HTTPStatus.UNAUTHORIZED else None
    return Response(orjson.dumps({"error": sentence}), status, headers, "application/json")


def _token(authorization: str) -> str:
    """The token of a request; "" if there is none."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return b64decode(given.strip(), validate=True).decode().partition(":")[2]
    except ValueError:  # not base64, or not UTF-8
        return ""


def _is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether another site's page asks through a user's browser. *Source:* Fetch Metadata; RFC 6454, section 7."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in _OWN_SITE
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


_log = structlog.get_logger(__name__)

_MAX_REQUESTS: Final = 8 * MAX_CONNECTIONS
"""Beyond it requests get 503: those of connections that were ended may still be at work."""
_MAX_HEAD_BYTES: Final = 16 * 1024
"""Request line and headers."""
_KEEP_ALIVE_SECONDS: Final = 10
_GRACEFUL_SECONDS: Final = 2
_BACKLOG: Final = 128


async def serve_http(
    app: ASGIApp,
    access: HttpAccess,
    address: tuple[str, int],
    context: ssl.SSLContext | None,
    on_stop: Callable[[], None],
    *,
    task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until cancelled, and reports the port when clients can connect. Port 0: any free one.

    `access` counts connections that were ended. `on_stop` is called before open requests get their last seconds: it has
    to end those that would not end.

    Raises:
        ConfigError: it cannot listen there.
    """
    bound = _bound(address, "--http")
    server = _Server(_config(app, access.refused, context))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve_to_the_end, server, bound)
        port = int(bound.getsockname()[1])
        _log.info("listening_for_http", host=address[0], port=port, tls=context is not None)
        task_status.started(port)
        try:
            await anyio.sleep_forever()
        finally:
            on_stop()
            server.should_exit = True


async def serve_probes(
    app: ASGIApp, address: tuple[str, int], *, task_status: TaskStatus[int] = anyio.TASK_STATUS_IGNORED
) -> None:
    """Serves until cancelled, in a thread with a loop of its own: it answers while a pass over what agents sent keeps
    the service's loop busy, which a hostile agent can make take seconds. Reports the port when clients can connect.

    Raises:
        ConfigError: it cannot listen there.
    """
    bound = _bound(address, "--probes")
    server = _Server(_config(app, Counter(), None))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve_in_thread, server, bound)
        port = int(bound.getsockname()[1])
        _log.info("listening_for_probes", host=address[0], port=port)
        task_status.started(port)
        try:
            await anyio.sleep_forever()
        finally:
            server.should_exit = True


def _bound(address: tuple[str, int], option: str) -> socket.socket:
    try:
        return socket.create_server(address, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen for HTTP on {address[0]}:{address[1]}: {error.strerror}; "
            f"is another service running? choose another port with {option} HOST:PORT"
        ) from error


def _config(app: ASGIApp, refused: Counter[str], context: ssl.SSLContext | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=connection_class(refused),
        proxy_headers=False,  # nothing here depends on an address, and anybody on the machine could say one
        ws="none",
        log_config=None,
        access_log=False,
        backlog=_BACKLOG,
        limit_concurrency=_MAX_REQUESTS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        ssl_context_factory=None if context is None else lambda _, __: context,
    )


class _Server(uvicorn.Server):
    """A server that leaves signals to the process it is part of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leaves the signal handlers of the process as they are."""
        yield


async def _serve_to_the_end(server: uvicorn.Server, bound: socket.socket) -> None:
    """Serves until `should_exit` is set: open requests get their time even if all else is cancelled."""
    with anyio.CancelScope(shield=True):
        await server.serve(sockets=[bound])


async def _serve_in_thread(server: uvicorn.Server, bound: socket.socket) -> None:
    """As `_serve_to_the_end`, in a thread."""
    with anyio.CancelScope(shield=True):
        await to_thread.run_sync(anyio.run, lambda: server.serve(sockets=[bound]))


WEB: Final = Path(__file__).parent.parent / "web"

_SCRIPT: Final = "text/javascript; charset=utf-8"


class PageFiles(StaticFiles):
    """The page's files; a browser asks each time whether they are still the same, so an upgrade shows at once."""

    def __init__(self) -> None:
        super().__init__(directory=WEB)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """One file, or 304 if the browser has it."""
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = "no-cache"
        return response


async def page(_: Request) -> Response:
    """The live page as HTML."""
    return FileResponse(WEB / "index.html", headers={"Cache-Control": "no-cache"})


async def runbooks(_: Request) -> Response:
    """The page of runbooks for findings: docs/findings.md as HTML (`tools/runbook-page` writes it)."""
    return FileResponse(WEB / "runbooks.html", headers={"Cache-Control": "no-cache"})


class PlotlyScript:
    """Serves plotly's script, compressed once and kept: 1.4 MB instead of 4.6 MB for each new browser."""

    def __init__(self) -> None:
        self._compressed: bytes | None = None

    async def __call__(self, request: Request) -> Response:
        """The script, or 304 if the browser has this version."""
        etag = f'"plotly-{version("plotly")}"'
        headers = {"ETag": etag, "Cache-Control": "public, max-age=86400", "Vary": "Accept-Encoding"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return FileResponse(plotly_script_path(), headers=headers, media_type=_SCRIPT)
        if self._compressed is None:
            self._compressed = await to_thread.run_sync(_compressed_script)
        return Response(self._compressed, headers={**headers, "Content-Encoding": "gzip"}, media_type=_SCRIPT)


def _compressed_script() -> bytes:
    return gzip.compress(plotly_script_path().read_bytes(), compresslevel=6, mtime=0)
