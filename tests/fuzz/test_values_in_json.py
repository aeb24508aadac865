"""Every value of what others write in JSON, one at a time, is something else: a reader takes it or leaves it out.

Mutated bytes seldom stay JSON, and so seldom reach what looks at values.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from fuzz.targets import TARGETS
from strange_values import with_strange_values


def documents(name: str) -> list[list[Any]]:
    """The seeds of a target that are JSON, each as its lines."""
    found = []
    for seed in TARGETS[name].seeds():
        try:
            text = seed.decode()
            lines = [text] if name != "inspector" else text.splitlines()
            found.append([json.loads(line) for line in lines])
        except ValueError:
            continue
    return found


@pytest.mark.parametrize("name", [pytest.param("trace", marks=pytest.mark.slow), "inspector", "ras", "dump"])
def test_any_value_in_any_place_is_taken_or_left_out(name: str) -> None:
    tried = 0
    for lines in documents(name):
        for at, line in enumerate(lines):
            for other in with_strange_values(line):
                changed = [*lines[:at], other, *lines[at + 1 :]]
                TARGETS[name].check("\n".join(map(json.dumps, changed)).encode() + b"\n" * (name == "inspector"))
                tried += 1
    assert tried > 1000
