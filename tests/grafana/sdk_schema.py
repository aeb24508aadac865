"""JSON schemas of Grafana's files, made from the types of its own foundation SDK.

Strict where the SDK is: no key that it does not know, no value outside an enumeration. The types say which attribute
has which type, and `to_json` of a probe says under which key an attribute travels. What the SDK leaves open (`object`)
stays open, except a panel's options, fields and queries, for which the plug-in's own types are taken.
"""

from __future__ import annotations

import enum
import importlib
import types
import typing
from functools import cache
from typing import Final

from grafana_foundation_sdk.models import alerting, dashboard, expr, prometheus

Schema = dict[str, object]

_PLUGIN_MODULES: Final = {
    "timeseries": "timeseries",
    "stat": "stat",
    "status-history": "statushistory",
    "heatmap": "heatmap",
    "table": "table",
}

_PRIMITIVES: Final[dict[object, Schema]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}


def dashboard_schema() -> Schema:
    """The schema of a whole dashboard with the panels that ncclscope uses."""
    schema = dict(schema_of(dashboard.Dashboard))
    properties = dict(typing.cast("dict[str, Schema]", schema["properties"]))
    kinds: list[Schema] = [panel_schema(kind) for kind in _PLUGIN_MODULES]
    properties["panels"] = {"type": "array", "items": {"anyOf": [schema_of(dashboard.RowPanel), *kinds]}}
    return {**schema, "properties": properties}


@cache
def panel_schema(kind: str) -> Schema:
    """The schema of a panel of one kind that asks Prometheus."""
    module = importlib.import_module(f"grafana_foundation_sdk.models.{_PLUGIN_MODULES[kind]}")
    schema = dict(schema_of(dashboard.Panel))
    properties = dict(typing.cast("dict[str, Schema]", schema["properties"]))
    properties["type"] = {"const": kind}
    properties["options"] = schema_of(module.Options)
    properties["targets"] = {"type": "array", "items": schema_of(prometheus.Dataquery)}
    if hasattr(module, "FieldConfig"):
        properties["fieldConfig"] = _with_custom(properties["fieldConfig"], schema_of(module.FieldConfig))
    return {**schema, "properties": properties}


def rule_group_schema() -> Schema:
    """The schema of a rule group as the provisioning API takes it, with queries to Prometheus and thresholds."""
    schema = dict(schema_of(alerting.RuleGroup))
    rule = dict(schema_of(alerting.Rule))
    query = dict(schema_of(alerting.Query))
    model: Schema = {"anyOf": [schema_of(prometheus.Dataquery), schema_of(expr.TypeThreshold)]}
    query["properties"] = {**typing.cast("Schema", query["properties"]), "model": model}
    data: Schema = {"type": "array", "items": query}
    rule["properties"] = {**typing.cast("Schema", rule["properties"]), "data": data}
    rules: Schema = {"type": "array", "items": rule}
    interval: Schema = {"type": "integer", "minimum": 1}
    schema["properties"] = {**typing.cast("Schema", schema["properties"]), "rules": rules, "interval": interval}
    return schema


def contact_point_schema() -> Schema:
    """The schema of a contact point."""
    return schema_of(alerting.ContactPoint)


def schema_of(model: type) -> Schema:
    """The schema of one type of the SDK; required is what its `to_json` always writes."""
    hints = _hints(model)
    keys = _keys(model, tuple(hints))
    always: typing.Any = _bare(model)
    return {
        "type": "object",
        "properties": {keys[name]: _of_hint(hint) for name, hint in hints.items() if name in keys},
        "required": [key for key in always.to_json() if key in keys.values()],
        "additionalProperties": False,
    }


def _hints(model: type) -> dict[str, object]:
    module = importlib.import_module(model.__module__)
    found: dict[str, object] = {}
    for name, hint in model.__annotations__.items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        try:
            found[name] = typing.get_type_hints(alone, vars(module))[name]
        except NameError:  # a forward reference to a type that the SDK does not define: it stays open
            found[name] = object
    return found


def _bare(model: type) -> object:
    made: object = model()
    return made


def _keys(model: type, names: tuple[str, ...]) -> dict[str, str]:
    """Attribute to key."""
    keys: dict[str, str] = {}
    for name in names:
        probe, mark = _bare(model), object()
        setattr(probe, name, mark)
        written = typing.cast("typing.Any", probe).to_json()
        for key, value in written.items():
            if value is mark:
                keys[name] = key
    return keys


def _of_hint(hint: object) -> Schema:  # noqa: PLR0911
    if hint in _PRIMITIVES:
        return _PRIMITIVES[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_hint(each) for each in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _of_hint(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_hint(arguments[1])}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if isinstance(hint, type) and hasattr(hint, "to_json") and hint is not dashboard.Dashboard:
        return _cached_schema(hint)
    return {}


@cache
def _cached_schema(model: type) -> Schema:
    return schema_of(model)


def _with_custom(field_config: Schema, custom: Schema) -> Schema:
    """A panel's fieldConfig whose `defaults.custom` is of the plug-in's type."""
    options = typing.cast("list[Schema]", field_config["anyOf"])
    source = dict(options[0])
    properties = dict(typing.cast("dict[str, Schema]", source["properties"]))
    defaults = dict(properties["defaults"])
    defaults["properties"] = {**typing.cast("Schema", defaults["properties"]), "custom": custom}
    properties["defaults"] = defaults
    return {**source, "properties": properties}
