"""The JSON API in one table: routes, parameters and what they answer; routing, tests and `describe` follow from it.

*Source* of `describe`: OpenAPI 3.1.0, whose schemas are JSON Schema 2020-12.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ncclscope_service.intake.journal_entry import MarkAction
from ncclscope_service.show.details import BandwidthView, CommunicatorDetail, RankDetail, SizePoints
from ncclscope_service.show.finding_events import FindingEvent
from ncclscope_service.show.layout import LayoutView
from ncclscope_service.show.lost_time import LostTimeView
from ncclscope_service.show.node_graph import NodeGraphView
from ncclscope_service.show.one_collective import OneCollective
from ncclscope_service.show.overview import FindingView, HealthView, MarksView, Overview, SettingsView
from ncclscope_service.show.steps import StepsView
from ncclscope_service.show.timeline import Timeline
from ncclscope_service.show.traffic_square import TrafficView
from ncclscope_service.store.plan_records import PlanPattern, PlanRecord


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a query; all are optional."""

    name: str
    schema: dict[str, Any]
    description: str
    place: str = "query"


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One path with one method."""

    path: str
    """As Starlette takes it, for instance `/api/jobs/{job:path}/ranks/{rank:int}`."""
    operation: str
    """Name of the method that answers it, and of the operation in OpenAPI."""
    summary: str
    answer: Any = None
    """Type of the JSON that it answers; None for another media type."""
    parameters: tuple[Parameter, ...] = ()
    faults: tuple[tuple[int, str], ...] = ()
    """Other statuses, and when they are given."""
    method: str = "GET"
    body: Any = None
    """Type of the JSON that it takes; None: it takes none."""
    media_type: str = "application/json"

    @property
    def described_path(self) -> str:
        """The path as OpenAPI writes it, without the types of its parts."""
        return re.sub(r":\w+\}", "}", self.path)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of the path that vary."""
        return tuple(re.findall(r"\{(\w+)\}", self.described_path))


class MarkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to do to findings: of those that `finding` names, or for a mute of all that fit the rest."""

    action: MarkAction
    finding: str = ""
    """Id of a finding."""
    kind: str = ""
    job: str = ""
    """Pattern (`*`, `?`)."""
    ranks: tuple[int, ...] = ()
    """A finding fits that names one of these global ranks."""
    hosts: tuple[str, ...] = ()
    """The same, patterns."""
    seconds: float = 0.0
    """How long a mute lasts."""
    mute: str = ""
    """Id of the mute that is cleared."""
    note: str = ""
    by: str = ""
    """Who it is; of a token that has a name, that name counts."""


class ChangeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thresholds to change, by name; null: as given at the start again."""

    values: dict[str, float | None]
    by: str = ""


MAX_TIMELINE_SECONDS: Final = 60.0
"""The longest stretch that the timeline is drawn for."""

RANGES: Final = ("recent", "job")

_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "integer", "minimum": 0}
_JOB: Final = Parameter("job", _TEXT, "Only this job; default: all.")
_COMMUNICATOR: Final = Parameter("communicator", _TEXT, "Only this communicator, by the name that the page gives it.")
_RANGE: Final = Parameter(
    "range",
    {"type": "string", "enum": list(RANGES), "default": RANGES[0]},
    "What courses over time cover: the last minutes, or the job since its start in fewer, longer buckets.",
)

_BAD_PARAMETER: Final = (400, "A parameter is not understood.")
_NO_JOB: Final = "There is no such job."
_NO_GROUP: Final = "There is no such job or communicator."


def _post(path: str, operation: str, summary: str, body: object, answer: object) -> ApiRoute:
    """A route that changes something."""
    faults = (
        (400, "The body is not understood, or says what cannot be done."),
        (413, "The body is too long."),
        (503, "The state of before the restart is being restored."),
    )
    return ApiRoute(path, operation, summary, answer, faults=faults, method="POST", body=body)


def _of_job(
    path: str, operation: str, summary: str, answer: object, *parameters: Parameter, missing: str = _NO_JOB
) -> ApiRoute:
    """A route below one job."""
    faults = ((_BAD_PARAMETER,) if parameters else ()) + ((404, missing),)
    return ApiRoute(f"/api/jobs/{{job:path}}/{path}", operation, summary, answer, parameters, faults)


API_ROUTES: Final[tuple[ApiRoute, ...]] = (
    ApiRoute(
        "/api/overview",
        "overview",
        "Everything the live page shows, at one time: jobs, communicators, findings, clocks, agents, health.",
        Overview,
    ),
    ApiRoute("/api/findings", "findings", "The latest findings, the open ones first.", list[FindingView], (_JOB,)),
    ApiRoute(
        "/api/findings/marks",
        "marks",
        "What people said of findings, as far as it holds: acknowledgements and mutes.",
        MarksView,
    ),
    _post(
        "/api/findings/mark",
        "mark",
        "Acknowledges or mutes findings, or takes that back; answers with all marks that hold then.",
        MarkRequest,
        MarksView,
    ),
    ApiRoute(
        "/api/settings",
        "settings",
        "The thresholds of the detectors: defaults, bounds, what was given and what was changed since.",
        SettingsView,
    ),
    _post(
        "/api/settings/change",
        "change_settings",
        "Changes thresholds of the detectors from now on, over restarts; answers with all that hold then.",
        ChangeRequest,
        SettingsView,
    ),
    ApiRoute(
        "/api/health",
        "service_health",
        "What was understood, lost, skipped or refused so far, and how far behind the service is.",
        HealthView,
    ),
    ApiRoute(
        "/api/events",
        "events",
        "Server-sent events: `overview` (Overview, every second), `finding` (FindingEvent, as it happens, with an "
        "id) and `health` (HealthView, every five seconds). Begins with the present state, then reports changes.",
        media_type="text/event-stream",
        parameters=(
            Parameter(
                "events",
                {"type": "string", "examples": ["finding,health"]},
                "Names of events, separated by commas; default: overview,finding.",
            ),
            Parameter(
                "Last-Event-ID",
                _TEXT,
                "Id of the last event that was received; browsers send it by themselves. What was kept since comes "
                "first, behind an event `missed` if that is not all.",
                place="header",
            ),
        ),
        faults=((400, "There is no event of that name."), (503, "There are too many listeners.")),
    ),
    ApiRoute(
        "/api/snapshot",
        "snapshot",
        "The files of `ncclscope snapshot`, as one zip.",
        method="POST",
        media_type="application/zip",
        parameters=(
            _JOB,
            Parameter(
                "minutes",
                {"type": "number", "exclusiveMinimum": 0},
                "Only the last so many minutes; default: all that is in memory.",
            ),
        ),
        faults=(
            _BAD_PARAMETER,
            (404, _NO_JOB),
            (429, "A snapshot is being written."),
            (507, "There is no room to write it."),
        ),
    ),
    _of_job(
        "communicators/{alias}",
        "communicator",
        "One communicator, by the name that the page gives it: its series, ranks, waits and sizes.",
        CommunicatorDetail,
        _RANGE,
        missing=_NO_GROUP,
    ),
    _of_job(
        "ranks/{rank:int}",
        "rank",
        "One global rank: where it runs, how it waits, and its part in each of its communicators.",
        RankDetail,
        _RANGE,
        missing="There is no such job or rank.",
    ),
    _of_job(
        "communicators/{alias}/collective",
        "collective",
        "One collective on all its ranks: when each arrived and how long it waited; null if none is in memory.",
        OneCollective | None,
        Parameter("sequence", _NUMBER, "Its number in the communicator; default: the one in which most was lost."),
        Parameter("late_rank", _NUMBER, "Of those in which this global rank came last."),
        missing=_NO_GROUP,
    ),
    _of_job(
        "timeline",
        "timeline",
        "Kernels of some seconds, waiting and transfer apart, with their sums: short neighbours are drawn "
        "together, and stretches of which nothing is known are named.",
        Timeline,
        Parameter(
            "seconds",
            {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMELINE_SECONDS, "default": 2},
            "How long it is.",
        ),
        Parameter(
            "until_ns",
            _NUMBER,
            "Where it ends, on the reference clock; default: where the waiting of every lane is known.",
        ),
        Parameter("communicator", _TEXT, "Only this communicator, a lane for each of its ranks."),
        Parameter("rank", _NUMBER, "Only this rank, a lane for each of its communicators."),
        missing=_NO_GROUP,
    ),
    _of_job(
        "traffic", "traffic", "Bytes from rank to rank, or from host to host if there are many ranks.", TrafficView
    ),
    _of_job(
        "lost-time",
        "lost_time",
        "Who holds up whom: the time per step that others lose to each rank, over what is usual.",
        LostTimeView,
        _COMMUNICATOR,
        _RANGE,
        missing=_NO_GROUP,
    ),
    _of_job(
        "bandwidth",
        "bandwidth",
        "How the bus bandwidth, and the logged bytes, of the communicators in the overview went.",
        BandwidthView,
        _RANGE,
    ),
    _of_job(
        "layout",
        "layout",
        "Where the job runs: its hosts, their ranks and GPUs, and the groups that connect them.",
        LayoutView,
    ),
    _of_job(
        "node-graph",
        "node_graph",
        "NCCL's graph of each kind of node: GPUs, switches and cards, links with rates and the bytes on them; "
        "rings and trees.",
        NodeGraphView,
    ),
    _of_job("steps", "steps", "How long the job's steps took since it began.", StepsView),
    _of_job("sizes", "sizes", "Bus bandwidth against message size, with the limits.", SizePoints),
    _of_job(
        "plan",
        "plan",
        "What the job should send by its description (`serve --model`), and what it sends; null without one.",
        PlanRecord | None,
    ),
    _of_job(
        "plan/pattern",
        "plan_pattern",
        "Who should send how much to whom in an iteration, beside who does; whether expert groups exchange in "
        "pairs, and the rhythm of blocks; null without a plan.",
        PlanPattern | None,
    ),
    ApiRoute("/api/openapi.json", "openapi", "This description.", dict[str, Any]),
)

EVENTS: Final = frozenset({"overview", "finding", "health"})
"""Names of the events that a listener may ask for."""

DEFAULT_EVENTS: Final = frozenset({"overview", "finding"})
"""Events for a listener that names none; the overview holds the health."""

_BODIES: Final = frozenset(route.body.__name__ for route in API_ROUTES if route.body is not None)
"""Of these fields may be left out."""

_REFERENCE: Final = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The answer to a request that fails."""

    error: str
    """A sentence that says what is wrong."""


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI document of a service of this version."""
    bodies = [route.body for route in API_ROUTES]
    typed = [route.answer for route in API_ROUTES if route.answer is not None]
    schemas, components = msgspec.json.schema_components(
        [*typed, FindingEvent, Fault, *(each for each in bodies if each is not None)],
        schema_hook=_schema_of,
        ref_template=_REFERENCE,
    )
    answers = dict(zip([route.path for route in API_ROUTES if route.answer is not None], schemas, strict=False))
    paths = {route.described_path: {route.method.lower(): _operation(route, answers)} for route in API_ROUTES}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ncclscope",
            "version": version,
            "description": "The state of an ncclscope service. Times: ns since 1970 in UTC. Unknown values are null.",
        },
        "paths": paths,
        "components": {"schemas": {name: _closed(schema) for name, schema in components.items()}},
    }


def _operation(route: ApiRoute, answers: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.media_type: {"schema": answers[route.path]} if route.path in answers else {}}
    faults = {
        str(status): {
            "description": when,
            "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Fault")}}},
        }
        for status, when in route.faults
    }
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "responses": {"200": {"description": "The answer.", "content": content}, **faults},
    }
    parts = (Parameter(name, _TEXT, description="", place="path") for name in route.parts)
    if route.body is not None:
        schema = {"$ref": _REFERENCE.format(name=route.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if parameters := [_parameter(each) for each in (*parts, *route.parameters)]:
        operation["parameters"] = parameters
    return operation


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "schema": parameter.schema,
        "description": parameter.description,
    }


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, with every field required and no other allowed: fields are always there, null if unknown."""
    if "properties" not in schema:
        return schema
    properties = {
        name: {key: value for key, value in field.items() if key != "default"}
        for name, field in schema["properties"].items()
    }
    required = schema["required"] if schema.get("title") in _BODIES else list(properties)
    return {**schema, "properties": properties, "required": required, "additionalProperties": False}


def _schema_of(kind: type) -> dict[str, Any]:
    """Whatever JSON holds, for evidence: each kind of finding has its own."""
    if kind is object:
        return {"description": "Any JSON."}
    raise NotImplementedError(f"{kind} has no JSON schema")
