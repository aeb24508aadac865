"""The gate before every route, and the login: a form for the token, and a cookie that only this service can read."""

from __future__ import annotations

import html
import time
import urllib.parse
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ncclscope_service.http_gate import COOKIE, Answer, Asked, HttpGate

MOST_FORM_BYTES: Final = 4096
_SENTENCES: Final[Mapping[Answer, tuple[HTTPStatus, str]]] = {
    Answer.UNAUTHORIZED: (
        HTTPStatus.UNAUTHORIZED,
        "a token is needed, and this is none or a wrong one: send it as `Authorization: Bearer TOKEN`",
    ),
    Answer.FORBIDDEN: (HTTPStatus.FORBIDDEN, "this token may read only: its line in the list needs role=write"),
    Answer.CROSS_SITE: (HTTPStatus.FORBIDDEN, "another site asked for this: ask from this service's own page"),
    Answer.WRONG_NAME: (
        HTTPStatus.MISDIRECTED_REQUEST,
        "this service is not known by that name: ask by address, or name it with --public-url",
    ),
    Answer.TOO_LONG: (HTTPStatus.REQUEST_URI_TOO_LONG, "no path of this service is so long"),
    Answer.TOO_MANY: (HTTPStatus.TOO_MANY_REQUESTS, "too many requests, or too many wrong tokens: wait"),
}
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>ncclscope: sign in</title><link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/style.css"></head>
<body><main class="view"><section class="card" aria-labelledby="title"><h1 id="title">ncclscope</h1>
<p role="status">{told}</p>
<form method="post" action="/login"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus size="48">
<button type="submit">Sign in</button></form>
<form method="post" action="/logout"><button type="submit">Sign out</button></form>
</section></main></body></html>
"""


class Gated:
    """Lets through what the gate lets through, and answers the rest."""

    def __init__(self, app: ASGIApp, gate: HttpGate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer = self._gate.decide(_asked(request), time.monotonic())
        if answer is Answer.GO_ON:
            await self._app(scope, receive, send)
        else:
            await _refusal(answer)(scope, receive, send)


class Login:
    """The form, and what it does."""

    def __init__(self, gate: HttpGate) -> None:
        self._gate = gate

    async def show(self, _: Request) -> Response:
        """The form."""
        return _form("This service asks who reads it.")

    async def enter(self, request: Request) -> Response:
        """Checks the token of the form, and remembers the browser."""
        token = await _token(request)
        cookie = self._gate.login(token, _address(request), time.monotonic())
        if cookie is None:
            return _form("That token is not known here.", status=HTTPStatus.FORBIDDEN)
        answer = RedirectResponse("/", status_code=HTTPStatus.SEE_OTHER)
        is_encrypted = request.url.scheme == "https"
        answer.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", secure=is_encrypted)
        return answer

    async def leave(self, request: Request) -> Response:
        """Forgets the browser."""
        self._gate.logout(request.headers)
        answer = RedirectResponse("/login", status_code=HTTPStatus.SEE_OTHER)
        answer.delete_cookie(COOKIE)
        return answer


def _asked(request: Request) -> Asked:
    return Asked(
        method=request.method,
        path=request.url.path,
        address=_address(request),
        headers=request.headers,
        certificate=tuple(request.scope.get("state", {}).get("certificate", ())),
    )


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


async def _token(request: Request) -> str:
    """The token in a form's body; "" where there is none, or too much."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_FORM_BYTES:
            return ""
    return urllib.parse.parse_qs(body.decode("ascii", "replace")).get("token", [""])[0].strip()


def _refusal(answer: Answer) -> Response:
    if answer is Answer.LOGIN:
        return RedirectResponse("/login", status_code=HTTPStatus.SEE_OTHER)
    status, sentence = _SENTENCES[answer]
    headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else None
    return Response(orjson.dumps({"error": sentence}), status, headers, "application/json")


def _form(told: str, *, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return HTMLResponse(_PAGE.format(told=html.escape(told)), status, {"Cache-Control": "no-store"})
