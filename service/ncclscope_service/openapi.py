"""The description of the JSON API, made from the table of routes and the types of what they answer.

Source: OpenAPI 3.1.0, whose schemas are JSON Schema 2020-12.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ncclscope_service.api_table import API_ROUTES, ApiRoute, Parameter
from ncclscope_service.finding_news import FindingEvent

_REFERENCE: Final = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is answered instead."""

    error: str
    """A sentence that says what is wrong."""


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI document of a service of this version."""
    typed = [route.answer for route in API_ROUTES if route.answer is not None]
    schemas, components = msgspec.json.schema_components(
        [*typed, FindingEvent, Fault], schema_hook=_schema_of, ref_template=_REFERENCE
    )
    answers = dict(zip([route.path for route in API_ROUTES if route.answer is not None], schemas, strict=False))
    paths = {route.described_path: {route.method.lower(): _operation(route, answers)} for route in API_ROUTES}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ncclscope",
            "version": version,
            "description": "What a service of ncclscope knows. Times: ns since 1970 in UTC. What is not known is null.",
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
    parts = (Parameter(name=name, place="path", schema={"type": "string"}, description="") for name in route.parts)
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
    """The same, with every field required and no other allowed: fields are always there, null where not known."""
    if "properties" not in schema:
        return schema
    properties = {name: _without_default(field) for name, field in schema["properties"].items()}
    return {**schema, "properties": properties, "required": list(properties), "additionalProperties": False}


def _without_default(field: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in field.items() if name != "default"}


def _schema_of(kind: type) -> dict[str, Any]:
    """Whatever JSON holds, for evidence: each kind of finding has its own."""
    if kind is object:
        return {"description": "Any JSON."}
    raise NotImplementedError(f"{kind} has no JSON schema")
