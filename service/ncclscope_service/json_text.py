"""Dataclasses as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import orjson


def to_json(value: object) -> bytes:
    """Dataclasses as JSON on one line."""
    return orjson.dumps(value, default=_mapping_as_dict, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _mapping_as_dict(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
