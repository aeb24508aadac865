"""The API's description: valid, about every route, and true of real answers."""

from __future__ import annotations

from typing import Any

import jsonschema
import orjson
import pytest
from service import fake_service as fake
from service.serve.test_routes import client_of
from starlette.routing import Route

from ncclscope_service.serve.api_table import API_ROUTES, EVENTS, ApiRoute, describe
from ncclscope_service.serve.routes import make_app, to_json
from ncclscope_service.show.finding_events import FindingTracker

DESCRIPTION = describe("0")


def schema_of(name: str) -> dict[str, Any]:
    """The schema of one component, with all the others at hand."""
    return {"$ref": f"#/components/schemas/{name}", "components": DESCRIPTION["components"]}


def check(value: Any, schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator({**schema, "components": DESCRIPTION["components"]}).validate(value)


@pytest.mark.parametrize("name", sorted(DESCRIPTION["components"]["schemas"]))
def test_every_schema_is_one_and_allows_nothing_unsaid(name: str) -> None:
    schema = DESCRIPTION["components"]["schemas"][name]
    jsonschema.Draft202012Validator.check_schema(schema)
    if schema.get("type") == "object":
        assert schema["additionalProperties"] is False
        fields = set(schema["properties"])
        bodies = {"MarkRequest": {"action"}, "ChangeRequest": {"values"}}
        assert set(schema["required"]) == bodies.get(name, fields)


def test_every_route_of_the_api_is_in_the_table() -> None:
    app = make_app(fake.FakeService(), fake.FakeService().hub)
    routes = {route.path for route in app.routes if isinstance(route, Route) and route.path.startswith("/api/")}
    assert routes == {route.path for route in API_ROUTES}
    assert set(DESCRIPTION["paths"]) == {route.described_path for route in API_ROUTES}


def test_parts_of_a_path_are_parameters() -> None:
    route = ApiRoute(path="/api/jobs/{job:path}/ranks/{rank:int}", operation="rank", summary="")
    assert (route.described_path, route.parts) == ("/api/jobs/{job}/ranks/{rank}", ("job", "rank"))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "path", [route.path for route in API_ROUTES if route.answer is not None and route.method == "GET"]
)
@pytest.mark.parametrize(
    "service",
    [fake.small(fake.FakeService()), fake.small(fake.FakeService(with_kernels=False)), fake.FakeService(is_empty=True)],
    ids=["all", "logs only", "empty"],
)
async def test_answers_are_what_the_description_says(path: str, service: fake.FakeService) -> None:
    asked = path.replace("{job:path}", fake.JOB).replace("{rank:int}", "5").replace("{alias}", "dp-0")
    async with client_of(service) as client:
        answer = await client.get(asked)
    assert answer.headers["content-type"] == "application/json"
    described = next(route.described_path for route in API_ROUTES if route.path == path)
    responses = DESCRIPTION["paths"][described]["get"]["responses"]
    check(answer.json(), responses[str(answer.status_code)]["content"]["application/json"]["schema"])
    assert answer.status_code == 200 or (service.is_empty and "{job}" in described)


def test_events_are_what_the_description_says() -> None:
    service = fake.small(fake.FakeService())
    assert {"overview", "finding", "health"} == EVENTS
    (event,) = FindingTracker().compare(service.findings(), 0)
    check(orjson.loads(to_json(event)), schema_of("FindingEvent"))
    check(orjson.loads(to_json(service.health())), schema_of("HealthView"))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/api/events?events=gossip"), ("POST", "/api/snapshot?minutes=-1"), ("POST", "/api/snapshot?job=none")],
)
async def test_faults_are_what_the_description_says(method: str, path: str) -> None:
    service = fake.small(fake.FakeService())
    async with client_of(service) as client:
        answer = await client.request(method, path)
    check(answer.json(), schema_of("Fault"))
    described = DESCRIPTION["paths"][path.partition("?")[0]][method.lower()]["responses"]
    assert str(answer.status_code) in described
