"""What the page asks beside the overview: one communicator, one rank, the timeline, the traffic, sizes against speed.

All of `/api/jobs/...`; every answer is bounded by the named limits of the view that makes it, and made at most once a
second however many pages ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import anyio
from anyio import to_thread
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ncclscope_service.api_table import MAX_TIMELINE_SECONDS
from ncclscope_service.communicator_detail import communicator_detail
from ncclscope_service.json_text import to_json
from ncclscope_service.rank_detail import rank_detail
from ncclscope_service.size_points import size_points
from ncclscope_service.timeline_view import timeline_of_communicator, timeline_of_rank, timeline_of_ranks
from ncclscope_service.traffic_view import sent_by, traffic_view
from ncclscope_service.views_of_job import JobAsked

KEPT_SECONDS: Final = 1.0
"""How long an answer serves others who ask the same."""

TRAFFIC_KEPT_SECONDS: Final = 10.0

_MAX_KEPT: Final = 64

_MAX_DIGITS: Final = 18
"""Of a number in a query; Python refuses to read thousands of them."""


class JobsView(Protocol):
    """What these routes need of the service; returns at once."""

    def job(self, name: str) -> tuple[JobAsked, int] | None:
        """What can be asked about a job, and the time; None where there is no such job."""
        ...


class DetailAnswers:
    """One method per route of `/api/jobs/...`, named as its operation in the table."""

    def __init__(self, view: JobsView) -> None:
        self._view = view
        self._kept: dict[str, tuple[float, bytes]] = {}
        self._one_traffic = anyio.Lock()

    async def communicator(self, request: Request) -> Response:
        """One communicator of a job."""

        def make(asked: JobAsked, now_ns: int) -> object:
            alias = request.path_params["alias"]
            found = asked.communicator(alias)
            if found is None:
                raise HTTPException(404, f"job {asked.job!r} has no communicator {alias!r}")
            return communicator_detail(asked, found, now_ns)

        return self._answer(request, make)

    async def rank(self, request: Request) -> Response:
        """One rank of a job."""

        def make(asked: JobAsked, now_ns: int) -> object:
            rank = request.path_params["rank"]
            found = rank_detail(asked, rank, now_ns)
            if found is None:
                raise HTTPException(404, f"job {asked.job!r} has no rank {rank}")
            return found

        return self._answer(request, make)

    async def timeline(self, request: Request) -> Response:
        """The last seconds of a job, of a communicator or of a rank."""
        seconds = _asked_seconds(request.query_params)
        alias, rank = request.query_params.get("communicator"), request.query_params.get("rank")

        def make(asked: JobAsked, _: int) -> object:
            if alias:
                communicator = asked.communicator(alias)
                if communicator is None:
                    raise HTTPException(404, f"job {asked.job!r} has no communicator {alias!r}")
                return timeline_of_communicator(asked, communicator, seconds)
            if rank:
                if not rank.isdecimal() or len(rank) > _MAX_DIGITS:
                    raise HTTPException(400, f"rank must be a whole number, not {rank!r}")
                return timeline_of_rank(asked, int(rank), seconds)
            return timeline_of_ranks(asked, seconds)

        return self._answer(request, make)

    async def traffic(self, request: Request) -> Response:
        """Bytes from rank to rank; made beside the event loop, and less often: it is the costliest."""
        key = self._key(request)
        kept = self._fresh(key, TRAFFIC_KEPT_SECONDS)
        if kept is None:
            async with self._one_traffic:
                kept = self._fresh(key, TRAFFIC_KEPT_SECONDS)
                if kept is None:
                    sent = sent_by(self._job(request)[0])
                    kept = await to_thread.run_sync(lambda: to_json(traffic_view(sent)))
                    self._keep(key, kept)
        return _json(kept)

    async def sizes(self, request: Request) -> Response:
        """Bus bandwidth against message size."""
        return self._answer(request, lambda asked, _: size_points(asked))

    def _answer(self, request: Request, make: Callable[[JobAsked, int], object]) -> Response:
        key = self._key(request)
        kept = self._fresh(key, KEPT_SECONDS)
        if kept is None:
            kept = to_json(make(*self._job(request)))
            self._keep(key, kept)
        return _json(kept)

    def _job(self, request: Request) -> tuple[JobAsked, int]:
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


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


def _asked_seconds(query: Mapping[str, str]) -> float:
    """The parameter `seconds`; 2 where it is not given. Raises HTTPException(400) where it is none."""
    text = query.get("seconds") or "2"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMELINE_SECONDS:
        raise HTTPException(400, f"seconds must be above 0 and at most {MAX_TIMELINE_SECONDS:g}, not {text!r}")
    return seconds
