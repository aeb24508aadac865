"""The service's HTTP side: page, metrics, health, JSON, events and snapshots, over a small view of the service."""

from __future__ import annotations

import importlib.util
import itertools
import math
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final, Protocol

import anyio
import orjson
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ncclscope_service.api_table import API_ROUTES, DEFAULT_EVENTS, EVENTS
from ncclscope_service.detail_routes import DetailAnswers, JobsView
from ncclscope_service.exposition import Scrapes
from ncclscope_service.finding_news import FindingNews
from ncclscope_service.http_access import Gated, Login
from ncclscope_service.http_gate import HttpGate
from ncclscope_service.json_text import to_json
from ncclscope_service.live import Event, Hub
from ncclscope_service.metrics import MetricsView
from ncclscope_service.openapi import describe
from ncclscope_service.overview import FindingView, HealthView, Overview
from ncclscope_service.runbooks import runbooks
from ncclscope_service.snapshot_zip import ZipResponse, zip_folder
from ncclscope_service.vitals import ProbeAnswer, Vital, liveness, readiness
from ncclscope_service.web_files import PageFiles, PlotlyScript, page

OVERVIEW_SECONDS: Final = 1.0
"""How often listeners get a new overview."""

HEALTH_TURNS: Final = 5
"""The health is told every so many overviews."""

SECURITY_HEADERS: Final = {
    # plotly writes style elements and draws heat maps as data: images.
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class ServiceView(JobsView, Protocol):
    """What the routes need of the service; all but `write_snapshot` return at once."""

    def overview(self) -> Overview:
        """Everything the page shows, now."""
        ...

    def findings(self) -> tuple[FindingView, ...]:
        """All findings that are kept, the open ones first."""
        ...

    def health(self) -> HealthView:
        """What was lost, skipped or refused."""
        ...

    def metrics(self) -> MetricsView:
        """Every metric, now."""
        ...

    def is_ready(self) -> tuple[bool, str]:
        """Whether agents can be served, and a sentence that says why or why not."""
        ...

    def vitals(self) -> tuple[Vital, ...]:
        """What was looked at of the service itself."""
        ...

    async def write_snapshot(
        self, directory: Path, job: str | None, minutes: float | None, *, with_perfetto: bool = False
    ) -> None:
        """Writes the files of a snapshot into an empty directory; None = every job, all that is kept."""
        ...


def make_app(view: ServiceView, hub: Hub, gate: HttpGate | None = None) -> Starlette:
    """The application, behind a gate if there is one.

    Close the hub before the server is asked to stop: open event streams end only then.
    """
    pushes = _Pushes(view, hub)
    answers = _Answers(view, pushes)
    return Starlette(
        routes=[
            Route("/", page),
            Route("/runbooks", runbooks),
            Route("/metrics", answers.metrics),
            Route("/healthz", answers.liveness),
            Route("/readyz", answers.readiness),
            *_api_routes(answers, DetailAnswers(view)),
            Route("/static/plotly.min.js", PlotlyScript().__call__),
            Mount("/static", PageFiles()),
            *([] if gate is None else _login_routes(Login(gate))),
        ],
        middleware=[Middleware(_SecurityHeaders), *([] if gate is None else [Middleware(Gated, gate)])],
        exception_handlers={HTTPException: _http_error},
        lifespan=pushes.lifespan,
    )


def _login_routes(login: Login) -> list[Route]:
    return [
        Route("/login", login.show),
        Route("/login", login.enter, methods=["POST"]),
        Route("/logout", login.leave, methods=["POST"]),
    ]


def _api_routes(*owners: object) -> list[Route]:
    """The routes of the table; each operation is a method of one of the owners."""
    return [
        Route(
            each.path,
            next(getattr(owner, each.operation) for owner in owners if hasattr(owner, each.operation)),
            methods=[each.method],
        )
        for each in API_ROUTES
    ]


class _Pushes:
    """Publishes findings as they come, and an overview every second and the health every five while someone listens."""

    def __init__(self, view: ServiceView, hub: Hub) -> None:
        self._view = view
        self.hub = hub
        self._news = FindingNews()

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncGenerator[None, None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run)
            try:
                yield
            finally:
                self.hub.close()
                tasks.cancel_scope.cancel()

    async def _run(self) -> None:
        for turn in itertools.count():
            for event in self._news.look(self._view.findings(), time.time_ns()):
                self.hub.publish_kept("finding", to_json(event))
            if self.hub.has_listener("overview"):
                self.hub.publish_nowait(overview_event(self._view.overview()))
            if turn % HEALTH_TURNS == 0 and self.hub.has_listener("health"):
                self.hub.publish_nowait(health_event(self._view.health()))
            await anyio.sleep(OVERVIEW_SECONDS)


class _EventStream(Response):
    """The answer to a listener; leaves the hub when the listener goes."""

    def __init__(self, hub: Hub, first: tuple[Event, ...], wanted: frozenset[str], after: str | None) -> None:
        super().__init__()
        self._hub = hub
        self._first = first
        self._wanted = wanted
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        async with aclosing(self._hub.listen(self._first, wanted=self._wanted, after=self._after)) as events:
            stream = StreamingResponse(events, media_type="text/event-stream", headers=headers)
            await stream(scope, receive, send)


class _Answers:
    """One method per route."""

    def __init__(self, view: ServiceView, pushes: _Pushes) -> None:
        self._view = view
        self._hub = pushes.hub
        self._scrapes = Scrapes(with_process=True)
        self._one_scrape = anyio.Lock()
        self._one_snapshot = anyio.Lock()

    async def metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        accept_encoding = request.headers.get("accept-encoding", "")
        async with self._one_scrape:
            view = self._view.metrics()
            scrape = await to_thread.run_sync(
                lambda: self._scrapes.answer(view, accept=accept, accept_encoding=accept_encoding)
            )
        headers = {"Content-Type": scrape.content_type, "Vary": "Accept, Accept-Encoding"}
        if scrape.is_gzipped:
            headers["Content-Encoding"] = "gzip"
        return Response(scrape.body, headers=headers)

    async def liveness(self, _: Request) -> Response:
        return _probed(*liveness(self._view.vitals()))

    async def readiness(self, _: Request) -> Response:
        is_ready, reason = self._view.is_ready()
        return _probed(*readiness(is_ready, reason, self._view.vitals()))

    async def overview(self, _: Request) -> Response:
        return _json(self._view.overview())

    async def findings(self, request: Request) -> Response:
        job = request.query_params.get("job")
        return _json([each for each in self._view.overview().findings if job in {None, each.job}])

    async def service_health(self, _: Request) -> Response:
        return _json(self._view.health())

    async def openapi(self, _: Request) -> Response:
        return _json(describe(self._view.health().version))

    async def events(self, request: Request) -> Response:
        wanted = asked_events(request.query_params)
        if not self._hub.has_room():
            raise HTTPException(503, "too many listeners: close a page and try again")
        first = [overview_event(self._view.overview())] if "overview" in wanted else []
        first += [health_event(self._view.health())] if "health" in wanted else []
        return _EventStream(self._hub, tuple(first), wanted, request.headers.get("last-event-id"))

    async def snapshot(self, request: Request) -> Response:
        job, minutes = self._asked_job(request.query_params), asked_minutes(request.query_params)
        with_perfetto = _is_perfetto_asked(request.query_params)
        try:
            self._one_snapshot.acquire_nowait()
        except anyio.WouldBlock:
            raise HTTPException(429, "a snapshot is being written: try again when it is done") from None
        try:
            with tempfile.TemporaryDirectory(prefix="ncclscope-snapshot-") as folder:
                await self._view.write_snapshot(Path(folder), job, minutes, with_perfetto=with_perfetto)
                file = await to_thread.run_sync(zip_folder, Path(folder))
        except OSError as error:
            why = error.strerror or type(error).__name__
            told = f"the service could not write the snapshot: {why}; ask for fewer minutes, or for one job"
            raise HTTPException(HTTPStatus.INSUFFICIENT_STORAGE, told) from error
        finally:
            self._one_snapshot.release()
        return ZipResponse(file, name="ncclscope-snapshot.zip")

    def _asked_job(self, query: Mapping[str, str]) -> str | None:
        job = query.get("job") or None
        if job is None:
            return None
        known = [each.name for each in self._view.overview().jobs]
        if job not in known:
            raise HTTPException(404, f"there is no job {job!r}; known are: {', '.join(known) or 'none'}")
        return job


class _SecurityHeaders:
    """Adds SECURITY_HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def _is_perfetto_asked(query: Mapping[str, str]) -> bool:
    """Whether `trace_format` asks for Perfetto's own format too. Raises HTTPException(400) where it cannot be had."""
    asked = query.get("trace_format") or "json"
    if asked not in ("json", "perfetto"):
        raise HTTPException(400, f"trace_format is json or perfetto, not {asked!r}")
    if asked == "perfetto" and importlib.util.find_spec("perfetto") is None:
        raise HTTPException(400, "the service lacks a package: pip install 'ncclscope[perfetto]' where it runs")
    return asked == "perfetto"


def asked_minutes(query: Mapping[str, str]) -> float | None:
    """The parameter `minutes`; None where it is not given. Raises HTTPException(400) unless it is more than 0."""
    text = query.get("minutes") or None
    if text is None:
        return None
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise HTTPException(400, f"minutes must be a number above 0, not {text!r}")
    return minutes


def asked_events(query: Mapping[str, str]) -> frozenset[str]:
    """The parameter `events`; DEFAULT_EVENTS where it is not given. Raises HTTPException(400) for other names."""
    asked = frozenset(filter(None, (query.get("events") or "").replace(" ", "").split(",")))
    if not asked <= EVENTS:
        raise HTTPException(400, f"events are {', '.join(sorted(EVENTS))}, not {', '.join(sorted(asked - EVENTS))}")
    return asked or DEFAULT_EVENTS


def overview_event(overview: Overview) -> Event:
    """The event "overview"."""
    return Event(name="overview", data=to_json(overview))


def health_event(health: HealthView) -> Event:
    """The event "health"."""
    return Event(name="health", data=to_json(health))


def _probed(status: HTTPStatus, answer: ProbeAnswer) -> Response:
    return Response(to_json(answer), status, {"Cache-Control": "no-store"}, "application/json")


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json", headers={"Cache-Control": "no-store"})


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = orjson.dumps({"error": error.detail})
    return Response(body, status_code=error.status_code, headers=error.headers, media_type="application/json")
