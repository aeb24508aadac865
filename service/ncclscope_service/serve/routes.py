"""The service's HTTP side: page, metrics, health, JSON, events and snapshots."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

import anyio
import msgspec
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

from ncclscope_service.job.plan_pattern import pattern_of_plan, plan_pattern
from ncclscope_service.metrics.exposition import Scrapes
from ncclscope_service.serve.api_table import (
    API_ROUTES,
    DEFAULT_EVENTS,
    EVENTS,
    MAX_TIMELINE_SECONDS,
    RANGES,
    ChangeRequest,
    MarkRequest,
    describe,
)
from ncclscope_service.serve.http_server import Gated, HttpAccess, PageFiles, PlotlyScript, page, runbooks
from ncclscope_service.serve.live import Event, Hub
from ncclscope_service.serve.snapshots import ZipResponse, zip_folder
from ncclscope_service.serve.views import ServiceViews
from ncclscope_service.show.details import JobQuery, bandwidth_view, communicator_detail, rank_detail, size_points
from ncclscope_service.show.finding_events import FindingTracker
from ncclscope_service.show.health import ProbeAnswer, liveness, readiness
from ncclscope_service.show.layout import layout_view
from ncclscope_service.show.lost_time import lost_time_view
from ncclscope_service.show.node_graph import node_graph_input, node_graph_view
from ncclscope_service.show.one_collective import one_collective
from ncclscope_service.show.overview import HealthView, Overview
from ncclscope_service.show.steps import steps_view
from ncclscope_service.show.timeline import timeline_of_communicator, timeline_of_rank, timeline_of_ranks
from ncclscope_service.show.traffic_square import traffic_input, traffic_view
from ncclscope_service.store.records import Communicator
from ncclscope_wire.errors import ConfigError

OVERVIEW_SECONDS: Final = 1.0
"""How often listeners get a new overview."""

HEALTH_TURNS: Final = 5
"""The health is sent with one overview of this many."""

KEPT_SECONDS: Final = 1.0
"""How long an answer serves others who ask the same."""

TRAFFIC_KEPT_SECONDS: Final = 10.0

_MAX_KEPT: Final = 64

_MAX_BODY_BYTES: Final = 64 * 1024

_Body = TypeVar("_Body", MarkRequest, ChangeRequest)
_Copied = TypeVar("_Copied")

_LARGEST: Final = 2**62
"""Of a number in a query; Python refuses to read thousands of them."""

SECURITY_HEADERS: Final = {
    # plotly writes style elements and draws heat maps as data: images.
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_app(view: ServiceViews, hub: Hub, access: HttpAccess | None = None) -> Starlette:
    """The application, for those who may ask; without `access` for everybody.

    Close the hub before the server is asked to stop: open event streams end only then.
    """
    pushes = _Pushes(view, hub)
    answers = _Answers(view, pushes)
    return Starlette(
        routes=[
            Route("/", page),
            Route("/runbooks", runbooks),
            Route("/metrics", answers.metrics),
            *_probe_routes(view),
            *_api_routes(answers, _JobAnswers(view)),
            Route("/static/plotly.min.js", PlotlyScript().__call__),
            Mount("/static", PageFiles()),
        ],
        middleware=[Middleware(_SecurityHeaders), *([] if access is None else [Middleware(Gated, access)])],
        exception_handlers={HTTPException: _http_error, Exception: _own_error},
        lifespan=pushes.lifespan,
    )


def make_probes(view: ServiceViews) -> Starlette:
    """The two probes alone, for everybody; they may be answered in any thread."""
    return Starlette(routes=_probe_routes(view), middleware=[Middleware(_SecurityHeaders)])


def _probe_routes(view: ServiceViews) -> list[Route]:
    async def alive(_: Request) -> Response:
        return _probed(*liveness(view.health_checks()))

    async def ready(_: Request) -> Response:
        return _probed(*readiness(*view.is_ready(), view.health_checks()))

    return [Route("/healthz", alive), Route("/readyz", ready)]


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

    def __init__(self, view: ServiceViews, hub: Hub) -> None:
        self._view = view
        self.hub = hub
        self._news = FindingTracker()

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
            for event in self._news.compare(self._view.findings(), time.time_ns()):
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

    def __init__(self, view: ServiceViews, pushes: _Pushes) -> None:
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

    async def overview(self, _: Request) -> Response:
        return _json(self._view.overview())

    async def findings(self, request: Request) -> Response:
        job = request.query_params.get("job")
        return _json([each for each in self._view.overview().findings if job in {None, each.job}])

    async def marks(self, _: Request) -> Response:
        return _json(self._view.marks())

    async def mark(self, request: Request) -> Response:
        asked = await self._asked(request, MarkRequest)
        _checked(self._view.mark, msgspec.structs.replace(asked, by=_name_of(request) or asked.by))
        return _json(self._view.marks())

    async def settings(self, _: Request) -> Response:
        return _json(self._view.settings())

    async def change_settings(self, request: Request) -> Response:
        asked = await self._asked(request, ChangeRequest)
        _checked(self._view.change_settings, msgspec.structs.replace(asked, by=_name_of(request) or asked.by))
        return _json(self._view.settings())

    async def _asked(self, request: Request, kind: type[_Body]) -> _Body:
        """The body of a request that changes something."""
        is_ready, reason = self._view.is_ready()
        if not is_ready:
            raise HTTPException(503, reason)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has over {_MAX_BODY_BYTES} bytes")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
            raise HTTPException(400, f"the body is not understood: {error}") from error

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
        try:
            self._one_snapshot.acquire_nowait()
        except anyio.WouldBlock:
            raise HTTPException(429, "a snapshot is being written: try again when it is done") from None
        try:
            with tempfile.TemporaryDirectory(prefix="ncclscope-snapshot-") as folder:
                await self._view.write_snapshot(Path(folder), job, minutes)
                file = await to_thread.run_sync(zip_folder, Path(folder))
        except OSError as error:
            why = error.strerror or type(error).__name__
            detail = f"the service could not write the snapshot: {why}; ask for fewer minutes, or for one job"
            raise HTTPException(HTTPStatus.INSUFFICIENT_STORAGE, detail) from error
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


class _JobAnswers:
    """One method per route of `/api/jobs/...`, named as its operation in the table."""

    def __init__(self, view: ServiceViews) -> None:
        self._view = view
        self._kept: dict[str, tuple[float, bytes]] = {}
        self._one_traffic = anyio.Lock()

    async def communicator(self, request: Request) -> Response:
        alias = request.path_params["alias"]
        return self._answer(request, lambda asked: communicator_detail(asked, _communicator(asked, alias)))

    async def rank(self, request: Request) -> Response:
        def make(asked: JobQuery) -> object:
            rank = request.path_params["rank"]
            found = rank_detail(asked, rank)
            if found is None:
                raise HTTPException(404, f"job {asked.job!r} has no rank {rank}")
            return found

        return self._answer(request, make)

    async def timeline(self, request: Request) -> Response:
        seconds, until_ns = _asked_seconds(request.query_params), _whole(request.query_params, "until_ns")
        alias, rank = request.query_params.get("communicator"), _whole(request.query_params, "rank")

        def make(asked: JobQuery) -> object:
            if alias:
                return timeline_of_communicator(asked, _communicator(asked, alias), seconds, until_ns)
            if rank is not None:
                return timeline_of_rank(asked, rank, seconds, until_ns)
            return timeline_of_ranks(asked, seconds, until_ns)

        return self._answer(request, make)

    async def collective(self, request: Request) -> Response:
        alias, query = request.path_params["alias"], request.query_params
        sequence, late_rank = _whole(query, "sequence"), _whole(query, "late_rank")

        def make(asked: JobQuery) -> object:
            return one_collective(asked, _communicator(asked, alias), sequence=sequence, late_rank=late_rank)

        return self._answer(request, make)

    async def traffic(self, request: Request) -> Response:
        return await self._answer_beside(request, traffic_input, traffic_view)

    async def node_graph(self, request: Request) -> Response:
        return await self._answer_beside(request, node_graph_input, node_graph_view)

    async def plan_pattern(self, request: Request) -> Response:
        return await self._answer_beside(
            request,
            lambda asked: pattern_of_plan(asked.store, asked.job),
            lambda given: None if given is None else plan_pattern(given),
        )

    async def layout(self, request: Request) -> Response:
        return self._answer(request, layout_view)

    async def lost_time(self, request: Request) -> Response:
        alias = request.query_params.get("communicator")
        return self._answer(
            request, lambda asked: lost_time_view(asked, _communicator(asked, alias) if alias else None)
        )

    async def bandwidth(self, request: Request) -> Response:
        return self._answer(request, bandwidth_view)

    async def steps(self, request: Request) -> Response:
        return self._answer(request, lambda asked: steps_view(asked.store.step_histories.get(asked.job)))

    async def plan(self, request: Request) -> Response:
        return self._answer(request, lambda asked: asked.store.plans.get(asked.job))

    async def sizes(self, request: Request) -> Response:
        return self._answer(request, size_points)

    async def _answer_beside(
        self, request: Request, copied: Callable[[JobQuery], _Copied], make: Callable[[_Copied], object]
    ) -> Response:
        """Made beside the event loop, one at a time, and kept longer: what is costly."""
        key = self._key(request)
        kept = self._fresh(key, TRAFFIC_KEPT_SECONDS)
        if kept is None:
            async with self._one_traffic:
                kept = self._fresh(key, TRAFFIC_KEPT_SECONDS)
                if kept is None:
                    given = copied(self._job(request))
                    kept = await to_thread.run_sync(lambda: to_json(make(given)))
                    self._keep(key, kept)
        return _json_bytes(kept)

    def _answer(self, request: Request, make: Callable[[JobQuery], object]) -> Response:
        key = self._key(request)
        kept = self._fresh(key, KEPT_SECONDS)
        if kept is None:
            asked = self._job(request)
            asked = asked.over_the_whole_job() if _is_whole_job(request.query_params) else asked
            kept = to_json(make(asked))
            self._keep(key, kept)
        return _json_bytes(kept)

    def _job(self, request: Request) -> JobQuery:
        name = request.path_params["job"]
        found = self._view.job(name)
        if found is None:
            raise HTTPException(404, f"there is no job {name!r}")
        return found

    @staticmethod
    def _key(request: Request) -> str:
        return f"{request.url.path}?{request.url.query}"

    def _fresh(self, key: str, seconds: float) -> bytes | None:
        kept = self._kept.get(key)
        return kept[1] if kept is not None and anyio.current_time() - kept[0] <= seconds else None

    def _keep(self, key: str, answer: bytes) -> None:
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        self._kept[key] = (anyio.current_time(), answer)


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


def _communicator(asked: JobQuery, alias: str) -> Communicator:
    """The communicator of a short name. Raises HTTPException(404) if there is none."""
    found = asked.communicator(alias)
    if found is None:
        raise HTTPException(404, f"job {asked.job!r} has no communicator {alias!r}")
    return found


def _name_of(request: Request) -> str:
    """The name that the list of tokens gives whoever asks."""
    return str(getattr(request.state, "name", ""))


def _checked(change: Callable[[_Body], None], asked: _Body) -> None:
    try:
        change(asked)
    except ConfigError as error:
        raise HTTPException(400, str(error)) from error


def _asked_seconds(query: Mapping[str, str]) -> float:
    """The parameter `seconds`; 2 if it is not given. Raises HTTPException(400) if it is no such number."""
    text = query.get("seconds") or "2"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMELINE_SECONDS:
        raise HTTPException(400, f"seconds must be above 0 and at most {MAX_TIMELINE_SECONDS:g}, not {text!r}")
    return seconds


def _whole(query: Mapping[str, str], name: str) -> int | None:
    """A parameter that is a whole number; None if it is not given. Raises HTTPException(400) for anything else."""
    text = query.get(name) or None
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 20 or int(text) > _LARGEST:
        raise HTTPException(400, f"{name} must be a whole number, not {text!r}")
    return int(text)


def _is_whole_job(query: Mapping[str, str]) -> bool:
    """The parameter `range`. Raises HTTPException(400) unless it is one of RANGES."""
    text = query.get("range") or RANGES[0]
    if text not in RANGES:
        raise HTTPException(400, f"range must be {' or '.join(RANGES)}, not {text!r}")
    return text == RANGES[1]


def asked_minutes(query: Mapping[str, str]) -> float | None:
    """The parameter `minutes`; None if it is not given. Raises HTTPException(400) unless it is more than 0."""
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
    """The parameter `events`; DEFAULT_EVENTS if it is not given. Raises HTTPException(400) for other names."""
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


def to_json(value: object) -> bytes:
    """Dataclasses as JSON on one line."""
    return orjson.dumps(value, default=_mapping_as_dict, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _mapping_as_dict(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def _probed(status: HTTPStatus, answer: ProbeAnswer) -> Response:
    return Response(to_json(answer), status, {"Cache-Control": "no-store"}, "application/json")


def _json(value: object) -> Response:
    return _json_bytes(to_json(value))


def _json_bytes(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


async def _own_error(_: Request, error: Exception) -> Response:
    """A mistake of ours, which the server logs."""
    body = orjson.dumps({"error": f"the service failed to answer ({type(error).__name__}): see its log"})
    return Response(body, status_code=500, media_type="application/json")


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = orjson.dumps({"error": error.detail})
    return Response(body, status_code=error.status_code, headers=error.headers, media_type="application/json")
